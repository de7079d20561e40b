"""Triton's deltas of adapters against float64; interpreted where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.ops.linear_triton import TritonLinear
from penstock.ops.lora_triton import TritonLora
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import close, random
from tests.ops.lora import CASES, Case, Made, check

OPS = TritonLora()
OPS_OF = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_row_gets_its_adapter(name: str, dtype: torch.dtype) -> None:
    for rows in (1, 20):
        check(OPS, CASES[name], dtype, rows, DEVICE, biased=rows == 20)


def test_many_rows() -> None:
    """More than are cut into parts by programs; a third of them, with the same bits, by parts."""
    check(OPS, Case((40, 24), 520, [[16, 3], [0, 20]], 32, (1,)), DTYPES[1], 300, DEVICE)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="real sizes need a GPU")
@pytest.mark.parametrize("rows", [1, 64, 300, 700, 4096])
def test_real_sizes(rows: int) -> None:
    for rank in (16, 64):
        check(OPS, Case((4096, 1024, 1024), 4096, [[rank] * 3] * 7, rank), torch.bfloat16, rows, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("kind", "pieces"), [(None, (160, 48, 48)), (None, (37, 5)), ("silu", (288, 288)),
                                              ("gelu_tanh", (96,))])
@pytest.mark.parametrize("most", [16, 40, 64])
def test_products_of_few_rows(kind: str | None, pieces: tuple[int, ...], dtype: torch.dtype, most: int) -> None:
    """The GEMM, the deltas and the activation of few rows, with large ranks of one, give what they give one after another."""
    case = Case(pieces, 512, [[most, 3, 5], [0, 10, 16], [13, most - 2, 7]], most, (1,))
    case.ranks = [ranks[:len(pieces)] for ranks in case.ranks]
    made, n = Made(case, dtype, DEVICE), sum(pieces)
    weight = TritonLinear.pack(random(n, 512, dtype=dtype, seed=5).to(DEVICE) / 512 ** 0.5)
    weight.ops = TritonLinear
    bias = random(n, dtype=dtype, seed=6).to(DEVICE)
    for rows in (1,) if most > 16 else (1, 5, 39) if DEVICE.type == "cpu" else (1, 5, 16, 33, 64):
        draw = np.random.default_rng(rows)
        for slots in (draw.integers(-1, 3, rows).tolist(), [1] * rows, [-1] * rows):
            groups, x = made.groups(slots), (random(rows, 512, dtype=dtype, seed=1) / 32).to(DEVICE)
            found = OPS.product(x, "it", made.slabs, groups, weight, bias, kind)
            assert found is not None
            wide = (x.double() @ weight.data.double().T + bias.double()).cpu()
            wanted = made.wanted(x.cpu(), wide, bias.cpu(), slots)
            if kind is not None:
                first, second = wanted.to(dtype).double().chunk(2, -1)
                wanted = OPS_OF[kind](first) * second
            close(found.cpu(), wanted, 1.0, factor=16)
