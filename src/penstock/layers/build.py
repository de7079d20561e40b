"""The materials of layers: parameters as data, what is loaded of them, kernels, projections; and the protocol of a mixer, one
sublayer of a block. Attention mixes tokens; a feed-forward layer is a mixer without a state.

A new mixer is one file: a frozen dataclass that describes it, and the layer that it builds. Scheduler, cache, worker and loader
find out what they need (states, parameters, projections) by this protocol alone.

A parameter as data has a name, a shape, how it is stored, and how tensor parallelism may cut it. Memory is planned and a
checkpoint checked by these, before a byte of it is read.

`Linear` is the only place where a projection is computed, so an adapter's delta and a rank's collective have one home. A
checkpoint's matrices may be joined (q, k and v; gate and up), and an activation may follow in the kernel (`Activated`)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F

from penstock.core.state import DTYPE_BYTES, StateSpec
from penstock.layers.rope import RopeSpec
from penstock.layers.step import Adapted, Delta, StateView, Step, Works
from penstock.ops.experts import Stack
from penstock.ops.experts_hosted import Stages
from penstock.ops.linear import Joined, Weight
from penstock.ops.registry import Kernels
from penstock.parallel.group import Group
from penstock.parallel.lockstep import Lockstep
from penstock.quant.scheme import PLAIN, Part, Scheme


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


def own_channels(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's channels, of all on the last axis, filled up with zeros."""
    piece = Piece("up", x.shape[-1], even_unit(x.shape[-1]))
    first, last = piece.share(rank, ranks)
    return F.pad(x[..., first:last], (0, piece.room(ranks) - last + first))


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


RopeTable = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [max_model_len, rotated dimensions / 2]."""


class Coming(Protocol):
    """Matrices of blocks that are on the device only while their block runs (`models/away.py::Away`)."""

    saved: int

    def enter(self, block: int) -> None: ...

    def leave(self, block: int) -> None: ...

    def there(self, block: int) -> AbstractContextManager[None]: ...


class Values(dict[str, Weight | torch.Tensor]):
    """Loaded parameters by path: packed matrices and plain tensors."""

    away: Coming | None = None
    """If some blocks' matrices are not on the device."""

    def matrix(self, path: str) -> Weight:
        found = self[path]
        assert isinstance(found, Weight), path
        return found

    def stack(self, path: str) -> Stack:
        found = self[path]
        assert isinstance(found, Stack), path
        return found

    def tensor(self, path: str) -> torch.Tensor:
        found = self[path]
        assert isinstance(found, torch.Tensor), path
        return found


@dataclass
class Build:
    """One model's building. Layers take from it what they keep."""

    values: Values
    kernels: Kernels
    device: torch.device
    max_model_len: int
    group: Group | None = None
    """The ranks of tensor parallelism, whose shares of a projection's inputs add up to the result; None on a single rank."""
    data: Lockstep | None = None
    """The engines with which this one steps together, each with some of the experts."""
    context: Group | None = None
    """The ranks that divide the positions of every context."""
    tables: dict[RopeSpec, RopeTable] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)
    """Of experts in host memory."""

    def rope(self, spec: RopeSpec) -> RopeTable:
        """The table of a rotation, one for all layers of an equal spec."""
        if spec not in self.tables:
            self.tables[spec] = spec.table(self.max_model_len, self.device)
        return self.tables[spec]


@dataclass(frozen=True)
class LinearSpec:
    """x times one matrix, the rows of `outputs` stacked in order, and perhaps a bias."""

    inputs: int
    outputs: tuple[Piece, ...]
    bias: bool = False
    split: Split = Split.WHOLE
    unit: int = 1
    """Inputs that stay together on one rank, if they are split."""
    groups: int = 0
    """Runs of such inputs, as in `Piece`."""

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.outputs)

    def parameters(self, path: str) -> Iterator[Parameter]:
        """`path` is that of the joined parameter; pieces are its siblings."""
        for kind, shape in (("weight", (self.rows, self.inputs)), ("bias", (self.rows,))):
            if kind == "bias" and not self.bias:
                continue
            parent = path.rpartition(".")[0]
            pieces = tuple(replace(piece, name=f"{parent}.{piece.name}.{kind}") for piece in self.outputs)
            # A bias is added to the sum over ranks, so ranks that divide the inputs have it whole.
            split = Split.WHOLE if kind == "bias" and self.split is Split.COLUMNS else self.split
            columns = self.split is Split.COLUMNS
            yield Parameter(f"{path}.{kind}", shape, PLAIN if kind == "weight" else None, pieces if len(pieces) > 1 else (),
                            split=split, unit=self.unit if columns else self.outputs[0].unit,
                            groups=self.groups if columns else self.outputs[0].groups if len(pieces) == 1 else 0)


def matrix(spec: LinearSpec, path: str, build: Build) -> Weight:
    """A projection's matrix, or its pieces as one where each is stored in its own way."""
    if f"{path}.weight" in build.values:
        return build.values.matrix(f"{path}.weight")
    parent = path.rpartition(".")[0]
    return Joined([build.values.matrix(f"{parent}.{piece.name}.weight") for piece in spec.outputs], build.kernels.gated)


class Linear:
    """x [T, K] -> [T, N] in x's dtype."""

    _plain = True
    """Whether the result has x's dtype."""

    def __init__(self, spec: LinearSpec, path: str, build: Build) -> None:
        self.path = path
        self.weight = matrix(spec, path, build)
        self.bias = build.values.tensor(f"{path}.bias") if spec.bias else None
        self._apply = self.weight.ops.apply
        self._reduce = build.group.reduce if build.group is not None and spec.split is Split.COLUMNS else None
        self._leaves = False
        members = self.weight.members if isinstance(self.weight, Joined) else (self.weight,)
        self.shape: tuple[object, ...] = (*(type(one.ops) for one in members), self.weight.n, self.weight.k, self.bias is None)
        """Equal for projections that launch the same kernels for the same rows."""

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        """`step` says which rows have which adapter."""
        if step.delta is not None:
            return self._adapted(x, step.delta)
        if self._leaves and step.runs is not None:
            borders = step.runs.borders
            return step.runs.leave(lambda run: self._apply(x[slice(*borders[run])], self.weight, None))
        if self._reduce is None:
            return self._apply(x, self.weight, self.bias)
        return self._whole(self._apply(x, self.weight, None))

    def _adapted(self, x: torch.Tensor, delta: Delta) -> torch.Tensor:
        # Each rank adds its inputs' and columns' part. The first factor precedes the GEMM, which loads weights meanwhile.
        bias = self.bias if self._reduce is None else None
        out = delta.product(self.path, x, self.weight, bias, None) if self._plain else None
        if out is None:
            out = delta.expand(self.path, delta.shrink(self.path, x), self._apply(x, self.weight, bias), bias)
        return out if self._reduce is None else self._whole(out)

    def leave_sum(self) -> bool:
        """From now on returns this rank's part, which the caller sums over ranks; False if there is no such sum."""
        if self._reduce is None or self.bias is not None:
            return False
        self._reduce, self._leaves = None, True
        return True

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of what each computed with its inputs."""
        assert self._reduce is not None
        out = self._reduce(part)
        return out if self.bias is None else out + self.bias


class Activated(Linear):
    """activation(x W^T + b); gated, with the two halves g and u of the projection: activation(g) * u."""

    def __init__(self, spec: LinearSpec, path: str, build: Build, kind: str, gated: bool) -> None:
        super().__init__(spec, path, build)
        self._kind = kind
        self._fused = self.weight.ops.gated if gated else None
        self._activate = build.kernels.gated if gated else build.kernels.activation
        self.shape = (*self.shape, kind, gated)

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        if self._fused is not None:
            out = (self._fused(x, self.weight, self.bias, self._kind) if step.delta is None else
                   step.delta.product(self.path, x, self.weight, self.bias, self._kind))
            if out is not None:
                return out
        return self._activate(super().__call__(x, step), self._kind)


class MixerSpec(Protocol):
    """A mixer as data: frozen, comparable, and equal for layers that are built alike."""

    @property
    def name(self) -> str:
        """Its parameters' path within the block; different for the mixers of one block."""

    @property
    def width(self) -> int:
        """Of the stream that it reads and adds to."""

    def parameters(self, path: str) -> Iterator[Parameter]: ...

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """Its cache entries, per position or per page; `dtype` is the model's, a torch name."""

    def share(self, ranks: int) -> "MixerSpec":
        """One rank's part: the mixer with fewer heads or channels, and parameters of the shapes that `Parameter.share` leaves.
        It is the same for every rank: smaller ones are filled with zeros. One of WHOLE parameters alone returns itself."""

    def build(self, path: str, build: Build) -> "Mixer": ...


class Mixer(Protocol):
    """x [T, width] -> [T, width]: what it adds to the stream. The defaults are of a mixer without states and sums."""

    looks_around: bool
    """Whether a token's result depends on other tokens than itself."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Its projections, which are warmed up at start, in the order in which they were made."""
        return [one for one in vars(self).values() if isinstance(one, Linear)]

    def reader(self, width: int) -> Weight | None:
        """The matrix that its input is multiplied with first, whose kernel may take codes."""
        return next((one.weight for one in self.linears if one.weight.k == width), None)

    def attach(self, views: Sequence[StateView], works: Works) -> None:  # noqa: ARG002
        """Gives it its windows into the cache, one for each state, and has it enter in `works` what steps prepare for it."""
        return

    def detach(self) -> None:
        """Lets go of the cache."""
        return

    def leave_sum(self) -> bool:
        """From now on returns this rank's part, if the last thing that it does is to sum over ranks; else returns False."""
        return False

    def leave_parts(self) -> None:
        """From now on it may return [T, P, width], of which the caller takes the sum over P."""
        return

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Runs on a step, updating its states for all of its tokens. With `ends` [E], results are for those tokens alone."""


class TokenMixer(Mixer):
    """One that looks around, and ends with the projection `o`."""

    looks_around = True
    o: Linear

    def leave_sum(self) -> bool:
        return self.o.leave_sum()
