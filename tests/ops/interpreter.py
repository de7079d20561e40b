"""Triton kernels where there is no GPU: import this before a module that holds kernels, and they run in Triton's interpreter.

With a GPU this changes nothing. The interpreter computes in NumPy: float32 and float16 are right, bfloat16 is not.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32, torch.float16)

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter  # noqa: E402  (after the environment is set)

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element inside the interpreter; NumPy 2.4 no longer turns those into loop bounds by itself."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index


def _library(queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
             causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_library._call` in plain PyTorch: queries [B, N, H, D], keys [B, M, KV, D]."""
    q, k, v = (x.transpose(1, 2) for x in (queries, k, v))
    group = q.shape[1] // k.shape[1]
    scores = (q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2)) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    found = scores.softmax(-1) @ v.float().repeat_interleave(group, 1)
    return found.to(q.dtype).transpose(1, 2).contiguous(), scores.logsumexp(-1)


if DEVICE.type == "cpu":
    from penstock.ops import attention_library

    attention_library._call = _library
