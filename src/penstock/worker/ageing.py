"""Pages as tiers behind the device keep them, where that is in fewer bits (`core/state.py::StateSpec.aged`): encoded when they
leave the device, decoded when they come back.

Both are functions of the bytes of whole pages, run by the lane that copies them, on the device."""

from collections.abc import Iterator, Sequence

import torch

from penstock.core.state import CacheLayout, Field, StateSpec
from penstock.ops.codec import aged


class Ageing:
    """The pages of an arena laid out by `here`, and those of the tiers, by `there`."""

    def __init__(self, states: Sequence[StateSpec], here: CacheLayout, there: CacheLayout) -> None:
        self._states, self._here, self._there = states, here, there

    def old(self, group: int, pages: torch.Tensor, count: int) -> torch.Tensor:
        """The bytes of `count` consecutive device pages, with the gaps between them, as those of the tiers' pages."""
        young = _rows(pages, count, self._here.groups[group].stride)
        cut = self._there.groups[group]
        found = torch.zeros(count, cut.stride, dtype=torch.uint8, device=pages.device)
        for state, (at, to) in self._each(group):
            if not state.aged:
                found[:, to:to + state.page_bytes(self._here.page)] = young[:, at:at + state.page_bytes(self._here.page)]
                continue
            new = {field.name: place for field, place in _places(state.behind, self._here.page, to)}
            for field, (begin, end) in _places(state, self._here.page, at):
                codes, scales = aged(field.shape[-1]).encode(_numbers(young[:, begin:end], field))
                for name, part in ((field.name, codes), (f"{field.name}_scale", scales)):
                    assert part is not None
                    found[:, slice(*new[name])] = part.contiguous().view(torch.uint8).view(count, -1)
        return found.view(-1)[:(count - 1) * cut.stride + cut.page_bytes]

    def young(self, group: int, pages: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
        """The reverse, on `device`."""
        old = _rows(pages.to(device, non_blocking=True), count, self._there.groups[group].stride)
        cut = self._here.groups[group]
        found = torch.zeros(count, cut.stride, dtype=torch.uint8, device=device)
        for state, (to, at) in self._each(group):
            if not state.aged:
                found[:, to:to + state.page_bytes(self._here.page)] = old[:, at:at + state.page_bytes(self._here.page)]
                continue
            kept = {field.name: _numbers(old[:, slice(*place)], field)
                    for field, place in _places(state.behind, self._here.page, at)}
            for field, place in _places(state, self._here.page, to):
                numbers = aged(field.shape[-1]).decode(kept[field.name], kept[f"{field.name}_scale"])
                numbers = numbers.to(getattr(torch, field.dtype))
                found[:, slice(*place)] = numbers.contiguous().view(torch.uint8).view(count, -1)
        return found.view(-1)[:(count - 1) * cut.stride + cut.page_bytes]

    def _each(self, group: int) -> Iterator[tuple[StateSpec, tuple[int, int]]]:
        """The states of a group, and where they begin in pages of both kinds."""
        here, there = self._here.groups[group], self._there.groups[group]
        for place, *offsets in zip(here.layers, here.offsets, there.offsets, strict=True):
            yield self._states[place], (offsets[0], offsets[1])


def _rows(pages: torch.Tensor, count: int, stride: int) -> torch.Tensor:
    """Pages [count, bytes of one], without what a last one lacks of its gap."""
    return pages.as_strided((count, pages.numel() - (count - 1) * stride), (stride, 1))


def _places(state: StateSpec, page: int, begin: int) -> Iterator[tuple[Field, tuple[int, int]]]:
    for field, at in zip(state.fields, state.offsets(page), strict=False):
        yield field, (begin + at, begin + at + field.page_bytes(page))


def _numbers(data: torch.Tensor, field: Field) -> torch.Tensor:
    """Bytes [pages, n] of a field as vectors [pages, vectors, elements]."""
    return data.contiguous().view(getattr(torch, field.dtype)).view(len(data), -1, field.shape[-1])
