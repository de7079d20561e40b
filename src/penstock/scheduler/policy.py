"""In which order requests are served: policies, and the order itself, which follows whatever state they decide by.

A policy sees two levels. A group (a class, a tenant) has a standing, such as what it is owed, that changes as it is served. In
its group a sequence has a key, such as its arrival or its predicted time. The first in the order is planned and admitted first,
and the last is preempted first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from penstock.core.sequence import Sequence

Key = tuple[float, ...]


class Policy(Protocol):
    """Decides who comes first; lower comes before higher. The first in order must always be able to go on."""

    charges: bool
    """Whether `charge` is of any use; asked once."""

    def group(self, sequence: Sequence) -> str:
        """Whose standing counts for the sequence; never changes."""
        ...

    def standing(self, group: str) -> float:
        """The group's place among groups, as of now."""
        ...

    def key(self, sequence: Sequence) -> Key:
        """The sequence's place within its group, as of now. `Order.changed` must follow a change."""
        ...

    def charge(self, sequence: Sequence, positions: int) -> None:
        """So many positions of the sequence were planned. May raise the standing of its group, and of no other."""
        ...


class Priority:
    """By priority, then by arrival; the sequences of one request in their order."""

    charges = False

    def group(self, sequence: Sequence) -> str:  # noqa: ARG002 (all are one group)
        return ""

    def standing(self, group: str) -> float:  # noqa: ARG002
        return 0.0

    def key(self, sequence: Sequence) -> Key:
        return sequence.request.priority, sequence.request.arrival, sequence.index

    def charge(self, sequence: Sequence, positions: int) -> None:
        """Nobody is owed anything."""


class FirstCome(Priority):
    """By arrival alone."""

    def key(self, sequence: Sequence) -> Key:
        return sequence.request.arrival, sequence.index


POLICIES: dict[str, type[Priority]] = {"priority": Priority, "fcfs": FirstCome}
"""By the names of the option `scheduling_policy`."""

_Entry = tuple[Key, int, Sequence]


class Order:
    """Sequences in a policy's order. To add, remove or move one takes O(log n) comparisons; the standing of groups is looked at
    when the order is walked through."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[str, list[_Entry]] = {}
        """Each sorted by key; of equal keys, who came first."""
        self._entries: dict[Sequence, _Entry] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def __iter__(self) -> Iterator[Sequence]:
        """In order, of those that are here now. Whoever is charged meanwhile comes the later for it, and who is removed still
        comes."""
        if len(self._groups) <= 1:
            return iter([entry[2] for group in self._groups.values() for entry in group])
        return self._merged()

    def _merged(self) -> Iterator[Sequence]:
        """The groups' sequences, the group of the least standing first at each."""
        heap = [(self._policy.standing(name), number, name, iter([entry[2] for entry in group]))
                for number, (name, group) in enumerate(self._groups.items())]
        heapq.heapify(heap)
        while heap:
            standing, number, name, left = heap[0]
            now = self._policy.standing(name)
            if now != standing:
                heapq.heapreplace(heap, (now, number, name, left))
                continue
            sequence = next(left, None)
            if sequence is None:
                heapq.heappop(heap)
            else:
                yield sequence

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place, behind those of equal keys."""
        assert sequence not in self._entries, "a sequence is in an order twice"
        entry = self._entries[sequence] = self._policy.key(sequence), next(self._numbers), sequence
        insort(self._groups.setdefault(self._policy.group(sequence), []), entry)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        entry, name = self._entries.pop(sequence), self._policy.group(sequence)
        group = self._groups[name]
        del group[bisect_left(group, entry)]
        if not group:
            del self._groups[name]

    def changed(self, sequence: Sequence) -> None:
        """The sequence's key has changed."""
        self.remove(sequence)
        self.add(sequence)
