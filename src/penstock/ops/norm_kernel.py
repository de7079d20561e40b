"""The Triton kernel of ops/norm_triton.py, for all three norms."""

import triton
import triton.language as tl

from penstock.ops.activation_kernel import store_rounded
from penstock.ops.linked_kernel import await_previous, launch


@triton.jit(do_not_specialize=("rows", "x_stride", "residual_stride"))
def normalise(x, residual, weight, bias, out, codes, scales, fixed, rows, x_stride, residual_stride, eps, offset,
              width: tl.constexpr, block: tl.constexpr, tall: tl.constexpr, align: tl.constexpr, centred: tl.constexpr,
              span: tl.constexpr, most: tl.constexpr, linked: tl.constexpr):
    """out [rows, width] = norm(x + residual) * (offset + weight) + bias; the sum, rounded, replaces residual. With a `span`
    that divides the block also out's codes, see ops/activation_kernel.py::store_rounded.

    Residual and bias may be None. A program takes `tall` rows, each of which fits in a block. Strides are in units of `align`
    elements, so that loads can be vectorised."""
    row = (tl.program_id(0) * tall + tl.arange(0, tall)).to(tl.int64)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < width)
    launch(linked)
    w = 1.0 if weight is None else tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    await_previous(linked)
    v = tl.load(x + row * (x_stride.to(tl.int64) * align) + column, mask=inside, other=0.0)
    if residual is not None:
        at = residual + row * (residual_stride.to(tl.int64) * align) + column
        v = (v.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(at, v, mask=inside)
    v = v.to(tl.float32)
    if centred:
        v = tl.where(inside, v - tl.sum(v, 1)[:, None] / width, 0.0)
    y = v * tl.rsqrt(tl.sum(v * v, 1)[:, None] / width + eps) * w
    if bias is not None:
        y += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + row * width + column, y, mask=inside)
    if span > 0:
        store_rounded(tl.where(inside, y, 0.0), row, column, inside, rows, width, codes, scales, fixed, span, most)
