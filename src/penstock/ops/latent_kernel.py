"""The Triton kernels of ops/latent_triton.py."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import enter


@triton.jit
def _turn(x, out, cos, sin, kept, half: tl.constexpr, near: tl.constexpr, interleaved: tl.constexpr):
    """Rotates the 2 * half elements at x [n, 1] into those at out [n, 1]."""
    a = tl.arange(0, near)[None, :]
    first = 2 * a if interleaved else a
    second = first + 1 if interleaved else first + half
    kept = kept & (a < half)
    left = tl.load(x + first, mask=kept, other=0.0).to(tl.float32)
    right = tl.load(x + second, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + first, (left * cos - right * sin).to(out.dtype.element_ty), mask=kept)
    tl.store(out + second, (right * cos + left * sin).to(out.dtype.element_ty), mask=kept)


@triton.jit
def latent_write(q, latent, norm, positions, slots, cache, cos, sin, out, eps, q_token, q_head, latent_token, page_stride,
                 slot_stride, out_token, out_head, heads: tl.constexpr, start: tl.constexpr, width: tl.constexpr,
                 half: tl.constexpr, page: tl.constexpr, interleaved: tl.constexpr, many: tl.constexpr, near: tl.constexpr,
                 wide: tl.constexpr, linked: tl.constexpr):
    """Grid: (tokens, 1 for the latent + blocks of `many` query heads). The rotated elements of a query begin at `start`."""
    enter(linked)
    token = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, near)
    at = tl.load(positions + token).to(tl.int64) * half + a
    c = tl.load(cos + at, mask=a < half, other=0.0)[None, :]
    s = tl.load(sin + at, mask=a < half, other=0.0)[None, :]
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * many + tl.arange(0, many)[:, None]
        _turn(q + token * q_token + head * q_head + start, out + token * out_token + head * out_head + width, c, s,
              head < heads, half, near, interleaved)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            to = cache + slot // page * page_stride + slot % page * slot_stride
            from_ = latent + token * latent_token
            d = tl.arange(0, wide)
            x = tl.load(from_ + d, mask=d < width, other=0.0).to(tl.float32)
            x *= tl.rsqrt(tl.sum(x * x) / width + eps) * tl.load(norm + d, mask=d < width, other=0.0).to(tl.float32)
            tl.store(to + d, x.to(cache.dtype.element_ty), mask=d < width)
            one = tl.arange(0, 1)[:, None]
            _turn(from_ + width + one, to + width + one, c, s, one == 0, half, near, interleaved)


@triton.jit
def head_linear(x, weight, out, tokens, x_token, x_head, w_head, w_k, w_n, out_token, out_head, n: tl.constexpr,
                k: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, linked: tl.constexpr):
    """Grid: (blocks of tokens, heads, blocks of columns)."""
    enter(linked)
    row = tl.program_id(0).to(tl.int64) * block_m + tl.arange(0, block_m)
    head = tl.program_id(1).to(tl.int64)
    column, d = tl.program_id(2) * block_n + tl.arange(0, block_n), tl.arange(0, block_k)
    x += row[:, None] * x_token + head * x_head
    weight += head * w_head + column[None, :] * w_n
    acc = tl.zeros((block_m, block_n), tl.float32)
    for first in range(0, k, block_k):
        at = first + d
        left = tl.load(x + at[None, :], mask=(row < tokens)[:, None] & (at < k)[None, :], other=0.0)
        right = tl.load(weight + at[:, None] * w_k, mask=(at < k)[:, None] & (column < n)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(out + row[:, None] * out_token + head * out_head + column[None, :], acc.to(out.dtype.element_ty),
             mask=(row < tokens)[:, None] & (column < n)[None, :])
