"""The Triton kernel of ops/rows_triton.py, with the functions and the rounding to codes that other kernels inline."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import enter


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


@triton.jit
def rounded(v, fixed, axis: tl.constexpr, most: tl.constexpr, dtype: tl.constexpr):
    """(codes, scales) of v, rounded and saturated: a scale is the largest magnitude along the axis / `most`, `fixed` if it is
    given, and 1 where all is zero."""
    scale = tl.max(tl.abs(v), axis) / most
    scale = tl.where(scale > 0, scale, 1.0)
    if fixed is not None:
        scale = tl.zeros_like(scale) + tl.load(fixed)
    least: tl.constexpr = -128.0 if dtype == tl.int8 else -most
    y = tl.minimum(tl.maximum(v / tl.expand_dims(scale, axis), least), most)
    if dtype == tl.int8:
        # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
        y = (y + 12582912.0) - 12582912.0
    return y.to(dtype), scale


@triton.jit
def store_rounded(y, row, column, inside, rows, width, codes, scales, fixed, span: tl.constexpr, most: tl.constexpr):
    """codes [rows, width] and scales [spans, rows] of y [R, C], whose rows and columns are `row` [R, 1] and `column` [1, C]:
    a scale for each `span` columns. `inside` [R, C]: where y is the matrix's; elsewhere it is 0."""
    spans: tl.constexpr = y.shape[1] // span
    code, scale = rounded(tl.reshape(y.to(tl.float32), (y.shape[0], spans, span)), fixed, 2, most, codes.dtype.element_ty)
    tl.store(codes + row * width + column, tl.reshape(code, y.shape), mask=inside)
    place = tl.min(column, 1) // span + tl.arange(0, spans)[None, :]
    tl.store(scales + place * rows + row, scale, mask=(row < rows) & (place * span < width))


@triton.jit
def _scaled(y, column, row_scale, column_scale, inside):
    """y times its row's and its columns' factors, which are of a product that had none."""
    if row_scale is not None:
        y *= row_scale * tl.load(column_scale + column, mask=inside, other=0.0)
    return y


@triton.jit(do_not_specialize=("stride", "rows"))
def apply(x, row_scales, column_scales, out, codes, scales, fixed, stride, rows, width: tl.constexpr, block: tl.constexpr,
          align: tl.constexpr, kind: tl.constexpr, gated: tl.constexpr, span: tl.constexpr, most: tl.constexpr,
          linked: tl.constexpr):
    """out [rows, width] = kind(x), or x without a kind, times the second half of x's rows if gated. A program takes a block of
    one row. With a `span` that divides blocks also the result's codes, see `store_rounded`.

    `stride` is x's row stride in units of `align` elements. row_scales [rows] and column_scales [x's columns]: factors of x."""
    enter(linked)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    own = None
    if row_scales is not None:
        own = tl.load(row_scales + row)
    at = x + row * (stride.to(tl.int64) * align) + column
    y = _scaled(tl.load(at, mask=inside, other=0.0).to(tl.float32), column, own, column_scales, inside)
    if kind is not None:
        y = activate(y, kind)
    if gated:
        y *= _scaled(tl.load(at + width, mask=inside, other=0.0).to(tl.float32), column + width, own, column_scales, inside)
    y = y.to(out.dtype.element_ty)
    tl.store(out + row * width + column, y, mask=inside)
    if span > 0:
        y = tl.where(inside, y, 0.0)[None, :]
        store_rounded(y, row, column[None, :], inside[None, :], rows, width, codes, scales, fixed, span, most)
