"""Host time of a cadence's decisions and of an estimator's verdicts; prints one JSON line.

    python bench/cadence.py [--policy aspire] [--requests 64] [--steps 2000]

Contexts of 4k to 64k and acceptance of .80 to .98, decided step by step as the scheduler would.
"""

import argparse
import json
import random
import statistics
import time

from aspire.speculation.cadence import Decision, Drafting, Outlook
from aspire.speculation.cost import CostModel, kv_shape
from aspire.speculation.policy import PRESET_NAMES, resolve_policy


def measure(policy_name: str, num_requests: int, num_steps: int) -> dict[str, float]:
    """Microseconds: of decide() for all requests, and of one observe()."""
    rng = random.Random(0)
    policy = resolve_policy(policy_name, 32)
    cost = CostModel(0.4e-3, 3.8e-3, 2.2e-5, 1 / 4.2e12, kv_shape(policy.layers, policy.selection, 4096))
    estimator, limit = policy.new_estimator(), policy.draft_limit
    alphas = [rng.uniform(0.8, 0.98) for _ in range(num_requests)]
    contexts = [round(4000 * 16 ** rng.random()) for _ in range(num_requests)]
    drafted = [0] * num_requests
    decide, observe = [], []
    for step in range(num_steps):
        requests = [Drafting(str(i), drafted[i], limit - drafted[i], contexts[i], i) for i in range(num_requests)]
        outlook = Outlook(estimator, cost, 0, step)
        start = time.perf_counter()
        decisions = policy.cadence.decide(requests, outlook)
        decide.append(time.perf_counter() - start)
        for i, decision in enumerate(decisions):
            if decision is Decision.DRAFT:
                drafted[i] += 1
            elif decision is Decision.VERIFY:
                accepted = 0
                while accepted < drafted[i] and rng.random() < alphas[i]:
                    accepted += 1
                start = time.perf_counter()
                estimator.observe(str(i), drafted[i], accepted)
                observe.append(time.perf_counter() - start)
                drafted[i] = 0
                contexts[i] += accepted + 1
    quantiles = statistics.quantiles(decide, n=20)
    return {"decide_us_p5": round(quantiles[0] * 1e6, 1), "decide_us_median": round(quantiles[9] * 1e6, 1),
            "decide_us_p95": round(quantiles[18] * 1e6, 1), "observe_us": round(statistics.median(observe) * 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="aspire", choices=[name for name in PRESET_NAMES if name != "delta"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    result = measure(arguments.policy, arguments.requests, arguments.steps)
    print(json.dumps({"bench": "cadence", "policy": arguments.policy, "requests": arguments.requests, **result}))


if __name__ == "__main__":
    main()
