"""/dashboard: what is served to whom, and the page itself in Chromium (skipped without a browser)."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import aspire.server
from aspire.testing.fake_engine import FakeEngine

from .conftest import Serve

FOLDER = Path(__file__).with_name("npm")
STATIC = Path(aspire.server.__file__).parent / "static"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_page_is_open_and_its_numbers_are_not(serve: Serve) -> None:
    """Planted fault: the stream among the open paths."""
    server = serve(api_keys=("key",))
    with server.client() as client:
        for path, kind in (("/dashboard", "text/html"), ("/dashboard/static/app.js", "text/javascript"),
                           ("/dashboard/static/style.css", "text/css")):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert client.get("/dashboard/stream").status_code == 401
        for name in ("../app.py", "..%2fapp.py", "index.html", "none.js"):
            assert client.get(f"/dashboard/static/{name}").status_code in (401, 404)


def test_stream_of_snapshots(serve: Serve) -> None:
    server = serve(FakeEngine(step_seconds=0.005))
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as running:
        begun = running.iter_lines()  # dropping it would close the response
        next(begun)
        with client.stream("GET", "/dashboard/stream?interval=0.1") as answer:
            snapshots = (json.loads(line[6:]) for line in answer.iter_lines() if line)
            first = next(snapshot for snapshot in snapshots if snapshot["requests"])
            last = next(snapshot for snapshot in snapshots if snapshot["num_steps"] > first["num_steps"])
        assert last["requests"][0]["state"] == "verify"
        assert last["num_output_tokens"] > first["num_output_tokens"]
        assert last["state"] == "ready"
        assert 0 < last["kv_usage"] < 1
        assert client.get("/dashboard/stream?interval=0").status_code == 400


def test_watchers_are_bounded_and_end_with_the_server(serve: Serve) -> None:
    """Planted fault: not counting down when a page leaves."""
    server = serve()
    with server.client() as client:
        for _ in range(40):
            with client.stream("GET", "/dashboard/stream") as answer:
                assert answer.status_code == 200
        held = [client.send(client.build_request("GET", "/dashboard/stream"), stream=True) for _ in range(33)]
        assert [answer.status_code for answer in held[-2:]] == [200, 429]
        assert server.stop() < 3
        for answer in held:
            answer.close()


def test_it_can_be_switched_off(serve: Serve) -> None:
    with serve(dashboard=False).client() as client:
        assert client.get("/dashboard").status_code == 404


def test_no_file_names_another_host() -> None:
    for path in STATIC.iterdir():
        found = set(re.findall(r"https?://[^\s\"')]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not found, path


def test_html_is_well_formed() -> None:
    """Every tag closes, every id is there once, every id that a label or script names exists."""
    ids: list[str] = []
    stack: list[str] = []
    named: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            values = dict(attrs)
            ids.extend([values["id"]] if values.get("id") else [])
            named.extend(str(values[key]) for key in ("for", "aria-labelledby") if key in values)
            if tag not in ("meta", "link", "input"):
                stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert stack.pop() == tag
    Check().feed((STATIC / "index.html").read_text())
    assert stack == []
    assert len(ids) == len(set(ids))
    script = (STATIC / "app.js").read_text()
    assert {*named, *re.findall(r'element\("([^"]+)"\)', script)} <= set(ids)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or shutil.which("node") is None
                    or not (FOLDER / "node_modules" / "playwright-core").is_dir(),
                    reason="needs chromium and node, and npm ci in tests/server/npm")
def test_the_page_in_a_browser(serve: Serve) -> None:
    """Planted fault: accepted drafts not marked. ASPIRE_PICTURE names a file for a picture of the page."""
    server = serve(FakeEngine(step_seconds=0.02), api_keys=("key",))
    done = subprocess.run(["node", "dashboard.mjs", server.url, "key", str(CHROMIUM),
                           os.environ.get("ASPIRE_PICTURE", "")], cwd=FOLDER, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    server.wait_idle()
