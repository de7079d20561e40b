"""The cache's bytes: one arena, and each state's view of its pages in it."""

import math
import mmap
from collections.abc import Sequence

import torch

from penstock.core.plan import Move
from penstock.core.state import CacheLayout, Field, Group, StateSpec
from penstock.layers.step import StateView


def own_pages(size: int) -> torch.Tensor:
    """Page-aligned host memory that shares no system page with others, as pinning requires: none can be registered twice."""
    pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8, count=max(1, size))[:size]


class Arena:
    """The bytes, allocated once. Pages are addressed by (group, page id), as the layout defines."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        # Not zeroed: on a CPU only pages that are used become resident.
        self.whole = own_pages(layout.nbytes) if device.type == "cpu" else torch.empty(
            layout.nbytes, dtype=torch.uint8, device=device)
        self.pages = [self.whole.as_strided((layout.slabs * group.per_slab, group.page_bytes), (group.stride, 1))
                       for group in layout.groups]
        """By group [page, byte]."""

    def views(self, states: Sequence[StateSpec]) -> list[StateView]:
        """One view a state, in the order of the states: its fields by name, over all pages of its group."""
        views: dict[int, StateView] = {}
        for g, group in enumerate(self.layout.groups):
            for place, offset in zip(group.layers, group.offsets, strict=True):
                state = states[place]
                starts = state.offsets(self.layout.page)
                views[place] = StateView(g, self.layout.page, {field.name: self._field(group, field, offset + start)
                                                               for field, start in zip(state.fields, starts, strict=False)})
        return [views[place] for place in range(len(states))]

    def _field(self, group: Group, field: Field, offset: int) -> torch.Tensor:
        """One field in every page of a group, `offset` bytes from a page's beginning: [pages, ..., page, d] of a field of shape
        (..., d) per position, [pages, ...] of one per page."""
        dtype = getattr(torch, field.dtype)
        inner = field.shape
        if field.per == "position":
            inner = (*field.shape[:-1], self.layout.page // field.stripes, *field.shape[-1:])
        strides = [math.prod(inner[i + 1:]) for i in range(len(inner))]
        shape = (self.layout.slabs * group.per_slab, *inner)
        return self.whole.view(dtype).as_strided(shape, (group.stride // dtype.itemsize, *strides), offset // dtype.itemsize)

    def stretch(self, group: int, first: int, count: int) -> torch.Tensor:
        """The bytes of consecutive pages, including the gaps between them. The size is equal in any arena of this layout."""
        cut = self.layout.groups[group]
        start = first * cut.stride
        return self.whole[start:start + (count - 1) * cut.stride + cut.page_bytes]

    def copy(self, moves: Sequence[Move]) -> None:
        """Performs page copies in order."""
        for move in moves:
            pages = self.pages[move.group]
            pages[move.target].copy_(pages[move.source])
