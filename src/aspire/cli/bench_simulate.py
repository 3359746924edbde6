"""`aspire bench simulate`: scheduling policies compared in a simulated batch, without a GPU."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aspire.progress import terminal_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aspire.simulate.run import Scenario, Totals
    from aspire.simulate.suite import Contender
    from aspire.simulate.traces import Trace
    from aspire.speculation.cost import CostModel

WIDTH = 140

DEFAULT_POLICIES = ("autoregressive,fixed-2,fixed-3,fixed-4,fixed-5,fixed-6,fixed-7,fixed-8,fixed-10,fixed-12,"
                    "lockstep-8,published,published-estimator,direct,"
                    "clairvoyant-batch-rate,clairvoyant-own-rate")


def simulate(
    machine: Annotated[str, typer.Option(help="Device and model whose cost model is the clock")] = "h200-llama-8b",
    batch: Annotated[int, typer.Option(min=1, help="Requests that run together")] = 32,
    seconds: Annotated[float, typer.Option(min=0.01, help="Simulated seconds of the endless scenarios")] = 6.0,
    seed: Annotated[int, typer.Option(help="Of contexts, acceptance and luck")] = 0,
    seeds: Annotated[int, typer.Option(
        min=1, metavar="N", help="Repeat with so many seeds from --seed on; one table then, with standard errors")] = 1,
    policies: Annotated[str, typer.Option(help="Comma-separated names, or all")] = DEFAULT_POLICIES,
    scenario: Annotated[str, typer.Option(help="Only scenarios whose name holds this text")] = "",
    refresh_every: Annotated[int, typer.Option(
        min=1, metavar="N", help="Drafts from one renewal of the lists to the next: changes what drafts read")] = 1,
    traces: Annotated[str | None, typer.Option(metavar="FILE", help="Recorded verifications, JSON lines")] = None,
) -> None:
    """Compare scheduling policies on simulated batches; one table per scenario, or one for all with --seeds; one JSON
    line last."""
    from aspire.simulate.suite import MACHINES, cost_of, scenarios
    from aspire.simulate.traces import load_traces, recorded_scenario
    from aspire.speculation.policy import Overrides

    if machine not in MACHINES:
        raise ValueError(f"machine must be one of {', '.join(MACHINES)}, got {machine!r}")
    entrants = choose(policies)
    recordings = load_traces(Path(traces)) if traces else ()
    cost = cost_of(MACHINES[machine], Overrides(refresh_every=refresh_every))

    def chosen(seed: int) -> "list[Scenario]":
        found = [one for one in scenarios(seed, batch, seconds) if scenario in one.name]
        return found + ([recorded_scenario(recordings, batch, seconds)] if recordings else [])

    if not chosen(seed):
        raise ValueError(f"scenario must be part of a scenario's name, got {scenario!r}")
    summary: dict[str, object] = {"bench": "simulate", "machine": machine, "batch": batch, "seed": seed, "seeds": seeds,
                                  "seconds": seconds, "refresh_every": refresh_every}
    if seeds == 1:
        summary["scenarios"] = run_once(chosen(seed), cost, entrants)
    else:
        summary["scenarios"] = run_often([chosen(seed + i) for i in range(seeds)], cost, entrants)
    if recordings:
        summary["forecast_error"] = forecast_errors(recordings)
    print(json.dumps(summary))


def run_once(chosen: "Sequence[Scenario]", cost: "CostModel",
             entrants: "Sequence[Contender]") -> list[dict[str, object]]:
    """Every scenario with a table of its own, shown as it is done."""
    from aspire.simulate.suite import compare

    results = []
    for one in chosen:
        results.append(summarise(one, compare(one, cost, entrants)))
        show(results[-1])
    return results


def run_often(chosen: "Sequence[Sequence[Scenario]]", cost: "CostModel",
              entrants: "Sequence[Contender]") -> list[dict[str, object]]:
    """chosen: the scenarios of each seed. One row for each scenario and policy that is compared."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from aspire.simulate.repeat import standings
    from aspire.simulate.suite import compare

    table = Table(box=None, padding=(0, 2, 0, 0), title=f"mean and standard error over {len(chosen)} seeds",
                  title_justify="left")
    for index, title in enumerate(("scenario", "policy", "best fixed\nlength", "over it", "lowest\nseed",
                                   "over each\nseed's best", "of clairvoyant", "lowest\nseed")):
        table.add_column(title, justify="left" if index < 3 else "right", no_wrap=True)
    results: list[dict[str, object]] = []
    with terminal_progress("Scenarios", len(chosen[0])) as advance:
        for repeats in zip(*chosen, strict=True):
            totals = [compare(one, cost, entrants) for one in repeats]
            rates = {name: [run[name].tokens_per_second for run in totals] for name in totals[0]}
            for found in standings(rates):
                table.add_row(repeats[0].name, found.policy, found.best_fixed, str(found.over_fixed),
                              f"{found.over_fixed.lowest:.4f}", str(found.over_each), str(found.of_clairvoyant),
                              f"{found.of_clairvoyant.lowest:.4f}")
                results.append({"scenario": repeats[0].name, **asdict(found)})
            advance(1)
    Console(width=WIDTH).print(table)
    return results


def choose(policies: str) -> "list[Contender]":
    """The contenders by name. Raises ValueError naming an unknown one."""
    from aspire.simulate.suite import contenders

    known = {entrant.name: entrant for entrant in contenders()}
    names = list(known) if policies == "all" else [name.strip() for name in policies.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"policies must be among {', '.join(known)}, got {name!r}")
    return [known[name] for name in names]


def summarise(scenario: "Scenario", totals: "dict[str, Totals]") -> dict[str, object]:
    """Rates, and their shares of the best clairvoyant and the best fixed length of this scenario."""
    rates = {name: run.tokens_per_second for name, run in totals.items()}
    clairvoyant = max((rate for name, rate in rates.items() if name.startswith("clairvoyant")), default=None)
    fixed = max((rate for name, rate in rates.items() if name.startswith(("fixed", "autoregressive"))), default=None)
    return {"scenario": scenario.name, "policies": {name: {
        "tokens_per_second": round(rates[name], 1),
        "share_of_clairvoyant": round(rates[name] / clairvoyant, 4) if clairvoyant else None,
        "over_best_fixed": round(rates[name] / fixed, 4) if fixed else None,
        "tokens_per_verification": round(run.tokens_per_verification, 3),
        "drafts_per_verification": round(run.drafted / run.verifications, 3) if run.verifications else None,
        "rows_per_step": round(run.row_tokens / run.steps, 1) if run.steps else None,
        "steps_past_knee": round(run.steps_past_knee / run.steps, 4) if run.steps else None,
        "prediction_error": round(run.mean_prediction_error, 4),
    } for name, run in totals.items()}}


def show(result: dict[str, object]) -> None:
    """One scenario as a table."""
    from rich.console import Console
    from rich.table import Table

    policies = result["policies"]
    assert isinstance(policies, dict), "summarise() makes it one"
    table = Table(title=str(result["scenario"]), title_justify="left")
    columns = {"tokens_per_second": "tokens/s", "share_of_clairvoyant": "of clairvoyant", "over_best_fixed": "of fixed",
               "tokens_per_verification": "tokens/verification", "drafts_per_verification": "drafts",
               "rows_per_step": "rows/step", "steps_past_knee": "past knee", "prediction_error": "forecast error"}
    table.add_column("policy")
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, row in policies.items():
        table.add_row(name, *("" if row[key] is None else f"{row[key]:.3f}" if row[key] < 100 else f"{row[key]:.0f}"
                              for key in columns))
    Console(width=WIDTH).print(table)


def forecast_errors(recordings: "tuple[Trace, ...]") -> dict[str, float]:
    """Mean absolute error of both estimators' forecasts of tokens per verification on recorded runs."""
    from aspire.simulate.traces import forecast_error
    from aspire.speculation.acceptance import PublishedEstimator, SurvivalEstimator

    limit = max(d for trace in recordings for d, _ in trace.rounds)
    survival = forecast_error(recordings, lambda: SurvivalEstimator(limit=max(1, limit)))
    published = forecast_error(recordings, PublishedEstimator)
    return {"survival": round(survival, 4), "published": round(published, 4), "ratio": round(survival / published, 4)}
