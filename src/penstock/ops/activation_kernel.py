"""The Triton kernel of ops/activation_triton.py, and the activation functions that other kernels inline."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def activate(x, kind: tl.constexpr):
    """The kinds of ops/activation.py, in float32. tanh(y) is 2 sigmoid(2 y) - 1."""
    if kind == "silu":
        x = x * tl.sigmoid(x)
    elif kind == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif kind == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(kind == "relu" or kind == "relu2")
        x = tl.maximum(x, 0.0)
        if kind == "relu2":
            x = x * x
    return x


@triton.jit(do_not_specialize=("stride",))
def apply(x, out, stride, width: tl.constexpr, block: tl.constexpr, align: tl.constexpr, kind: tl.constexpr,
          gated: tl.constexpr, linked: tl.constexpr):
    """out [rows, width] = kind(x), times the second half of x's rows if gated. A program takes a block of one row.

    `stride` is x's row stride in units of `align` elements.
    """
    if linked:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    at = x + row * (stride.to(tl.int64) * align) + column
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if gated:
        z = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        y = activate(y, kind) * z
    else:
        y = activate(y, kind)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
