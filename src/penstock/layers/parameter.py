"""A parameter as data: its name, its shape, how it is stored, and how tensor parallelism may cut it.

Memory is planned and a checkpoint checked by these, before a byte of it is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from penstock.core.state import DTYPE_BYTES
from penstock.quant.scheme import Part, Scheme


class Split(Enum):
    """Which axis of a matrix [outputs, inputs] the ranks of tensor parallelism divide among them."""

    WHOLE = "whole"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Each rank computes its share of the outputs."""
    COLUMNS = "columns"
    """Each rank computes with its share of the inputs; the sum over ranks is the result."""


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that checkpoints may store on their own, and that ranks divide on their own, from the previous
    piece's end on."""

    name: str
    rows: int
    unit: int = 1
    """Rows that stay together on one rank: those of a head."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model. `name` is its path in the tree; a matrix's ends in ".weight"."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme | None = None
    """How a matrix that the operation `linear` reads is stored; None: a plain tensor in the model's dtype."""
    pieces: tuple[Piece, ...] = ()
    """Its rows in order, if it is joined from several matrices. Their names are paths as well."""
    rest: float = 0.0
    """The value of a plain tensor that changes nothing: 1 for the weight of a norm."""
    split: Split = Split.WHOLE
    unit: int = 1
    """Rows or columns that stay together on one rank, where there are no pieces to say so."""
    stack: int = 0
    """Of the experts' matrices of a layer: so many, of equal shape, joined by rows. 0: it is a single matrix."""
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
        """The half-open intervals of rows or columns that a rank holds, one for each piece, counted from the whole's beginning.

        Units are dealt out in order, as evenly as whole ones can be; of a piece with fewer units than ranks (KV heads) several
        ranks hold the same one.
        """
        if self.split is Split.WHOLE or ranks == 1:
            return [(0, self.shape[0])]
        length = self.shape[0 if self.split is Split.ROWS else 1]
        pieces = self.pieces if self.pieces and self.split is Split.ROWS else (Piece(self.name, length, self.unit),)
        found, at = [], 0
        for piece in pieces:
            units = piece.rows // piece.unit
            assert units * piece.unit == piece.rows, f"{piece.name} has {piece.rows} rows, which are no whole units"
            first = units * rank // ranks
            last = units * (rank + 1) // ranks if units >= ranks else first + 1
            found.append((at + first * piece.unit, at + last * piece.unit))
            at += piece.rows
        return found
