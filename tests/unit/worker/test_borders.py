"""Filters over shares of the vocabulary: the same threshold as over all of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from penstock.core.plan import Enter, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from penstock.worker.rows import Rows
from penstock.worker.sampler import border
from tests.system.ranks import Shared, Threads

ASKED = [SamplingParams(temperature=temperature, **filtered) for temperature in (0.7, 1.5) for filtered in (
    {"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.05}, {"top_k": 200}, {"top_k": 300, "top_p": 0.6}, {"min_p": 0.1},
    {"top_p": 1e-6}, {})]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("steps", [0.0, 0.5], ids=["all differ", "many equal"])
def test_shares_give_the_whole_threshold(ranks: int, steps: float) -> None:
    logits = torch.randn(len(ASKED), 600 * ranks, generator=torch.Generator().manual_seed(ranks)) * 4
    if steps:
        logits = (logits / steps).round() * steps
    rows = Rows(len(ASKED), 16, 16, 1, torch.device("cpu"))
    rows.apply(StepPlan(0, enter=[Enter(row, [0], 1, params, row, []) for row, params in enumerate(ASKED)],
                        edits=[np.zeros((0, 3), np.int32)]))
    table, row = rows.parameters.table, torch.arange(len(ASKED), dtype=torch.int32)
    whole, shared = bind(detect("cpu"), torch.float32).sample.threshold(logits, table, row), Shared(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda rank: border(logits.chunk(ranks, 1)[rank], table, row, Threads(rank, shared)),
                              range(ranks)))
    x = logits * table.view(torch.float32)[:, 3, None]
    for one in found:
        assert torch.equal(one, found[0])
        # The same tokens stay.
        assert torch.equal(x >= one[:, None], x >= whole[:, None])
