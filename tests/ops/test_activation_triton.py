"""Triton's activations against float64; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.ops import rows_triton
from penstock.ops.activation import ACTIVATIONS
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import close, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str, dtype: torch.dtype) -> None:
    """One row and several, widths that no block divides, rows that do not lie together, arguments far from zero."""
    for rows, width, gap in ((1, 6, 0), (3, 1024, 0), (2, 2700, 16), (5, 66, 3)):
        x = (3 * random(rows, width + gap, seed=width)).to(dtype).to(DEVICE)[:, :width]
        close(rows_triton.activation(x, kind), ACTIVATIONS[kind](x.double()), factor=2)
        left, right = x.double().chunk(2, -1)
        close(rows_triton.gated(x, kind), ACTIVATIONS[kind](left) * right, factor=4)
    assert rows_triton.gated(x[:0], kind).shape == (0, 33)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_of_rows_and_columns(dtype: torch.dtype) -> None:
    """Of a product that had none: plain and gated, from float32 and from the result's own type."""
    for rows, width in ((1, 6), (3, 2700), (5, 66)):
        x, left, right = (random(*shape, seed=len(shape)).to(DEVICE) for shape in ((rows, width), (rows,), (width,)))
        exact = x.double() * left.double()[:, None] * right.double()
        close(rows_triton.scaled(x, left, right, dtype, None, None), exact, factor=2)
        y, z = (x.to(dtype).double() * left.double()[:, None] * right.double()).chunk(2, -1)
        close(rows_triton.scaled(x.to(dtype), left, right, dtype, "silu", None), ACTIVATIONS["silu"](y) * z, factor=4)
