"""The operation `linear`: GEMMs with a weight matrix, and embedding look-ups in it.

A weight is packed once after loading, into the layout of the implementation that will read it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from penstock.ops.activation import gated
from penstock.ops.table import register


class MatrixOps(Protocol):
    """A kernel's operations on a matrix that it has packed, as `LinearOps` says."""

    def apply(self, x: torch.Tensor, weight: "Weight", bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor: ...

    def gated(self, x: torch.Tensor, weight: "Weight", bias: torch.Tensor | None, kind: str) -> torch.Tensor: ...

    def gather(self, ids: torch.Tensor, weight: "Weight") -> torch.Tensor: ...


class Weight:
    """A packed [N, K] matrix. The layout of `data` is private to the implementation that packed it; `nbytes`: in memory."""

    __slots__ = ("data", "dtype", "k", "n", "nbytes", "ops", "reader")

    def __init__(self, data: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> None:
        self.data = data
        self.n = n
        self.k = k
        self.dtype = dtype
        self.nbytes = data.numel() * data.element_size()
        self.reader: Weight | None = None
        """The matrix that reads the activated product, for kernels that round activations for it on the way."""
        self.ops: MatrixOps
        """The kernel that has packed it and reads it; set by `quant/scheme.py::pack`."""

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor of which it is made by another of the same shape, type and strides."""
        for name in (name for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ()) if name != "reader"):
            value = getattr(self, name, None)
            if isinstance(value, torch.Tensor):
                setattr(self, name, change(value))
            elif isinstance(value, Weight):
                value.move(change)
            elif isinstance(value, dict):
                setattr(self, name, {key: change(one) for key, one in value.items()})
            elif isinstance(value, list | tuple):
                for one in value:
                    if isinstance(one, Weight):
                        one.move(change)


class StoredWeight(Weight):
    """A matrix that is kept as a scheme (`quant/scheme.py::Scheme`) stores it."""

    __slots__ = ("parts", "scheme")

    def __init__(self, scheme: Any, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """`dtype` is that of activations and gathered rows."""
        super().__init__(next(iter(parts.values())), shape[0], shape[1], dtype)
        self.scheme = scheme
        self.parts = dict(parts)
        self.nbytes = sum(part.nbytes for part in parts.values())


def rows_of(scheme: Any, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, first: int,
            last: int) -> dict[str, torch.Tensor]:
    """A stored matrix's rows [first, last): views of its parts. A part may have one place for several rows."""
    n, k = shape
    found = dict(parts)
    for part in scheme.parts(n, k, str(dtype).removeprefix("torch.")):
        if part.rows is not None:
            size = parts[part.suffix].shape[part.rows]
            begin = first * size // n
            found[part.suffix] = parts[part.suffix].narrow(part.rows, begin, -(-last * size // n) - begin)
    return found


@register("linear", "reference", rank=0, batch_invariant=False, threads=True)
class LinearOps:
    """The reference. An implementation has these four functions."""

    @staticmethod
    def pack(weight: torch.Tensor) -> Weight:
        """Packs a [N, K] matrix of f32, f16 or bf16 (any strides) into the layout that the other functions read."""
        return Weight(weight.contiguous(), weight.shape[0], weight.shape[1], weight.dtype)

    @staticmethod
    def apply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """GEMM: x [T, K] times the transposed weight, plus bias [N]. x has the weight's dtype and a contiguous last dimension.

        Returns [T, N] in `out_dtype`, by default x's, summed in float32: if batch_invariant, in an order independent of T."""
        out: torch.Tensor = F.linear(x, weight.data, bias)
        return out if out_dtype is None else out.to(out_dtype)

    @staticmethod
    def gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        """The GEMM with a gated activation behind it: gated(apply(x, weight, bias), kind) of ops/activation.py, [T, N / 2]."""
        return gated(F.linear(x, weight.data, bias), kind)

    @staticmethod
    def gather(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Embedding look-up: rows `ids` [T] (int32 or int64) of the weight as [T, K], in the weight's dtype."""
        return F.embedding(ids, weight.data)


class Joined(Weight):
    """Matrices [N1, K], [N2, K], ... as one [N1 + N2 + ..., K]: read together, as q, k and v, but stored in several ways. A
    factor [K] multiplies their columns."""

    __slots__ = ("factor", "members")

    def __init__(self, members: Sequence[Weight], gated: Callable[[torch.Tensor, str], torch.Tensor],
                 factor: torch.Tensor | None = None) -> None:
        first = members[0]
        super().__init__(first.data, sum(member.n for member in members), first.k, first.dtype)
        self.members, self.factor = tuple(members), factor
        self.nbytes = sum(member.nbytes for member in members) + (0 if factor is None else factor.nbytes)
        self.ops = JoinedOps(gated)


class JoinedOps:
    """The operation `linear`: each member by its own kernel, with outputs side by side."""

    def __init__(self, gated: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._gated = gated

    def apply(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        found, at = [], 0
        x = x if weight.factor is None else x * weight.factor
        for member in weight.members:
            found.append(member.ops.apply(x, member, None if bias is None else bias[at:at + member.n], out_dtype))
            at += member.n
        return torch.cat(found, -1)

    def gated(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return self._gated(self.apply(x, weight, bias), kind)

    def gather(self, ids: torch.Tensor, weight: Any) -> torch.Tensor:
        found = torch.cat([member.ops.gather(ids, member) for member in weight.members], -1)
        return found if weight.factor is None else found * weight.factor
