"""The operation `lora`: x A^T B^T for the rows of a step, each with its own adapter's matrices; the plain PyTorch reference.

The matrices of all adapters on a device are one tensor, `Slabs.data`, with a line for each slot, so that a CUDA graph finds
those of any mix of adapters: which rows have which slot is data on the device (`Groups`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.ops.linear import Weight
from penstock.ops.table import register

UNIT = 16
"""Ranks are padded to multiples of this."""
MOST_PIECES = 4
"""Matrices that one projection may be joined from."""
WIDE = 256
"""The most columns of a piece that a program of a GPU kernel writes."""


def padded(rank: int) -> int:
    return -(-rank // UNIT) * UNIT


@dataclass(frozen=True)
class Target:
    """A projection that adapters may change, and where a slot's line holds its matrices. With the slot's padded rank r, A of
    piece p is [r, inputs] at (down + p * inputs) * r, and B^T of all pieces is [r, rows] at up * r."""

    pieces: tuple[int, ...]
    """Rows of each of the matrices that it is joined from."""
    inputs: int
    down: int
    up: int
    gains: int
    """Where a line of `Slabs.gains` holds its rows' factors less 1."""
    facts: int
    """Where a line of `Slabs.facts` holds the padded rank of each piece (0: no matrices), and whether there are gains."""

    @property
    def rows(self) -> int:
        return sum(self.pieces)

    def blocks(self) -> list[tuple[int, int, int]]:
        """(piece, first row, end of the piece) of each block of up to WIDE rows."""
        borders = pairwise(accumulate(self.pieces, initial=0))
        return [(piece, row, end) for piece, (first, end) in enumerate(borders) for row in range(first, end, WIDE)]


class Layout:
    """The targets of a model, by the paths of their projections, and the size of a slot."""

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...], int]]) -> None:
        """`shapes`: path, rows of each piece, inputs."""
        self.targets: dict[str, Target] = {}
        at = gains = 0
        for number, (path, pieces, inputs) in enumerate(shapes):
            assert len(pieces) <= MOST_PIECES, path
            # Vector loads want aligned beginnings.
            up = padded(at + len(pieces) * inputs)
            self.targets[path] = Target(pieces, inputs, at, up, gains, UNIT * (1 + number))
            at, gains = padded(up + sum(pieces)), padded(gains + sum(pieces))
        self.unit, self.gains = at, gains
        """Elements of a slot's matrices for each rank, and of its gains."""
        self.facts = UNIT * (1 + len(shapes))


@dataclass(frozen=True)
class Matrices:
    """An adapter in host memory, as its slot will hold it."""

    data: torch.Tensor
    """The part of a slot's line that it changes, [unit * padded rank] if that is all."""
    places: list[tuple[int, int]]
    """Where these elements lie in the line: beginnings and ends."""
    gains: torch.Tensor | None
    """Factors less 1 of results' rows (DoRA); None if it has none."""
    facts: torch.Tensor
    """[facts] int32; the first is the padded rank."""


class Slabs:
    """The matrices of the adapters on a device."""

    def __init__(self, layout: Layout, slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.rank = padded(rank)
        self.data = torch.zeros(slots, layout.unit * self.rank, dtype=dtype, device=device)
        self.gains = torch.zeros(slots, layout.gains, dtype=dtype, device=device)
        self.facts = torch.zeros(slots, layout.facts, dtype=torch.int32, device=device)
        tables = {target.pieces: torch.tensor(target.blocks(), dtype=torch.int32).to(device)
                  for target in layout.targets.values()}
        self.blocks = {path: tables[target.pieces] for path, target in layout.targets.items()}
        """[blocks, 3] int32: `Target.blocks`."""
        self.packed: dict[str, bytes] = {}
        """By path, arguments of a kernel that are the same in every call."""

    @staticmethod
    def nbytes(layout: Layout, slots: int, rank: int, dtype: torch.dtype) -> int:
        """Of all slots."""
        return slots * (dtype.itemsize * (layout.unit * padded(rank) + layout.gains) + 4 * layout.facts)

    def fill(self, slot: int, matrices: Matrices) -> None:
        """Enqueues the copies of an adapter into a slot."""
        at = 0
        for first, end in matrices.places:
            self.data[slot, first:end].copy_(matrices.data[at:at + end - first], non_blocking=True)
            at += end - first
        self.facts[slot].copy_(matrices.facts, non_blocking=True)
        if matrices.gains is not None:
            self.gains[slot].copy_(matrices.gains, non_blocking=True)


class Groups(NamedTuple):
    """The rows of a step that have adapters, sorted by slot and cut into tiles of equal slots."""

    number: torch.Tensor
    """[1] int32: number of tiles."""
    tiles: torch.Tensor
    """[3, most] int32: slot of each tile, and where its places begin and end."""
    order: torch.Tensor
    """[rows] int32: the row at each place; those without adapters come first."""
    slot: torch.Tensor
    """[rows] int32: the slot of the row at each place; -1: none."""
    tall: int
    """The most places of a tile."""

    @classmethod
    def of(cls, flat: torch.Tensor, rows: int, slots: int) -> "Groups":
        """Views of what `write` wrote."""
        order, slot = _begins(rows, slots)
        return cls(flat[:1], flat[UNIT:order].view(3, -1)[:, :tiles(rows, slots)], flat[order:order + rows],
                   flat[slot:slot + rows], tall(rows))


def size(rows: int, slots: int) -> int:
    """Elements of the groups of so many rows."""
    return _begins(rows, slots)[1] + padded(rows)


def _begins(rows: int, slots: int) -> tuple[int, int]:
    """Where `Groups.order` and `Groups.slot` begin."""
    order = UNIT + 3 * padded(tiles(rows, slots))
    return order, order + padded(rows)


def tall(rows: int) -> int:
    """Places of a tile where there are so many rows."""
    return 16 if rows <= 256 else 32 if rows <= 512 else 64


def tiles(rows: int, slots: int) -> int:
    """The most tiles that so many rows are cut into."""
    return min(rows, rows // tall(rows) + slots)


def write(host: npt.NDArray[np.int32], given: npt.NDArray[np.int32], rows: int, slots: int) -> None:
    """Groups rows with the slots `given` (-1: none) in a step padded to `rows`, for `Groups.of`."""
    given = np.pad(given, (0, rows - len(given)), constant_values=-1)
    order = np.argsort(given, kind="stable")
    found, counts = np.unique(given, return_counts=True)
    height, begin, at, (ordered, slotted) = tall(rows), 0, 0, _begins(rows, slots)
    tile = host[UNIT:ordered].reshape(3, -1)
    for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            begins = np.arange(begin, begin + count, height)
            cut = slice(at, at := at + len(begins))
            tile[0, cut], tile[1, cut], tile[2, cut] = slot, begins, np.minimum(begins + height, begin + count)
        begin += count
    host[0] = at
    host[ordered:ordered + rows], host[slotted:slotted + rows] = order, given[order]


class LoraOps:
    """The reference. An implementation has these functions; the first may leave its work to the third."""

    def shrink(self, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups) -> torch.Tensor:
        """x A^T of every piece for the rows in `groups`, [1, T, pieces, rank] float32, in a form that only `expand` knows."""
        target = slabs.layout.targets[path]
        low = torch.zeros(1, len(x), len(target.pieces), slabs.rank, device=x.device)
        for slot, rows, (width, *_), ranks in self._tiles(target, slabs, groups):
            for piece, rank in enumerate(ranks):
                begin = (target.down + piece * target.inputs) * width
                down = slabs.data[slot, begin:begin + rank * target.inputs].view(rank, target.inputs).float()
                # One row after another, so that its bits do not depend on the others.
                for row in rows:
                    low[0, row, piece, :rank] = torch.mv(down, x[row].float())
        return low

    def look_up(self, tokens: torch.Tensor, path: str, slabs: Slabs, groups: Groups) -> torch.Tensor:
        """The same for an embedding: columns of A."""
        target = slabs.layout.targets[path]
        low = torch.zeros(1, len(tokens), 1, slabs.rank, device=tokens.device)
        for slot, rows, (width, *_), (rank,) in self._tiles(target, slabs, groups):
            begin = target.down * width
            down = slabs.data[slot, begin:begin + rank * target.inputs].view(rank, target.inputs)
            low[0, rows, 0, :rank] = down[:, tokens[rows].long()].t().float()
        return low

    def expand(self, low: torch.Tensor, path: str, slabs: Slabs, groups: Groups, out: torch.Tensor,
               bias: torch.Tensor | None) -> None:
        """Adds to `out` [T, rows], in place, `low` times B^T for the rows in `groups`. `bias` is what `out` contains of one.
        Of rows with gains g, `out` less the bias is multiplied by g first.

        x A^T is rounded to x's dtype; the sum is done in float32 and rounded once. A row's bits do not depend on other rows."""
        target = slabs.layout.targets[path]
        for slot, rows, (width, scaled), ranks in self._tiles(target, slabs, groups):
            up = slabs.data[slot, target.up * width:(target.up + target.rows) * width].view(width, target.rows).float()
            total, at = out[rows].float(), 0
            if scaled:
                base = 0.0 if bias is None else bias.float()
                total += (total - base) * slabs.gains[slot, target.gains:target.gains + target.rows].float()
            for piece, (count, rank) in enumerate(zip(target.pieces, ranks, strict=True)):
                inner = low[0, rows, piece, :rank].to(slabs.data.dtype).float()
                total[:, at:at + count] += torch.stack([torch.mv(up[:rank, at:at + count].t(), row) for row in inner])
                at += count
            out[rows] = total.to(out.dtype)

    def product(self, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups, weight: Weight,  # noqa: ARG002
                bias: torch.Tensor | None, kind: str | None) -> torch.Tensor | None:  # noqa: ARG002
        """x W^T + bias with deltas, of a `kind` gated, where that is faster than one after another; None elsewhere."""
        return None

    @staticmethod
    def _tiles(target: Target, slabs: Slabs, groups: Groups) -> Iterator[tuple[int, torch.Tensor, tuple[int, int], list[int]]]:
        """Of each tile: slot, rows, (padded rank, whether scaled), the rank of each piece."""
        for slot, begin, end in groups.tiles[:, :int(groups.number)].t().tolist():
            told = slabs.facts[slot].tolist()
            ranks = told[target.facts:target.facts + len(target.pieces)]
            yield slot, groups.order[begin:end].long(), (told[0], told[target.facts + MOST_PIECES]), ranks


register("lora", "reference", rank=0, capturable=False)(LoraOps())
