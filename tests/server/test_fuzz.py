"""schemathesis over the server's own OpenAPI: no 5xx, no hang. Skipped without schemathesis."""

from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from aspire.server.config import ServerConfig
from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer

schemathesis = pytest.importorskip("schemathesis")


@pytest.mark.slow
def test_no_request_breaks_the_server() -> None:
    """Planted fault: strings with lone surrogates passed to the tokenizer."""
    server = LiveServer(FakeEngine(), ServerConfig(shutdown_grace=1.0), None)
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 12
    num_cases = wrong = 0
    try:
        for operation, mode in product(operations, schemathesis.GenerationMode):
            @settings(max_examples=40, deadline=None, database=None, derandomize=True, phases=(Phase.generate,),
                      suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                nonlocal num_cases, wrong
                num_cases += 1
                wrong += mode is schemathesis.GenerationMode.NEGATIVE
                answer = case.call(timeout=5)
                assert answer.status_code < 500, answer.text
            check()
        server.wait_idle()
    finally:
        server.stop()
    assert num_cases - wrong > 200
    assert wrong > 200
