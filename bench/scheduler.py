"""The host's cost of planning and applying a step: decoding rows, no model; and a long prompt's way into the prefix index
and out of it. Prints one JSON line a number of rows, and one for the prompt.

usage: python bench/scheduler.py [rows ...]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

import numpy as np

from penstock.cache.manager import Cache
from penstock.cli.bench.environment import environment
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.scheduler.admission import Limits
from penstock.scheduler.scheduler import Scheduler


def measure(rows: int, steps: int = 128) -> dict[str, float]:
    """Median seconds of `plan` and `apply` for `rows` decoding sequences of different contexts, and the longest of both
    together: all rows come to a page border in the same step, where each adds a page to the index."""
    states = [StateSpec((Field("k", (8, 128), "bfloat16"), Field("v", (8, 128), "bfloat16")), Everything())]
    layout = lay_out(states, 16, lay_out(states, 16, 0).slab_bytes * rows * 40)
    scheduler = Scheduler(Cache(layout), Limits(4096, rows, 8192, rows, 1 << 20))
    for i in range(rows):
        scheduler.add(Request(str(i), [i + 1] * 128, SamplingParams(max_tokens=400, seed=i)), 0.0)

    def run(plan: StepPlan) -> StepResult:
        return StepResult(plan.id, np.ones(int(plan.wants.sum()), np.int32), plan.wants)

    while scheduler.waiting:
        scheduler.apply(run(scheduler.plan(0.0)), 0.0)
        scheduler.take_updates()
    plans, applies = [], []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        result = run(plan)
        ran = time.perf_counter()
        scheduler.apply(result, 0.0)
        scheduler.take_updates()
        plans.append(planned - began)
        applies.append(time.perf_counter() - ran)
    both = sorted(map(sum, zip(plans, applies, strict=True)))
    return {"plan_ms": statistics.median(plans) * 1e3, "apply_ms": statistics.median(applies) * 1e3,
            "mean_ms": statistics.mean(both) * 1e3, "border_ms": statistics.median(both[-steps // 16:]) * 1e3}


def long_prompt(length: int = 32_768, times: int = 40) -> dict[str, float]:
    """Median milliseconds of a prompt's `match` when nothing is there, of its `settle`, and of its `match` when all of it
    is."""
    states = [StateSpec((Field("k", (8, 128), "bfloat16"), Field("v", (8, 128), "bfloat16")), Everything())]
    cache = Cache(lay_out(states, 16, lay_out(states, 16, 0).slab_bytes * (length // 16 + 1) * (times + 1)))
    rng, missed, inserted, found = random.Random(0), [], [], []
    for _ in range(times):
        tokens = [rng.randrange(128_000) for _ in range(length)]
        for times_, expected in ((missed, 0), (found, length)):
            sequence = Sequence(Request("r", [*tokens, 1], SamplingParams()), 0, 0, length + 2)
            sequence.row = 0
            began = time.perf_counter()
            sequence.planned = sequence.computed = cache.match(sequence)
            times_.append(time.perf_counter() - began)
            assert sequence.planned == expected
            if not expected:
                cache.grow(sequence, length)
                sequence.planned = sequence.computed = length
                began = time.perf_counter()
                cache.commit(sequence)
                inserted.append(time.perf_counter() - began)
            cache.release(sequence)
            cache.drain(StepPlan(0))
    both = [a + b for a, b in zip(missed, inserted, strict=True)]
    return {name: statistics.median(values) * 1e3 for name, values in (
        ("match_nothing_ms", missed), ("insert_ms", inserted), ("both_ms", both), ("match_all_ms", found))}


if __name__ == "__main__":
    for count in [int(a) for a in sys.argv[1:]] or [1, 64, 256, 1000]:
        print(json.dumps({"rows": count, **{k: round(v, 4) for k, v in measure(count).items()}, "environment": environment()}))
    print(json.dumps({"prompt": 32_768, **{k: round(v, 4) for k, v in long_prompt().items()}, "environment": environment()}))
