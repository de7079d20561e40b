"""Paged attention in Triton against the reference: in the interpreter without a GPU, in all dtypes with one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.interpreter import DEVICE, DTYPES  # isort: skip  (before Triton's kernels are imported)

from penstock.ops.attention_triton import INVARIANT, TRITON, TritonAttention
from tests.ops.kernels import close, reference
from tests.ops.test_attention import CASES, Case

BOTH = pytest.mark.parametrize("attention", [TRITON, INVARIANT], ids=["triton", "invariant"])


def built(case: Case, dtype: torch.dtype, seed: int = 0) -> Case:
    case = dataclasses.replace(case, dtype=dtype)
    case.build(seed)
    for name in ("k", "v", "table", "context", "query_start", "q"):
        setattr(case, name, getattr(case, name).to(DEVICE))
    return case


def wanted(case: Case, sinks: torch.Tensor | None = None) -> torch.Tensor:
    return reference("attention").apply(case.q.float(), case.k.float(), case.v.float(), case.table, case.query_start,
                                        case.context, case.size ** -0.5, case.window, case.softcap, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.page & (case.page - 1) == 0], ids=repr)
@BOTH
def test_attention(attention: TritonAttention, case: Case, dtype: torch.dtype) -> None:
    case = built(case, dtype)
    close(case.run(attention), wanted(case), 0.1 if dtype is torch.float32 else 1.0, 2.0)
