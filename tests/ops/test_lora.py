"""The operation `lora`: every CPU implementation and the reference against float64, and batch invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.ops.lora import Groups, size, tall, write
from tests.ops.kernels import DTYPES, every, reference, usable
from tests.ops.lora import CASES, Case, check, check_look_up

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", [None, *every("lora")])
def test_each_row_gets_its_adapter(implementation: object, dtype: torch.dtype) -> None:
    ops = reference("lora") if implementation is None else usable(implementation, dtype)  # type: ignore[arg-type]
    for case in CASES.values():
        for rows in (1, 9, 70):
            check(ops, case, dtype, rows, CPU, biased=rows == 9)
    check_look_up(ops, CASES["long"], dtype, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 17, 256, 300, 513, 2000])
def test_groups_hold_each_row_with_an_adapter_once(rows: int) -> None:
    for slots in (1, 5, 64):
        given = np.random.default_rng(rows).integers(-1, slots, rows).astype(np.int32)
        flat, seen = np.zeros(size(rows, slots), np.int32), []
        write(flat, given, rows, slots)
        groups = Groups.of(torch.from_numpy(flat), rows, slots)
        for slot, begin, end in groups.tiles[:, :int(groups.number)].t().tolist():
            assert 0 < end - begin <= tall(rows)
            mine = groups.order[begin:end].numpy()
            assert (given[mine] == slot).all()
            seen += mine.tolist()
        assert sorted(seen) == np.flatnonzero(given >= 0).tolist()


def test_no_row_has_an_adapter() -> None:
    case = Case((8,), 8, [[4]], 4)
    check(reference("lora"), Case(case.pieces, case.inputs, [[0]], 4), torch.float32, 5, CPU)
