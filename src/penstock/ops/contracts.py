"""The types of the operations, as the kernel table binds them. The reference's docstring says what an operation computes.

Operations of several functions whose implementations share code are classes instead: `ops/attention.py::AttentionOps` and
`ops/sample.py::SampleOps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from penstock.ops.linear import Weight


class MatrixOps(Protocol):
    """ops/linear.py: GEMMs with a packed weight, and rows of it."""

    def apply(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor: ...

    def gated(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor: ...

    def gather(self, ids: torch.Tensor, weight: Weight) -> torch.Tensor: ...


class PlainOps(MatrixOps, Protocol):
    """Kernels for plain matrices."""

    def pack(self, weight: torch.Tensor, /) -> Weight: ...


class StoredOps(MatrixOps, Protocol):
    """Kernels that compute with a matrix as a scheme other than plain stores it."""

    def pack(self, scheme: Any, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, /) -> Weight:
        """The matrix of `shape` for activations of `dtype`. `scheme` is a `quant/scheme.py::Scheme`, `parts` what its `parts`
        lists; they are on the device, and may be kept."""
        ...


class HeadMatrixOps(Protocol):
    """ops/latent.py: GEMMs with a matrix a head. The packed form is private to the implementation."""

    def pack(self, weight: torch.Tensor, /) -> Any: ...

    def apply(self, x: torch.Tensor, weight: Any, out: torch.Tensor) -> None: ...
