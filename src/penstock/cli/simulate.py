"""Serve a recorded trace on simulated replicas: the real scheduler and cache, and a device that is a model of step time.

A trace is Azure's or Vidur's CSV or Mooncake's JSON lines; lines may have `class`, `tenant` and `deadline` besides."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from penstock.cli.bench.workload import BLOCK, Lengths, numbers, read_trace
from penstock.cli.simulation.fleet import ROUTERS, Cost, Fleet, Outcome, read_cost
from penstock.cli.simulation.report import curves, figures, table
from penstock.core import service
from penstock.core.errors import ConfigError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams


def add(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    parser.add_argument("--replicas", metavar="N", type=int, default=1, help="1 to 1,000 (default: 1)")
    parser.add_argument("--router", choices=ROUTERS, default=ROUTERS[0], help="which replica gets a request (default: prefix)")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the distributions of TTFT and TPOT")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Declares what a trace is and how it is served."""
    parser.add_argument("trace", metavar="TRACE", type=Path)
    parser.add_argument("--model-cost", metavar="FILE", type=Path, required=True,
                        help="a device and its limits, as GET /step_time of a running server answers")
    parser.add_argument("--requests", metavar="N", type=int, help="only the first N of the trace")
    parser.add_argument("--rate", metavar="X", type=float, default=1.0, help="arrivals so many times as fast (default: 1)")
    parser.add_argument("--mix", metavar="CLASS=SHARE,...", default="", help="classes drawn for requests that name none "
                                                                              "(default: all standard)")
    parser.add_argument("--classes", metavar="FILE", help="classes of service, as for serve")
    parser.add_argument("--scheduling-policy", choices=("promises", "fcfs", "priority"), default="promises")
    parser.add_argument("--max-num-seqs", metavar="N", type=int, help="instead of the cost model's")
    parser.add_argument("--max-num-batched-tokens", metavar="N", type=int, help="instead of the cost model's")


def run(args: argparse.Namespace) -> int:
    """0. ConfigError for a trace or a cost model that cannot be used."""
    if not 1 <= args.replicas <= 1000:
        raise ConfigError(f"--replicas is {args.replicas}; it is 1 to 1000")
    classes, cost = service.read(args.classes), cost_of(args)
    outcome = simulated(args, cost, args.replicas, args.router, classes)
    found = figures(outcome, classes)
    print(json.dumps(found) if args.json else table(found), flush=True)
    if args.svg is not None:
        args.svg.write_text(curves(outcome.records, args.trace.stem))
    return 0


def cost_of(args: argparse.Namespace) -> Cost:
    """The cost model, with the limits of the command line."""
    given = {name: getattr(args, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return structs.replace(read_cost(args.model_cost), **{name: value for name, value in given.items() if value is not None})


def simulated(args: argparse.Namespace, cost: Cost, replicas: int, router: str, classes: dict[str, service.Service]) -> Outcome:
    """The trace, served. ConfigError if it has no requests."""
    outcome = Fleet(cost, replicas, router, args.scheduling_policy, classes).run(requests(args, cost, classes))
    if not outcome.records:
        raise ConfigError(f"{args.trace} has no requests")
    return outcome


def requests(args: argparse.Namespace, cost: Cost, classes: dict[str, service.Service]) -> Iterator[Request]:
    """The trace's requests: equal blocks are equal tokens, all other prompts are different."""
    if args.rate <= 0:
        raise ConfigError(f"--rate must be above 0, got {args.rate}")
    shares = numbers(args.mix or f"{service.DEFAULT}=1", "=", "--mix takes CLASS=SHARE,...")
    names, draw, first = [service.named(name, classes) for name in shares], random.Random(0), 0.0
    for number, item in enumerate(read_trace(args.trace)):
        if number == args.requests:
            return
        first = first or item.arrival
        tier = service.named(item.tier or draw.choices(names, list(shares.values()))[0], classes)
        arrival = 1.0 + (item.arrival - first) / args.rate
        room = cost.max_model_len - 1
        output = max(1, min(item.output_len, room - min(item.input_len, room - 1)))
        yield Request(str(number), _tokens(number, item)[:room - output], SamplingParams(max_tokens=output, ignore_eos=True,
                                                                                         seed=0), arrival=arrival,
                      tenant=item.tenant, tier=tier, deadline=arrival + item.deadline if item.deadline else 0.0)


def _tokens(number: int, item: Lengths) -> list[int]:
    if item.blocks:
        return [token for block in item.blocks for token in range(block * BLOCK, (block + 1) * BLOCK)][:item.input_len]
    base = (1 << 30) + number * 200_003 % (1 << 29)
    return list(range(base, base + item.input_len))
