"""Long prompt chunks through a library's attention: the same numbers as one backend for all rows."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aspire.attention.chunked import ChunkedAttention
from aspire.attention.chunks import ChunkGroup, split_rows
from aspire.attention.libraries import FlashChunks
from aspire.attention.protocol import AttentionBackend
from aspire.attention.reference import ReferenceAttention
from aspire.attention.rows import HostRow, Probe
from aspire.build import assemble
from aspire.config import EngineConfig
from aspire.model.layers import ModelOps
from aspire.request import SamplingParams
from aspire.runtime.devices import DeviceKit
from aspire.runtime.operators import reference_operators
from aspire.speculation.policy import Overrides
from aspire.testing.attention_cases import AttentionCase, CaseSpec, RowSpec, make_case
from aspire.testing.engines import run, tiny_bed


class MaskedChunks:
    """torch's attention under explicit masks, chunk by chunk; counts the queries it was given."""

    name = "masked"

    def __init__(self) -> None:
        self.queries: list[tuple[int, ...]] = []

    def supports(self, query: Tensor) -> bool:
        return True

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, group: ChunkGroup, scale: float) -> Tensor:
        self.queries.append(group.num_queries)
        starts, keys = group.query_start.tolist(), group.key_start.tolist()
        parts = []
        for n in range(len(group.spans)):
            q, k, v = query[starts[n]:starts[n + 1]], key[keys[n]:keys[n + 1]], value[keys[n]:keys[n + 1]]
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            out = scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, scale=scale,
                                               enable_gqa=True)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


def with_host(case: AttentionCase, spec: CaseSpec, num_probed: Sequence[int]) -> AttentionCase:
    """The case as the engine would plan it: what the host knows, and probes of the last queries of some rows."""
    slots, starts = case.rows.slot.tolist(), case.rows.query_start.tolist()
    host = tuple(HostRow(slot, row.num_queries, None if row.num_queries < 3 else row.kv_len, probed)
                 for slot, row, probed in zip(slots, spec.rows, num_probed, strict=True))
    probe, probed_rows = None, [r for r, count in enumerate(num_probed) if count]
    if probed_rows:
        width = max(num_probed)
        token = torch.full((len(probed_rows) + 1, width), -1, dtype=torch.int32)
        for n, r in enumerate(probed_rows):
            token[n, :num_probed[r]] = torch.arange(starts[r + 1] - num_probed[r], starts[r + 1])
        logits = torch.full((len(token), width, spec.num_heads, case.rows.max_kv_len), torch.nan)
        device = case.query.device
        probe = Probe(token.to(device), torch.tensor([*probed_rows, -1], dtype=torch.int32, device=device),
                      logits.to(device, case.query.dtype))
    return replace(case, rows=replace(case.rows, host=host), probe=probe)


MIXES = {
    "one chunk alone": ((RowSpec(61, 40),), (0,)),
    "a whole prompt that samples": ((RowSpec(37, 37),), (5,)),
    "between decoding rows": ((RowSpec(70), RowSpec(90, 33), RowSpec(50, 1, True), RowSpec(44, 4)), (1, 0, 0, 4)),
    "several, of which some sample": ((RowSpec(70, 1, True), RowSpec(90, 33), RowSpec(64, 17), RowSpec(45, 45),
                                       RowSpec(0, 0), RowSpec(40, 9), RowSpec(101, 21)), (0, 4, 0, 3, 0, 2, 0)),
    "too short without the probed": ((RowSpec(61, 18), RowSpec(61, 30)), (4, 4)),
}


def attend(backend: ReferenceAttention | ChunkedAttention, case: AttentionCase) -> tuple[Tensor, Tensor | None]:
    if case.probe is not None:
        case.probe.logits.fill_(torch.nan)
    return backend.attend(case.query, case.key_cache, case.value_cache, case.rows, case.selection, case.options,
                          case.probe)


def test_views_of_a_step_are_split_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers alternate between two views, as where lists are seldom renewed. Planted fault: only the last view kept."""
    rows, num_probed = MIXES["between decoding rows"]
    spec = CaseSpec(rows, num_heads=6, num_kv_heads=2, head_dim=16)
    first = with_host(make_case(spec, seed=1), spec, num_probed)
    second = replace(first, rows=replace(first.rows, sparse=torch.zeros_like(first.rows.sparse), view=1))
    split = []
    monkeypatch.setattr("aspire.attention.chunked.split_rows",
                        lambda rows, *given, **named: (split.append(rows.view), split_rows(rows, *given, **named))[1])
    backend = ChunkedAttention(ReferenceAttention, MaskedChunks(), least=16)
    for case in (first, second, first, second):
        expected, _ = attend(ReferenceAttention(), case)
        torch.testing.assert_close(attend(backend, case)[0], expected, atol=2e-6, rtol=2e-5)
    assert split == [0, 1]


@pytest.mark.parametrize("most_keys", [1 << 16, 1], ids=["together", "one by one"])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_one_backend_for_all_rows(mix: str, most_keys: int) -> None:
    """Planted faults: keys of the probed tail given to the chunk too; the rest's places by the order of rows, not of
    tokens; probes not moved to the rest's places; the second chunk's keys taken from the first one's slot."""
    check(mix, most_keys, ReferenceAttention)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # lanes that no store keeps divide by zero
@pytest.mark.parametrize("mix", MIXES)
def test_kernels_serve_the_rest(mix: str) -> None:
    """Rows whose queries are all taken have none left, which only happens here. Planted fault: such rows keep one
    query in the rest's table of starts."""
    from aspire.attention.triton import TritonAttention
    from aspire.testing.model_op_checks import poisoned_memory

    with poisoned_memory():
        check(mix, 1 << 16, TritonAttention)


def check(mix: str, most_keys: int, new_backend: Callable[[], AttentionBackend]) -> None:
    """Against the reference for all rows: outputs, probed logits, their sums; and what the library was given."""
    rows, num_probed = MIXES[mix]
    spec = CaseSpec(rows, num_heads=6, num_kv_heads=2, head_dim=16, spare_tokens=3)
    case = with_host(make_case(spec, seed=len(mix)), spec, num_probed)
    expected, expected_lse = attend(ReferenceAttention(), case)
    logits = None if case.probe is None else case.probe.logits.clone()
    library = MaskedChunks()
    out, lse = attend(ChunkedAttention(new_backend, library, least=16, most_keys=most_keys), case)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=2e-5)
    given = [row.num_queries - probed for row, probed in zip(rows, num_probed, strict=True)]
    assert [q for queries in library.queries for q in queries] == [q for q in given if q >= 16]
    if case.probe is None or lse is None or expected_lse is None:
        assert lse is None
        return
    assert logits is not None
    torch.testing.assert_close(case.probe.logits[~logits.isnan()], logits[~logits.isnan()], atol=1e-5, rtol=2e-5)
    used = case.probe.token[case.probe.token >= 0].long()
    torch.testing.assert_close(lse[used], expected_lse[used], atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize(("window", "softcap"), [(20, None), (None, 5.0)], ids=["window", "soft cap"])
def test_layers_that_the_library_does_not_know_are_not_split(window: int | None, softcap: float | None) -> None:
    """Layers of both kinds share a step. Planted fault: the split of the layer before taken over."""
    spec = CaseSpec((RowSpec(90, 40), RowSpec(70)), head_dim=16)
    case = with_host(make_case(spec, seed=1), spec, (0, 0))
    other = replace(case, options=replace(case.options, window=window, softcap=softcap))
    library = MaskedChunks()
    backend = ChunkedAttention(ReferenceAttention, library, least=16)
    for each, calls in ((case, 1), (other, 1), (case, 2)):
        torch.testing.assert_close(attend(backend, each)[0], attend(ReferenceAttention(), each)[0])
        assert len(library.queries) == calls


def test_eight_bit_caches_are_scaled_back() -> None:
    """Planted fault: value_scale left out."""
    spec = CaseSpec((RowSpec(90, 40), RowSpec(70)), head_dim=16)
    case = with_host(make_case(spec, seed=2), spec, (3, 0))
    caches = [cache.nan_to_num().to(torch.float8_e4m3fn) for cache in (case.key_cache, case.value_cache)]
    case = replace(case, key_cache=caches[0], value_cache=caches[1],
                   options=replace(case.options, key_scale=0.5, value_scale=2.0))
    out, _ = attend(ChunkedAttention(ReferenceAttention, MaskedChunks(), least=16), case)
    torch.testing.assert_close(out, attend(ReferenceAttention(), case)[0], atol=2e-6, rtol=2e-5)


def test_steps_without_host_rows_or_long_chunks_are_not_split() -> None:
    """Captured steps carry no host rows. Planted fault: decoding rows of many drafts taken for chunks."""
    spec = CaseSpec((RowSpec(90, 40), RowSpec(70)), head_dim=16)
    case = make_case(spec, seed=3)
    assert split_rows(with_host(case, spec, (0, 0)).rows, 41, 16, least=41, most_keys=99) is None
    decoding = replace(case.rows, host=(HostRow(0, 40, None, 0), HostRow(1, 1, None, 0)))
    assert split_rows(decoding, 41, 16, least=16, most_keys=99) is None
    library = MaskedChunks()
    attend(ChunkedAttention(ReferenceAttention, library, least=16), case)
    assert library.queries == []


@pytest.mark.parametrize("policy", ["autoregressive", "aspire", "aspire-paper"])
def test_tokens_of_an_engine(policy: str, tmp_path: Path) -> None:
    """Chunks of 40 and more, the last of each prompt probed. Planted faults: kv_len of the host's rows without their
    own tokens."""
    bed = tiny_bed(tmp_path)
    chance = random.Random(0)
    prompts = [[chance.randrange(256) for _ in range(length)] for length in (100, 61, 150, 33, 128)]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
    expected = run(bed.engine({"policy": "autoregressive", "max_num_seqs": 1}), prompts, params)
    config = EngineConfig.from_options(bed.name, {"policy": policy, "overrides": Overrides(budget=64, window=32),
                                                  "max_num_seqs": 4, "max_num_batched_tokens": 90})
    config = config.resolve(device="cpu", model_dtype="float32", model_limit=bed.spec.max_model_len)
    library = MaskedChunks()
    kit = DeviceKit(ChunkedAttention(ReferenceAttention, library, least=40), reference_operators(), ModelOps())
    outputs = run(assemble(config, bed.spec, bed.model, bed.tokenizer, device=torch.device("cpu"), kit=kit), prompts,
                  params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert len(library.queries) > 2 * bed.spec.num_layers


def test_the_rest_is_small() -> None:
    """Planted fault: a chunk's queries left with the rest as well, which costs the time twice."""
    spec = CaseSpec((RowSpec(90, 40), RowSpec(70), RowSpec(50, 50)), head_dim=16, spare_tokens=2)
    split = split_rows(with_host(make_case(spec, seed=5), spec, (3, 1, 0)).rows, 93, 16, least=16, most_keys=150)
    assert split is not None
    assert split.rest.tokens.tolist() == [37, 38, 39, 40, 91, 92]
    assert split.rest.rows.query_start.tolist() == [0, 3, 4, 4]
    assert split.rest.rows.max_query_len == 3
    assert [group.spans for group in split.groups] == [((0, 37), (41, 91))]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64), (8, 2, 96), (8, 8, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Odd lengths, several chunks, decoding and drafting rows beside, probes. Planted fault on the CPU, see above."""
    from aspire.attention.triton import TritonAttention
    from aspire.testing.attention_checks import PROBE_TOLERANCE, TOLERANCE, relative_error

    rows = (RowSpec(4100), RowSpec(900, 1, True), RowSpec(3001, 700), RowSpec(517, 517), RowSpec(2049, 300),
            RowSpec(8000, 1233), RowSpec(300, 100))
    spec = CaseSpec(rows, *shape, capacity=512, dtype=dtype, device="cuda")
    case = with_host(make_case(spec, seed=4), spec, (1, 0, 17, 17, 0, 0, 17))
    assert case.probe is not None
    case = replace(case, probe=replace(case.probe, logits=case.probe.logits.to(torch.bfloat16)))
    expected, expected_lse = attend(ReferenceAttention(), case)
    assert case.probe is not None
    logits = case.probe.logits.clone()
    for most_keys in (1 << 16, 1):
        out, lse = attend(ChunkedAttention(TritonAttention, FlashChunks(), least=256, most_keys=most_keys), case)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        seen, slack = ~logits.isnan(), PROBE_TOLERANCE[torch.bfloat16]
        torch.testing.assert_close(case.probe.logits[seen], logits[seen], atol=slack, rtol=slack)
        assert lse is not None
        assert expected_lse is not None
        used = case.probe.token[case.probe.token >= 0].long()
        torch.testing.assert_close(lse[used], expected_lse[used], atol=2e-2, rtol=1e-3)
