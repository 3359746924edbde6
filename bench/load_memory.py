"""Peak memory while a model loads, over the size of its weights: must stay below 1.2.

    python bench/load_memory.py [--limit 1.2] [--gigabytes 2]

Cases: the real SmolLM2-135M (GGUF, dequantised) and a random Llama-shaped checkpoint in 5 safetensors shards, written
to a temporary folder and removed. Each loads in a process of its own; the peak is VmHWM after the load minus the
resident size before it, so imports do not count. Needs Linux. One JSON line last; exit status 1 above the limit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARDS = 5


def status_bytes(field: str) -> int:
    """A size of this process from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def measure(model: str, dtype: str) -> dict[str, float]:
    """Loads `model` in this process."""
    import torch
    import transformers  # noqa: F401  (its import is not what we measure)

    from aspire.model.build import build_model, torch_dtype
    from aspire.model.resolve import resolve_model

    torch.set_num_threads(1)
    source = resolve_model(model)
    before, start = status_bytes("VmRSS"), time.perf_counter()
    decoder, _ = build_model(source, dtype=torch_dtype(dtype), device="cpu")
    seconds = time.perf_counter() - start
    size = sum(tensor.numel() * tensor.element_size() for tensor in decoder.parameters.values())
    peak = status_bytes("VmHWM") - before
    return {"weights_mb": round(size / 1e6, 1), "peak_mb": round(peak / 1e6, 1), "ratio": round(peak / size, 3),
            "seconds": round(seconds, 2)}


def write_checkpoint(path: Path, gigabytes: float) -> None:
    """A bf16 Llama checkpoint of about that size in SHARDS files, never more than one shard in memory."""
    import torch
    from safetensors.torch import save_file

    from aspire.model.build import describe_model
    from aspire.model.layout import checkpoint_parts
    from aspire.model.resolve import resolve_model

    layers = max(1, round((gigabytes * 1e9 - 32000 * 2048 * 2) / (2 * 60.8e6)))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
              "intermediate_size": 8192, "num_hidden_layers": layers, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
              "tie_word_embeddings": True, "dtype": "bfloat16", "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(config))
    parts = checkpoint_parts(describe_model(resolve_model(str(path), load_format="dummy")))
    names, where = list(parts), {}
    row = torch.randn(1 << 13, generator=torch.Generator().manual_seed(0)).bfloat16()
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        chosen = names[shard * len(names) // SHARDS:(shard + 1) * len(names) // SHARDS]
        where.update(dict.fromkeys(chosen, file))
        tensors = {name: torch.empty(parts[name].shape, dtype=torch.bfloat16) for name in chosen}
        for tensor in tensors.values():
            tensor.copy_(row[:tensor.shape[-1]])
        save_file(tensors, str(path / file))
        del tensors, tensor
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def measure_in_child(model: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", model, dtype]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    result: dict[str, float] = json.loads(lines[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return 0
    results = {f"smollm2-135m {dtype}": measure_in_child("smollm2-135m", dtype) for dtype in ("bfloat16", "float32")}
    with tempfile.TemporaryDirectory(prefix="aspire-load-") as folder:
        write_checkpoint(Path(folder), options.gigabytes)
        for dtype in ("bfloat16", "float32"):
            results[f"{SHARDS} shards {dtype}"] = measure_in_child(folder, dtype)
    for name, result in results.items():
        print(f"{name:24} weights {result['weights_mb']:8.1f} MB   peak {result['peak_mb']:8.1f} MB   "
              f"ratio {result['ratio']:.3f}   {result['seconds']:.1f} s")
    worst = max(result["ratio"] for result in results.values())
    print(json.dumps({"bench": "load_memory", "limit": options.limit, "worst_ratio": worst, "cases": results}))
    return 0 if worst < options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
