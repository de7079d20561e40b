"""The types of the operations, as the kernel table binds them. The reference's docstring says what an operation computes.

Operations of several functions whose implementations share code are classes instead: `ops/attention.py::AttentionOps` and
`ops/sample.py::SampleOps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from penstock.ops.codec import Scales
    from penstock.ops.linear import Weight
    from penstock.ops.routing import Routing
    from penstock.ops.step import StepTensors


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


class RmsNorm(Protocol):
    """ops/norm.py."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0,
                 reader: Weight | None = None) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    """ops/norm.py."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 offset: float = 0.0, reader: Weight | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...


class LayerNorm(Protocol):
    """ops/norm.py."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor: ...


class RopeWrite(Protocol):
    """ops/rope.py."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, positions: torch.Tensor,
                 slots: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor | None,
                 cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, q_norm: torch.Tensor | None = None,
                 k_norm: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
                 interleaved: bool = False) -> torch.Tensor: ...


class CacheWrite(Protocol):
    """ops/codec.py."""

    def __call__(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                 scales: Scales) -> None: ...


class LatentWrite(Protocol):
    """ops/latent.py."""

    def __call__(self, q: torch.Tensor, latent: torch.Tensor, norm: torch.Tensor, eps: float, positions: torch.Tensor,
                 slots: torch.Tensor, cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
                 out: torch.Tensor) -> None: ...


class HeadMatrixOps(Protocol):
    """ops/latent.py: GEMMs with a matrix a head. The packed form is private to the implementation."""

    def pack(self, weight: torch.Tensor, /) -> Any: ...

    def apply(self, x: torch.Tensor, weight: Any, out: torch.Tensor) -> None: ...


class Route(Protocol):
    """ops/routing.py."""

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing,
                 counts: torch.Tensor | None = None, live: torch.Tensor | None = None
                 ) -> tuple[torch.Tensor, torch.Tensor]: ...


class BuildStep(Protocol):
    """ops/step.py."""

    def __call__(self, known: torch.Tensor, tables: list[torch.Tensor], row: torch.Tensor, start: torch.Tensor,
                 query_start: torch.Tensor, page: int, tokens: int, columns: int) -> StepTensors: ...


class Activation(Protocol):
    """ops/activation.py."""

    def __call__(self, x: torch.Tensor, kind: str) -> torch.Tensor: ...
