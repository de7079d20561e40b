"""Rows of a table: exact, of any width, in any order; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.rows_triton import gather
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 64, 288, 4096, 5000])
def test_gather(width: int, dtype: torch.dtype) -> None:
    table = random(70, width, seed=1).to(dtype).to(DEVICE)
    for ids in (torch.tensor([69]), torch.randint(0, 70, (9,), generator=torch.Generator().manual_seed(2)), torch.zeros(0)):
        for kind in (torch.int32, torch.int64):
            where = ids.to(kind).to(DEVICE)
            assert torch.equal(gather(where, table), table[where.long()])
