"""Products with a weight matrix, and rows of it. A weight is packed once after loading and read by one implementation only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.ops.activation import gated
from penstock.ops.contracts import MatrixOps
from penstock.ops.registry import register


class Weight:
    """A packed [N, K] matrix. `data` is the implementation's own business; `nbytes` is what it occupies."""

    __slots__ = ("data", "dtype", "k", "n", "nbytes", "ops")

    def __init__(self, data: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> None:
        self.data = data
        self.n = n
        self.k = k
        self.dtype = dtype
        self.nbytes = data.numel() * data.element_size()
        self.ops: MatrixOps
        """The kernel that has packed it and reads it; set by `quant/scheme.py::pack`."""


@register("linear", "reference", rank=0, batch_invariant=False, threads=True)
class LinearOps:
    """The four functions of an implementation of `linear`."""

    @staticmethod
    def pack(weight: torch.Tensor) -> Weight:
        """Takes a [N, K] matrix of f32, f16 or bf16 (any strides) into the layout that `apply` and `gather` read."""
        return Weight(weight.contiguous(), weight.shape[0], weight.shape[1], weight.dtype)

    @staticmethod
    def apply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, K] (last dimension contiguous, dtype as the weight's) times the transposed weight, plus bias [N].

        Returns [T, N] in `out_dtype`, by default x's. Sums are float32. Every output row depends on its input row alone:
        the order of summation must not depend on T.
        """
        out: torch.Tensor = F.linear(x, weight.data, bias)
        return out if out_dtype is None else out.to(out_dtype)

    @staticmethod
    def gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        """gated(apply(x, weight, bias), kind) of ops/activation.py: [T, N / 2]."""
        return gated(F.linear(x, weight.data, bias), kind)

    @staticmethod
    def gather(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Rows `ids` [T] (int32 or int64) of the weight as [T, K], in the weight's dtype: an embedding."""
        return F.embedding(ids, weight.data)
