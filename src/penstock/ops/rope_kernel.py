"""The Triton kernel of ops/rope_triton.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _scale(left, right, rest, size: tl.constexpr, eps):
    """1 / rms of each head, given in three pieces; elements outside of a head are zero."""
    total = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(rest * rest, 1)
    return tl.rsqrt(total / size + eps)[:, None]


@triton.jit
def _turn(x, out, norm, cos, sin, kept, written, eps, offset, size: tl.constexpr, half: tl.constexpr, near: tl.constexpr,
          far: tl.constexpr, interleaved: tl.constexpr):
    """Norms and rotates the heads at x [n, 1] into those at out [n, 1].

    The first `half` elements of a head rotate with the next `half`, or if interleaved each even one with the next, in blocks of
    `near`; the rest, a block of `far`, is copied."""
    a, b = tl.arange(0, near)[None, :], tl.arange(0, far)[None, :]
    turned, stays = a < half, b < size - 2 * half
    first = 2 * a if interleaved else a
    second = first + 1 if interleaved else first + half
    left = tl.load(x + first, mask=kept & turned, other=0.0).to(tl.float32)
    right = tl.load(x + second, mask=kept & turned, other=0.0).to(tl.float32)
    rest = tl.load(x + 2 * half + b, mask=kept & stays, other=0.0).to(tl.float32)
    if norm is not None:
        scale = _scale(left, right, rest, size, eps)
        left *= scale * (tl.load(norm + first, mask=turned, other=0.0).to(tl.float32) + offset)
        right *= scale * (tl.load(norm + second, mask=turned, other=0.0).to(tl.float32) + offset)
        rest *= scale * (tl.load(norm + 2 * half + b, mask=stays, other=0.0).to(tl.float32) + offset)
    if half > 0:
        tl.store(out + first, (left * cos - right * sin).to(out.dtype.element_ty), mask=written & turned)
        tl.store(out + second, (right * cos + left * sin).to(out.dtype.element_ty), mask=written & turned)
    if size > 2 * half:
        tl.store(out + 2 * half + b, rest.to(out.dtype.element_ty), mask=written & stays)


@triton.jit
def rope_write(q, k, v, positions, slots, k_cache, v_cache, cos, sin, q_norm, k_norm, out, eps, offset, q_token, q_head,
               k_token, k_head, v_token, v_head, k_page, k_row, k_slot, v_page, v_row, v_slot, heads: tl.constexpr,
               kv_heads: tl.constexpr, size: tl.constexpr, page: tl.constexpr, half: tl.constexpr, near: tl.constexpr,
               far: tl.constexpr, whole: tl.constexpr, many: tl.constexpr, linked: tl.constexpr,
               early: tl.constexpr, interleaved: tl.constexpr):
    """Grid: (tokens, blocks of `many` query heads and then of key heads with their values). `whole` is a head's block."""
    if linked:
        gdc_launch_dependents()
        if not early:
            gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    c = 0.0
    s = 0.0
    if half > 0:
        a = tl.arange(0, near)
        at = tl.load(positions + token).to(tl.int64) * half + a
        c = tl.load(cos + at, mask=a < half, other=0.0)[None, :]
        s = tl.load(sin + at, mask=a < half, other=0.0)[None, :]
    slot = token if slots is None else tl.load(slots + token)
    if linked and early:
        gdc_wait()
    if block < (heads + many - 1) // many:
        head = block * many + tl.arange(0, many)[:, None]
        kept = head < heads
        _turn(q + token * q_token + head * q_head, out + (token * heads + head) * size, q_norm, c, s, kept, kept, eps, offset,
              size, half, near, far, interleaved)
    else:
        head = (block - (heads + many - 1) // many) * many + tl.arange(0, many)[:, None]
        kept = head < kv_heads
        written = kept & (slot >= 0)
        to_k = slot // page * k_page + slot % page * k_slot + head * tl.cast(k_row, tl.int64)
        _turn(k + token * k_token + head * k_head, k_cache + to_k, k_norm, c, s, kept, written, eps, offset, size, half, near,
              far, interleaved)
        if v is not None:
            to_v = slot // page * v_page + slot % page * v_slot + head * tl.cast(v_row, tl.int64)
            d = tl.arange(0, whole)[None, :]
            value = tl.load(v + token * v_token + head * v_head + d, mask=kept & (d < size), other=0.0)
            tl.store(v_cache + to_v + d, value.to(v_cache.dtype.element_ty), mask=written & (d < size))
