"""One rank's share of a checkpoint: which part of each stored tensor it reads, and where that goes in its own parameters."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.core.errors import ModelError
from penstock.layers.build import Parameter, Split
from penstock.layers.spec import ModelSpec
from penstock.models.rules import Change
from penstock.parallel.axis import Place
from penstock.quant.scheme import Part


@dataclass(frozen=True)
class Source:
    """A checkpoint's tensor, and where it goes: places of a parameter's `part` from `first` on along the axis `axis`."""

    name: str
    part: str
    row: int
    """The first of the parameter's rows that it holds something of."""
    rows: int
    axis: int | None
    first: int
    count: int
    change: Change | None


class Stretch(NamedTuple):
    """Places along an axis of a stored tensor."""

    axis: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(*self)


@dataclass(frozen=True)
class Cut:
    """A run of a checkpoint's tensor (None: all of it), and the runs of a rank's stored tensor that select its place there."""

    taken: Stretch | None
    placed: tuple[Stretch, ...]

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.taken is None else self.taken.of(tensor)

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        for run in self.placed:
            tensor = run.of(tensor)
        return tensor


def stored(parameter: Parameter, dtype: str, rows: int | None = None) -> tuple[Part, ...]:
    """The tensors that hold a parameter, or so many rows of it, in a model of `dtype`."""
    if parameter.scheme is not None:
        return parameter.parts(dtype, rows)
    shape = parameter.shape if rows is None else (rows, *parameter.shape[1:])
    return (Part("", shape, parameter.dtype or dtype),)


class Shares:
    """The share of the model `whole` of the rank at `place`."""

    def __init__(self, whole: ModelSpec, place: Place, dtype: str) -> None:
        self.whole = whole.dealt(place)
        self.spec = whole.at(place)
        """The part of the model that this rank runs; all ranks of a stage have equal ones."""
        self._place, self._dtype = place, dtype
        self._wholes = {parameter.name: parameter for parameter in self.whole.parameters()}

    def _axis(self, whole: Parameter) -> tuple[int, int]:
        """(rank, ranks) of those that divide a parameter: experts are divided among all ranks of engines that step together."""
        place = self._place
        return (place.number, place.world) if whole.stack and place.datas > 1 else (place.tensor, place.tensors)

    def of(self, parameter: Parameter) -> Parameter:
        """The whole of which this rank's `parameter` is a share."""
        return self._wholes[parameter.name]

    def taken(self, parameter: Parameter, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's share of the stored tensors of a whole parameter."""
        whole, found = self.of(parameter), dict[str, torch.Tensor]()
        if self._axis(whole)[1] == 1:
            return parts
        for part in stored(whole, self._dtype):
            axis = part.rows
            source = Source(whole.name, part.suffix, 0, whole.shape[0], axis, 0, 0 if axis is None else part.shape[axis], None)
            found[part.suffix] = parts[part.suffix].new_zeros(self.shapes(parameter, [source])[part.suffix])
            for cut in self.cuts(parameter, source):
                cut.target(found[part.suffix]).copy_(cut.source(parts[part.suffix]))
        return found

    def _part(self, parameter: Parameter, suffix: str, rows: int | None = None) -> Part:
        return next(part for part in stored(parameter, self._dtype, rows) if part.suffix == suffix)

    def shapes(self, parameter: Parameter, sources: list[Source]) -> dict[str, tuple[int, ...]]:
        """Of each stored tensor of this rank's `parameter`. Of one that comes in pieces, those one behind the other."""
        found = {}
        for part in stored(parameter, self._dtype):
            shape = list(part.shape)
            rows = self.of(parameter).shape[0]
            joined = all(source.rows < rows for source in sources if source.part == part.suffix)
            if part.rows is not None and parameter.pieces and joined:
                shape[part.rows] = sum(self._length(parameter, part.suffix, piece.rows) for piece in parameter.pieces)
            found[part.suffix] = tuple(shape)
        return found

    def _length(self, parameter: Parameter, suffix: str, rows: int) -> int:
        """Places along the axis of rows that so many rows take."""
        part = self._part(parameter, suffix, rows)
        assert part.rows is not None
        return part.shape[part.rows]

    def clear(self, parameter: Parameter, tensors: dict[str, torch.Tensor]) -> None:
        """Sets to zero what no cut fills, where this rank has fewer heads or channels than there is room for."""
        whole = self._wholes[parameter.name]
        held = sum(last - first for first, last in whole.share(*self._axis(whole)))
        if whole.split is not Split.WHOLE and held < sum(piece.rows for piece in parameter.divided):
            for tensor in tensors.values():
                tensor.zero_()

    def cuts(self, parameter: Parameter, source: Source) -> Iterator[Cut]:
        """The part of a source that this rank's `parameter` holds."""
        whole = self._wholes[parameter.name]
        rows = () if source.axis is None else (Stretch(source.axis, source.first, source.count),)
        if self._axis(whole)[1] == 1 or whole.split is Split.WHOLE:
            yield Cut(None, rows)
        elif whole.split is Split.COLUMNS:
            part = self._part(whole, source.part)
            ((first, last),) = whole.share(*self._axis(whole))
            if part.columns is None:
                yield Cut(None, rows)
            elif first < last:
                at, end = (self._scaled(whole, place, whole.shape[1], part.shape[part.columns]) for place in (first, last))
                yield Cut(Stretch(part.columns, at, end - at), (*rows, Stretch(part.columns, 0, end - at)))
        elif source.axis is None:
            yield Cut(None, ())
        else:
            yield from self._rows(whole, parameter, source, source.axis)

    def _rows(self, whole: Parameter, own: Parameter, source: Source, axis: int) -> Iterator[Cut]:
        at = 0
        joined = source.rows < whole.shape[0]
        for (first, last), piece in zip(whole.share(*self._axis(whole)), own.divided, strict=True):
            low, high = max(first, source.row), min(last, source.row + source.rows)
            if low < high:
                taken = [self._scaled(whole, row - source.row, source.rows, source.count) for row in (low, high)]
                room = self._length(own, source.part, piece.rows)
                begin = at + self._scaled(whole, low - first, piece.rows, room)
                count = taken[1] - taken[0]
                yield Cut(Stretch(axis, taken[0], count), (Stretch(axis, begin, count),))
            at += self._length(own, source.part, piece.rows) if joined else self._scaled(
                whole, piece.rows, own.shape[0], self._length(own, source.part, own.shape[0]))

    def _scaled(self, parameter: Parameter, place: int, length: int, stored_length: int) -> int:
        """Where a row or column lies in a stored tensor that has `stored_length` places for `length` of them."""
        at, rest = divmod(place * stored_length, length)
        if rest:
            assert parameter.scheme is not None
            raise ModelError(f"{parameter.name} is stored as {parameter.scheme.name}, whose blocks would be cut apart by "
                             f"{self._axis(parameter)[1]} ranks; use another tensor_parallel_size")
        return at
