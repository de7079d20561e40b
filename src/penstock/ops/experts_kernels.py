"""The Triton kernels of mixtures of experts. `ops/experts_triton.py` decides which serve, and launches them.

A pick is a place in the flattened picks [T * K]: number a is the (a % K)-th of token a // K. A stack is [E, n, k], contiguous;
where it is gated, n = 2 F rows, gates first. Inner results are kept by pick or, where picks are sorted, by place in the order.
"""

import triton
import triton.language as tl

from penstock.ops.activation_kernel import activate
from penstock.ops.linear_kernels import _added, _dot, _operand, _place, _step, _with
from penstock.ops.linked_kernel import follow


@triton.jit
def _gate(x, z, dtype: tl.constexpr, kind: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr):
    """ops/experts.py::Glu of gates x and ups z. Sums are rounded to `dtype` first, so that fused and separate results agree."""
    x = x.to(dtype).to(tl.float32)
    z = z.to(dtype).to(tl.float32)
    if limit > 0:
        x = tl.minimum(x, limit)
        z = tl.minimum(tl.maximum(z, -limit), limit)
    if alpha != 1.0:
        x = activate(x * alpha, kind) / alpha
    else:
        x = activate(x, kind)
    return x * (z + shift)


@triton.jit
def _begin(where, expert, size):
    """At which element an expert's matrix begins: where its number says, or `where` [E], a multiple of 16."""
    if where is None:
        at = expert.to(tl.int64) * size
    else:
        at = tl.multiple_of(tl.load(where + expert), 16)
    return at


@triton.jit
def _matrix(weight, where, beyond, expert, n, k, parts: tl.constexpr, experts: tl.constexpr, runs: tl.constexpr):
    """(where an expert's matrix begins, from row to row, from the gates to the others).

    With `beyond`, numbers from `experts` on are runs of k channels of one network: its matrix, that many times as wide."""
    start = weight + _begin(where, expert, tl.cast(n, tl.int64) * parts * k)
    row = tl.cast(k, tl.int64)
    beside = tl.cast(n, tl.int64) * k
    if beyond is not None:  # noqa: SIM102
        if expert >= experts:
            start = beyond + (expert - experts).to(tl.int64) * (n * k if parts == 2 else k)
            row = tl.cast(k, tl.int64) * (1 if parts == 2 else runs)
            beside = tl.cast(n, tl.int64) * k * runs
    return start, row, beside


@triton.jit
def picked(x, weight, where, beyond, gains, fixed, bias, out, picks, scales, n, k, stride, count: tl.constexpr,
           wide: tl.constexpr, deep: tl.constexpr, stages: tl.constexpr, even: tl.constexpr, ahead: tl.constexpr,
           gated: tl.constexpr, kind: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr,
           inward: tl.constexpr, linked: tl.constexpr, most: tl.constexpr, whole: tl.constexpr, paired: tl.constexpr,
           experts: tl.constexpr, runs: tl.constexpr):
    """GEMV for each pick, without tensor cores. Grid: (blocks of `wide` outputs, picks).

    Gated: x is the tokens' [T, k], out [T * K, n] by pick. Else x is [T * K, k] by pick, and out is x's product times scales.
    The first `ahead` blocks of the weight are loaded before the wait for the kernel that writes x; the picks are older. The
    scales of FP8 codes are as in ops/linear_kernels.py::matvec; gated, x is one token's codes, or is not scaled."""
    pick = tl.program_id(1)
    follow(linked and gated)
    expert = tl.load(picks + pick)
    rows = tl.program_id(0) * wide + tl.arange(0, wide)
    columns = tl.arange(0, deep)
    kept = tl.minimum(rows, n - 1)
    parts: tl.constexpr = 2 if gated else 1
    base = tl.maximum(expert, 0).to(tl.int64) * n * parts
    at, line, apart = _matrix(weight, where, beyond, tl.maximum(expert, 0), n, k, parts, experts, runs)
    at += kept.to(tl.int64)[:, None] * line + columns[None, :]
    beside = at + apart
    first = ()
    for i in tl.static_range(ahead):
        first = first + (tl.load(at + i * deep),)  # noqa: RUF005 (Triton has no starred expressions)
    follow(linked and not gated)
    if expert < 0:
        return
    row = (pick // count if gated else pick).to(tl.int64)
    scale = tl.load(scales + pick)
    v = x + row * stride + columns
    dtype: tl.constexpr = weight.dtype.element_ty
    step = _step(x + row * stride, fixed, k, most, whole)
    total = tl.zeros((wide, deep), tl.float32)
    other = tl.zeros((wide, deep), tl.float32)
    for i in tl.static_range(ahead):
        total = _added(total, first[i], _operand(tl.load(v + i * deep), step, most, dtype, paired)[None, :], paired)
    for start in tl.range(ahead * deep, k, deep, num_stages=stages):
        mask = None if even else start + columns < k
        across = None if even else mask[None, :]
        rest: tl.constexpr = None if even else 0.0
        a = tl.load(v + start, mask=mask, other=rest)
        w = tl.load(at + start, mask=across, other=rest)
        if gated:
            u = tl.load(beside + start, mask=across, other=rest)
        if inward and gated:
            a = (a.to(tl.float32) * scale).to(x.dtype.element_ty)
        a = _operand(a, step, most, dtype, paired)[None, :]
        total = _added(total, w, a, paired)
        if gated:
            other = _added(other, u, a, paired)
    step *= 16.0 if paired else 1.0
    y = _with(tl.sum(total, 1) * step, gains, bias, base + kept)
    if gated:
        z = _with(tl.sum(other, 1) * step, gains, bias, base + n + kept)
        y = _gate(y, z, out.dtype.element_ty, kind, alpha, limit, shift)
    elif not inward:
        y = y * scale
    tl.store(out + pick.to(tl.int64) * n + rows, y.to(out.dtype.element_ty), mask=rows < n)


@triton.jit
def add_up(results, picks, out, width: tl.constexpr, count: tl.constexpr, block: tl.constexpr, linked: tl.constexpr):
    """out [T, width]: the float32 sum of a token's results [T * K, width], in the order of its picks (-1: skipped)."""
    follow(linked)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), tl.float32)
    for i in tl.static_range(count):
        there = tl.load(picks + token * count + i) >= 0
        total += tl.load(results + (token * count + i) * width + column, mask=inside & there, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


# -- sorting: `order` [T * K] has the picks of expert 0, then those of 1, ...; starts [E + 2] says where each expert's begin,
# and behind that how many tiles there are. Tile t holds `tall` places of tile_expert[t] from tile_place[t] on, or `high` ones
# of an expert with many picks (`_many`); -1 behind the last.


@triton.jit
def _many(counts, tall: tl.constexpr):
    """Whether so many picks of an expert are for high tiles: two low ones would not hold them."""
    return counts > 2 * tall


@triton.jit
def _height(counts, tall: tl.constexpr, high: tl.constexpr):
    """Of the tiles of an expert with so many picks; `high` 0: all are `tall`."""
    return tl.where(_many(counts, tall), high if high > 0 else tall, tall)


@triton.jit
def _plan(counts, starts, tile_expert, tile_place, tiles, experts: tl.constexpr, slots: tl.constexpr, tall: tl.constexpr,
          high: tl.constexpr, block: tl.constexpr):
    """Program e writes what belongs to expert e, given the counts of all; the last one fills up the tiles, of which there are
    at most `tiles`. Returns where the expert's places begin."""
    mine = tl.program_id(0)
    expert = tl.arange(0, slots)
    before = tl.where(expert < mine, counts, 0)
    begin = tl.sum(before, 0)
    count = tl.sum(tl.where(expert == mine, counts, 0), 0)
    first = tl.sum(tl.cdiv(before, _height(before, tall, high)), 0)
    height = _height(count, tall, high)
    last = first + tl.cdiv(count, height)
    tl.store(starts + mine, begin)
    for at in range(first, last, block):
        tile = at + tl.arange(0, block)
        tl.store(tile_expert + tile, tl.full((block,), 0, tl.int32) + mine, mask=tile < last)
        tl.store(tile_place + tile, begin + (tile - first) * height, mask=tile < last)
    if mine == experts - 1:
        tl.store(starts + experts, begin + count)
        tl.store(starts + experts + 1, last)
        for at in range(last, tiles, block):
            tile = at + tl.arange(0, block)
            tl.store(tile_expert + tile, tl.full((block,), -1, tl.int32), mask=tile < tiles)
    return begin


@triton.jit(do_not_specialize=("total", "tiles"))
def arrange(picks, order, starts, tile_expert, tile_place, total, tiles, experts: tl.constexpr, slots: tl.constexpr,
            block: tl.constexpr, tall: tl.constexpr, high: tl.constexpr, linked: tl.constexpr):
    """Sorts up to `block` picks in one launch: program e finds its own picks and plans its own tiles."""
    follow(linked)
    number = tl.arange(0, block)
    pick = tl.load(picks + number, mask=number < total, other=-1)
    counts = tl.histogram(tl.where(pick < 0, 0, pick), slots, mask=pick >= 0)
    begin = _plan(counts, starts, tile_expert, tile_place, tiles, experts, slots, tall, high, 64)
    match = pick == tl.program_id(0)
    tl.store(order + begin + tl.cumsum(match.to(tl.int32), 0) - 1, number, mask=match)


@triton.jit(do_not_specialize=("total",))
def tally(picks, counts, total, slots: tl.constexpr, block: tl.constexpr):
    """Adds the number of picks of each expert to counts [slots]."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    pick = tl.load(picks + number, mask=number < total, other=-1)
    found = tl.histogram(tl.where(pick < 0, 0, pick), slots, mask=pick >= 0)
    tl.atomic_add(counts + tl.arange(0, slots), found, mask=found > 0)


@triton.jit(do_not_specialize=("tiles",))
def plan(counts, cursor, starts, tile_expert, tile_place, tiles, experts: tl.constexpr, slots: tl.constexpr,
         tall: tl.constexpr, high: tl.constexpr):
    """Starts, tiles, and where `place` begins for each expert: a program each."""
    count = tl.load(counts + tl.arange(0, slots))
    begin = _plan(count, starts, tile_expert, tile_place, tiles, experts, slots, tall, high, 64)
    tl.store(cursor + tl.program_id(0), begin)


@triton.jit(do_not_specialize=("total",))
def place(picks, cursor, order, total, block: tl.constexpr):
    """Fills the order. The order of an expert's picks among themselves affects no result."""
    number = tl.program_id(0) * block + tl.arange(0, block)
    pick = tl.load(picks + number, mask=number < total, other=-1)
    at = tl.atomic_add(cursor + tl.maximum(pick, 0), 1, mask=pick >= 0)
    tl.store(order + at, number, mask=pick >= 0)


@triton.jit(do_not_specialize=("total",))
def fetch(picks, total, missing, up, up_stage, down, down_stage, up_size, down_size, every: tl.constexpr, most: tl.constexpr,
          block: tl.constexpr):
    """Copies both matrices of expert missing[i] to place i of the stages, if it is among up to `most` picks, or in any case.

    Sizes are those of a matrix in 32-bit words. Grid: (missing experts, programs that share one)."""
    expert = tl.load(missing + tl.program_id(0))
    wanted = 1
    if not every:
        number = tl.arange(0, most)
        wanted = tl.max((tl.load(picks + number, mask=number < total, other=-1) == expert).to(tl.int32), 0)
    if wanted > 0:
        begin, to = expert.to(tl.int64), tl.program_id(0).to(tl.int64)
        for at in range(tl.program_id(1) * block, up_size, tl.num_programs(1) * block):
            word = at + tl.arange(0, block)
            tl.store(up_stage + to * up_size + word, tl.load(up + begin * up_size + word, mask=word < up_size),
                     mask=word < up_size)
        for at in range(tl.program_id(1) * block, down_size, tl.num_programs(1) * block):
            word = at + tl.arange(0, block)
            tl.store(down_stage + to * down_size + word, tl.load(down + begin * down_size + word, mask=word < down_size),
                     mask=word < down_size)


@triton.jit(do_not_specialize=("total", "lacking"))
def share(picks, weights, x, missing, kept, host_picks, host_weights, host_x, total, lacking, stride, link, first, more, call,
          width: tl.constexpr, count: tl.constexpr, picked: tl.constexpr, most: tl.constexpr, slots: tl.constexpr,
          gaps: tl.constexpr, block: tl.constexpr):
    """Divides the experts of `missing` [lacking] that are among `total` <= `most` picks between the link and the CPU.

    The CPU takes those with the fewest tokens, as many as make the later of both end soonest: an expert takes `link` over the
    link, and on the CPU `first` and `more` for each further token, behind `call`. Program t writes token t's picks [count] to
    `kept`, -1 where they are the CPU's, and to the host those that are, their weights and the token."""
    never: tl.constexpr = 1 << 30
    token = tl.program_id(0)
    number, gap, at = tl.arange(0, most), tl.arange(0, gaps), tl.arange(0, slots)
    pick = tl.load(picks + number, mask=number < total, other=-1)
    absent = tl.load(missing + gap, mask=gap < lacking, other=-2)
    tokens = tl.histogram(tl.where(pick < 0, 0, pick), slots, mask=pick >= 0)
    away = tl.histogram(tl.where(absent < 0, 0, absent), slots, mask=absent >= 0)
    order = tl.sort(tl.where((tokens > 0) & (away > 0), tokens * slots + at, never))
    asked = order < never
    wanted = tl.sum(asked.to(tl.int32), 0)
    behind = call + tl.cumsum(tl.where(asked, first + more * (order // slots - 1), 0.0), 0)
    ends = tl.where(asked, tl.maximum(behind, (wanted - 1 - at) * link), float("inf"))
    best = tl.min(ends, 0)
    last = tl.where(best < wanted * link, tl.min(tl.where(ends == best, order, never), 0), -1)
    place = tl.arange(0, picked)
    mine = tl.load(picks + token * count + place, mask=place < count, other=-1)
    among = tl.sum((mine[:, None] == pick[None, :]).to(tl.int32), 1)
    lacks = tl.max((mine[:, None] == absent[None, :]).to(tl.int32), 1) > 0
    given = lacks & (among * slots + mine <= last)
    tl.store(kept + token * count + place, tl.where(given, -1, mine), mask=place < count)
    tl.store(host_picks + token * count + place, tl.where(given, mine, -1), mask=place < count)
    weight = tl.load(weights + token * count + place, mask=place < count)
    tl.store(host_weights + token * count + place, weight, mask=place < count)
    if tl.max(given.to(tl.int32), 0) > 0:
        for begin in range(0, width, block):
            column = begin + tl.arange(0, block)
            found = tl.load(x + token.to(tl.int64) * stride + column, mask=column < width)
            tl.store(host_x + token * width + column, found, mask=column < width)


@triton.jit
def join(picks, kept, found, out, width: tl.constexpr, count: tl.constexpr, picked: tl.constexpr, block: tl.constexpr):
    """Adds the CPU's results, `found` [T, width] in float32 in host memory, to the tokens whose picks it had."""
    token = tl.program_id(0)
    place = tl.arange(0, picked)
    mine = tl.load(picks + token * count + place, mask=place < count, other=-1)
    left = tl.load(kept + token * count + place, mask=place < count, other=-1)
    if tl.max((mine != left).to(tl.int32), 0) > 0:
        column = tl.program_id(1) * block + tl.arange(0, block)
        to = out + token.to(tl.int64) * width + column
        y = tl.load(to, mask=column < width).to(tl.float32) + tl.load(found + token * width + column, mask=column < width)
        tl.store(to, y.to(out.dtype.element_ty), mask=column < width)


# -- grouped GEMMs


@triton.jit
def _leave(total, other, bias, out, base, n, rn, to, within, scale, swap: tl.constexpr, gated: tl.constexpr,
           kind: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr, inward: tl.constexpr):
    """The epilogue of a tile: bias, activation or scale, and the rows `to` of out."""
    kept = tl.minimum(rn, n - 1)
    y = total.T if swap else total
    if bias is not None:
        y += tl.load(bias + base + kept).to(tl.float32)[None, :]
    if gated:
        z = other.T if swap else other
        if bias is not None:
            z += tl.load(bias + base + n + kept).to(tl.float32)[None, :]
        y = _gate(y, z, out.dtype.element_ty, kind, alpha, limit, shift)
    elif not inward:
        y = y * scale[:, None]
    tl.store(out + to.to(tl.int64)[:, None] * n + rn[None, :], y.to(out.dtype.element_ty),
             mask=within[:, None] & (rn < n)[None, :])


@triton.jit
def _tile(x, weight, where, beyond, bias, out, scales, expert, places, pick, within, column, n, k, stride, count: tl.constexpr,
          tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, even: tl.constexpr, swap: tl.constexpr,
          stages: tl.constexpr, gated: tl.constexpr, kind: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
          shift: tl.constexpr, inward: tl.constexpr, experts: tl.constexpr, runs: tl.constexpr):
    """`tall` picks of one expert times `wide` of its outputs (of each half, if gated)."""
    rn, rk = column * wide + tl.arange(0, wide), tl.arange(0, deep)
    parts: tl.constexpr = 2 if gated else 1
    base = expert.to(tl.int64) * n * parts
    w, line, beside = _matrix(weight, where, beyond, expert, n, k, parts, experts, runs)
    w += tl.minimum(rn, n - 1).to(tl.int64)[:, None] * line + rk[None, :]
    row = pick // count if gated else places
    v = x + row.to(tl.int64)[:, None] * stride + rk[None, :]
    scale = tl.load(scales + pick, mask=within, other=0.0)
    height: tl.constexpr = wide if swap else tall
    width: tl.constexpr = tall if swap else wide
    total = tl.zeros((height, width), tl.float32)
    other = tl.zeros((height, width), tl.float32)
    for start in tl.range(0, k, deep, num_stages=stages):
        mask = None if even else (start + rk < k)[None, :]
        rest: tl.constexpr = None if even else 0.0
        a = tl.load(v + start, mask=within[:, None] if even else within[:, None] & mask, other=0.0)
        b = tl.load(w + start, mask=mask, other=rest)
        if gated:
            c = tl.load(w + beside + start, mask=mask, other=rest)
        if inward and gated:
            a = (a.to(tl.float32) * scale[:, None]).to(x.dtype.element_ty)
        total = _dot(b, a, total, swap)
        if gated:
            other = _dot(c, a, other, swap)
    to = places if gated else pick
    _leave(total, other, bias, out, base, n, rn, to, within, scale, swap, gated, kind, alpha, limit, shift, inward)


@triton.jit
def _matches(picks, expert, total, block: tl.constexpr):
    """(which of the first `block` picks are of an expert, how many up to each, how many in all)"""
    number = tl.arange(0, block)
    match = tl.load(picks + number, mask=number < total, other=-1) == expert
    return match, tl.cumsum(match.to(tl.int32), 0), tl.sum(match.to(tl.int32), 0)


@triton.jit
def _ranked(match, rank, slot, block: tl.constexpr):
    """The picks at the places `slot` among those of an expert."""
    hit = match[None, :] & (rank[None, :] == slot[:, None] + 1)
    return tl.sum(tl.where(hit, tl.arange(0, block)[None, :], 0), 1)


@triton.jit
def _picks_of(starts, expert):
    """The number of an expert's picks."""
    return tl.load(starts + expert + 1) - tl.load(starts + expert)


@triton.jit
def _sorted_picks(order, starts, tile_place, expert, tall: tl.constexpr):
    """(the places of a tile of sorted picks, which of them are the expert's, the picks there)"""
    places = tl.load(tile_place + tl.program_id(1)) + tl.arange(0, tall)
    within = places < tl.load(starts + expert + 1)
    return places, within, tl.load(order + places, mask=within, other=0)


@triton.jit(do_not_specialize=("total",))
def grouped(x, weight, where, beyond, bias, out, picks, order, starts, tile_expert, tile_place, scales, total, n, k, stride,
            arranged: tl.constexpr, count: tl.constexpr, block: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
            deep: tl.constexpr, even: tl.constexpr, swap: tl.constexpr, gated: tl.constexpr, kind: tl.constexpr,
            alpha: tl.constexpr, limit: tl.constexpr, shift: tl.constexpr, inward: tl.constexpr, linked: tl.constexpr,
            stages: tl.constexpr, high: tl.constexpr, experts: tl.constexpr, runs: tl.constexpr):
    """The grouped GEMM. Grid: (blocks of outputs, tiles) of sorted picks if `arranged`; gated, out is then by place, else x is.
    Otherwise (blocks of outputs, E) of up to `block` unsorted picks, of which a program finds its expert's; rows of x and out
    are as in `picked`."""
    follow(linked)
    if arranged:
        expert = tl.load(tile_expert + tl.program_id(1))
        if expert < 0:
            return
        if high > 0:  # noqa: SIM102 (known when it is compiled)
            if _many(_picks_of(starts, expert), tall):
                fewer: tl.constexpr = 3 if stages > 3 else stages  # so that as many programs share a multiprocessor
                places, within, pick = _sorted_picks(order, starts, tile_place, expert, high)
                _tile(x, weight, where, beyond, bias, out, scales, expert, places, pick, within, tl.program_id(0), n, k, stride,
                      count, high, wide, 64 if deep > 64 else deep, even, swap, fewer, gated, kind, alpha, limit, shift, inward,
                      experts, runs)
                return
        places, within, pick = _sorted_picks(order, starts, tile_place, expert, tall)
        _tile(x, weight, where, beyond, bias, out, scales, expert, places, pick, within, tl.program_id(0), n, k, stride, count,
              tall, wide, deep, even, swap, stages, gated, kind, alpha, limit, shift, inward, experts, runs)
    else:
        expert = tl.program_id(1)
        match, rank, mine = _matches(picks, expert, total, block)
        for first in range(0, mine, tall):
            slot = first + tl.arange(0, tall)
            pick = _ranked(match, rank, slot, block)
            _tile(x, weight, where, beyond, bias, out, scales, expert, pick, pick, slot < mine, tl.program_id(0), n, k, stride,
                  count, tall, wide, deep, even, swap, stages, gated, kind, alpha, limit, shift, inward, experts, runs)


@triton.jit
def panels(x, weight, xs, gains, bias, out, order, starts, tile_expert, tile_place, scales, n, k, stride, experts: tl.constexpr,
           count: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, group: tl.constexpr,
           even: tl.constexpr, gated: tl.constexpr, kind: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
           shift: tl.constexpr):
    """As `grouped`, for many rows: persistent programs, and TMA for the weight, whose descriptor is [E * parts, n, k], with
    blocks [parts, wide, deep], and for x where its rows lie in order (not gated), with blocks [tall, deep].

    Gated, both halves are one operand, so that a tile has `wide` outputs from 2 * wide rows. Tiles are swizzled in bands of
    `group`, so that concurrent programs share x and weight in L2. Both may be codes: rows of x have the scales xs, those of
    the weight the factors gains."""
    across = tl.cdiv(n, wide)
    parts: tl.constexpr = 2 if gated else 1
    rk = tl.arange(0, deep)
    last = tl.load(starts + experts + 1)
    for i in tl.range(tl.program_id(0), last * across, tl.num_programs(0), flatten=True):
        tile, column = _place(i, last, across, group)
        expert = tl.load(tile_expert + tile)
        place = tl.load(tile_place + tile)
        places = place + tl.arange(0, tall)
        within = places < tl.load(starts + expert + 1)
        pick = tl.load(order + places, mask=within, other=0)
        sums = tl.zeros((tall, wide * parts), tl.float32)
        for start in range(0, k, deep):
            w = tl.reshape(weight.load([expert * parts, column * wide, start]), (parts * wide, deep))
            if gated:
                v = x + (pick // count).to(tl.int64)[:, None] * stride + (start + rk)[None, :]
                # Zeros that TMA fills in are not to meet NaN.
                a = tl.load(v, mask=within[:, None] if even else within[:, None] & (start + rk < k)[None, :], other=0.0)
            else:
                a = x.load([place, start])
            sums = tl.dot(a, w.T, sums)
        base = expert.to(tl.int64) * n * parts
        rn = column * wide + tl.arange(0, wide)
        if gated:
            first, second = tl.split(tl.permute(tl.reshape(sums, (tall, 2, wide)), (0, 2, 1)))
            if gains is not None:
                each, own = tl.load(xs + pick // count, mask=within, other=0.0)[:, None], gains + base + tl.minimum(rn, n - 1)
                first, second = first * each * tl.load(own)[None, :], second * each * tl.load(own + n)[None, :]
            _leave(first, second, bias, out, base, n, rn, places, within, sums, False, True, kind, alpha, limit, shift, False)
        else:
            scale = tl.load(scales + pick, mask=within, other=0.0)
            if gains is not None:
                sums *= tl.load(xs + places, mask=within, other=0.0)[:, None]
                sums *= tl.load(gains + base + tl.minimum(rn, n - 1))[None, :]
            _leave(sums, sums, bias, out, base, n, rn, pick, within, scale, False, False, kind, alpha, limit, shift, False)
