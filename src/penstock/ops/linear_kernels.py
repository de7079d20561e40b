"""The Triton GEMM kernels. `ops/linear_triton.py` decides which kernel serves a shape, and launches it.

Imported late: Triton is not on every machine, and takes 0.3 s where it is."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.activation_kernel import activate
from penstock.ops.linked_kernel import await_previous, launch
from penstock.ops.lora_kernels import low_part


@triton.jit
def _with(y, gains, bias, at):
    """y, whose last axis is that of the outputs `at`, times their gains, plus their bias; either may be None."""
    if gains is not None:
        gain = tl.load(gains + at)
        y *= gain if len(y.shape) == 1 else gain[None, :]
    if bias is not None:
        more = tl.load(bias + at).to(tl.float32)
        y += more if len(y.shape) == 1 else more[None, :]
    return y


@triton.jit
def _finish(y, z, gains, bias, at, n, dtype: tl.constexpr, kind: tl.constexpr):
    """The epilogue of sums y, with a `kind` gated with the sums z of outputs n + at."""
    y = _with(y, gains, bias, at)
    if kind is not None:
        y = _gate(y, _with(z, gains, bias, n + at), dtype, kind)
    return y


@triton.jit
def _gate(x, z, dtype: tl.constexpr, kind: tl.constexpr):
    """Epilogue kind(x) * z. The accumulators are rounded to `dtype` first, so that fused and separate kernels agree."""
    return activate(x.to(dtype).to(tl.float32), kind) * z.to(dtype).to(tl.float32)


@triton.jit
def _fetch(at, columns, wide: tl.constexpr, threads: tl.constexpr):
    """Prefetches the first `columns` of each of `wide` rows into L2, in multiples of 16 bytes per thread.

    Rows must be aligned to 16 bytes. Does nothing if `columns` is below one."""
    pieces: tl.constexpr = threads // wide
    piece = columns // (pieces * 8) * 8
    if piece > 0:
        spread = at[:, None] + (tl.arange(0, pieces) * piece)[None, :]
        size = tl.full((wide, pieces), 0, tl.int32) + piece * (at.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                                  [spread.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _operand(v, scale, most: tl.constexpr, dtype: tl.constexpr, paired: tl.constexpr):
    """v in float32, `paired` a sixteenth of it in float16; with `most` it is rounded as the codes v / scale of `dtype`, at most
    `most`."""
    if most > 0:
        v = tl.minimum(tl.maximum(v.to(tl.float32) / scale, -most), most).to(dtype)
    return v.to(tl.float16) * 0.0625 if paired else v.to(tl.float32)


@triton.jit
def _step(x, fixed, k, most: tl.constexpr, whole: tl.constexpr):
    """The scale of the codes of a row x [k]: `fixed`, or with `most` by its largest magnitude, else 1. `whole` >= k."""
    scale = 1.0
    if fixed is not None:
        scale = tl.load(fixed)
    elif most > 0:
        every = tl.arange(0, whole)
        scale = tl.max(tl.abs(tl.load(x + every, mask=every < k, other=0.0).to(tl.float32)), 0) / most
        scale = tl.where(scale > 0, scale, 1.0)
    return scale


@triton.jit
def _added(total, w, v, paired: tl.constexpr):
    """total + w * v. `paired`: of FP8 codes w and sixteenths of such v, products are exact in float16. Of eight in a row, two
    sums of four are rounded to float16 and added in float32 in the first one's place: 12 instructions instead of 20."""
    if paired:
        total = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 p, u, v; .reg .f32 s, t; mov.b32 {a, b}, $8; cvt.rn.f16x2.e4m3x2 u, a; "
            "cvt.rn.f16x2.e4m3x2 v, b; mul.rn.f16x2 p, u, $10; fma.rn.f16x2 p, v, $11, p; mov.b32 {a, b}, $9; "
            "cvt.rn.f16x2.e4m3x2 u, a; cvt.rn.f16x2.e4m3x2 v, b; fma.rn.f16x2 p, u, $12, p; fma.rn.f16x2 p, v, $13, p; "
            "mov.b32 {a, b}, p; cvt.f32.f16 s, a; cvt.f32.f16 t, b; add.f32 s, s, t; add.f32 $0, s, $14; mov.f32 $1, $15; "
            "mov.f32 $2, $16; mov.f32 $3, $17; mov.f32 $4, $18; mov.f32 $5, $19; mov.f32 $6, $20; mov.f32 $7, $21; }",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,f,f,f,f,f,f,f,f", [w, v, total], dtype=tl.float32, is_pure=True,
            pack=8)
    else:
        total += w.to(tl.float32) * v
    return total


@triton.jit
def matvec(x, weight, gains, fixed, bias, out, n, k, wide: tl.constexpr, deep: tl.constexpr, stages: tl.constexpr,
           ahead: tl.constexpr, even: tl.constexpr, kind: tl.constexpr, linked: tl.constexpr, most: tl.constexpr,
           whole: tl.constexpr, paired: tl.constexpr = False, adapters=None, pieces: tl.constexpr = 1, rank: tl.constexpr = 16,
           ranks: tl.constexpr = 16, span: tl.constexpr = 16, early: tl.constexpr = 1):
    """out [n] = weight [n, k] @ x [k]; with a `kind` the weight is [2 n, k] and out = kind(first half) * second half.

    A thread accumulates its own columns in float32; the program reduces them once, at the end. The first `ahead` blocks of the
    weight, which k must have, are loaded before the wait for the kernel that writes x. FP8 codes: `gains` are factors of their
    rows, and x is codes times the scale `fixed`, or with `most`, their largest magnitude, it is rounded to codes here, as by
    ops/coded_kernels.py::quantize; `whole` is a power of two of at least k. `paired`: as in `_added`. `adapters`: the first
    programs compute x A^T of the row's adapter beside, by ops/lora_kernels.py::low_part."""
    program = tl.program_id(0)
    if adapters is not None:
        helpers, data, facts, slots, low, line, told, down, fact = adapters
        if program < helpers:
            slot = tl.load(slots).to(tl.int64)
            if slot >= 0:
                low_part(x, data, facts, slot, 0, program, low, 1, line, told, k, down, fact, pieces, rank, ranks, span, early,
                         linked)
            return
        program -= helpers
    rows = program * wide + tl.arange(0, wide)
    columns = tl.arange(0, deep)
    kept = tl.minimum(rows, n - 1)
    at = weight + kept.to(tl.int64)[:, None] * k + columns[None, :]
    beside = at + tl.cast(n, tl.int64) * k  # n == 1 is specialised to a constant, which has no .to()
    launch(linked)
    first = ()
    second = ()
    for i in tl.static_range(ahead):
        first = first + (tl.load(at + i * deep),)  # noqa: RUF005 (Triton has no starred expressions)
        if kind is not None:
            second = second + (tl.load(beside + i * deep),)  # noqa: RUF005
    await_previous(linked)
    dtype: tl.constexpr = weight.dtype.element_ty
    scale = _step(x, fixed, k, most, whole)
    total = tl.zeros((wide, deep), tl.float32)
    other = tl.zeros((wide, deep), tl.float32)
    for i in tl.static_range(ahead):
        v = _operand(tl.load(x + i * deep + columns), scale, most, dtype, paired)[None, :]
        total = _added(total, first[i], v, paired)
        if kind is not None:
            other = _added(other, second[i], v, paired)
    for start in tl.range(ahead * deep, k, deep, num_stages=stages):
        inside = None if even else start + columns < k
        across = None if even else inside[None, :]
        rest: tl.constexpr = None if even else 0.0
        v = _operand(tl.load(x + start + columns, mask=inside, other=rest), scale, most, dtype, paired)[None, :]
        total = _added(total, tl.load(at + start, mask=across, other=rest), v, paired)
        if kind is not None:
            other = _added(other, tl.load(beside + start, mask=across, other=rest), v, paired)
    if paired:
        scale *= 16.0
    y = _finish(tl.sum(total, 1) * scale, tl.sum(other, 1) * scale, gains, bias, kept, n, out.dtype.element_ty, kind)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < n)


@triton.jit
def _place(tile, down, across, group: tl.constexpr):
    """(row, column) of a tile, swizzled in bands of `group` rows of tiles: concurrent tiles then share x and weight in L2."""
    first = tile // (group * across) * group
    band = tl.minimum(down - first, group)
    return first + tile % (group * across) % band, tile % (group * across) // band


@triton.jit
def _share(k, split: tl.constexpr):
    """Columns of each split-K part but the last: independent of the tile, whose depth must divide 128."""
    return tl.cdiv(k, 128 * split) * 128


@triton.jit
def _dot(w, x, total, swap: tl.constexpr):
    """total + x @ w.T, or its transpose. float32 operands are multiplied in float32, not tf32."""
    if swap:
        total = tl.dot(w, x.T, total, input_precision="ieee", out_dtype=total.dtype)
    else:
        total = tl.dot(x, w.T, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def _leave(total, partial, tile, part, split: tl.constexpr, parts: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    """Stores this program's partial sums."""
    at = partial + (tile.to(tl.int64) * (split * parts) + part) * (height * width)
    tl.store(at + tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :], total)


@triton.jit
def _add_up(partial, tile, part, split: tl.constexpr, parts: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    """Adds the partial sums of a tile in the order of K, whichever program finished last."""
    at = partial + (tile.to(tl.int64) * (split * parts) + part) * (height * width)
    at += tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    total = tl.load(at, cache_modifier=".cg")
    for i in tl.static_range(1, split):
        total += tl.load(at + i * (parts * height * width), cache_modifier=".cg")
    return total


@triton.jit
def _together(total, other, partial, tickets, tile, split: tl.constexpr, gated: tl.constexpr, height: tl.constexpr,
              width: tl.constexpr):
    """The end of split-K: (whether this program is the last of its tile, then the tile's sums). `other`: of gated halves."""
    parts: tl.constexpr = 2 if gated else 1
    _leave(total, partial, tile, tl.program_id(1) * parts, split, parts, height, width)
    if gated:
        _leave(other, partial, tile, tl.program_id(1) * parts + 1, split, parts, height, width)
    tl.debug_barrier()
    last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == split - 1
    if last:
        tl.store(tickets + tile, 0)
        total = _add_up(partial, tile, 0, split, parts, height, width)
        if gated:
            other = _add_up(partial, tile, 1, split, parts, height, width)
    return last, total, other


@triton.jit(do_not_specialize=("rows", "stride"))
def tiles(x, weight, bias, out, partial, tickets, rows, n, k, stride, tall: tl.constexpr, wide: tl.constexpr,
          deep: tl.constexpr, split: tl.constexpr, joined: tl.constexpr, swap: tl.constexpr, ahead: tl.constexpr,
          even: tl.constexpr, align: tl.constexpr, group: tl.constexpr, kind: tl.constexpr, threads: tl.constexpr,
          linked: tl.constexpr, late: tl.constexpr = False):
    """out [rows, n] = x [rows, k] @ weight [n, k].T; with a `kind` the weight is [2 n, k], as in `matvec`.

    `stride` is x's row stride in units of `align` elements. Split-K: K is summed in `split` parts, which are added in order.
    Grid: (tiles, split); the last program of a tile, found by an atomic ticket, adds the parts. `partial` holds `split` sums
    per tile, `tickets` one counter per tile, zero before and after. With `joined` the grid is (tiles, 1), one program computes
    all parts, and neither buffer is used. `late`: the previous kernel does not write x,
    and waited for the one that does before it let this one start."""
    tile = tl.program_id(0)
    row, column = _place(tile, tl.cdiv(rows, tall), tl.cdiv(n, wide), group)
    rm, rn, rk = row * tall + tl.arange(0, tall), column * wide + tl.arange(0, wide), tl.arange(0, deep)
    kept = tl.minimum(rn, n - 1)
    share = _share(k, split) if split > 1 else tl.cdiv(k, deep) * deep
    begin = tl.program_id(1) * share
    end = k if joined else tl.minimum(begin + share, k)
    beside = tl.cast(n, tl.int64) * k
    if linked:
        if ahead > 0:
            columns = tl.minimum(end - begin, ahead * deep)
            _fetch(weight + kept.to(tl.int64) * k + begin, columns, wide, threads)
            if kind is not None:
                _fetch(weight + beside + kept.to(tl.int64) * k + begin, columns, wide, threads)
        if not late:
            gdc_wait()
        if ahead > 0:
            gdc_launch_dependents()
    w = weight + kept.to(tl.int64)[:, None] * k + rk[None, :]
    v = x + rm.to(tl.int64)[:, None] * (stride.to(tl.int64) * align) + rk[None, :]
    within = (rm < rows)[:, None]
    height: tl.constexpr = wide if swap else tall
    width: tl.constexpr = tall if swap else wide
    total = tl.zeros((height, width), tl.float32)
    other = tl.zeros((height, width), tl.float32)
    if joined:
        whole = tl.zeros((height, width), tl.float32)
    for start in range(begin, end, deep):
        mask = None if even else (start + rk < k)[None, :]
        rest: tl.constexpr = None if even else 0.0
        a = tl.load(v + start, mask=within if even else within & mask, other=0.0)
        total = _dot(tl.load(w + start, mask=mask, other=rest), a, total, swap)
        if kind is not None:
            other = _dot(tl.load(w + beside + start, mask=mask, other=rest), a, other, swap)
        if joined and (start + deep) % share == 0:
            whole += total
            total = tl.zeros((height, width), tl.float32)
    if linked and ahead == 0:  # the next kernel starts while this one stores
        gdc_launch_dependents()
    if joined:
        total = whole + total
    if linked and late:
        gdc_wait()
    last = True
    if split > 1 and not joined:
        last, total, other = _together(total, other, partial, tickets, tile, split, kind is not None, height, width)
    if last:
        y = _finish(total.T if swap else total, other.T if swap else other, None, bias, kept, n, out.dtype.element_ty, kind)
        at = out + rm.to(tl.int64)[:, None] * n + rn[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=within & (rn < n)[None, :])


@triton.jit(do_not_specialize=("rows",))
def panels(x, weight, bias, out, rows, n, k, tall: tl.constexpr, wide: tl.constexpr, deep: tl.constexpr, group: tl.constexpr,
           split: tl.constexpr, kind: tl.constexpr):
    """As `tiles`, for many rows: persistent programs with TMA. x, weight and out are tensor descriptors; a program loads the
    next tile's blocks while it stores. The order of summation is the same.

    Blocks: x [tall, deep]. Without a kind, weight [wide, deep] and out [tall, wide / 2]: a tile is stored in halves to leave
    room for blocks. With one, weight [2, wide, deep] of [2, n, k], so that both halves are one operand, and out [tall, wide].
    """
    down, across = tl.cdiv(rows, tall), tl.cdiv(n, wide)
    halves: tl.constexpr = wide if kind is not None else wide // 2
    share = k
    begins, ends, step = tl.program_id(0), down * across, tl.num_programs(0)
    if split > 1:
        share = _share(k, split)
        whole = tl.zeros((tall, 2 * halves), tl.float32)
        begins, ends, step = 0, tl.cdiv(ends - begins, step) * split, 1
    for i in tl.range(begins, ends, step, flatten=True):
        tile, begin = (tl.program_id(0) + i // split * tl.num_programs(0), i % split * share) if split > 1 else (i, 0)
        row, column = _place(tile, down, across, group)
        total = tl.zeros((tall, 2 * halves), tl.float32)
        for start in range(0, share, deep):
            if kind is not None:
                w = tl.reshape(weight.load([0, column * wide, begin + start]), (2 * wide, deep))
            else:
                w = weight.load([column * wide, begin + start])
            total = _dot(w, x.load([row * tall, begin + start]), total, False)
        last = True
        if split > 1:
            whole = tl.where(begin == 0, total, whole + total)
            total = whole
            last = i % split == split - 1
        if last:
            first, second = tl.split(tl.permute(tl.reshape(total, (tall, 2, halves)), (0, 2, 1)))
            if bias is not None:
                kept = column * wide + tl.arange(0, halves)
                beside = n if kind is not None else halves
                end = n * 2 - 1 if kind is not None else n - 1
                first += tl.load(bias + tl.minimum(kept, end)).to(tl.float32)[None, :]
                second += tl.load(bias + tl.minimum(kept + beside, end)).to(tl.float32)[None, :]
            if kind is not None:
                out.store([row * tall, column * wide], _gate(first, second, out.dtype, kind).to(out.dtype))
            else:
                out.store([row * tall, column * wide], first.to(out.dtype))
                out.store([row * tall, column * wide + halves], second.to(out.dtype))
