"""Reports whole pages that were stored on or removed from the device, by content key, to the tiers and to the event sink."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from penstock.cache.events import Sink
from penstock.cache.prefix import TOKEN, Node, Prefix
from penstock.cache.tiers import Content
from penstock.cache.tiers.hierarchy import Hierarchy


class News:
    """Listens to the prefix index. Hierarchy get the changes in batches (`flush`), the sink at once."""

    def __init__(self, index: Prefix, tiers: Hierarchy | None, sink: Sink | None) -> None:
        self._index = index
        self._tiers = tiers
        self._sink = sink
        self._certain: list[Content] = []
        self._leaving: list[Content] = []
        self._broken = False
        self.offered = False
        """True if pages for the tiers have been collected since the last plan."""
        index.stored, index.removed = self._stored, self._removed

    def _stored(self, node: Node, group: int, blocks: list[int]) -> None:
        if len(node.tokens) < self._index.width or self._index.model is None:
            return
        if self._tiers is not None:
            self._certain += [self._content(node, group, block) for block in blocks]
            self.offered = True
        if self._sink is not None:
            self._index.key(node, blocks[-1])
            # Along a run, blocks grow as their places do.
            for _, run in groupby(enumerate(blocks), lambda one: one[1] - one[0]):
                self._tell(node, group, [block for _, block in run])

    def _tell(self, node: Node, group: int, run: list[int]) -> None:
        """Reports consecutive blocks to the sink."""
        assert self._sink is not None
        keys, first, page = [self._index.key(node, block) for block in run], run[0], self._index.page
        parent = self._index.key(node, first - 1) if first or node.start else None
        tokens: list[int] = np.frombuffer(node.tokens, np.int32, len(run) * page, first * page * TOKEN).tolist()
        self._sink.stored(group, "device", parent, keys, tokens, node.label.salt, node.label.adapter)

    def _removed(self, node: Node, group: int, block: int) -> None:
        if self._index.model is None:
            return
        if self._tiers is not None and self._broken:
            self._tiers.forget([self._content(node, group, block)])
        elif self._tiers is not None:
            self._leaving.append(self._content(node, group, block))
            self.offered = True
        if self._sink is not None:
            self._sink.removed(group, "device", [self._index.key(node, block)])

    def _content(self, node: Node, group: int, block: int) -> Content:
        return Content(group, node.pages[group][block], self._index.key(node, block))

    def open(self) -> None:
        """Called when the index has got its model name: reports everything in it, parents first."""
        for node in self._index.nodes():
            for group, ids in enumerate(node.pages):
                blocks = [block for block, page in enumerate(ids) if page >= 0]
                if blocks:
                    self._stored(node, group, blocks)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Pages removed inside this context are invalid: tiers must forget them instead of saving them."""
        self._broken = True
        try:
            yield
        finally:
            self._broken = False

    def flush(self) -> None:
        """Offers the collected pages to the tiers, before the plan being made takes its transfers."""
        if self._tiers is not None:
            if self._certain:
                self._tiers.offer(self._certain, leaving=False)
            if self._leaving:
                self._tiers.offer(self._leaving, leaving=True)
        self._certain, self._leaving, self.offered = [], [], False

    def cleared(self) -> None:
        self._certain, self._leaving = [], []
        if self._sink is not None:
            self._sink.cleared()
