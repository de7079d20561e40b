"""A parameter as data: its name, its shape, how it is stored, and how tensor parallelism may cut it.

Memory is planned and a checkpoint checked by these, before a byte of it is read."""

import math
from dataclasses import dataclass
from enum import Enum

from penstock.core.state import DTYPE_BYTES
from penstock.quant.scheme import Part, Scheme


class Split(Enum):
    """The axis of a matrix [outputs, inputs] that tensor parallelism divides among ranks."""

    WHOLE = "whole"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Each rank computes its share of the outputs."""
    COLUMNS = "columns"
    """Each rank computes with its share of the inputs; the sum over ranks is the result."""


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter, from the previous piece's end on, that checkpoints may store and that ranks divide on their own."""

    name: str
    rows: int
    unit: int = 1
    """Rows that stay together on one rank: those of a head."""
    groups: int = 0
    """Equal runs of units (the query heads of a KV head) that are dealt out whole while there are enough for all ranks; else
    each run is divided among some ranks. 0: units belong to no run."""
    copied: bool = False
    """If there are fewer units than ranks, several ranks hold the same one (KV heads) instead of some holding none."""

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        """The half-open interval of rows that a rank holds, counted from the piece's beginning.

        Ranks take equal numbers of units in order, as many as the first needs; the last ones may have fewer, or none."""
        units = self.rows // self.unit
        assert units * self.unit == self.rows, f"{self.name} has {self.rows} rows, which are no whole units"
        if self.copied and units < ranks:
            first = rank * units // ranks
            last = first + 1
        elif self.groups:
            each = units // self.groups
            if self.groups >= ranks:
                first, last = (part * each for part in deal(self.groups, rank, ranks))
            else:
                run = rank * self.groups // ranks
                peers = [other for other in range(ranks) if other * self.groups // ranks == run]
                first, last = (run * each + part for part in deal(each, rank - peers[0], len(peers)))
        else:
            first, last = deal(units, rank, ranks)
        return first * self.unit, last * self.unit

    def room(self, ranks: int) -> int:
        """Rows that every rank allots: the largest share. Ranks with fewer fill up with zeros, so that all are built alike."""
        return max(last - first for first, last in (self.share(rank, ranks) for rank in range(ranks)))


def even_unit(length: int) -> int:
    """Channels of a plain axis that stay together on one rank: 128, which suits kernels and the blocks of most schemes, but
    fewer on short axes, so that there are at least 16 runs to deal out."""
    unit = 128
    while unit > 1 and (length % unit or length < 16 * unit):
        unit //= 2
    return unit


def deal(units: int, rank: int, ranks: int) -> tuple[int, int]:
    """The half-open interval of units that a rank gets: ceil(units / ranks) each, until there are none left."""
    each = -(-units // ranks)
    return min(units, rank * each), min(units, (rank + 1) * each)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model. `name` is its path in the tree; a matrix's ends in ".weight"."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme | None = None
    """The scheme of a matrix that the operation `linear` reads; None: a plain tensor in the model's dtype."""
    pieces: tuple[Piece, ...] = ()
    """Its rows in order, if it is joined from several matrices. Their names are paths as well."""
    rest: float = 0.0
    """The value of a plain tensor that changes nothing: 1 for the weight of a norm."""
    split: Split = Split.WHOLE
    unit: int = 1
    """Rows or columns that stay together on one rank, where there are no pieces to say so."""
    groups: int = 0
    copied: bool = False
    """These two are a Piece's, where there are none."""
    listed: bool = False
    """Its pieces are names of a checkpoint's tensors alone: ranks divide the whole."""
    stack: int = 0
    """Of the experts' matrices of a layer: so many, of equal shape, joined by rows. 0: it is a single matrix."""
    picks: int = 0
    """Of a stack, matrices that a token is multiplied by."""
    resident: int = 0
    """Of a stack, matrices on the device; all are in host memory then. 0: all are on the device alone."""
    away: bool = False
    """It is in host memory or on disk, and on the device for as long as its block runs."""
    live: int = 0
    """Elements of a token's result that a step holds, where that is not the number of rows."""
    dtype: str | None = None
    """A plain tensor's type, if it is not the model's."""
    decoded: bool = False
    """Layers compute with the matrix otherwise than as a projection: it is a plain tensor once loaded, however it is stored."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stem(self) -> str:
        """The common beginning of the names of a matrix's stored tensors."""
        return self.name.removesuffix(".weight")

    def parts(self, dtype: str, rows: int | None = None) -> tuple[Part, ...]:
        """The stored tensors of a matrix, or of so many rows of it, in a model of `dtype`."""
        assert self.scheme is not None, self.name
        return self.scheme.parts(self.shape[0] if rows is None else rows, self.shape[1], dtype)

    def nbytes(self, dtype: str) -> int:
        """Bytes as stored, in a model of `dtype`."""
        if self.scheme is None:
            return self.size * DTYPE_BYTES[self.dtype or dtype]
        return sum(part.nbytes for part in self.parts(dtype))

    def share(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """The half-open intervals of rows or columns that a rank holds, one for each piece, from the whole's beginning on."""
        if self.split is Split.WHOLE or ranks == 1:
            return [(0, self.shape[0])]
        found, at = [], 0
        for piece in self.divided:
            first, last = piece.share(rank, ranks)
            found.append((at + first, at + last))
            at += piece.rows
        return found

    @property
    def divided(self) -> tuple[Piece, ...]:
        """The rows or columns that ranks divide, as pieces."""
        if self.pieces and self.split is Split.ROWS and not self.listed:
            return self.pieces
        return (Piece(self.name, self.shape[0 if self.split is Split.ROWS else 1], self.unit, self.groups, self.copied),)
