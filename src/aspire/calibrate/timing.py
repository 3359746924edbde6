"""The cost of steps on this machine, from steps that were timed: CostModel's coefficients, and what scoring adds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from aspire.bench.acceptance import TimedStep
from aspire.speculation.cost import CostModel, KvShape, Sample, fit
from aspire.speculation.layers import LayerPlan

WARM_UP = 2  # steps of a shape that are not counted: graphs are captured, kernels compiled
LEAST = 3  # steps of a shape that count at all
TRIES = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Steps of one kind and shape on one engine. seconds: their median; scoring: layers that score in such steps."""

    tokens: int
    kv_bytes: float
    seconds: float
    count: int
    scoring: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """cost: of a step in which no layer scores. per_scoring: seconds that each scoring layer adds. error: median
    relative error of the groups."""

    cost: CostModel
    per_scoring: float
    error: float


def scoring_layers(layers: LayerPlan, kind: str, *, captured: bool) -> int:
    """Layers that score and select in a drafting or a verifying step. captured: by a CUDA graph, which runs the
    kernels of both kinds in either step, over padding where there is nothing to score."""
    drafting = sum(bool(lists) for lists in layers.draft_writes)
    verifying = sum(bool(lists) for lists in layers.verify_writes)
    if captured:
        return sum(bool(one or other) for one, other in zip(layers.draft_writes, layers.verify_writes, strict=True))
    return drafting if kind == "draft" else verifying


def group_steps(steps: Sequence[TimedStep], layers: LayerPlan, *, captured: bool) -> list[Group]:
    """The timed steps of one run, by kind and number of tokens; its first steps of each are left out."""
    by_shape: dict[tuple[str, int], list[TimedStep]] = {}
    for step in steps:
        by_shape.setdefault((step.kind, step.tokens), []).append(step)
    groups = []
    for (kind, tokens), all_steps in by_shape.items():
        kept = all_steps[WARM_UP:]
        if len(kept) >= LEAST or (kept and kind == "verify"):
            groups.append(Group(tokens, statistics.mean(one.kv_bytes for one in kept),
                                statistics.median(one.seconds for one in kept), len(kept),
                                scoring_layers(layers, kind, captured=captured)))
    return groups


def fit_groups(groups: Sequence[Group], kv: KvShape) -> StepCost:
    """Coefficients for the groups; the seconds per scoring layer are the ones under which the rest fits best.

    Raises ValueError when there are fewer than 4 groups.
    """
    scored = [group for group in groups if group.scoring]
    most = min((group.seconds / group.scoring for group in scored), default=0.0)
    best: StepCost | None = None
    for share in (0.0, *(0.9 ** power for power in range(TRIES * 3))) if scored else (0.0,):
        trial = _fit(groups, kv, share * most)
        if best is None or trial.error < best.error * 0.995:
            best = trial
    assert best is not None, "at least one share was tried"
    return best


def _fit(groups: Sequence[Group], kv: KvShape, per_scoring: float) -> StepCost:
    samples = [Sample(group.tokens, group.kv_bytes, max(1e-9, group.seconds - per_scoring * group.scoring),
                      min(group.count, 8.0)) for group in groups]
    cost = fit(samples, kv)
    errors = [abs(cost.step_seconds(group.tokens, group.kv_bytes) + per_scoring * group.scoring - group.seconds)
              / group.seconds for group in groups]
    return StepCost(cost, per_scoring, statistics.fmean(errors))
