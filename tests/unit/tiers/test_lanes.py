"""Lanes: what is copied, and how much of it is under way at a time. Events of a device are played here."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch

from penstock.worker import jobs
from penstock.worker.jobs import Lane, moment

CPU = torch.device("cpu")
PIECE = 1000


class Played:
    """In place of CUDA: an event has ended when somebody has waited for it, and copies are as far as events tell."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.open: list[Event] = []
        self.most = 0

    def event(self) -> Event:
        self.open.append(Event(self))
        self.most = max(self.most, len(self.open))
        return self.open[-1]


class Event:
    def __init__(self, played: Played) -> None:
        self.played = played

    def synchronize(self) -> None:
        del self.played.open[:self.played.open.index(self) + 1]


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    monkeypatch.setattr(jobs, "_PIECE_BYTES", PIECE)
    return Lane("test", CPU)


def copies(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(size, dtype=torch.uint8), torch.randint(256, (size,), dtype=torch.uint8)) for size in sizes]


@pytest.mark.parametrize("sizes", [[], [1], [PIECE], [PIECE + 1, 3], [10 * PIECE + 7], [300] * 40, [1, 5000, 1, 999, 2, 1001]])
def test_everything_is_copied_in_pieces(lane: Lane, sizes: list[int]) -> None:
    pairs = copies(sizes)
    pieces = list(jobs._cut(pairs))
    assert sum(to.nbytes for piece in pieces for to, _ in piece) == sum(sizes)
    assert all(sum(to.nbytes for to, _ in piece) < 2 * PIECE for piece in pieces)
    lane.run(pairs, [moment(CPU)]).wait()
    assert all(torch.equal(to, source) for to, source in pairs)
    lane.close()


def test_few_pieces_are_under_way_unless_somebody_waits(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(lane)
    monkeypatch.setattr(jobs, "_event", played.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    lane._stream = object()  # type: ignore[assignment]
    pairs = copies([PIECE] * 50)
    for _ in range(2):
        lane.run(pairs, [])._future.result()
    assert played.most <= jobs._PIECES + 2, "and the events behind all of it"
    lane.hurry = True
    lane.run(pairs, [])._future.result()
    assert played.most > 50, "who waits has the device wait, not a thread"
    lane.hurry = False
    lane.run(pairs, [])._future.result()
    assert len(played.open) <= jobs._PIECES + 1
    assert all(torch.equal(to, source) for to, source in pairs)
    lane._stream = None
    lane.close()


def test_a_failure_is_told_to_who_waits(lane: Lane) -> None:
    fence = lane.run([(torch.zeros(2, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))], [])
    with pytest.raises(RuntimeError):
        fence.wait()
    pairs = copies([10])
    after = lane.run(pairs, [])
    until = time.monotonic() + 5
    while not after.passed() and time.monotonic() < until:
        time.sleep(0.001)
    assert torch.equal(*pairs[0])
    lane.close()
