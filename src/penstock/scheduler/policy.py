"""In which order requests are served: a sort key, lowest first. The last in order is the first to be preempted."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.sequence import Sequence

Key = tuple[float, ...]
Policy = Callable[[Sequence], Key]


def first_come(sequence: Sequence) -> Key:
    """By priority, then by arrival; the sequences of one request in their order."""
    return sequence.request.priority, sequence.request.arrival, sequence.index
