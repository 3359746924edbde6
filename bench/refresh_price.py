"""Tokens per second to expect of refresh layers, from measured acceptance and a machine's price of steps.

    python bench/refresh_price.py [--machine h200-llama-8b] [--batch 16] [--context 32768] \
        --layers none:.967 21:.972 6,13,19,26:.980

Each --layers is LAYERS:ALPHA, the chance that a draft is accepted with those refresh layers. One line each, best fixed
draft length of 1 to 15; then one JSON line. What more acceptance is worth depends on what a draft may read.
"""

import argparse
import json

from aspire.calibrate.forecast import Target, forecast, plain_rate
from aspire.simulate.suite import LIMIT, MACHINES, cost_of
from aspire.speculation.policy import Overrides


def parse(text: str) -> tuple[tuple[int, ...], float]:
    layers, _, alpha = text.partition(":")
    return (() if layers == "none" else tuple(map(int, layers.split(",")))), float(alpha)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=list(MACHINES), default="h200-llama-8b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--layers", type=parse, nargs="+", required=True, metavar="LAYERS:ALPHA")
    arguments = parser.parse_args()
    machine, target = MACHINES[arguments.machine], Target(arguments.batch, arguments.context)
    found = []
    for layers, alpha in arguments.layers:
        cost = cost_of(machine, Overrides(refresh=layers, budget=arguments.budget))
        best, plain = forecast([alpha ** j for j in range(1, LIMIT + 1)], target, cost), plain_rate(target, cost)
        found.append({"layers": layers, "alpha": alpha, "tokens_per_second": round(best.tokens_per_second, 1),
                      "draft_length": best.draft_length, "over_plain": round(best.tokens_per_second / plain, 3)})
        print(f"layers {','.join(map(str, layers)) or 'none':14s} alpha {alpha:.3f}: {best.tokens_per_second:9.1f} "
              f"tokens/s, {found[-1]['over_plain']} of plain decoding, draft length {best.draft_length}")
    print(json.dumps({"bench": "refresh_price", "machine": machine.name, "batch": arguments.batch,
                      "context": arguments.context, "budget": arguments.budget, "layers": found}))


if __name__ == "__main__":
    main()
