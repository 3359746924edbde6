"""The sampler against known answers, a plain Python model and its own statistics."""

import math

import pytest
import torch

from aspire.ops.sample.noise import exp32, gumbel, log32, noise, noise_words, philox
from aspire.ops.sample.reference import filter_threshold, probabilities, sample
from aspire.ops.sample.rows import SamplingRows, seed_bits


def make_rows(n: int, *, mode: str = "filtered", **values: object) -> SamplingRows:
    """Rows with everything off except what `values` gives (a scalar for all rows, or a list)."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    dtypes = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    tensors = {}
    for name, default in defaults.items():
        value = torch.as_tensor(values.get(name, default), dtype=dtypes.get(name, torch.float32))
        tensors[name] = value.expand(n).contiguous()
    return SamplingRows(**tensors, mode=mode, stream=values.get("stream", 0))  # type: ignore[arg-type]


KNOWN = [  # counter, key, words: the known-answer table that the authors of Philox publish (Random123, philox4x32 10)
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_matches_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Fails with 9 rounds, with the two key increments swapped, with a logical shift forgotten."""
    got = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in got) == words


def test_noise_addresses() -> None:
    """Token id, position, seed (both halves) and stream each change the noise; the layout is (id // 4, id % 4).

    Fails when the seed's high half is dropped or when words are laid out [4, V / 4]."""
    seed = torch.tensor([0xA4093822 | (0x299F31D0 << 32)])
    words = noise_words(seed, torch.tensor([77]), 11, stream=2)
    zero = torch.tensor(0)
    for token in range(11):
        group = philox((torch.tensor(token // 4), torch.tensor(77), zero + 2, zero),
                       (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)))
        assert int(words[0, token]) == int(group[token % 4])
    for other_seed, position, stream in ((int(seed) ^ 1, 77, 2), (int(seed) ^ (1 << 40), 77, 2), (int(seed), 78, 2),
                                         (int(seed), 77, 0)):
        other = noise_words(torch.tensor([other_seed]), torch.tensor([position]), 11, stream=stream)
        assert not (other == words).any()
    assert noise_words(torch.tensor([-1]), torch.tensor([0]), 4).min() >= 0


def test_log_and_exp_are_accurate() -> None:
    """Fails when a polynomial coefficient is off in its fifth digit, or the exponent by one."""
    x = torch.cat([torch.logspace(-30, 30, 20001), torch.linspace(0.5, 2, 20001)])
    error = (log32(x).double() - x.double().log()).abs()
    assert (error <= 2e-7 * x.double().log().abs().clamp(min=0.3)).all()
    y = torch.cat([torch.linspace(-86.9, 0, 20001), torch.tensor([-88.0, -1e9, -torch.inf])])
    assert torch.allclose(exp32(y).double(), torch.where(y < -87, 0.0, y.double().exp()), rtol=3e-7, atol=0)


def test_gumbel_values() -> None:
    """Against float64 on the extreme words and on a grid: fails when -log(1 - u) is computed without the care for
    small u (relative error 1 at word 0)."""
    words = torch.cat([torch.tensor([0, 1, 2, 1000, 2**32 - 1, 2**32 - 300]), torch.arange(0, 2**32, 7919 * 101)])
    u = ((words.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    exact = -(-torch.log1p(-u)).log()
    got = gumbel(words)
    assert ((got.double() - exact).abs() <= 2e-6 + 1e-6 * exact.abs() + 2e-7 / (1 - u) * 0.5).all()
    assert 22.8 < float(got[0]) < 22.9
    assert -2.82 < float(got[4]) < -2.80


def test_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov distance of 200,000 values below 0.0052: false-alarm probability below 4e-5 (2 exp(-2 n d^2)).

    Fails when the Gumbel's sign is flipped or -log(u) is returned."""
    values = noise(torch.tensor([12345, 6]), torch.tensor([7, 1]), 100_000).flatten().double().sort().values
    cdf = (-(-values).exp()).exp()
    n = values.numel()
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((steps - cdf).abs().max(), (cdf - steps + 1 / n).abs().max())
    assert float(distance) < 0.0052
    lag = noise(torch.tensor([3]), torch.tensor([0]), 200_001)[0].double()
    correlation = torch.corrcoef(torch.stack([lag[:-1], lag[1:]]))[0, 1]
    assert abs(float(correlation)) < 4.2 / math.sqrt(200_000)  # false alarm 3e-5


def keep_by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters as loops: min-p, then top-k, then top-p on what is left."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weight = [math.exp((x - logits[order[0]]) / temperature) for x in logits]
    kept = [i for i in order if weight[i] >= min_p]
    if top_k > 0:
        kept = [i for i in kept if logits[i] >= logits[kept[min(top_k, len(kept)) - 1]]]
    if top_p < 1:
        total, above, nucleus = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            if above < top_p * total or logits[i] == logits[nucleus[-1]]:
                nucleus.append(i)
            above += weight[i]
        kept = nucleus
    return set(kept)


def test_filters_match_a_plain_model() -> None:
    """Rows of different settings, ties included. Fails with min-p on unscaled logits, with top-k off by one."""
    generator = torch.Generator().manual_seed(1)
    cases = [(t, k, p, m) for t in (0.3, 1.0, 2.5) for k in (0, 1, 3, 400) for p in (0.05, 0.5, 0.9, 1.0)
             for m in (0.0, 0.02, 0.3, 1.0)]
    logits = (torch.randn(len(cases), 300, generator=generator) * 3 * 8).round() / 8  # many exact ties
    t, k, p, m = (list(column) for column in zip(*cases, strict=True))
    threshold = filter_threshold(logits, make_rows(len(cases), temperature=t, top_k=k, top_p=p, min_p=m))
    for row, case in enumerate(cases):
        kept = set((logits[row] >= threshold[row]).nonzero().flatten().tolist())
        assert kept == keep_by_hand(logits[row].tolist(), *case), case


def test_greedy_and_ties() -> None:
    """Temperature 0 ignores seed, noise and filters; equal logits pick the lower id, also across modes."""
    no = -torch.inf
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 1.0, 0.0, 2.0], [no] * 4, [no, 3, no, no]])
    for mode in ("greedy", "plain", "filtered"):
        rows = make_rows(4, mode=mode, temperature=0.0, top_k=1, top_p=0.01, seed=[1, 2, 3, 4])
        picks = sample(logits, rows)
        assert picks.token.tolist() == [1, 0, 0, 1]
        assert picks.margin.tolist() == [0.0, 0.0, 0.0, math.inf]


def test_margin_is_perturbed_best_minus_second() -> None:
    """Exact bits although most noise is computed roughly. Fails when ROUGH_ERROR is so small that the best keeps its
    rough value."""
    n = 500
    logits = torch.randn(n, 50, generator=torch.Generator().manual_seed(3)) * 0.3
    rows = make_rows(n, mode="plain", temperature=[0.0, 0.5, 1.0, 2.0, 0.1] * 100, seed=list(range(n)), position=9)
    score = logits + rows.temperature.unsqueeze(1) * noise(rows.seed, rows.position, 50)
    top = score.topk(2, dim=1)
    picks = sample(logits, rows)
    assert torch.equal(picks.token, top.indices[:, 0])
    assert torch.equal(picks.margin, top.values[:, 0] - top.values[:, 1])


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Each row alone, in the batch, and in a wider mode: the same token and margin bits, odd sizes.

    Fails when noise is drawn from a generator, or when masses are summed in float32 with torch.sum."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, 1003, generator=generator) * 2
    settings = {"temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 0.2, 2.0, 1.0, 1.0], "top_k": [0, 0, 5, 0, 50, 3, 0, 0, 1],
                "top_p": [1.0, 1.0, 0.9, 0.5, 0.99, 1.0, 0.8, 1.0, 0.3], "min_p": [0, 0, 0, 0.1, 0, 0.05, 0.01, 0.2, 0],
                "seed": [4, 5, 6, 7, -8, 9, 10**18, 11, 12], "position": [1, 1, 9, 100, 2, 3, 77, 8, 0]}
    together = sample(logits, make_rows(9, **settings))
    for row in range(9):
        alone = sample(logits[row : row + 1], make_rows(1, **{k: v[row] for k, v in settings.items()}))
        assert int(alone.token) == int(together.token[row])
        assert float(alone.margin) == float(together.margin[row])
    plain = sample(logits[1:2], make_rows(1, mode="plain", temperature=1.0, seed=5, position=1))
    assert int(plain.token) == int(together.token[1])


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15}], ids=str)
def test_samples_follow_the_softmax(filters: dict[str, float]) -> None:
    """20,000 positions, chi-square over the kept tokens below df + 2 sqrt(df x) + 2 x, x = ln 1e6
    (Laurent and Massart, 2000, lemma 1): false-alarm probability below 1e-6 per case.

    Fails when noise is added before the division by the temperature, or when one position's noise serves all."""
    logits = torch.tensor([1.0, 0.5, 0.2, -0.3, 2.0, -1.0, 0.0, 1.5])
    n = 20_000
    rows = make_rows(n, temperature=0.8, seed=42, position=list(range(n)), **filters)
    batch = logits.expand(n, -1).contiguous()
    counts = torch.bincount(sample(batch, rows).token, minlength=8).double()
    one = make_rows(1, temperature=0.8, **filters)
    expected = probabilities(logits.unsqueeze(0), one)[0].double() * n
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    df = int(kept.sum()) - 1
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    bound = df + 2 * math.sqrt(df * math.log(1e6)) + 2 * math.log(1e6)
    assert statistic < bound


@pytest.mark.parametrize(("seed", "bits"), [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 + 5, 5),
                                            (-(2**63) - 1, 2**63 - 1)])
def test_seed_bits(seed: int, bits: int) -> None:
    """Users may pass any integer. Fails when the wrap is at 2^64 only: tensors refuse 2^63."""
    assert seed_bits(seed) == bits
    assert int(torch.tensor(seed_bits(seed))) == bits
