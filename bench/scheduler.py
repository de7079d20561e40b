"""What planning and applying a step costs on the host: decoding rows, no model. Prints one JSON line a number of rows.

usage: python bench/scheduler.py [rows ...]
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np

from penstock.cache.manager import Cache
from penstock.core.layout import lay_out
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec
from penstock.scheduler.admission import Limits
from penstock.scheduler.scheduler import Scheduler


def measure(rows: int, steps: int = 100) -> dict[str, float]:
    """Median seconds of `plan` and `apply` for `rows` decoding sequences."""
    states = [StateSpec((Field("k", (8, 128), "bfloat16"), Field("v", (8, 128), "bfloat16")), Everything())]
    layout = lay_out(states, 16, lay_out(states, 16, 0).slab_bytes * rows * 40)
    scheduler = Scheduler(Cache(layout), Limits(4096, rows, 8192, rows, 1000))
    for i in range(rows):
        scheduler.add(Request(str(i), [1] * 128, SamplingParams(max_tokens=400, seed=i)), 0.0)

    def run(plan: StepPlan) -> StepResult:
        return StepResult(plan.id, np.ones(len(plan.rows), np.int32))

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
    return {"plan_ms": statistics.median(plans) * 1e3, "apply_ms": statistics.median(applies) * 1e3}


if __name__ == "__main__":
    for count in [int(a) for a in sys.argv[1:]] or [1, 64, 256, 1000]:
        print(json.dumps({"rows": count, **{k: round(v, 4) for k, v in measure(count).items()}}))
