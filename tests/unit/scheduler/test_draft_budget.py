"""The drafts of a step are divided among its sequences by how likely they are kept, on a simulated device."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from penstock.core.request import Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.scheduler.drafting import Adaptive
from tests.unit.scheduler.test_draft_numbers import SECONDS, measured_times

PASS = 0.36e-3
"""Seconds of the drafter's pass behind the longest chain that others have, as measured at 32 sequences."""
MOST = 6
GRID = np.array([np.interp(range(513), list(SECONDS), [line[drafts] / 1e3 for line in SECONDS.values()])
                 for drafts in range(MOST + 1)])


def sequences(acceptances: list[float | None]) -> list[Sequence]:
    found = [Sequence(Request("x", [1, 2, 3, 4], SamplingParams()), 0, 0, 1000) for _ in acceptances]
    for one, acceptance in zip(found, acceptances, strict=True):
        one.acceptance = acceptance
    return found


def run(policy: Adaptive, rows: int, kept: list[float], steps: int = 400, seed: int = 0) -> tuple[float, list[float]]:
    """Tokens a second, of those without drafts, and the mean number of drafts, of sequences whose drafts are kept with these
    probabilities in turn. The first third of the steps does not count."""
    rng, every = random.Random(seed), sequences([None] * rows)
    chance, planned = [kept[at % len(kept)] for at in range(rows)], list[tuple[int, list[int]]]()
    tokens = seconds = 0.0
    drafts = np.zeros(len(kept))
    for step in range(steps):
        allowed = policy.begin(rows)
        planned.append((allowed, [policy.count(one) if allowed else 0 for one in every]))
        if len(planned) < 2:
            continue
        allowed, counts = planned.pop(0)
        right = [next((place for place in range(count) if rng.random() >= one), count)
                 for count, one in zip(counts, chance, strict=True)]
        for one, count, good in zip(every, counts, right, strict=True):
            if count:
                policy.learn(one, count, good)
        mean = sum(counts) / rows
        took = float(np.interp(mean, range(MOST + 1), GRID[:, rows])) + PASS * (max(counts) - mean)
        took *= rng.uniform(0.98, 1.02) * (1.05 if allowed and not sum(counts) else 1)
        policy.stepped(rows, rows + sum(counts), rows + sum(right), took, allowed)
        if step > steps // 3:
            tokens, seconds = tokens + rows + sum(right), seconds + took
            drafts += [sum(counts[at::len(kept)]) for at in range(len(kept))]
    return tokens / seconds * GRID[0, rows] / rows, (drafts * len(kept) / rows / (steps * 2 // 3)).tolist()


@pytest.mark.parametrize("drafts", [2, 3, 4])
def test_the_common_budget_goes_to_the_drafts_that_are_likeliest_kept(drafts: int) -> None:
    """As many drafts in all as if each had the same number, and those that a heap takes, one after the other."""
    policy, rng = Adaptive(MOST, measured_times()), random.Random(drafts)
    own = [rng.uniform(0.57, 0.65) if at % 2 else rng.uniform(0.9, 0.999) for at in range(40)]
    policy._accepted, policy._drafts, policy._pass, policy._told = 0.8, drafts, 1e-5, own
    policy._allot(0.01)
    counts = [policy.count(one) for one in sequences(list(own))]
    assert policy._trust > 0.4 and policy._longest > drafts and max(counts) == policy._longest and min(counts) < drafts
    taken, estimates = [0] * 40, [0.8 + policy._trust * (one - 0.8) for one in own]
    heap = [(-one, at) for at, one in enumerate(estimates)]
    heapq.heapify(heap)
    for _ in range(drafts * 40):
        chance, at = heapq.heappop(heap)
        taken[at] += 1
        if taken[at] < policy._longest:
            heapq.heappush(heap, (chance * estimates[at], at))
    assert counts == taken and sum(counts) == drafts * 40


def test_chains_are_longer_only_while_further_passes_pay() -> None:
    """Half of the sequences could use all drafts, four each."""
    found = []
    for seconds in (1e-5, 4e-4, 1e-2):
        policy = Adaptive(MOST, measured_times())
        policy._accepted, policy._drafts, policy._pass, policy._told = 0.7, 2, seconds, [0.99, 0.5] * 16
        policy._allot(0.006)
        found.append(policy._longest)
    assert found == [4, 3, 2]


@pytest.mark.parametrize(("rows", "kept", "gain"), [
    (32, [0.95, 0.2, 0.2, 0.2], 1.1), (8, [0.95, 0.2, 0.2, 0.2], 1.05), (64, [0.95, 0.5], 1.02), (32, [0.95, 0.5], 1.0),
    (32, [0.9, 0.3], 0.98), (128, [0.95, 0.65], 1.0), (32, [0.8], 0.98), (128, [0.8], 0.98), (1, [0.8], 0.98)], ids=str)
def test_sequences_of_unlike_acceptance_gain_by_it(rows: int, kept: list[float], gain: float,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Against equal numbers, of which those far below the average have fewer. Those that are right most often have most; where
    all are alike, nothing changes."""
    mine, drafts = np.mean([run(Adaptive(MOST, measured_times()), rows, kept, seed=seed)[0] for seed in range(3)]), run(
        Adaptive(MOST, measured_times()), rows, kept)[1]

    def equal(self: Adaptive, _seconds: float) -> None:
        self._told, self._trust, self._least, self._longest = [], 0.0, 0.0, self._drafts

    monkeypatch.setattr(Adaptive, "_allot", equal)
    others = np.mean([run(Adaptive(MOST, measured_times()), rows, kept, seed=seed)[0] for seed in range(3)])
    print(rows, kept, round(float(mine), 3), round(float(others), 3), drafts)
    assert mine >= gain * others
    assert len(kept) == 1 or drafts[0] > 1.5 * drafts[-1]
