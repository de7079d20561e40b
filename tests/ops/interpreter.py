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
