"""Penalties, filters and seeds by numbers worked out by hand: no chance, so that a small fault cannot hide behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.plan import Enter, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.ops.sample import SampleOps
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows, Sampler

PROBABILITIES = [0.4, 0.3, 0.2, 0.06, 0.04]


def entered(params: SamplingParams, tokens: list[int], prompt: int, seed: int = 0) -> Rows:
    """Rows of which the first has these tokens, `prompt` of them the prompt's."""
    rows = Rows(2, 64, 16, 1, torch.device("cpu"))
    rows.apply(StepPlan(0, [Enter(0, tokens, prompt, params, seed, [])], [], [np.zeros((0, 3), np.int32)]))
    return rows


@pytest.mark.parametrize(("params", "expected"), [
    # Token 0 is in the prompt alone, 1 in the output twice, 2 in both, 3 and 4 nowhere.
    ({"repetition_penalty": 2.0}, [2.0, -4.0, 1.0, 1.0, -1.0]),
    ({"presence_penalty": 0.5}, [4.0, -2.5, 1.5, 1.0, -1.0]),
    ({"frequency_penalty": 0.5}, [4.0, -3.0, 1.5, 1.0, -1.0]),
    ({"repetition_penalty": 0.5, "presence_penalty": 1.0}, [8.0, -2.0, 3.0, 1.0, -1.0]),
])
def test_penalties(params: dict[str, float], expected: list[float]) -> None:
    tokens = [0, 2, 1, 1, 2]
    rows = entered(SamplingParams(temperature=1.0, **params), tokens, 2)
    logits = torch.tensor([[4.0, -2.0, 2.0, 1.0, -1.0]])
    first = torch.zeros(1, dtype=torch.int32)
    SampleOps().penalize(logits, rows.parameters.table, rows.tokens, first, torch.tensor([5], dtype=torch.int32), first)
    assert logits[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("params", "kept"), [
    ({"min_p": 0.3}, 3), ({"min_p": 0.6}, 2),
    # At temperature 0.5 probabilities are squared: 0.16, 0.09, 0.04, ...; those below 0.3 x 0.16 go. At 2 they are closer.
    ({"min_p": 0.3, "temperature": 0.5}, 2), ({"min_p": 0.3, "temperature": 2.0}, 5), ({"min_p": 0.4, "temperature": 2.0}, 3),
    ({"min_p": 0.3, "temperature": 0.5, "top_p": 0.9999}, 2), ({"min_p": 0.4, "temperature": 2.0, "top_k": 4}, 3),
    ({"top_p": 0.7}, 2), ({"top_p": 0.71}, 3), ({"top_p": 0.95}, 4),
    # Top-k first: of the three that are left, 0.3 is preceded by 0.4 of 0.9, 0.2 by 0.7 of 0.9.
    ({"top_k": 3, "top_p": 0.95}, 3), ({"top_k": 3, "top_p": 0.7}, 2), ({"top_k": 1, "top_p": 0.99}, 1),
    ({"min_p": 0.25, "top_p": 0.95}, 3), ({"min_p": 0.25, "top_p": 0.95, "top_k": 2}, 2),
    ({"min_p": 0.12, "top_k": 5, "top_p": 0.999}, 4),
])
def test_filters(params: dict[str, float], kept: int) -> None:
    wanted = SamplingParams(**{"temperature": 1.0, **params})
    rows = entered(wanted, [0], 1)
    logits = torch.tensor([PROBABILITIES]).log()
    threshold = SampleOps().threshold(logits.clone(), rows.parameters.table, torch.zeros(1, dtype=torch.int32))
    assert int((logits / wanted.temperature >= threshold - 1e-6).sum()) == kept


def drawn(seed: int) -> list[int]:
    """Tokens at 32 positions of a flat distribution over 1,000."""
    found = []
    for position in range(1, 33):
        rows = entered(SamplingParams(temperature=1.0), [0] * position, 1, seed)
        row, place = np.zeros(1, np.int32), np.array([position], np.int32)
        lines = LogitsRows(np.arange(1), row, place, torch.from_numpy(row), torch.from_numpy(place))
        found += Sampler(SampleOps(), rows).launch(torch.zeros(1, 1000), lines).tokens().tolist()
    return found


def test_every_bit_of_a_seed_counts() -> None:
    """Also the high half: seeds of 64 bits that differ there alone drew the same once."""
    seeds = [1, 1 + (1 << 32), 1 + (1 << 40), 1 + (1 << 63), 2, 1 << 32]
    sequences = [drawn(seed) for seed in seeds]
    for i, one in enumerate(sequences):
        for other in sequences[:i]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 8
    assert drawn(1 + (1 << 40)) == sequences[2]




def test_each_row_has_its_own_top_k() -> None:
    """Beside a row that keeps more, a row's own top-k still goes before its top-p."""
    narrow, wide = SamplingParams(temperature=1.0, top_k=3, top_p=0.95), SamplingParams(temperature=1.0, top_p=0.95)
    rows = Rows(3, 64, 16, 1, torch.device("cpu"))
    enter = [Enter(row, [0], 1, params, 0, []) for row, params in enumerate((narrow, wide))]
    rows.apply(StepPlan(0, enter, [], [np.zeros((0, 3), np.int32)]))
    logits = torch.tensor([PROBABILITIES, PROBABILITIES]).log()
    threshold = SampleOps().threshold(logits.clone(), rows.parameters.table, torch.tensor([0, 1], dtype=torch.int32))
    assert (logits >= threshold[:, None] - 1e-6).sum(-1).tolist() == [3, 4]
