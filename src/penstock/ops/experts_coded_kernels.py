"""The Triton kernel of mixtures of experts whose matrices are quantized: their codes are decoded in the inner loop.

`ops/experts_coded.py` decides how it is tiled, and launches it. Picks, orders and results are those of ops/experts_kernels.py,
codes those of ops/coded_forms.py::CodedWeight: a stack is one matrix [E * n, k], or with gates [E * 2 n, k], gates first."""

import triton
import triton.language as tl

from penstock.ops.coded_kernels import _walk
from penstock.ops.experts_kernels import _leave, _many, _matches, _picks_of, _ranked, _sorted_picks
from penstock.ops.linked_kernel import follow


@triton.jit
def _codes(codes, where, expert, base, row, k, rk, size: tl.constexpr, four: tl.constexpr):
    """Where the codes of an expert's rows [wide] begin, and their columns `rk`. Its first row is `base`, or at an element that
    `where` [E] says, a multiple of 16."""
    if where is None:
        row = base + row
    else:
        codes += tl.multiple_of(tl.load(where + expert), 16)
        row = row.to(tl.int64)
    if four:
        at = codes + (row // 64)[:, None] * (k * 16) + (row % 64 * size)[:, None] + rk[None, :]
    else:
        at = codes + row[:, None] * k + rk[None, :]
    return at


@triton.jit
def _finish(total, gains, row, each, scaled: tl.constexpr):
    """Sums as float32, times the scales of x's rows and of the matrix's."""
    total = total.to(tl.float32)
    if scaled == "token":
        total *= each[None, :]
    if gains is not None:
        total *= tl.load(gains + row)[:, None]
    return total


@triton.jit
def _tile(x, xs, codes, where, words, gains, table, bias, out, scales, expert, places, pick, within, column, n, k, stride, rows,
          padded, spread, count: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr, unit: tl.constexpr, units: tl.constexpr,
          even: tl.constexpr, kind: tl.constexpr, form: tl.constexpr, half: tl.constexpr,
          parts: tl.constexpr, scaled: tl.constexpr, four: tl.constexpr, stages: tl.constexpr, fast: tl.constexpr,
          gated: tl.constexpr, activation: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr,
          inward: tl.constexpr):
    """`tall` picks of one expert times `wide` of its outputs (of each half, if gated), `units` units of columns a step."""
    rn = column * wide + tl.arange(0, wide)
    base = expert.to(tl.int64) * n * (2 if gated else 1)
    kept = tl.minimum(rn, n - 1)
    own = base + kept
    size: tl.constexpr = unit // 4 if four else unit
    rk = tl.arange(0, size)
    at = _codes(codes, where, expert, base, kept, padded, rk, size, four)
    row = (pick // count if gated else places).to(tl.int64)
    v = x + row[:, None] * stride + rk[None, :]
    beside = _codes(codes, where, expert, base, kept + n, padded, rk, size, four) if gated else at
    total, other = _walk(v, within, at, beside, xs, row, rows, words, own, n, table, k, 0, padded, padded, spread, wide,
                         tall, unit, units, stages, even, kind, form, half, parts, scaled, gated, False, fast)
    each = tl.load(xs + row, mask=within, other=0.0) if scaled == "token" else row
    total = _finish(total, gains, own, each, scaled)
    if gated:
        other = _finish(other, gains, own + n, each, scaled)
    else:
        other = total
    weight = tl.load(scales + pick, mask=within, other=0.0)
    _leave(total, other, bias, out, base, n, rn, places if gated else pick, within, weight, True, gated, activation, alpha,
           limit, shift, inward)


@triton.jit(do_not_specialize=("total", "rows"))
def product(x, xs, codes, where, words, gains, table, bias, out, picks, order, starts, tile_expert, tile_place, scales, total,
            n, k, stride, rows, padded, spread, arranged: tl.constexpr, count: tl.constexpr, block: tl.constexpr,
            tall: tl.constexpr, wide: tl.constexpr, unit: tl.constexpr, units: tl.constexpr, even: tl.constexpr,
            kind: tl.constexpr, form: tl.constexpr, half: tl.constexpr, parts: tl.constexpr,
            scaled: tl.constexpr, four: tl.constexpr, stages: tl.constexpr, fast: tl.constexpr, gated: tl.constexpr,
            activation: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr, inward: tl.constexpr,
            linked: tl.constexpr, high: tl.constexpr):
    """The grouped GEMM, with the grids of ops/experts_kernels.py::grouped.

    x [rows, k], with scales xs if it is `scaled`: [rows] ("token") or [padded / unit, rows] ("group")."""
    follow(linked)
    column = tl.program_id(0)
    if arranged:
        expert = tl.load(tile_expert + tl.program_id(1))
        if expert < 0:
            return
        if high > 0:  # noqa: SIM102 (known when it is compiled)
            if _many(_picks_of(starts, expert), tall):
                fewer: tl.constexpr = 3 if stages > 3 else stages
                places, within, pick = _sorted_picks(order, starts, tile_place, expert, high)
                _tile(x, xs, codes, where, words, gains, table, bias, out, scales, expert, places, pick, within, column, n, k,
                      stride, rows, padded, spread, count, high, wide, unit, units, even, kind, form, half, parts, scaled,
                      four, fewer, fast, gated, activation, alpha, limit, shift, inward)
                return
        places, within, pick = _sorted_picks(order, starts, tile_place, expert, tall)
        _tile(x, xs, codes, where, words, gains, table, bias, out, scales, expert, places, pick, within, column, n, k, stride,
              rows, padded, spread, count, tall, wide, unit, units, even, kind, form, half, parts, scaled, four, stages,
              fast, gated, activation, alpha, limit, shift, inward)
    else:
        expert = tl.program_id(1)
        match, rank, mine = _matches(picks, expert, total, block)
        for first in range(0, mine, tall):
            slot = first + tl.arange(0, tall)
            pick = _ranked(match, rank, slot, block)
            _tile(x, xs, codes, where, words, gains, table, bias, out, scales, expert, pick, pick, slot < mine, column, n, k,
                  stride, rows, padded, spread, count, tall, wide, unit, units, even, kind, form, half, parts, scaled,
                  four, stages, fast, gated, activation, alpha, limit, shift, inward)


@triton.jit(do_not_specialize=("rows",))
def picked(x, xs, codes, where, words, gains, table, bias, out, picks, scales, n, k, stride, rows, padded, spread,
           count: tl.constexpr, wide: tl.constexpr, unit: tl.constexpr, units: tl.constexpr, even: tl.constexpr,
           kind: tl.constexpr, form: tl.constexpr, half: tl.constexpr, parts: tl.constexpr, scaled: tl.constexpr,
           four: tl.constexpr, stages: tl.constexpr, fast: tl.constexpr, gated: tl.constexpr, activation: tl.constexpr,
           alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr, inward: tl.constexpr, linked: tl.constexpr):
    """GEMV for each pick, as ops/experts_kernels.py::picked. Grid: (blocks of `wide` outputs, picks). x, xs: see `product`."""
    follow(linked)
    pick = tl.program_id(1) + tl.arange(0, 1)
    expert = tl.load(picks + tl.program_id(1))
    if expert < 0:
        return
    row = (pick // count if gated else pick).to(tl.int64)
    rn = tl.program_id(0) * wide + tl.arange(0, wide)
    base = expert.to(tl.int64) * n * (2 if gated else 1)
    kept = tl.minimum(rn, n - 1)
    own = base + kept
    size: tl.constexpr = unit // 4 if four else unit
    rk = tl.arange(0, size)
    at = _codes(codes, where, expert, base, kept, padded, rk, size, four)
    beside = _codes(codes, where, expert, base, kept + n, padded, rk, size, four) if gated else at
    within = pick >= 0
    total, other = _walk(x + row[:, None] * stride + rk[None, :], within, at, beside, xs, row, rows, words, own, n, table, k, 0,
                         padded, padded, spread, wide, size, unit, units, stages, even, kind, form, half, parts, scaled, gated,
                         False, fast)
    each = tl.load(xs + row) if scaled == "token" else row
    total = _finish(tl.sum(total, 1)[:, None], gains, own, each, scaled)
    if gated:
        other = _finish(tl.sum(other, 1)[:, None], gains, own + n, each, scaled)
    else:
        other = total
    _leave(total, other, bias, out, base, n, rn, pick, within, tl.load(scales + pick), True, gated, activation, alpha, limit,
           shift, inward)
