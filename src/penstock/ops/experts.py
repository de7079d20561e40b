"""The operation `experts`: each token's picked feed-forward networks, weighted and summed; the plain PyTorch reference.

The matrices of all experts of a layer are one `Stack`, packed once after loading by the implementation that will read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F

from penstock.ops.activation import ACTIVATIONS
from penstock.ops.coded_forms import CodedWeight
from penstock.ops.linear import Weight
from penstock.ops.table import register


@dataclass(frozen=True)
class Glu:
    """kind(alpha * g) / alpha * (u + shift) of the two halves g and u of a projection, both limited first: g from above, u from
    both sides. With its defaults, SwiGLU. gpt-oss: silu, alpha 1.702, limit 7, shift 1."""

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    """0: unlimited."""
    shift: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 F] -> [T, F]."""
        gate, up = x.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        gate = ACTIVATIONS[self.kind](gate) if self.alpha == 1.0 else ACTIVATIONS[self.kind](self.alpha * gate) / self.alpha
        return gate * (up + self.shift if self.shift else up)


class Stack(Weight):
    """`count` packed [n, k] matrices. The layout of `data` is private to the implementation, `grouped`, that packed it."""

    __slots__ = ("count", "grouped")
    coded: CodedWeight | None = None
    """The parts of quantized matrices, one behind the other as its rows, where GPU kernels decode them."""

    def __init__(self, data: torch.Tensor, count: int, n: int, k: int, dtype: torch.dtype, grouped: "ExpertsOps") -> None:
        super().__init__(data, n, k, dtype)
        self.count = count
        self.grouped = grouped

    def matrix(self, place: int) -> list[torch.Tensor]:
        """The memory of one matrix, as bytes. Copied to another place of an equal stack, it is the same matrix there."""
        return [_bytes(self.data[place])]


class Loose(Stack):
    """A stack of matrices that were packed one by one, by a kernel of the operation `linear`."""

    __slots__ = ("each",)

    def __init__(self, each: Sequence[Weight], dtype: torch.dtype, grouped: "ExpertsOps") -> None:
        super().__init__(torch.empty(0), len(each), each[0].n, each[0].k, dtype, grouped)
        self.each = each
        self.nbytes = sum(one.nbytes for one in each)

    def matrix(self, place: int) -> list[torch.Tensor]:
        one, found = self.each[place], dict[int, torch.Tensor]()
        names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        for value in (*(getattr(one, name, None) for name in names), *getattr(one, "parts", {}).values()):
            if isinstance(value, torch.Tensor):
                found[value.data_ptr()] = _bytes(value)
        return list(found.values())


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


class ExpertsOps:
    """The reference. An implementation has `pack` and `apply`, those of schemes and of host memory `pack_stored`."""

    invariant = False
    """Sums are in one order, whatever the number of tokens."""

    def pack(self, matrices: torch.Tensor) -> Stack:
        """Packs [E, n, k] matrices of f32, f16 or bf16 into the layout that `apply` reads."""
        count, n, k = matrices.shape
        return Stack(matrices.contiguous(), count, n, k, matrices.dtype, self)

    def pack_each(self, each: Sequence[Weight], dtype: torch.dtype) -> Stack:
        """Takes matrices that kernels of the operation `linear` have packed one by one: only picked ones are read."""
        return Loose(each, dtype, ExpertsOps())

    def pack_stored(self, scheme: Any, parts: Mapping[str, torch.Tensor], count: int, shape: tuple[int, int],
                    dtype: torch.dtype, _slots: int = 0, _device: torch.device | None = None) -> Stack:
        """Packs `count` matrices of `shape`, whose parts (`quant/scheme.py::Scheme.parts`) are joined by rows, for
        activations of `dtype`. `apply` takes two stacks of any schemes. With `slots`, so many of the matrices are on the
        `device`, and all in pinned host memory, where parts of plain ones are already."""
        return self.pack(scheme.decode(parts, dtype).view(count, *shape))

    def leaves_parts(self, _tokens: int, _up: Stack) -> bool:
        """Whether `apply` can leave the sum over picks of so many tokens to `add_rms_norm`, and is faster so."""
        return False

    def joins(self, _tokens: int, _picks: int, _up: Stack, _down: Stack, _shared: tuple[Weight, Weight]) -> bool:
        """Whether `apply` takes `shared` matrices for so many tokens."""
        return False

    def apply(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, glu: Glu,
              up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, inward: bool = False,
              shared: tuple[Weight, Weight] | None = None, whole: bool = True) -> torch.Tensor:
        """The sum over a token's picks e of weight * (down_e glu(up_e x + up_bias_e) + down_bias_e), [T, W] in x's dtype.

        x [T, W]; picks [T, K] int32, where -1 is no expert; weights [T, K] float32; up: stack of [2 F, W], gates first;
        down: stack of [W, F]; biases [E, 2 F] and [E, W]. With `inward` (Llama 4) weights multiply the experts' inputs instead.
        `shared` (`joins`): [2 S F, W] and [W, S F] of a network that is experts E to E + S - 1, a run of F channels each.
        Not `whole` (`leaves_parts`): [T, K + S, W], of which the sum is to be made; no pick may be -1.
        Products accumulate in float32, inner results have x's dtype, picks are summed in float32 in their order. An
        implementation that is registered as batch_invariant gives a token the same bits in any company."""
        assert shared is None and whole, "neither joins nor leaves parts"
        count, flat = picks.shape[1], picks.flatten()
        order = flat.argsort(stable=True)
        shares, runs = weights.flatten()[order, None], list[tuple[int, int, int]]()
        for expert, group in groupby(enumerate(flat[order].tolist()), itemgetter(1)):
            places = [place for place, _ in group]
            runs.append((expert, places[0], places[-1] + 1))
        rows = x[order // count]
        if inward:
            rows = (rows * shares).to(x.dtype)
        rows = self._runs(glu(self._runs(rows, up, up_bias, runs)), down, down_bias, runs).float()
        found = torch.empty_like(rows)
        found[order] = rows if inward else rows * shares
        each, total = found.view(len(x), count, x.shape[1]), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for place in range(count):
            total += each[:, place]
        return total.to(x.dtype)

    def products(self, x: torch.Tensor, picks: torch.Tensor, stack: Stack, bias: torch.Tensor | None) -> torch.Tensor:
        """x [P, k], each row times the matrix of its pick [P] (-1: any result), plus that one's bias: [P, n]."""
        out = x.new_zeros(len(x), stack.n)
        for expert in picks.unique().tolist():
            if expert >= 0:
                rows = (picks == expert).nonzero()[:, 0]
                out[rows] = stack.grouped.product(x[rows], stack, expert, None if bias is None else bias[expert])
        return out

    def _runs(self, x: torch.Tensor, stack: Stack, bias: torch.Tensor | None,
              runs: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """The products of rows that are sorted by expert; `runs`: (expert, its first row, their end). Nobody's are zeros."""
        return torch.cat([x.new_empty(0, stack.n), *(
            x.new_zeros(end - first, stack.n) if expert < 0 else
            stack.grouped.product(x[first:end], stack, expert, None if bias is None else bias[expert])
            for expert, first, end in runs)])

    def product(self, x: torch.Tensor, stack: Stack, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
        """Rows times one matrix of a stack that this implementation has packed."""
        if isinstance(stack, Loose):
            return stack.each[expert].ops.apply(x, stack.each[expert], bias)
        return F.linear(x, stack.data[expert], bias)


_AT_ONCE = 256
"""Picks of which `changed` computes at a time: their adapters' matrices are gathered."""


def changed(x: torch.Tensor, picks: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, up: Stack, down: Stack, glu: Glu,
            up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, inward: bool,
            factors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`ExpertsOps.apply` with an adapter. `factors`: A [E, r, W] and B [E, 2 F, r] of up,
    then those of down, by expert as `picks`; `places` [T, K]: where in the stacks the experts are, -1: nowhere here."""
    count = picks.shape[1]
    kept, found = places.flatten(), []
    experts, shares = picks.flatten().clamp(min=0), weights.flatten()[:, None]
    for first in range(0, len(kept), _AT_ONCE):
        some = slice(first, min(first + _AT_ONCE, len(kept)))
        rows = x[torch.arange(some.start, some.stop, device=x.device) // count]
        if inward:
            rows = (rows * shares[some]).to(x.dtype)
        for stack, bias, (a, b) in ((up, up_bias, factors[:2]), (down, down_bias, factors[2:])):
            out = stack.grouped.products(rows, kept[some], stack, bias)
            if a is not None and b is not None:
                low = torch.bmm(a[experts[some]], rows[:, :, None])
                out = out + torch.bmm(b[experts[some]], low)[:, :, 0]
            rows = glu(out) if stack is up else out
        found.append(rows.float() if inward else rows.float() * shares[some])
    total = torch.cat(found).masked_fill_((kept < 0)[:, None], 0.0).view(len(x), count, -1)
    return total.sum(1).to(x.dtype)

register("experts", "reference", rank=0, capturable=False, batch_invariant=False, threads=True)(ExpertsOps())
