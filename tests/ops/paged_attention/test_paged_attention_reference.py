"""The torch reference of paged_attention against a loop over tokens."""

import random

import pytest
import torch

from aspire.attention.reference import ReferenceAttention
from aspire.attention.rows import AttentionOptions
from aspire.ops.paged_attention.reference import paged_attention
from aspire.testing.attention_cases import AttentionCase, CaseSpec, RowSpec, make_case, plain_attention, random_spec

MIX = (RowSpec(150, 5), *(RowSpec(n, 1, True) for n in (140, 77, 3, 61, 130, 99, 150)), RowSpec(0, 0))


def check(case: AttentionCase, restricted: bool) -> None:
    selection = case.selection if restricted else None
    expected, lse_expected, logits = plain_attention(case, selection)
    out, lse = paged_attention(case.query, case.key_cache, case.value_cache, case.rows, selection, case.options,
                               case.probe)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    assert (lse is None) == (case.probe is None)
    if case.probe is None or lse is None:
        return
    for n, tokens in enumerate(case.probe.token.tolist()):
        for i, token in enumerate(tokens):
            written = case.probe.logits[n, i]
            if token < 0:
                assert written.isnan().all()
                continue
            seen = logits[token].shape[1]
            torch.testing.assert_close(written[:, :seen].double(), logits[token], atol=2e-5, rtol=2e-5, equal_nan=True)
            assert written[:, seen:].isnan().all()
            torch.testing.assert_close(lse[token].double(), lse_expected[token], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("restricted", [True, False], ids=["sparse", "all"])
@pytest.mark.parametrize("unit", [1, 4, 16])
def test_one_verifying_row_among_seven_drafting(unit: int, restricted: bool) -> None:
    """Planted faults: sinks read again when the tail starts at 0; a unit's tokens start at u, not u * unit."""
    check(make_case(CaseSpec(MIX, unit=unit, sinks=16, probes=2 if restricted else 0), seed=unit), restricted)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    """Planted faults: a window one key too long; the group's heads dealt to keys in turn instead of in runs."""
    rng = random.Random(seed)
    case = make_case(random_spec(rng, max_kv_len=160), seed)
    check(case, rng.random() < 0.7)


@pytest.mark.parametrize("kv_len", [700, 1300])
@pytest.mark.parametrize("window", [None, 200])
def test_long_prefill(kv_len: int, window: int | None) -> None:
    """The fused paths: a whole prompt and a chunk at the end of it. Planted fault: top-left causal mask of a chunk."""
    spec = CaseSpec((RowSpec(700, 700), RowSpec(kv_len, 600)), num_heads=3, num_kv_heads=1, window=window, probes=2)
    check(make_case(spec, seed=kv_len), restricted=True)


def test_eight_bit_cache_is_scaled_back() -> None:
    """Planted fault: value_scale applied to the keys."""
    case = make_case(CaseSpec(MIX), seed=3)
    kinds = [c.nan_to_num().to(torch.float8_e4m3fn) for c in (case.key_cache, case.value_cache)]
    options = AttentionOptions(0.125, key_scale=0.5, value_scale=2.0)
    case = AttentionCase(case.query, kinds[0], kinds[1], case.rows, case.selection, options, None)
    check(case, restricted=True)


def test_store_then_attend_through_the_backend() -> None:
    """Planted fault: key and value swapped in store. A row's own token, just stored, is what it reads."""
    case = make_case(CaseSpec((RowSpec(1), RowSpec(1, 1, True)), num_heads=2), seed=5)
    backend = ReferenceAttention()
    key, value = torch.randn(2, 2, 2, 64)
    slots = case.rows.block_table[case.rows.slot.long(), 0].long() * 16
    backend.store(key, value, case.key_cache, case.value_cache, slots)
    out, lse = backend.attend(case.query, case.key_cache, case.value_cache, case.rows, case.selection, case.options,
                              None)
    torch.testing.assert_close(out, value)
    assert lse is None
