"""schemathesis over the server's own OpenAPI: no 5xx, no hang. Skipped without schemathesis."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from aspire.server.config import ServerConfig
from aspire.testing.fake_engine import FakeEngine

from .conftest import LiveServer

schemathesis = pytest.importorskip("schemathesis")


def fuzz(operation: Any, mode: Any) -> int:
    """Call an operation with generated requests; how many."""
    num_cases = 0

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        nonlocal num_cases
        num_cases += 1
        answer = case.call(timeout=5)
        assert answer.status_code < 500, answer.text
    check()
    return num_cases


@pytest.mark.slow
def test_no_request_breaks_the_server() -> None:
    """Planted fault: strings with lone surrogates passed to the tokenizer."""
    server = LiveServer(FakeEngine(), ServerConfig(shutdown_grace=1.0), None)
    right, wrong = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    try:
        schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 12
        num_right = sum(fuzz(operation, right) for operation in operations)
        num_wrong = sum(fuzz(operation, wrong) for operation in operations if operation.method.upper() == "POST")
        assert num_right > 120
        assert num_wrong > 120
        server.wait_idle()
    finally:
        server.stop()
