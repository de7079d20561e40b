"""Matrices that are read together, as q, k and v, but stored in several ways: each by its kernel, with outputs side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.ops.linear import LinearOps, Weight


class Joined(Weight):
    """Matrices [N1, K], [N2, K], ... as one [N1 + N2 + ..., K]."""

    __slots__ = ("members",)

    def __init__(self, members: Sequence[Weight], gated: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        first = members[0]
        super().__init__(first.data, sum(member.n for member in members), first.k, first.dtype)
        self.members = tuple(members)
        self.nbytes = sum(member.nbytes for member in members)
        self.ops = JoinedOps(gated)


class JoinedOps(LinearOps):
    """The operation `linear` by the kernels of the members."""

    def __init__(self, gated: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._gated = gated

    def apply(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        found, at = [], 0
        for member in weight.members:
            found.append(member.ops.apply(x, member, None if bias is None else bias[at:at + member.n], out_dtype))
            at += member.n
        return torch.cat(found, -1)

    def gated(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return self._gated(self.apply(x, weight, bias), kind)

    def gather(self, ids: torch.Tensor, weight: Any) -> torch.Tensor:
        return torch.cat([member.ops.gather(ids, member) for member in weight.members], -1)
