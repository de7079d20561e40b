"""Tells a sink of events which whole pages the index keeps on the device. Between `cache/prefix.py` and `cache/events.py`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.cache.events import Sink
from penstock.cache.prefix import Node, Prefix


class Announcer:
    """Speaks of an index from now on. The ends of contexts within a page are not spoken of: they have no key."""

    def __init__(self, index: Prefix, sink: Sink) -> None:
        self.index = index
        self.sink = sink
        index.stored = self._stored
        index.removed = self._removed

    def _stored(self, node: Node, group: int, slots: list[int]) -> None:
        index, width = self.index, self.index.width
        whole = len(node.tokens) // width
        for first, end in _runs([slot for slot in slots if slot < whole]):
            start = node.start + first * index.page
            tokens = np.frombuffer(bytes(node.tokens[first * width:end * width]), np.int32).tolist()
            self.sink.stored(group, "device", index.key(node, first - 1) if start else None,
                             [index.key(node, slot) for slot in range(first, end)], tokens, node.label.salt,
                             node.label.adapter)

    def _removed(self, node: Node, group: int, slot: int) -> None:
        self.sink.removed(group, "device", [self.index.key(node, slot)])


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as intervals [first, end)."""
    first = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield slots[first], slots[i - 1] + 1
            first = i
