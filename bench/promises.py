"""Goodput of scheduling policies on simulated replicas of Llama 3.1 8B on an H200 (results/cost_llama8b_h200.json): Penstock's
promises against FCFS and against the policies of vLLM and SGLang, re-stated from their documentation.

vLLM: first come first served, running sequences before waiting ones, prompts cut to fill 8,192 tokens a step; the queue has no
bound.
SGLang: prompts before decode; while one can be read, no decode runs; 8,192 tokens a step, first come first served.

usage: python bench/promises.py [--mix azure mooncake chat reasoning] [--load 0.5 1 1.5 2 3] [--policy ...] [--requests 2000]
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from data import data_folder
from penstock.cache.manager import Cache
from penstock.cli.bench.drawing import COLOURS, Box, Line, legend, panel, picture, rounded
from penstock.cli.bench.workload import Lengths, read_trace
from penstock.cli.simulation.fleet import Cost, Fleet, Outcome, read_cost
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.service import BUILT_IN
from penstock.scheduler.admission import Limits
from penstock.scheduler.batch import Batch
from penstock.scheduler.policy import Policy
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step import InFlight

RESULTS = Path(__file__).parent / "results"
TRACES = data_folder() / "traces"
CLASSES = {"interactive": 0.5, "standard": 0.3, "batch": 0.2}


class PromptsFirst(Batch):
    """SGLang: a step either reads prompts or decodes."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.queues, scheduler.limits, scheduler.pace, scheduler.drafts)
        self.scheduler = scheduler

    def fill(self, step: InFlight, now: float) -> int | None:
        queues, budget = self.scheduler.queues, self.scheduler.limits.max_num_batched_tokens
        reads = any(s.goal - s.planned > 1 for s in queues.running) or (queues.rows and queues.waiting and not queues.crowded)
        if not reads:
            return super().fill(step, now)
        for sequence in list(queues.running):
            count = min(sequence.goal - sequence.planned, budget)
            if count > 1 and queues.cache.grow(sequence, sequence.planned + count):
                step.add(sequence, count)
                budget -= count
        if not step.sequences:
            before = len(queues.running)
            self.scheduler.admission.admit(step, budget, now)
            return super().fill(step, now) if len(queues.running) == before else 0
        return budget


def sglang(cache: Cache, limits: Limits, policy: Policy) -> Scheduler:
    scheduler = Scheduler(cache, limits, policy)
    scheduler.batch = PromptsFirst(scheduler)
    return scheduler


POLICIES = {
    "promises": ("promises", 0.05, None),
    "fcfs": ("fcfs", 0.05, None),
    "vllm": ("fcfs", None, None),
    "sglang": ("fcfs", None, sglang),
}


def servegen(folder: Path, count: int, seed: int = 0) -> Iterator[Lengths]:
    """Requests of ServeGen's clients: Poisson at each client's mean rate in its busiest window, lengths from its histograms."""
    draw, found = random.Random(seed), []
    for trace in sorted(folder.glob("*-trace.csv")):
        data = trace.with_name(trace.name.replace("trace.csv", "dataset.json"))
        if not data.exists():
            continue
        rates = [float(line.split(",")[1]) for line in trace.read_text().splitlines()]
        sets = [one for one in json.loads(data.read_text()).values() if one["input_tokens"] not in ("{}", None)]
        if not sets or max(rates) <= 0:
            continue
        inputs, outputs = (ast.literal_eval(sets[0][name]) for name in ("input_tokens", "output_tokens"))
        if inputs and outputs:
            found.append((sum(rates) / len(rates), inputs, outputs))
    clock = 0.0
    total = sum(rate for rate, _, _ in found)
    for _ in range(count):
        clock += draw.expovariate(total)
        _, inputs, outputs = draw.choices(found, [rate for rate, _, _ in found])[0]
        lengths = [max(1, int(draw.choices(list(h), list(h.values()))[0])) for h in (inputs, outputs)]
        yield Lengths(clock, *lengths)


def mix(name: str, count: int) -> list[Lengths]:
    source = {"azure": lambda: read_trace(TRACES / "azure2023_code.csv"), "mooncake": lambda: read_trace(
        TRACES / "mooncake_synthetic.jsonl"), "chat": lambda: servegen(TRACES / "servegen/m-small", count),
        "reasoning": lambda: servegen(TRACES / "servegen/deepseek-r1", count)}[name]()
    found = [item for _, item in zip(range(count), source, strict=False)]
    first = found[0].arrival
    return sorted(item._replace(arrival=item.arrival - first, output_len=max(1, min(item.output_len, 4096)),
                                input_len=min(item.input_len, 120_000)) for item in found)


def requests(items: list[Lengths], scale: float, tiers: dict[str, float] | None = None) -> Iterator[Request]:
    """`scale`: the factor of the arrivals' times."""
    draw = random.Random(7)
    for number, item in enumerate(items):
        tier = draw.choices(list(tiers), list(tiers.values()))[0] if tiers else ""
        if item.blocks:
            ids = [token for block in item.blocks for token in range(block * 512, block * 512 + 512)][:item.input_len]
        else:
            ids = list(range((number + 1) * 200_000 % (1 << 30), (number + 1) * 200_000 % (1 << 30) + item.input_len))
        yield Request(str(number), ids, SamplingParams(max_tokens=item.output_len, ignore_eos=True, seed=0),
                      arrival=1.0 + item.arrival * scale, tier=tier)


def run(cost: Cost, policy: str, items: Iterator[Request]) -> Outcome:
    name, target, kind = POLICIES[policy]
    return Fleet(replace(cost, step_target=target), 1, "round-robin", name, BUILT_IN, kind).run(items)


def summary(outcome: Outcome) -> dict[str, object]:
    found: dict[str, object] = {}
    records = outcome.records
    found["goodput"] = round(sum(r.kept(BUILT_IN[r.tier]) for r in records) / len(records), 4)
    found["refused"] = round(sum(r.refused for r in records) / len(records), 4)
    for tier in sorted({r.tier for r in records}):
        own = [r for r in records if r.tier == tier]
        took = sorted(r.ttft for r in own if r.tokens)
        tpot = sorted(r.tpot for r in own if r.tokens > 1)
        if took:
            found[tier or "none"] = {
                "kept": round(sum(r.kept(BUILT_IN[tier]) for r in own) / len(own), 3),
                "refused": round(sum(r.refused for r in own) / len(own), 3), "ttft_p50": round(took[len(took) // 2], 3),
                "ttft_p99": round(took[int(.99 * len(took))], 3), "tpot_p50": round(tpot[len(tpot) // 2], 4) if tpot else 0,
                "tpot_p99": round(tpot[int(.99 * len(tpot))], 4) if tpot else 0}
    found["tokens_per_second"] = round(sum(r.tokens for r in records) / outcome.seconds, 1)
    found["seconds"], found["preemptions"] = round(outcome.seconds, 2), outcome.preemptions
    return found


def drawn(records: list[dict[str, Any]]) -> str:
    """Goodput over load, a panel for each mix."""
    parts: list[str] = []
    for place, name in enumerate(dict.fromkeys(record["mix"] for record in records)):
        own = [record for record in records if record["mix"] == name]
        lines = [Line(policy, sorted((r["load"], r["goodput"]) for r in own if r["policy"] == policy), colour)
                 for policy, colour in zip(POLICIES, COLOURS, strict=False)]
        box = Box(60 + 300 * place, 50, 220, 180)
        parts += panel(box, name, rounded([0.0, 3.0]), rounded([0.0, 1.0]), lines, "load / capacity")
        parts += legend(box.left, 290, lines, across=60)
    return picture(60 + 300 * len({record["mix"] for record in records}), 310, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", nargs="*", default=["azure", "mooncake", "chat", "reasoning"])
    parser.add_argument("--load", nargs="*", type=float, default=[0.5, 0.75, 1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--policy", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--cost", type=Path, default=RESULTS / "cost_llama8b_h200.json")
    parser.add_argument("--draw", nargs=2, metavar=("RECORDS.jsonl", "FILE.svg"), type=Path, help="draw earlier runs")
    options = parser.parse_args()
    if options.draw:
        options.draw[1].write_text(drawn([json.loads(line) for line in options.draw[0].read_text().splitlines()]))
        return
    cost = read_cost(options.cost)
    for name in options.mix:
        items = mix(name, options.requests)
        whole = run(cost, "vllm", requests(items, 0.0))
        # Without the end, when few are left to run.
        capacity = 0.8 * len(items) / sorted(record.last for record in whole.records)[int(0.8 * len(items))]
        natural = len(items) / max(1e-9, items[-1].arrival)
        for load in options.load:
            for policy in options.policy:
                began = time.perf_counter()
                found = summary(run(cost, policy, requests(items, natural / (load * capacity), CLASSES)))
                print(json.dumps({"mix": name, "load": load, "policy": policy, **found, "capacity": round(capacity, 3),
                                  "took": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
