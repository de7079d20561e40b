"""Triton's norms against float64: odd widths, strided rows, few rows and many; interpreted where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.ops import coded_triton, rows_triton
from penstock.ops.coded_forms import codes_of
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import close, random
from tests.ops.test_coded_triton import ROUNDED, name, packed

SHAPES = [(1, 64), (3, 33), (5, 288), (2, 1000), (1, 4096), (1100, 64)]
"""Rows of up to 512 columns share a program."""


def matrix(rows: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> torch.Tensor:
    """[rows, width] whose rows lie `gap` numbers apart."""
    return random(rows, width + gap, seed=seed).to(dtype).to(DEVICE)[:, :width]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(1, shape[1], dtype, 1)[0]
    for gap, eps, offset in ((0, 1e-6, 0.0), (16, 1e-5, 1.0), (5, 1e-3, 0.0)):
        x = matrix(*shape, dtype, 2, gap)
        found = rows_triton.rms_norm(x, weight, eps, offset)
        assert found.is_contiguous()
        close(found, rms(x, weight, eps, offset), factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = matrix(1, shape[1], dtype, 1)[0]
    for gap in (0, 16, 5):
        x, residual = matrix(*shape, dtype, 2, gap), matrix(*shape, dtype, 3, gap)
        total = x + residual
        found, stream = rows_triton.add_rms_norm(x, residual, weight, 1e-5, 1.0)
        assert torch.equal(stream, total), "the sum is rounded once, to the stream's type"
        close(found, rms(total, weight, 1e-5, 1.0), factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Around a mean that is far from zero, where the difference of two sums would have no digits left."""
    x = matrix(*shape, dtype, 2, 3) + 30
    weight, bias = matrix(2, shape[1], dtype, 1)
    for added in (bias, None):
        wanted = F.layer_norm(x.double(), (shape[1],), weight.double(), None if added is None else added.double(), 1e-5)
        close(rows_triton.layer_norm(x, weight, added, 1e-5), wanted, factor=4)


def test_heads_and_nothing() -> None:
    x = random(3, 6, 64, seed=1).to(DEVICE)[:, 1:4]
    weight = random(64, seed=2).to(DEVICE)
    close(rows_triton.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6, 0.0), factor=2)
    assert rows_triton.rms_norm(x[:0].flatten(1), random(192, seed=3).to(DEVICE), 1e-6).shape == (0, 192)


@pytest.mark.parametrize("scheme", ROUNDED, ids=name)
def test_codes_for_the_next_product(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm and a gate leave the codes that a kernel of their own would make, and the product takes those."""
    for rows, k in ((1, 384), (3, 1280), (1100, 128)):
        weight, _, _ = packed(scheme, 128, k, torch.float16)
        x, residual, gain = (matrix(count, k, torch.float16, seed) for seed, count in enumerate((rows, rows, 1)))
        halves = matrix(rows, 2 * k, torch.float16, 4)
        halves[0] = 0
        for out in (rows_triton.rms_norm(x, gain[0], 1e-5, 0.0, weight),
                    rows_triton.add_rms_norm(x, residual, gain[0], 1e-5, 1.0, weight)[0],
                    rows_triton.gated(halves, "silu", weight)):
            found, plain = codes_of(out, weight), out.clone()
            assert found is not None and codes_of(plain, weight) is None and codes_of(out[:1], weight) is None
            for one, wanted in zip(found, coded_triton.quantized(plain, weight), strict=True):
                assert one.shape == wanted.shape and torch.equal(one.float(), wanted.float())
            ops = coded_triton.CodedTriton(False)
            wanted = ops.apply(plain, weight)
            with monkeypatch.context() as patch:
                patch.setattr("penstock.ops.coded_kernels.quantize", None)
                assert torch.equal(ops.apply(out, weight), wanted)
    assert codes_of(rows_triton.rms_norm(x, gain[0], 1e-5), weight) is None
