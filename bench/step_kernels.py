"""Kernels that one decoding step launches, counted on a CPU; prints one JSON line.

    TRITON_INTERPRET=1 python bench/step_kernels.py [--policy aspire] [--layers 30] [--sampling plain]

A tiny model of that many layers runs one step of two verifications and two drafts on the Triton kernels. Counted are
launches of these, and the torch operations that would launch something on a GPU: all but views and allocations.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from aspire.attention.triton import TritonAttention
from aspire.build import assemble
from aspire.config import EngineConfig
from aspire.model.build import build_model
from aspire.model.ops_triton import triton_ops
from aspire.model.resolve import resolve_model
from aspire.request import SamplingParams
from aspire.runtime.devices import DeviceKit
from aspire.runtime.operators import triton_operators
from aspire.runtime.runner import Runner
from aspire.schedule.plan import Row, RowKind, StepPlan
from aspire.testing.engines import tiny_bed

SIZES = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
FREE = ("empty", "detach", "alias", "resize_")  # name no view and launch nothing


class Launches(TorchDispatchMode):
    """Counts torch's operations by name, and Triton's kernels while `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self.triton: Counter[str] = Counter()
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        result = func(*args, **(kwargs or {}))
        is_free = name.startswith(FREE) or (func.is_view and _shares(result, args[0]))
        if not self._inside and not is_free:
            self.torch[name] += 1
        return result

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.triton[executor.fn.__name__] += 1
            self._inside += 1  # what the interpreter does is no part of the step
            try:
                return call(executor, *args, **kwargs)
            finally:
                self._inside -= 1

        return run


def _shares(result: Any, source: Tensor) -> bool:
    """Whether an operation that may give a view (a conversion, a reshape) did so."""
    parts = result if isinstance(result, list | tuple) else [result]
    return all(part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() for part in parts)


def make_runner(policy: str, num_layers: int) -> Runner:
    with tempfile.TemporaryDirectory() as folder:
        bed = tiny_bed(folder, "llama", num_hidden_layers=num_layers, **SIZES)
        model, _ = build_model(resolve_model(bed.name), dtype=torch.float32, device="cpu", ops=triton_ops())
    config = EngineConfig.from_options(bed.name, {"policy": policy, "max_num_seqs": 4, "max_num_batched_tokens": 64})
    config = config.resolve(device="cpu", model_dtype="float32", model_limit=bed.spec.max_model_len)
    engine = assemble(config, bed.spec, model, bed.tokenizer, device=torch.device("cpu"),
                      kit=DeviceKit(TritonAttention(), triton_operators(), triton_ops()))
    for index in range(4):
        engine.add(str(index), [index + 1] * 5, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    runner = engine.loop.runner
    assert isinstance(runner, Runner), "assemble made it"
    return runner


def decoding_plan(draft_limit: int) -> StepPlan:
    count = min(2, draft_limit)
    full, sparse = RowKind.FULL, RowKind.SPARSE
    rows = [Row("0", 0, full, 5, count + 1, count, True), Row("1", 1, full, 5, 1, 0, True)]
    if draft_limit:
        rows += [Row("2", 2, sparse, 5, 1, 0, True, (), False), Row("3", 3, sparse, 5, 1, 0, True, (), False)]
    return StepPlan(0, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="aspire")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--sampling", default="plain", choices=("greedy", "plain", "filtered"))
    args = parser.parse_args()
    runner = make_runner(args.policy, args.layers)
    batch = runner.builder.build(decoding_plan(runner.builder.layout.draft_limit))
    launches = Launches()
    before = GridExecutor.__call__
    GridExecutor.__call__ = launches.watched(before)
    with torch.inference_mode(), launches:
        runner.plain_step(batch, args.sampling)
    GridExecutor.__call__ = before
    print(json.dumps({
        "bench": "step_kernels", "policy": args.policy, "layers": args.layers, "triton": launches.triton.total(),
        "torch": launches.torch.total(), "triton_by_name": dict(launches.triton.most_common()),
        "torch_by_name": dict(launches.torch.most_common())}))


if __name__ == "__main__":
    main()
