"""How norms are launched on GPUs, with a kernel that only records it: no Triton needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.ops import gpu, rows_triton


@pytest.mark.parametrize("width", [64, 128, 1024, 4096, 5120])
def test_a_row_is_divided_alike_however_many_rows_there_are(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads sum a row's squares in an order that follows from its division, so another one gives other bits: batch-invariant
    answers would depend on the size of a step."""
    launches: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_arguments, **options: launches.append(options)

    monkeypatch.setitem(sys.modules, "penstock.ops.rows_kernels", SimpleNamespace(normalise=Kernel()))
    monkeypatch.setattr(gpu, "linked", lambda device: {"linked": True, "launch_pdl": True})
    weight = torch.empty(width, dtype=torch.bfloat16, device="meta")
    for rows in (1, 33, 1056, 1057, 8192):
        rows_triton.rms_norm(torch.empty(rows, width, dtype=torch.bfloat16, device="meta"), weight, 1e-6)
    assert len(launches) == 5
    assert len({(one["tall"], one["block"], one["num_warps"]) for one in launches}) == 1
