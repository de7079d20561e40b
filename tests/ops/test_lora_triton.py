"""Triton's deltas of adapters against float64; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.lora_triton import TritonLora
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.lora import CASES, Case, check

OPS = TritonLora()


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
