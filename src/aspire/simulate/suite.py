"""Machines, scenarios and policies to compare, and compare() itself."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from aspire.simulate.curves import Curve, Rates, constant, random_regimes
from aspire.simulate.oracle import JointGreedy
from aspire.simulate.run import Machine, Scenario, SimulatedRequest, Simulation, Totals, mixed_requests
from aspire.speculation.acceptance import AcceptanceEstimator, PublishedEstimator, SurvivalEstimator
from aspire.speculation.cadence import Adaptive, Always, Cadence, Lockstep, Staggered
from aspire.speculation.cost import CostModel, kv_shape
from aspire.speculation.direct import Direct
from aspire.speculation.policy import NO_OVERRIDES, PRESETS, Overrides, resolve_policy

LIMIT = PRESETS["aspire"].drafts
FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, LIMIT)

# Coefficients from what was measured on one H200: weights at copy bandwidth, GEMM seconds a token beyond the knee,
# KV bytes at 4.2 TB/s; base: launches and everything that is neither.
MACHINES: "MappingProxyType[str, Machine]" = MappingProxyType({
    "h200-llama-8b": Machine("h200-llama-8b", 32, 4096, (0.4e-3, 3.8e-3, 2.2e-5, 1 / 4.2e12)),
    "h200-qwen3-1.7b": Machine("h200-qwen3-1.7b", 28, 4096, (0.3e-3, 0.82e-3, 4.6e-6, 1 / 4.2e12)),
    "h200-smollm2": Machine("h200-smollm2", 30, 768, (0.25e-3, 0.08e-3, 4.5e-7, 1 / 4.2e12)),
})


@dataclass(frozen=True, slots=True)
class Contender:
    """A cadence with an estimator; None: the clairvoyant's, which knows the true rates."""

    name: str
    cadence: Callable[[], Cadence]
    estimator: Callable[[], AcceptanceEstimator] | None


def contenders() -> tuple[Contender, ...]:
    survival, published = lambda: SurvivalEstimator(limit=LIMIT), PublishedEstimator
    fixed = tuple(Contender(f"fixed-{k}", partial(Staggered, k), survival) for k in FIXED_LENGTHS)
    return (
        Contender("autoregressive", Always, survival), *fixed,
        Contender("lockstep-4", lambda: Lockstep(4), survival),
        Contender("lockstep-8", lambda: Lockstep(8), survival),
        Contender("published", Adaptive, published),
        Contender("published-rule", Adaptive, survival),
        Contender("published-estimator", lambda: Direct(LIMIT), published),
        Contender("direct", lambda: Direct(LIMIT), survival),
        Contender("direct-batch-rate", lambda: Direct(LIMIT, own_weight=0.0), survival),
        Contender("direct-own-rate", lambda: Direct(LIMIT, own_weight=1.0), survival),
        Contender("joint", lambda: JointGreedy(LIMIT), survival),
        Contender("clairvoyant-batch-rate", lambda: Direct(LIMIT, own_weight=0.0), None),
        Contender("clairvoyant-own-rate", lambda: Direct(LIMIT, own_weight=1.0), None),
        Contender("clairvoyant-joint", lambda: JointGreedy(LIMIT), None),
    )


def scenarios(seed: int = 0, batch: int = 64, horizon: float = 20.0) -> tuple[Scenario, ...]:
    """Mixed batches of endless requests, alpha .80 to .98, contexts 4k to 64k; and one that drains."""
    endless = 200_000

    def even(contexts: tuple[int, int], curve: Callable[[random.Random], Curve]) -> tuple[SimulatedRequest, ...]:
        return mixed_requests(seed, batch, endless, contexts=contexts, make_curve=curve)

    def uniform(rng: random.Random) -> Curve:
        return constant(rng.uniform(0.8, 0.98), rng.getrandbits(32))

    def falling(rng: random.Random) -> Curve:
        first, slope = rng.uniform(0.9, 0.99), rng.uniform(0.0, 0.015)
        return Rates(tuple(max(0.3, first - slope * j) for j in range(LIMIT)), rng.getrandbits(32))

    def changing(rng: random.Random) -> Curve:
        return random_regimes(rng, (0.8, 0.86, 0.92, 0.96, 0.98), 400.0, endless)

    def drained(rng: random.Random) -> tuple[SimulatedRequest, ...]:
        return tuple(SimulatedRequest(round(4000 * 16 ** rng.random()), round(200 * 20 ** rng.random()),
                                      changing(rng)) for _ in range(batch))

    def queue(rng: random.Random) -> tuple[SimulatedRequest, ...]:
        return tuple(SimulatedRequest(round(4000 * 16 ** rng.random()), round(200 * 5 ** rng.random()), changing(rng))
                     for _ in range(3 * batch))

    def arriving(rng: random.Random) -> tuple[SimulatedRequest, ...]:
        return tuple(SimulatedRequest(round(2000 * 8 ** rng.random()), round(200 * 4 ** rng.random()), uniform(rng),
                                      arrival=0.25 * i) for i in range(2 * batch))

    return (
        Scenario("same 16k, alpha .93", even((16_000, 16_000), lambda r: constant(0.93, r.getrandbits(32))), batch,
                 horizon=horizon),
        Scenario("16k, mixed alpha", even((16_000, 16_000), uniform), batch, horizon=horizon),
        Scenario("4k-64k, alpha .93", even((4_000, 64_000), lambda r: constant(0.93, r.getrandbits(32))), batch,
                 horizon=horizon),
        Scenario("4k-64k, mixed alpha", even((4_000, 64_000), uniform), batch, horizon=horizon),
        Scenario("4k-64k, falling by depth", even((4_000, 64_000), falling), batch, horizon=horizon),
        Scenario("4k-64k, regimes", even((4_000, 64_000), changing), batch, horizon=horizon),
        Scenario("4k-64k, regimes, overlapped", even((4_000, 64_000), changing), batch, horizon=horizon,
                 loop="overlapped"),
        Scenario("regimes, draining", drained(random.Random(seed + 1)), batch),
        Scenario("queue of 3 batches", queue(random.Random(seed + 3)), batch),
        Scenario("arrivals, chunked prefill", arriving(random.Random(seed + 2)), batch, prefill="chunked"),
    )


def cost_of(machine: Machine, changes: Overrides = NO_OVERRIDES) -> CostModel:
    """The machine's cost model under the default preset's layers and selection, or changed ones."""
    policy = resolve_policy("aspire", machine.num_layers, overrides=changes)
    return machine.cost(kv_shape(policy.layers, policy.selection, machine.bytes_per_token))


def compare(scenario: Scenario, cost: CostModel, entrants: Sequence[Contender]) -> dict[str, Totals]:
    """Every contender on the same requests with the same luck."""
    result = {}
    for entrant in entrants:
        estimator = entrant.estimator() if entrant.estimator is not None else None
        result[entrant.name] = Simulation(scenario, entrant.cadence(), estimator, cost).run()
    return result
