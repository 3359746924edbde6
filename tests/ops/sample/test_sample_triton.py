"""The Triton sampler against the reference: equal bits, not close values."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

import triton
import triton.language as tl

from aspire.ops.sample import kernels, noise, reference
from aspire.ops.sample import triton as compiled
from aspire.ops.sample.rows import SamplingRows

pytestmark = [pytest.mark.interpret] if os.environ.get("TRITON_INTERPRET") == "1" else [pytest.mark.gpu]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@triton.jit
def functions_kernel(x, words, log_out, exp_out, gumbel_out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(log_out + at, kernels.log32(value))
    tl.store(exp_out + at, kernels.exp32(-value))
    tl.store(gumbel_out + at, kernels.gumbel(tl.load(words + at).to(tl.uint32)))


@triton.jit
def words_kernel(seed, position, out, STREAM: tl.constexpr, GROUPS: tl.constexpr):
    words = kernels.noise_words(tl.load(seed), tl.load(position), 3, STREAM, GROUPS)
    tl.store(out + tl.arange(0, 4 * GROUPS), words.to(tl.int64))


def test_functions_have_the_bits_of_the_reference() -> None:
    """Fails when one multiply and add is contracted (compiled without enable_fp_fusion=False), or when a polynomial's
    order of operations differs."""
    generator = torch.Generator().manual_seed(0)
    n = 1 << 15
    x = torch.cat([torch.logspace(-30, 30, n // 2), 80 * torch.rand(n - n // 2, generator=generator) + 1e-30])
    words = torch.randint(0, 2**32, (n,), generator=generator)
    words[:6] = torch.tensor([0, 1, 2, 2**32 - 1, 2**31, 1258000000])
    log_out, exp_out, gumbel_out = torch.full((3, n), torch.nan, device=DEVICE)
    functions_kernel[(n // 1024,)](x.to(DEVICE), words.to(DEVICE), log_out, exp_out, gumbel_out, BLOCK=1024,
                                   enable_fp_fusion=False)
    assert torch.equal(log_out.cpu(), noise.log32(x))
    assert torch.equal(exp_out.cpu(), noise.exp32(-x))
    assert torch.equal(gumbel_out.cpu(), noise.gumbel(words))


@pytest.mark.parametrize(("seed", "position", "stream"), [(0, 0, 0), (-1, 7, 1), (0x1234_5678_9ABC_DEF0, 2**31 + 5, 3)])
def test_words(seed: int, position: int, stream: int) -> None:
    """Fails when the four words of a group are interleaved in another order."""
    out = torch.full((64,), -1, dtype=torch.int64, device=DEVICE)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    words_kernel[(1,)](seeds.to(DEVICE), positions.to(DEVICE), out, STREAM=stream, GROUPS=16)
    assert torch.equal(out.cpu(), noise.noise_words(seeds, positions, 76, stream)[0, 12:])


def random_rows(n: int, mode: str, generator: torch.Generator) -> SamplingRows:
    """Every row differs; some are greedy, some have filters off."""
    def choose(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (n,), generator=generator)]

    temperature = torch.zeros(n) if mode == "greedy" else choose([0.0, 0.3, 0.8, 1.0, 1.7])
    return SamplingRows(temperature, choose([0, 0, 1, 5, 40, 10**6]).int(), choose([1.0, 1.0, 0.3, 0.9, 0.97]),
                        choose([0.0, 0.0, 0.02, 0.2, 1.0]),
                        torch.randint(-(2**62), 2**62, (n,), generator=generator),
                        torch.randint(0, 2**20, (n,), generator=generator), mode=mode)  # type: ignore[arg-type]


def to_device(rows: SamplingRows) -> SamplingRows:
    return SamplingRows(*(getattr(rows, name).to(DEVICE) for name in ("temperature", "top_k", "top_p", "min_p", "seed",
                                                                      "position")), rows.mode, rows.stream)


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
@pytest.mark.parametrize("vocab", [1, 257, 5001])
def test_picks_equal_the_reference(mode: str, vocab: int) -> None:
    """Tokens, margins and thresholds, with ties, bans and rows that allow one token or none; odd sizes, a strided view,
    NaN behind the vocabulary.

    Fails when ties go to the later part, when the runner-up of the winning part is forgotten, when a mask reads past
    the vocabulary, when top-p counts what top-k left out."""
    generator = torch.Generator().manual_seed(vocab)
    n = 8
    wide = torch.full((n, vocab + 3), torch.nan)
    wide[:, :vocab] = (torch.randn(n, vocab, generator=generator) * 24).round() / 8
    wide[:, :vocab].masked_fill_(torch.rand(n, vocab, generator=generator) < 0.2, -torch.inf)
    wide[1, :vocab] = -torch.inf
    wide[2, :vocab] = -torch.inf
    wide[2, vocab // 2] = 1.5
    logits = wide[:, :vocab]
    rows = random_rows(n, mode, generator)
    expected = reference.sample(logits, rows)
    got = compiled.sample(wide.to(DEVICE)[:, :vocab], to_device(rows))
    assert torch.equal(got.token.cpu(), expected.token)
    assert torch.equal(got.margin.cpu(), expected.margin)
    if mode == "filtered":
        assert torch.equal(compiled.filter_threshold(wide.to(DEVICE)[:, :vocab], to_device(rows)).cpu(),
                           reference.filter_threshold(logits, rows))


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
def test_a_row_with_a_nan_says_so(mode: str) -> None:
    """One NaN, in the part that loses, is enough; its neighbours are not touched. Planted fault: the maximum over the
    parts decides, which passes over NaN."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5001, generator=generator)
    logits[1, 4999] = torch.nan
    logits[1, 17] = 50.0
    rows = random_rows(3, mode, generator)
    clean = reference.sample(logits.nan_to_num(0.0), rows)
    for sample, to in ((reference.sample, "cpu"), (compiled.sample, DEVICE)):
        got = sample(logits.to(to), rows if to == "cpu" else to_device(rows))
        assert int(got.token[1]) == 0
        assert bool(got.margin[1].isnan())
        assert torch.equal(got.token[::2].cpu(), clean.token[::2])
        assert torch.equal(got.margin[::2].cpu(), clean.margin[::2])


def test_no_rows() -> None:
    rows = random_rows(0, "plain", torch.Generator())
    assert compiled.sample(torch.zeros(0, 9, device=DEVICE), to_device(rows)).token.shape == (0,)


@pytest.mark.skipif(DEVICE == "cpu", reason="large")
def test_real_vocabulary() -> None:
    """150,000 tokens, 200 rows, every filter: equal bits."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(200, 151_936, generator=generator) * 3
    for mode in ("plain", "filtered"):
        rows = random_rows(200, mode, generator)
        expected = reference.sample(logits, rows)
        got = compiled.sample(logits.to(DEVICE), to_device(rows))
        assert torch.equal(got.token.cpu(), expected.token)
        assert torch.equal(got.margin.cpu(), expected.margin)
