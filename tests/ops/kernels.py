"""Shared by the tests of kernels: the implementations that this machine can run, and how close a result must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.ops.registry import implementations
from penstock.ops.table import Implementation
from penstock.platform.facts import detect

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}
"""Relative error of a sum rounded once: f32 by its length, the others by half a unit in the last place."""


def every(op: str) -> list[Any]:
    """A parameter for each implementation but the reference; those that cannot run here skip with the reason."""
    return [pytest.param(i, id=i.name) for i in implementations(op) if i.rank > 0]


def usable(implementation: Implementation, dtype: torch.dtype) -> Any:
    """The implementation's call, or a skip."""
    reason = implementation.supports(detect("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)
    return implementation.call


def reference(op: str) -> Any:
    return implementations(op)[0].call


def close(found: torch.Tensor, wanted: torch.Tensor, scale: float = 1.0, factor: float = 1.0) -> None:
    """`found` is `wanted` (float32 or better) up to the rounding of found's dtype, relative to the value or to `scale`."""
    assert found.shape == wanted.shape
    tolerance = factor * TOLERANCE[found.dtype]
    wanted = wanted.double()
    error = (found.double() - wanted).abs() / (wanted.abs() + scale)
    assert not error.isnan().any(), "NaN"
    assert error.max().item() <= tolerance if error.numel() else True, f"error {error.max().item():.3g} > {tolerance:.3g}"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)
