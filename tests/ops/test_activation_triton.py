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
