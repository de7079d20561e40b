"""The Triton kernels of adapters' deltas. `ops/lora_triton.py` launches them.

Programs walk over the tiles of ops/lora.py::Groups, whose number only the device knows, so that a launch is the same for any
mix of adapters. Adapters and groups are copied to the device before a step's first kernel, so programs read them before they
wait for the previous kernel: behind the wait there is one round of loads, one dot product and the stores."""

import triton
import triton.language as tl

from penstock.ops.activation_kernel import activate
from penstock.ops.linked_kernel import await_previous, launch


@triton.jit(do_not_specialize=("rows", "most", "stride", "told", "fact"))
def shrink(x, data, facts, count, tiles, order, low, stride, line, told, k, down, fact, rows, most, pieces: tl.constexpr,
           rank: tl.constexpr, ranks: tl.constexpr, deep: tl.constexpr, span: tl.constexpr, parts: tl.constexpr,
           joined: tl.constexpr, tall: tl.constexpr, align: tl.constexpr, ahead: tl.constexpr, linked: tl.constexpr):
    """low [parts, rows, pieces, rank] float32: x A^T over each `span` columns of x; joined, their sum is low's only part.

    Grid: (parts * pieces * blocks of `ranks` ranks, walkers over tiles). `line` and `told` are strides of data and facts,
    `down` and `fact` the target's places in them. x's rows are `stride * align` apart. The first `ahead` blocks of `deep`
    columns are loaded at once, those of A before the wait."""
    launch(linked)
    blocks: tl.constexpr = (rank + ranks - 1) // ranks
    program = tl.program_id(0)
    first = program % blocks * ranks
    piece = program // blocks % pieces
    part = program // (blocks * pieces)
    rr, rk = first + tl.arange(0, ranks), tl.arange(0, deep)
    for tile in range(tl.program_id(1), tl.load(count), tl.num_programs(1)):
        slot = tl.load(tiles + tile).to(tl.int64)
        places = tl.load(tiles + most + tile) + tl.arange(0, tall)
        within = places < tl.load(tiles + 2 * most + tile)
        width = tl.load(facts + slot * told)
        own = tl.multiple_of(tl.load(facts + slot * told + fact + piece), 16)
        if first < own:
            row = tl.load(order + places, mask=within, other=0).to(tl.int64)
            v = x + row[:, None] * (tl.cast(stride, tl.int64) * align) + rk[None, :]
            a = data + slot * line + tl.cast(down + piece * k, tl.int64) * width + rr[:, None].to(tl.int64) * k + rk[None, :]
            early = ()
            for i in tl.static_range(ahead):
                at = part * span + i * deep
                early = early + (tl.load(a + at, mask=(rr < own)[:, None] & (at + rk < k)[None, :], other=0.0),)  # noqa: RUF005
            await_previous(linked)
            near = ()
            for i in tl.static_range(ahead):
                at = part * span + i * deep
                near = near + (tl.load(v + at, mask=within[:, None] & (at + rk < k)[None, :], other=0.0),)  # noqa: RUF005
            total = tl.zeros((tall, ranks), tl.float32)
            repeats: tl.constexpr = parts if joined else 1
            for again in range(repeats):
                begin = (again if joined else part) * span
                sums = tl.zeros((tall, ranks), tl.float32)
                for i in tl.static_range(ahead):
                    sums = tl.dot(near[i], early[i].T, sums, input_precision="ieee")
                for start in range(begin + ahead * deep, min(begin + span, k), deep):
                    mask = (start + rk < k)[None, :]
                    xs = tl.load(v + start, mask=within[:, None] & mask, other=0.0)
                    w = tl.load(a + start, mask=(rr < own)[:, None] & mask, other=0.0)
                    sums = tl.dot(xs, w.T, sums, input_precision="ieee")
                total += sums
            kept: tl.constexpr = 1 if joined else parts
            to = low + (((tl.cast(part % kept, tl.int64) * rows + row) * pieces + piece) * rank)[:, None] + rr[None, :]
            tl.store(to, total, mask=within[:, None] & (rr < own)[None, :])
    await_previous(linked)


@triton.jit(do_not_specialize=("rows", "most", "told", "fact"))
def expand(low, data, gains, facts, blocks, count, tiles, order, out, bias, stride, line, spread, told, n, up, gain, fact, rows,
           most, pieces: tl.constexpr, rank: tl.constexpr, ranks: tl.constexpr, parts: tl.constexpr, scaled: tl.constexpr,
           even: tl.constexpr, tall: tl.constexpr, block: tl.constexpr, wide: tl.constexpr, linked: tl.constexpr):
    """out = (out - bias) * (1 + gain) + bias + low B^T, for the rows in tiles. Grid: (columns by `wide`, walkers over tiles).

    low [parts, rows, pieces, rank] is summed over its parts and rounded to data's type; out's rows are `stride` apart; blocks
    [blocks, 3] has the piece, the first column and the piece's end for each `block` columns; even: multiples of 16."""
    launch(linked)
    each: tl.constexpr = block // wide
    told_of = blocks + tl.program_id(0) // each * 3
    piece, begin, end = tl.load(told_of), tl.load(told_of + 1) + tl.program_id(0) % each * wide, tl.load(told_of + 2)
    if even:
        begin, end = tl.multiple_of(begin, 16), tl.multiple_of(end, 16)
    column = begin + tl.arange(0, wide)
    inside = column < end
    rk = tl.arange(0, ranks)
    for tile in range(tl.program_id(1), tl.where(begin < end, tl.load(count), 0), tl.num_programs(1)):
        slot = tl.load(tiles + tile).to(tl.int64)
        own = tl.multiple_of(tl.load(facts + slot * told + fact + piece), 16)
        factor = tl.load(facts + slot * told + fact + scaled)
        if own + factor > 0:
            width = tl.load(facts + slot * told)
            places = tl.load(tiles + most + tile) + tl.arange(0, tall)
            within = places < tl.load(tiles + 2 * most + tile)
            row = tl.load(order + places, mask=within, other=0).to(tl.int64)
            both = within[:, None] & inside[None, :]
            b = data + slot * line + tl.cast(up, tl.int64) * width + column[None, :]
            w = tl.load(b + rk[:, None].to(tl.int64) * n, mask=(rk < own)[:, None] & inside[None, :], other=0.0)
            await_previous(linked)
            to = out + row[:, None] * stride + column[None, :]
            total = tl.load(to, mask=both, other=0.0).to(tl.float32)
            at = low + ((row * pieces + piece) * rank)[:, None] + rk[None, :]
            h = _added(at, rows * pieces * rank, within[:, None] & (rk < own)[None, :], tall, ranks, parts)
            sums = tl.dot(h.to(data.dtype.element_ty), w, tl.zeros((tall, wide), tl.float32), input_precision="ieee")
            for first in tl.range(ranks, own, ranks, num_stages=1):
                there = first + rk < own
                h = _added(at + first, rows * pieces * rank, within[:, None] & there[None, :], tall, ranks, parts)
                w = tl.load(b + (first + rk)[:, None].to(tl.int64) * n, mask=there[:, None] & inside[None, :], other=0.0)
                sums = tl.dot(h.to(data.dtype.element_ty), w, sums, input_precision="ieee")
            if factor > 0:
                g = tl.load(gains + slot * spread + gain + column, mask=inside, other=0.0).to(tl.float32)
                base = total
                if bias is not None:
                    base -= tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
                total += base * g[None, :]
            tl.store(to, (total + sums).to(out.dtype.element_ty), mask=both)
    await_previous(linked)


@triton.jit
def _added(at, apart, mask, tall: tl.constexpr, ranks: tl.constexpr, parts: tl.constexpr):
    """The sum of the parts of low, which are `apart` elements apart."""
    h = tl.zeros((tall, ranks), tl.float32)
    for part in tl.static_range(parts):
        h += tl.load(at + tl.cast(part, tl.int64) * apart, mask=mask, other=0.0)
    return h


@triton.jit
def low_part(x, data, facts, slot, row, program, low, apart, line, told, k, down, fact, pieces: tl.constexpr,
             rank: tl.constexpr, ranks: tl.constexpr, span: tl.constexpr, ahead: tl.constexpr, linked: tl.constexpr):
    """low [parts, apart, pieces, rank] of a row x, for the program-th ranks, piece and part. `ahead` blocks of A precede the
    wait."""
    deep: tl.constexpr = 4096 // ranks
    cuts: tl.constexpr = (rank + ranks - 1) // ranks
    piece, part = program // cuts % pieces, program // cuts // pieces
    rr, at = program % cuts * ranks + tl.arange(0, ranks), part * span + tl.arange(0, deep)
    own, width = tl.load(facts + slot * told + fact + piece), tl.load(facts + slot * told)
    end = tl.minimum(part * span + span, k)
    a = data + slot * line + tl.cast(down + piece * k, tl.int64) * width + rr[:, None] * k + at[None, :]
    early = ()
    for i in tl.static_range(ahead):
        there = (rr < own)[:, None] & (at + i * deep < end)[None, :]
        early = early + (tl.load(a + i * deep, mask=there, other=0.0),)  # noqa: RUF005
    await_previous(linked)
    launch(linked)
    total = tl.zeros((ranks, deep), tl.float32)
    for i in tl.static_range(ahead):
        v = tl.load(x + at + i * deep, mask=at + i * deep < end, other=0.0)
        total += early[i].to(tl.float32) * v.to(tl.float32)[None, :]
    for start in range(ahead * deep, end - part * span, deep):
        v = tl.load(x + at + start, mask=at + start < end, other=0.0)
        w = tl.load(a + start, mask=(rr < own)[:, None] & (at + start < end)[None, :], other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    tl.store(low + ((part * apart + row) * pieces + piece) * rank + rr, tl.sum(total, 1), mask=rr < own)


@triton.jit(do_not_specialize=("rows", "stride"))
def shrink_rows(x, data, facts, order, slots, low, rows, stride, line, told, k, down, fact, pieces: tl.constexpr,
                rank: tl.constexpr, ranks: tl.constexpr, span: tl.constexpr, ahead: tl.constexpr, align: tl.constexpr,
                linked: tl.constexpr):
    """As `shrink`, one row a program. Grid: (parts * pieces, rows). The next kernel starts behind the wait."""
    slot, row = tl.load(slots + tl.program_id(1)).to(tl.int64), tl.load(order + tl.program_id(1)).to(tl.int64)
    if slot >= 0:
        low_part(x + row * (tl.cast(stride, tl.int64) * align), data, facts, slot, row, tl.program_id(0), low,
                 tl.cast(rows, tl.int64), line, told, k, down, fact, pieces, rank, ranks, span, ahead, linked)
    await_previous(linked)


@triton.jit
def _grown(low, data, gains, facts, bias, slot, row, mine, piece, column, inside, apart, line, spread, told, n, up, gain, fact,
           base, pieces: tl.constexpr, rank: tl.constexpr, ranks: tl.constexpr, parts: tl.constexpr, scaled: tl.constexpr,
           linked: tl.constexpr):
    """[R, columns]: the GEMM's results `base` of R rows plus low B^T. Each has its own B, loaded before the wait."""
    rk, at = tl.arange(0, ranks), facts + slot * told
    there = rk[None, :] < tl.load(at + fact + piece, mask=mine, other=0)[:, None]
    b = data + (slot * line + tl.cast(up, tl.int64) * tl.load(at, mask=mine, other=0))[:, None, None]
    w = tl.load(b + rk[None, :, None].to(tl.int64) * n + column[None, None, :],
                mask=there[:, :, None] & inside[None, None, :], other=0.0)
    factor = tl.load(at + fact + scaled, mask=mine, other=0) > 0
    g = tl.load(gains + (slot * spread)[:, None] + gain + column[None, :], mask=factor[:, None] & inside[None, :], other=0.0)
    await_previous(linked)
    h = tl.zeros(there.shape, tl.float32)
    for part in tl.static_range(parts):
        h += tl.load(low + (((part * apart + row) * pieces + piece) * rank)[:, None] + rk[None, :], mask=there, other=0.0)
    y = tl.load(base + row[:, None] * n + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    scale = y
    if bias is not None:
        scale -= tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    y += scale * g.to(tl.float32)
    return y + tl.sum(h.to(data.dtype.element_ty).to(tl.float32)[:, :, None] * w.to(tl.float32), 1)


@triton.jit(do_not_specialize=("rows",))
def expand_rows(low, data, gains, facts, blocks, order, slots, base, out, bias, line, spread, told, n, up, gain, fact, rows,
                pieces: tl.constexpr, rank: tl.constexpr, ranks: tl.constexpr, parts: tl.constexpr, scaled: tl.constexpr,
                even: tl.constexpr, block: tl.constexpr, wide: tl.constexpr, tall: tl.constexpr, kind: tl.constexpr,
                linked: tl.constexpr):
    """As `expand`, for few rows, of which a program takes `tall`. Grid: (columns by `wide`, rows by `tall`).

    With a `kind`, out [rows, n / 2] = kind(first half) * second half of that, for rows without adapters, too; it is `base`
    otherwise."""
    launch(linked)
    place = tl.program_id(1) * tall + tl.arange(0, tall)
    slot = tl.load(slots + place, mask=place < rows, other=-1)
    row = tl.load(order + place, mask=place < rows, other=0).to(tl.int64)
    each: tl.constexpr = block // wide
    told_of = blocks + tl.program_id(0) // each * 3
    piece, begin, end = tl.load(told_of), tl.load(told_of + 1) + tl.program_id(0) % each * wide, tl.load(told_of + 2)
    if kind is not None:
        end = n // 2
    if even:
        begin, end = tl.multiple_of(begin, 16), tl.multiple_of(end, 16)
    column, mine, apart = begin + tl.arange(0, wide), slot >= 0, tl.cast(rows, tl.int64)
    inside, slot = column < end, tl.maximum(slot, 0).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    if kind is not None or tl.max(mine.to(tl.int32), 0) > 0:
        size, kept = n, mine
        y = _grown(low, data, gains, facts, bias, slot, row, mine, piece, column, inside, apart, line, spread, told, n, up,
                   gain, fact, base, pieces, rank, ranks, parts, scaled, linked)
        if kind is not None:
            z = _grown(low, data, gains, facts, bias, slot, row, mine, pieces - 1, column + n // 2, inside, apart, line, spread,
                       told, n, up, gain, fact, base, pieces, rank, ranks, parts, scaled, linked)
            y = activate(y.to(dtype).to(tl.float32), kind) * z.to(dtype).to(tl.float32)
            size, kept = n // 2, place < rows
        tl.store(out + row[:, None] * size + column[None, :], y.to(dtype), mask=kept[:, None] & inside[None, :])
    await_previous(linked)
