"""GPTQ: products change less than by rounding to nearest, and where inputs do not correlate it is rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from penstock.quant.fp8 import FP8
from penstock.quant.integer import Grouped, Int8, gptq, serves
from penstock.quant.scheme import Scheme

SCHEMES = [Grouped(4, 32), Grouped(4, 32, "uint8"), Grouped(3, 64), Grouped(2, 32, "uint8"), Int8("token"), Grouped(4, 0)]


def loss(scheme: Scheme, matrix: torch.Tensor, parts: dict[str, torch.Tensor], moments: torch.Tensor) -> float:
    """The mean squared change of the products, as a share of their mean square."""
    exact = matrix.double()
    change = scheme.decode(parts, torch.float32).double() - exact
    return float((change @ moments.double() * change).sum() / (exact @ moments.double() * exact).sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}{getattr(scheme, 'zeros', '')}")
def test_products_change_less(scheme: Scheme) -> None:
    draw = torch.Generator().manual_seed(3)
    matrix = torch.randn(40, 192, generator=draw)
    inputs = torch.randn(500, 24, generator=draw) @ torch.randn(24, 192, generator=draw)
    inputs += 0.1 * torch.randn(500, 192, generator=draw)
    inputs[:, 7] = 0.0  # a channel that is never used
    moments = inputs.t() @ inputs
    found, nearest = gptq(scheme, matrix, moments), scheme.encode(matrix)
    assert {name: part.shape for name, part in found.items()} == {name: part.shape for name, part in nearest.items()}
    assert torch.equal(found["scale"], nearest["scale"])
    assert loss(scheme, matrix, found, moments) < 0.5 * loss(scheme, matrix, nearest, moments)


@pytest.mark.parametrize("scheme", SCHEMES[:5:2], ids=lambda scheme: scheme.name)
def test_inputs_without_correlation(scheme: Scheme) -> None:
    matrix = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    found = gptq(scheme, matrix, torch.eye(64) * 3)
    exact = scheme.decode(scheme.encode(matrix), torch.float32)
    # But for the largest number of a group, which is rounded to a code that does not exist, and cut.
    assert ((scheme.decode(found, torch.float32) - exact).abs() > 1e-6).float().mean() < 0.02


def test_schemes_without_a_grid_are_left_alone() -> None:
    assert not serves(FP8("token")) and not serves(Grouped(4, 32, ordered=True)) and all(map(serves, SCHEMES))
