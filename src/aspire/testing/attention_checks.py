"""Kernels against references on random mixed batches: what the GPU tests and the benchmark's gate run."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from aspire.ops.key_scores.reference import key_scores as reference_scores
from aspire.ops.key_scores.triton import key_scores
from aspire.ops.paged_attention.reference import paged_attention as reference_attention
from aspire.ops.paged_attention.triton import KernelConfig, PagedAttention
from aspire.ops.select_topk.reference import select_topk as reference_select
from aspire.ops.select_topk.triton import select_topk
from aspire.ops.store_kv.reference import store_kv as reference_store
from aspire.ops.store_kv.triton import store_kv
from aspire.testing.attention_cases import AttentionCase, CaseSpec, RowSpec, make_case

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}  # of the norm, per token
PROBE_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.05}  # of a logit of size 4

# Compile-time choices, few, so that hundreds of random batches share compiled kernels.
FAMILIES = (
    CaseSpec((), num_heads=32, num_kv_heads=8, head_dim=128, unit=1, probes=2, dtype=torch.bfloat16),
    CaseSpec((), num_heads=9, num_kv_heads=3, head_dim=64, unit=1, probes=2, dtype=torch.bfloat16),
    CaseSpec((), num_heads=8, num_kv_heads=2, head_dim=128, unit=16, sinks=16, dtype=torch.bfloat16),
    CaseSpec((), num_heads=6, num_kv_heads=2, head_dim=96, unit=4, sinks=8, dtype=torch.float16),
    CaseSpec((), num_heads=8, num_kv_heads=1, head_dim=64, unit=8, sinks=8, probes=4, dtype=torch.float32),
    CaseSpec((), num_heads=4, num_kv_heads=4, head_dim=128, unit=1, window=300, probes=2, dtype=torch.bfloat16),
    CaseSpec((), num_heads=8, num_kv_heads=4, head_dim=256, unit=16, sinks=0, softcap=20.0, dtype=torch.bfloat16),
    CaseSpec((), num_heads=16, num_kv_heads=1, head_dim=128, unit=2, sinks=2, block_size=32, dtype=torch.float16),
)


def family_case(seed: int, device: str) -> AttentionCase:
    """A random batch of family seed % 8."""
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 12)):
        n = int(2 ** rng.uniform(0, 13.5))
        kind = rng.choice(("verify", "sparse", "sparse", "sparse", "decode", "prefill", "padding"))
        queries = {"verify": min(n, rng.randint(2, 17)), "prefill": min(n, rng.randint(18, 400))}.get(kind, 1)
        rows.append(RowSpec(0, 0) if kind == "padding" else RowSpec(n, queries, kind == "sparse"))
    rows.append(RowSpec(rng.randint(600, 9000), rng.randint(1, 17)))
    spec = replace(FAMILIES[seed % len(FAMILIES)], rows=tuple(rows), capacity=512, spare_tokens=rng.choice((0, 5)),
                   device=device)
    return make_case(spec, seed)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """The largest ||out - expected|| / ||expected|| over tokens; NaN counts as infinite."""
    difference = (out.float() - expected.float()).flatten(1).norm(dim=1)
    size = expected.float().flatten(1).norm(dim=1).clamp(min=1e-20)
    return float((difference / size).nan_to_num(torch.inf).max())


def check_seed(seed: int, device: str, config: KernelConfig | None = None) -> None:
    """One random batch: attention with and without restriction, probed logits, scores, selection."""
    case = family_case(seed, device)
    attention = PagedAttention(config)
    for selection in (case.selection, None):
        if case.probe is not None:
            case.probe.logits.fill_(torch.nan)
        out, lse = attention(case.query, case.key_cache, case.value_cache, case.rows, selection, case.options,
                             case.probe)
        written = None if case.probe is None else case.probe.logits.clone()
        expected, expected_lse = reference_attention(case.query, case.key_cache, case.value_cache, case.rows, selection,
                                                     case.options, case.probe)
        error = relative_error(out, expected)
        assert error < TOLERANCE[case.query.dtype], f"seed {seed}: relative error {error}"
        if case.probe is None or written is None or lse is None or expected_lse is None:
            continue
        slack = PROBE_TOLERANCE[case.probe.logits.dtype]
        seen = ~case.probe.logits.isnan()
        torch.testing.assert_close(written[seen], case.probe.logits[seen], atol=slack, rtol=slack)
        used = case.probe.token[case.probe.token >= 0].long()
        torch.testing.assert_close(lse[used], expected_lse[used], atol=2e-2, rtol=1e-3)
        check_scores(case, expected_lse, seed)


def store_in_eight_bits(numbers: Tensor, key_scale: float, value_scale: float) -> tuple[Tensor, Tensor]:
    """Caches [2, ...] of the kernel and of the reference, for keys and values [2, 8, 3, 24]."""
    slots = torch.tensor([5, -1, 0, 11, 7, 2, 9, 3], device=numbers.device)
    found, expected = (torch.zeros(2, 3, 4, 3, 24, device=numbers.device).to(torch.float8_e4m3fn) for _ in range(2))
    for store, caches in ((store_kv, found), (reference_store, expected)):
        store(numbers[0], numbers[1], caches[0], caches[1], slots, key_scale=key_scale, value_scale=value_scale)
    return found.view(torch.uint8), expected.view(torch.uint8)


def check_scores(case: AttentionCase, lse: Tensor, seed: int) -> None:
    """key_scores from the same logits, then select_topk from the same scores (which must agree exactly)."""
    assert case.probe is not None
    unit, window = max(1, seed % 3 * 8), case.options.window
    for reduce in ("mean", "max"):
        scores = key_scores(case.probe, lse, case.rows, unit=unit, reduce=reduce, window=window)
        expected = reference_scores(case.probe, lse, case.rows, unit=unit, reduce=reduce, window=window)
        rows = case.probe.row[:-1].long()
        last = case.rows.kv_len[rows] // unit
        end = case.rows.query_start[rows + 1]
        top = case.probe.token[:-1].max(1).values
        seen = (case.rows.kv_len[rows] - end + top).cpu().tolist()
        for n, position in enumerate(seen):
            count = position // unit + 1
            torch.testing.assert_close(scores[n, :count], expected[n, :count], atol=1e-6, rtol=1e-3)
        first = torch.full_like(last, 1)
        k = torch.randint(0, 400, last.shape, device=last.device, dtype=torch.int32)
        chosen = select_topk(expected[:-1], first, last, k, capacity=300, coverage=None)
        right = reference_select(expected[:-1], first, last, k, capacity=300, coverage=None)
        assert torch.equal(chosen[0], right[0]), f"seed {seed}: selection differs"
        assert torch.equal(chosen[1], right[1]), f"seed {seed}: number selected differs"
