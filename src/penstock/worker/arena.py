"""The KV cache's bytes: one arena, and each layer's view of its pages in it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from penstock.core.layout import CacheLayout
from penstock.core.plan import Move
from penstock.core.state import StateSpec
from penstock.layers.step import KVView


def own_pages(size: int) -> torch.Tensor:
    """So many bytes of host memory that share no page of the system with anything else. To be pinned they must: of two tensors
    side by side on a heap, the second one's first page is the first one's last, and cannot be registered twice."""
    pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8, count=max(1, size))[:size]


class Arena:
    """Allocated once. Pages are addressed by (group, page id) as the layout says."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        # Empty, not zero: on a CPU only the pages that are used become resident.
        self._bytes = own_pages(layout.nbytes) if device.type == "cpu" else torch.empty(
            layout.nbytes, dtype=torch.uint8, device=device)
        self._pages = [self._bytes.as_strided((layout.slabs * group.per_slab, group.page_bytes), (group.stride, 1))
                       for group in layout.groups]

    def views(self, states: Sequence[StateSpec]) -> list[KVView]:
        """One view a layer, in layer order: k and v as [pages, KV heads, page, head size]."""
        views: list[KVView | None] = [None] * len(states)
        for g, group in enumerate(self.layout.groups):
            pages = self.layout.slabs * group.per_slab
            for layer, offset in zip(group.layers, group.offsets, strict=True):
                tensors = []
                for field in states[layer].fields:
                    dtype = getattr(torch, field.dtype)
                    heads, size = field.shape
                    flat = self._bytes.view(dtype)
                    at = offset // dtype.itemsize
                    shape = (pages, heads, self.layout.page, size)
                    strides = (group.stride // dtype.itemsize, self.layout.page * size, size, 1)
                    tensors.append(flat.as_strided(shape, strides, at))
                    offset += field.nbytes * self.layout.page
                views[layer] = KVView(g, *tensors)
        return [view for view in views if view is not None]

    def stretch(self, group: int, first: int, count: int) -> torch.Tensor:
        """The bytes of consecutive pages and of the gaps between them, in one piece: as much in any arena of this layout."""
        cut = self.layout.groups[group]
        start = first * cut.stride
        return self._bytes[start:start + (count - 1) * cut.stride + cut.page_bytes]

    @property
    def whole(self) -> torch.Tensor:
        """All of its bytes."""
        return self._bytes

    def copy(self, moves: Sequence[Move]) -> None:
        """Performs page copies in order."""
        for move in moves:
            pages = self._pages[move.group]
            pages[move.target].copy_(pages[move.source])
