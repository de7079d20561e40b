"""Find how many replicas, and which limits of a step, keep a promise on a recorded trace, by simulation; and what binds."""

import argparse
import json
import math
from typing import Any

from msgspec import structs

from penstock.cli.bench.workload import numbers
from penstock.cli.simulate import add_trace, cost_of, simulated
from penstock.cli.simulation.fleet import ROUTERS, Cost
from penstock.cli.simulation.report import figures
from penstock.core import service
from penstock.core.errors import ConfigError

_CHUNKS, _ROWS = (1, 4), (1, 4)
"""Divisors of the cost model's tokens and rows that are tried."""


def add(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    parser.add_argument("--slo", metavar="ttft=S,tpot=S", required=True, help="what every class shall keep, in seconds")
    parser.add_argument("--share", metavar="X", type=float, default=0.99, help="of the requests (default: 0.99)")
    parser.add_argument("--most", metavar="N", type=int, default=64, help="the most replicas to try (default: 64)")
    parser.add_argument("--router", choices=ROUTERS, default=ROUTERS[0])
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0 if a plan was found, else 1."""
    target, cost = _slo(args.slo), cost_of(args)
    classes = {name: structs.replace(one, ttft=target.ttft, tpot=target.tpot)
               for name, one in service.read(args.classes).items()}
    found = []
    for chunk in (cost.max_num_batched_tokens // part for part in _CHUNKS):
        for rows in (cost.max_num_seqs // part for part in _ROWS):
            one = structs.replace(cost, max_num_batched_tokens=max(chunk, rows), max_num_seqs=max(1, rows))
            if (fewest := _fewest(args, one, classes)) is not None:
                found.append((fewest[0], -fewest[1]["goodput"], {"replicas": fewest[0], "max_num_batched_tokens": chunk,
                                                                 "max_num_seqs": rows, **fewest[1]}))
    if not found:
        print(f"no plan with up to {args.most} replicas keeps {args.slo} for {args.share:.0%} of the requests")
        return 1
    best = min(found, key=lambda one: one[:2])[2]
    if args.json:
        print(json.dumps(best), flush=True)
        return 0
    print(f"{best['replicas']} replicas keep {args.slo} for {best['goodput']:.1%} of the requests: "
          f"--max-num-batched-tokens {best['max_num_batched_tokens']} --max-num-seqs {best['max_num_seqs']}")
    for _, _, other in sorted(found, key=lambda one: one[:2]):
        print(f"  tokens {other['max_num_batched_tokens']:>6}  rows {other['max_num_seqs']:>5}  "
              f"replicas {other['replicas']:>4}  kept {other['goodput']:.1%}  busy {max(other['utilisation']):.0%}")
    limits = sorted(best["limits"].items(), key=lambda item: -item[1])
    print("what binds: " + (", ".join(f"{name} {share:.0%}" for name, share in limits) or "nothing"), flush=True)
    return 0


def _fewest(args: argparse.Namespace, cost: Cost, classes: dict[str, service.Service]) -> tuple[int, dict[str, Any]] | None:
    """The fewest replicas that do, by doubling and halving."""
    def tried(replicas: int) -> dict[str, Any]:
        return figures(simulated(args, cost, replicas, args.router, classes), classes)

    low, high, best = 0, 1, dict[str, Any]()
    while high <= args.most:
        best = tried(high)
        if best["goodput"] >= args.share:
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = tried(middle)
        low, high, best = (low, middle, found) if found["goodput"] >= args.share else (middle, high, best)
    return high, best


def _slo(text: str) -> service.Service:
    usage = "--slo takes ttft=SECONDS,tpot=SECONDS"
    given = numbers(text, "=", usage)
    if set(given) - {"ttft", "tpot"} or min(given.values()) <= 0:
        raise ConfigError(f"{usage}, got {text!r}")
    return service.Service(ttft=given.get("ttft", math.inf), tpot=given.get("tpot", math.inf))
