"""A launch never waits for what is enqueued already: neither memory nor kernels are new to a step (docs/decisions/0054)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from fixed import write
from gpu_memory import CONFIGURATIONS
from penstock import LLM, SamplingParams
from penstock.core.plan import StepPlan, Want
from penstock.worker.dummy import dummy_plan

SLEEP = 300_000_000
"""Cycles, 150 ms or more: longer than any launch takes."""


def test_no_step_waits_for_those_before(tmp_path: Path) -> None:
    """Steps of any number of single tokens, and of a prompt beside them, behind a device that is busy."""
    draw, rows, known = random.Random(0), 320, 200
    with LLM(str(write(CONFIGURATIONS[0][0], tmp_path / "model")), load_format="dummy", skip_tokenizer_init=True) as llm:
        worker = llm.engine.rank.worker
        plan = dummy_plan(np.full(rows, 20, np.int32), layout=worker.layout)
        plan.enter = [enter._replace(params=SamplingParams(temperature=0.0), tokens=[5] * known, prompt_len=known)
                      for enter in plan.enter]
        worker.run(plan)
        waited, none = [], [np.zeros((0, 3), np.int32) for _ in worker.layout.groups]
        for _ in range(60):
            count, prompt = draw.randrange(1, rows), draw.choice((0, 0, draw.randrange(1, 20)))
            counts = np.ones(count, np.int32)
            counts[:draw.randrange(1, count + 1)] += prompt
            plan = StepPlan(-1, edits=none, rows=np.arange(count, dtype=np.int32), starts=np.zeros(count, np.int32),
                            counts=counts, wants=np.full(count, int(Want.SAMPLE), np.int32))
            torch.cuda.synchronize()
            with torch.cuda.stream(worker.stream):
                torch.cuda._sleep(SLEEP)
                slept = torch.cuda.Event()
                slept.record()
            launched = worker.launch(plan)
            if slept.query():
                waited.append((count, int(counts.sum())))
            launched.result()
        assert not waited
