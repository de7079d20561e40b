"""Scheduling policies, and the sorted order of sequences that a policy defines.

A policy has two levels: a group (a class, a tenant) has a standing, such as its service deficit, which serving changes; within
it a sequence has a key, such as its arrival. The first in order is planned and admitted first, the last preempted first."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import count
from operator import itemgetter
from typing import Any

from penstock.core.request import Sequence
from penstock.core.steptime import Load
from penstock.scheduler.step import InFlight

Key = tuple[float, ...]
Standing = float | tuple[float, ...]
"""Lower is first; of one type for all groups of a policy."""


class Policy:
    """Defines the service order; lower values come first. The first in order must always be able to make progress.

    This base class orders by priority, then arrival, then index within the request, and promises nothing."""

    def arrive(self, sequence: Sequence) -> None:
        """Reports a new sequence, before it is in any order. RequestError if it cannot be served."""

    def admit(self, sequence: Sequence, now: float, running: "Order", waiting: "Order", taken: bool, free: bool) -> None:
        """RequestError if a request that arrives now could not be served as promised. `taken`: no row is free, nor held beyond
        a request's share; `free`: nobody waits, and there are rows."""

    def begun(self, sequence: Sequence, now: float) -> None:
        """Reports the first token of a sequence."""

    def end(self, sequence: Sequence) -> None:
        """Reports that a sequence has ended."""

    def waits(self, sequence: Sequence, change: int) -> None:
        """Reports that a sequence has begun to wait (1), or waits no more (-1)."""

    def begin(self) -> None:
        """Called before each plan."""

    def planned(self, step: InFlight, now: float, entered: int, waiting: bool) -> None:
        """Reports a plan before its segments are given out: `entered` sequences got rows; `waiting`: others got none."""

    def group(self, sequence: Sequence) -> str:  # noqa: ARG002 (all are one group)
        """Returns the sequence's group. Must never change."""
        return ""

    def standing(self, group: str) -> Standing:  # noqa: ARG002
        """Returns the current rank of a group among groups. Of equal ones the one with the first key goes first."""
        return 0.0

    def key(self, sequence: Sequence) -> Key:
        """Returns the current sort key of a sequence within its group. Call `Order.changed` after it changes."""
        return sequence.request.priority, sequence.request.arrival, sequence.index

    def charge(self, sequence: Sequence, positions: int) -> None:
        """Reports that `positions` positions were planned. May raise the standing of the sequence's group only."""

    def charge_each(self, sequences: list[Sequence]) -> None:
        """As `charge`, of one position behind the prompt of each of these."""

    def expendable(self, sequence: Sequence, head: Sequence | None = None) -> int:  # noqa: ARG002
        """Returns how readily a running sequence gives up its pages, or its row for a waiting one (`head`); 0: not at all, if
        any other can. Of equal ones the last in order is taken."""
        return int(head is None)

    def rank(self, sequence: Sequence) -> float:
        """The importance of a sequence: a request gives rows beyond its share to requests of equal or lower rank."""
        return sequence.request.priority

    def urgent(self, sequence: Sequence, now: float, decode: Load) -> bool:  # noqa: ARG002
        """Whether a waiting sequence must start now, so that others have to make room beside a step that is `decode`."""
        return False

    def late(self, sequence: Sequence, now: float) -> bool:  # noqa: ARG002
        """Renews the promise of a waiting sequence if it cannot be kept any more. True if it did: the order has changed."""
        return False

    def share(self, sequence: Sequence, budget: int, unread: int, head: Sequence | None) -> int:  # noqa: ARG002
        """The part of the budget that a prompt may take beside others who read, or could begin to (`unread` tokens, with its
        own). `head`: the first of those who wait and could enter."""
        return budget

    def tightest(self, groups: Iterable[str]) -> float | None:  # noqa: ARG002
        """These groups' tightest promise between tokens, in seconds: infinity if nobody watches, None if none was made."""
        return None

    def bearable(self, load: Load, tightest: float | None) -> bool:  # noqa: ARG002
        """Whether a step without prompts can be of this size beside that promise."""
        return True


class FirstCome(Policy):
    """Orders by arrival, then index within the request."""

    def key(self, sequence: Sequence) -> Key:
        return sequence.request.arrival, sequence.index


def victim(policy: Policy, running: list[Sequence], head: Sequence | None = None) -> Sequence | None:
    """The running sequence that loses its pages; for a waiting `head` perhaps none."""
    readiest, last = max(((policy.expendable(sequence, head), i) for i, sequence in enumerate(running)), default=(0, -1))
    return running[last] if running and (readiest or head is None) else None


POLICIES: dict[str, type[Policy]] = {"priority": Policy, "fcfs": FirstCome}
"""Plain policies by the values of the option `scheduling_policy`; `promises` is `scheduler/promises.py::Promises`."""

_Entry = tuple[Key, int, Sequence]


class Order:
    """Sequences in a policy's order. Adding, removing or moving takes O(log n) comparisons. Standings are read on iteration."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[str, list[_Entry]] = {}
        """Each group's entries, sorted by key, then by insertion."""
        self._entries: dict[Sequence, _Entry] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over the sequences in order. Charging a group meanwhile moves its rest; removed ones are still yielded."""
        return map(itemgetter(2), list(*self._groups.values())) if len(self._groups) <= 1 else self._merged()

    def _merged(self) -> Iterator[Sequence]:
        """Merges the groups; each time, the group with the lowest standing yields next."""
        heap: list[Any] = [(self._policy.standing(name), group[0][0], number, 0, name, list(group))
                           for number, (name, group) in enumerate(self._groups.items())]
        heapq.heapify(heap)
        while heap:
            standing, key, number, at, name, entries = heap[0]
            now = self._policy.standing(name)
            if now != standing:
                heapq.heapreplace(heap, (now, key, number, at, name, entries))
            elif at + 1 == len(entries):
                heapq.heappop(heap)
                yield entries[at][2]
            else:
                heapq.heapreplace(heap, (now, entries[at + 1][0], number, at + 1, name, entries))
                yield entries[at][2]

    @property
    def groups(self) -> list[str]:
        """The groups that have sequences."""
        return list(self._groups)

    def heads(self) -> list[Sequence]:
        return [group[0][2] for group in self._groups.values()]

    def before(self, group: str, key: Key) -> list[Sequence]:
        """The sequences of a group whose keys are lower."""
        entries = self._groups.get(group, [])
        return [entry[2] for entry in entries[:bisect_left(entries, (key,))]]

    def add(self, sequence: Sequence) -> None:
        """Inserts a sequence, after those of equal keys."""
        assert sequence not in self._entries, "a sequence is in an order twice"
        entry = self._entries[sequence] = self._policy.key(sequence), next(self._numbers), sequence
        insort(self._groups.setdefault(self._policy.group(sequence), []), entry)

    def remove(self, sequence: Sequence) -> None:
        entry, name = self._entries.pop(sequence), self._policy.group(sequence)
        group = self._groups[name]
        del group[bisect_left(group, entry)]
        if not group:
            del self._groups[name]

    def changed(self, sequence: Sequence) -> None:
        """Reorders a sequence whose key has changed."""
        self.remove(sequence)
        self.add(sequence)
