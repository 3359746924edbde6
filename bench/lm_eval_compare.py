"""lm-eval-harness against the server and against transformers, on the same weights: SmolLM2-135M in float32.

    python bench/lm_eval_compare.py out/lm_eval [--limit 10] [--tasks gsm_choice,gsm_ppl,gsm_gen]

Needs `pip install 'lm_eval[api]' accelerate`; nothing is downloaded. Writes a checkpoint that transformers itself reads
from the built-in model's GGUF, the tasks of lm_eval_tasks.py, and the results of both runs (`local-completions` with
token-id prompts against `aspire serve smollm2-135m`, and `hf`) into the folder given. Prints every score of both and
one JSON line last; exit status 1 if a score differs by more than 1e-3 of its size or a generated text differs.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval_tasks

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-3  # of a score: a log-likelihood differs by about 1e-5 of its size between two orders of summation
START_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, default=None, help="documents of each task; default all")
    parser.add_argument("--tasks", default=",".join(lm_eval_tasks.TASKS))
    options = parser.parse_args()
    folder = options.folder.resolve()
    lm_eval_tasks.main(folder / "tasks")
    checkpoint = write_checkpoint(folder / "checkpoint")
    with served() as port:
        evaluate(options, folder / "server", "local-completions",
                 f"model=smollm2-135m,base_url=http://127.0.0.1:{port}/v1/completions,tokenizer={checkpoint},"
                 "tokenized_requests=True,num_concurrent=8")
    evaluate(options, folder / "transformers", "hf", f"pretrained={checkpoint},dtype=float32")
    result = compare(folder / "server", folder / "transformers")
    print(json.dumps({"bench": "lm_eval_compare", "limit": options.limit, **result}))
    return 0 if result["same"] else 1


def write_checkpoint(folder: Path) -> Path:
    """The built-in model as transformers reads it, without our loader; the tokenizer is ours, for both sides."""
    import torch
    import transformers

    from aspire.model.resolve import load_tokenizer, resolve_model

    if not (folder / "config.json").exists():
        source = resolve_model("smollm2-135m")
        packed = {"pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**packed, dtype=torch.float32)
        # transformers does not save a model that remembers having been quantised: a plain one takes the weights.
        plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(**packed),
                                                              dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        load_tokenizer(source).save_pretrained(str(folder))
        plain.save_pretrained(str(folder))
    return folder


@contextmanager
def served() -> Iterator[int]:
    """`aspire serve smollm2-135m` on a free port; its log goes to stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "aspire.cli.main", "serve", "smollm2-135m", "--dtype", "float32",
                               "--max-model-len", "2048", "--port", str(port), "--log-level", "warning"], env=_env())
    try:
        for _ in range(START_SECONDS * 5):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready")
                break
            except OSError:
                assert server.poll() is None, "the server did not start"
                time.sleep(0.2)
        yield port
    finally:
        server.terminate()
        server.wait(60)


def evaluate(options: argparse.Namespace, output: Path, kind: str, arguments: str) -> None:
    limit = [] if options.limit is None else ["--limit", str(options.limit)]
    subprocess.run([sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks",
                    options.tasks, "--include_path", str(output.parent / "tasks"), "--output_path", str(output),
                    "--log_samples", "--batch_size", "1", *limit], check=True, env=_env(), stdout=sys.stderr)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}


def compare(server: Path, reference: Path) -> dict[str, Any]:
    ours, theirs = scores(server), scores(reference)
    assert ours.keys() == theirs.keys(), "both runs must have the same scores"
    for name, value in ours.items():
        print(f"{name:32} server {value:12.6f}   transformers {theirs[name]:12.6f}")
    same = all(math.isclose(value, theirs[name], rel_tol=TOLERANCE) for name, value in ours.items())
    answers, expected = samples(server), samples(reference)
    assert answers.keys() == expected.keys(), "both runs must have the same documents"
    gaps, num_texts, num_equal = [0.0], 0, 0
    for key, given in answers.items():
        for one, other in zip(given, expected[key], strict=True):
            if isinstance(one, str):
                num_texts += 1
                num_equal += one == other
            else:
                gaps.append(abs(float(one) - float(other)))
    return {"same": same and num_equal == num_texts, "server": ours, "transformers": theirs,
            "num_loglikelihoods": len(gaps) - 1, "largest_loglikelihood_gap": max(gaps),
            "num_texts": num_texts, "num_equal_texts": num_equal}


def scores(folder: Path) -> dict[str, float]:
    """task/metric -> score, of the newest run."""
    newest = max(folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(newest.read_text(encoding="utf-8"))["results"]
    return {f"{task}/{name.partition(',')[0]}": float(value) for task, metrics in found.items()
            for name, value in metrics.items() if isinstance(value, (int, float)) and "," in name
            and "stderr" not in name}


def samples(folder: Path) -> dict[tuple[str, int], list[Any]]:
    """(task, document) -> the answers: log-likelihoods and whether greedy, or texts."""
    found: dict[tuple[str, int], list[Any]] = {}
    for path in sorted(folder.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
            found[task, sample["doc_id"]] = [_value(answer, task) for answer in sample["filtered_resps"]]
    return found


def _value(answer: Any, task: str) -> str | float:
    """A text of the generating task; else (log-likelihood, is greedy) or a log-likelihood, which are strings too."""
    if task == "gsm_gen":
        return str(answer)
    return float(answer[0] if isinstance(answer, list) else answer)


if __name__ == "__main__":
    sys.exit(main())
