"""Where experts are: which rank holds which, and how that follows the load. No tensors.

Every rank decides the same from the same counts, so that nothing has to be agreed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Held = tuple[tuple[int, ...], ...]
"""[rank][slot] the expert there; -1: none."""

_GAIN = 0.02
"""An exchange has to lower the most loaded rank's load by this share of the mean load."""


class Move(NamedTuple):
    """`expert` comes to a slot of a rank from a slot of another, or of the same."""

    rank: int
    slot: int
    expert: int
    source: int
    source_slot: int


def linear(experts: int, ranks: int, slots: int) -> Held:
    """Consecutive experts on each rank."""
    each = -(-experts // ranks)
    return tuple((*range(experts)[rank * each:(rank + 1) * each], *[-1] * slots)[:slots] for rank in range(ranks))


def round_robin(experts: int, ranks: int, slots: int) -> Held:
    """Expert e on rank e modulo ranks."""
    return tuple((*range(rank, experts, ranks), *[-1] * slots)[:slots] for rank in range(ranks))


def places_of(held: Held, experts: int, replicas: int) -> list[list[tuple[int, int]]]:
    """[expert][replica] (rank, slot). Replicas beyond an expert's own repeat."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for owner, slots in enumerate(held):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                found[expert].append((owner, slot))
    return [[places[i % len(places)] for i in range(replicas)] for places in found]


def moved(held: Held, moves: Sequence[Move]) -> Held:
    """The placement after moves that are made at once."""
    lines = [list(line) for line in held]
    for move in moves:
        lines[move.rank][move.slot] = move.expert
    return tuple(map(tuple, lines))


def exchanges(held: Held, wanted: Held) -> Iterator[list[Move]]:
    """Exchanges of two slots each that lead from one placement to another of the same experts."""
    for rank, line in enumerate(wanted):
        for slot, expert in enumerate(line):
            if held[rank][slot] != expert:
                other, place = next((r, s) for r, other in enumerate(held) for s, one in enumerate(other)
                                    if one == expert and wanted[r][s] != expert)
                moves = _swap(held, (rank, slot), (other, place))
                held = moved(held, moves)
                yield moves


def _swap(held: Held, one: tuple[int, int], other: tuple[int, int]) -> list[Move]:
    first, second = held[one[0]][one[1]], held[other[0]][other[1]]
    return [Move(*one, second, *other), Move(*other, first, *one)]


def balancing(held: Held, counts: Sequence[float], most: int) -> Iterator[list[Move]]:
    """Up to `most` steps, each of one or two moves at once, that make the most loaded rank's load smaller: a replica of its
    most picked expert where another rank has a slot to spare; else the best exchange with another rank."""
    for _ in range(most):
        loads, each = _loads(held, counts)
        hot = max(range(len(held)), key=lambda rank: loads[rank])
        moves = _copy(held, counts, loads, each, hot) or _exchange(held, loads, each, hot)
        if moves is None:
            return
        yield moves
        held = moved(held, moves)


def _loads(held: Held, counts: Sequence[float]) -> tuple[list[float], list[float]]:
    """(of each rank, of one replica of each expert)"""
    replicas = Counter(expert for line in held for expert in line)
    each = [count / max(1, replicas[expert]) for expert, count in enumerate(counts)]
    return [sum(each[expert] for expert in line if expert >= 0) for line in held], each


def _copy(held: Held, counts: Sequence[float], loads: list[float], each: list[float], hot: int) -> list[Move] | None:
    """A further replica of the hot rank's most picked expert on the least loaded rank that has a slot to spare."""
    expert = max((one for one in held[hot] if one >= 0), key=lambda one: each[one])
    everywhere = [one for line in held for one in line]
    for rank in sorted(range(len(held)), key=lambda rank: loads[rank]):
        spare = [slot for slot, one in enumerate(held[rank]) if one < 0 or everywhere.count(one) > 1]
        if rank == hot or expert in held[rank] or not spare:
            continue
        slot = min(spare, key=lambda slot: each[held[rank][slot]] if held[rank][slot] >= 0 else -1.0)
        moves = [Move(rank, slot, expert, hot, held[hot].index(expert))]
        if max(_loads(moved(held, moves), counts)[0]) < max(loads) - _GAIN * sum(counts) / len(held):
            return moves
    return None


def _exchange(held: Held, loads: list[float], each: list[float], hot: int) -> list[Move] | None:
    """The exchange between the hot rank and another after which the larger load of both is smallest."""
    best: tuple[float, list[Move]] | None = None
    load, mine = np.array([*each, np.nan]), np.array(held[hot])
    for rank, line in enumerate(held):
        if rank == hot:
            continue
        theirs = np.array(line)
        gain = load[mine][:, None] - load[theirs]
        # Empty slots compare as nothing, and replicas stay apart.
        possible = (gain > 0) & ~np.isin(mine, theirs)[:, None] & ~np.isin(theirs, mine)
        peak = np.where(possible, np.maximum(loads[hot] - gain, loads[rank] + gain), np.inf)
        slot, place = np.unravel_index(int(peak.argmin()), peak.shape)
        if best is None or peak[slot, place] < best[0]:
            best = float(peak[slot, place]), _swap(held, (hot, int(slot)), (rank, int(place)))
    mean = sum(loads) / len(loads)
    return best[1] if best is not None and best[0] < loads[hot] - _GAIN * mean else None
