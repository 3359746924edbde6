"""The official npm client drives every route. Skipped unless `npm ci` was run in tests/server/npm."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from aspire.request import SamplingParams
from aspire.testing.fake_engine import FakeEngine, echo_reply

from .conftest import Serve

FOLDER = Path(__file__).with_name("npm")
TOOL_CALL = '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>'


def script(prompt: str, params: SamplingParams) -> str:
    if params.structured_outputs is not None:
        return '{"a": 1}'
    return TOOL_CALL if "<user>call" in prompt else echo_reply(prompt, params)


@pytest.mark.skipif(shutil.which("node") is None or not (FOLDER / "node_modules" / "openai").is_dir(),
                    reason="needs node, and npm ci in tests/server/npm")
def test_openai_npm_client(serve: Serve) -> None:
    """Planted fault: no `data: [DONE]`-terminated stream, so that the client waits."""
    server = serve(FakeEngine(script, step_seconds=0.002), api_keys=("key",))
    done = subprocess.run(["node", "client.mjs", server.url, "key"], cwd=FOLDER, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pieces"] < 50
    server.wait_idle()
