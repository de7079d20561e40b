"""Where experts are, and how the load moves them; how layers are divided into stages."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from penstock.parallel.axis import runs
from penstock.parallel.placement import Held, Move, balancing, exchanges, linear, moved, places_of, round_robin


def loads(held: Held, counts: list[float]) -> list[float]:
    flat = [expert for line in held for expert in line]
    return [sum(counts[expert] / flat.count(expert) for expert in line if expert >= 0) for line in held]


@pytest.mark.parametrize(("experts", "ranks", "spare"), [(7, 2, 0), (8, 4, 1), (5, 3, 2), (128, 8, 2)])
def test_every_replica_is_on_one_rank(experts: int, ranks: int, spare: int) -> None:
    for make in (linear, round_robin):
        held = make(experts, ranks, -(-experts // ranks) + spare)
        found = places_of(held, experts, 3)
        tables = [[[slot if owner == rank else -1 for owner, slot in line] for line in found] for rank in range(ranks)]
        for expert in range(experts):
            for replica in range(3):
                there = [(rank, table[expert][replica]) for rank, table in enumerate(tables) if table[expert][replica] >= 0]
                assert len(there) == 1 and held[there[0][0]][there[0][1]] == expert


def test_exchanges_lead_from_one_placement_to_another() -> None:
    held, wanted = linear(10, 3, 4), round_robin(10, 3, 4)
    for moves in exchanges(held, wanted):
        assert all(held[move.source][move.source_slot] == move.expert for move in moves)
        held = moved(held, moves)
    assert held == wanted


def test_balancing_lowers_the_highest_load_and_loses_no_expert() -> None:
    draw = random.Random(1)
    for _ in range(50):
        ranks, experts, spare = draw.choice([2, 4, 8]), draw.choice([8, 16, 60]), draw.choice([0, 1, 3])
        counts = [draw.paretovariate(1.1) for _ in range(experts)]
        held, peaks = linear(experts, ranks, -(-experts // ranks) + spare), list[float]()
        start = max(loads(held, counts))
        for moves in balancing(held, counts, 200):
            assert all(held[move.source][move.source_slot] == move.expert for move in moves)
            assert len({(move.rank, move.slot) for move in moves}) == len(moves)
            held = moved(held, moves)
            assert {expert for line in held for expert in line} >= set(range(experts))
            peaks.append(max(loads(held, counts)))
        assert all(after < before + 1e-9 for before, after in pairwise([start, *peaks]))
        bound = max(sum(counts) / ranks, max(counts) / (spare * ranks + 1))
        assert max(loads(held, counts)) <= 2.0 * bound, (ranks, experts, spare)


def test_a_hot_expert_gets_a_replica() -> None:
    held = linear(4, 2, 3)
    first, *_ = balancing(held, [100.0, 1.0, 1.0, 1.0], 5)
    assert first == [Move(1, 2, 0, 0, 0)]
    assert list(balancing(linear(4, 2, 2), [1.0] * 4, 5)) == []


def test_stages_are_as_even_as_can_be() -> None:
    assert runs([1] * 8, 0, 2) == [4, 4]
    assert runs([1] * 8, 2, 2) == [5, 3]
    assert runs([4, 1, 1, 1, 1], 0, 2) == [1, 4]
    assert runs([1] * 3, 9, 3) == [1, 1, 1]
