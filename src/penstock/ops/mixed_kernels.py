"""The mixed-input GEMM for Hopper, in Gluon: 4-bit codes become 16-bit numbers in registers, an operand of wgmma.

A program has two warpgroups that multiply and a warp that loads by TMA. Imported late, as coded_kernels.py is."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from penstock.ops.activation_kernel import activate as _activate
from penstock.ops.coded_kernels import _lower
from penstock.ops.linked_kernel import enter as _enter

activate, enter, lower = (gluon.jit(one.fn) for one in (_activate, _enter, _lower))


@triton.constexpr_function
def _decoding(piece, kind, form, exact, wide):
    """PTX that makes 16-bit numbers of piece `piece` of two words of codes, $1. wide: bfloat16, else float16.

    $2 has their bases, $3 their factors and $4 what rounding the factors to 16 bits left out, unless that is nothing (`exact`).
    Shifts and their factors are float32, and come twice: $2 and $4."""
    t = "bf16x2" if wide else "f16x2"
    if kind == "int4":
        # 128 + code or 1024 + code, as in coded_kernels.py::quarters.
        numbers = f"shr.b32 q, $1, {4 * piece}; lop3.b32 q, q, 0x000F000F, {'0x43004300' if wide else '0x64006400'}, 0xEA; "
    else:
        # The exponent keeps its bias of 1, so the number is multiplied by 2^126 or 2^14.
        up = (6 if wide else 9) - 4 * piece
        mask, much = ("0x01C001C0", "0x7E807E80") if wide else ("0x0E000E00", "0x74007400")
        numbers = (f"shl.b32 q, $1, {12 - 4 * piece}; {f'shl.b32 m, $1, {up}' if up >= 0 else f'shr.b32 m, $1, {-up}'}; "
                   f"and.b32 m, m, {mask}; lop3.b32 q, q, 0x80008000, m, 0xEA; mov.b32 m, {much}; mul.rn.{t} q, q, m; ")
    if form == "shifts":
        apart = ("shl.b32 q, q, 16; mov.b32 a, q; mov.b32 b, m; " if wide else
                 "mov.b32 {h, i}, q; cvt.f32.f16 a, h; cvt.f32.f16 b, i; ")
        return ("{ .reg .b32 q, m; .reg .f32 a, b; .reg .b16 h, i; " + numbers + "and.b32 m, q, 0xFFFF0000; " + apart
                + f"fma.rn.f32 a, a, $4, $2; fma.rn.f32 b, b, $4, $2; cvt.rn.{t}.f32 $0, b, a; }}")
    if kind == "int4":
        numbers += f"sub.rn.{t} q, q, $2; "
    if form == "row":
        numbers += "mov.b32 $0, q; "
    else:
        numbers += f"mul.rn.{t} $0, q, $3; " if exact else f"mul.rn.{t} m, q, $4; fma.rn.{t} $0, q, $3, m; "
    return "{ .reg .b32 q, m; " + numbers + "}"


@gluon.jit
def _words(words, unit, own, spread, scales: gl.constexpr, form: gl.constexpr):
    """The words of a unit's scales, of which there are as many as scales or half."""
    found = ()
    lines: gl.constexpr = 0 if form == "row" else scales // 2 if form == "halves" else scales
    for i in gl.static_range(lines):
        line = unit // 2 if form == "pairs" else unit * lines + i
        found = found + (gl.load(words + line.to(gl.int64) * spread + own, mask=own < spread, other=0),)  # noqa: RUF005
    return found


@gluon.jit
def _factors(words, unit, own, scales: gl.constexpr, form: gl.constexpr, half: gl.constexpr, dtype: gl.constexpr):
    """For each of a unit's scales the operands of `_decoding`."""
    found = ()
    zero: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    base = gl.full([64], zero + 8.0, gl.float32, layout=own.type.layout)
    scale = base
    for g in gl.static_range(scales):
        if form != "row":
            word = words[g // 2 if form == "halves" else g]
            if form == "pairs":
                word = gl.where(unit % 2 == 1, word >> 16, word)
            elif form == "halves" and g % 2 == 1:
                word = word >> 16
            scale = word.to(gl.float32, bitcast=True) if form == "float" else lower(word, half)
            if form == "zeros":
                base = lower(word >> 16, half) + zero
        if form == "shifts":
            found = found + (((lower(word >> 16, half) - zero * scale)[:, None], scale[:, None], scale.to(dtype)),)  # noqa: RUF005
        else:
            high = scale.to(dtype)
            low = (scale - high.to(gl.float32)).to(dtype)
            found = found + ((base.to(dtype)[:, None], high[:, None], low[:, None]),)  # noqa: RUF005
    return found


@gluon.jit
def _numbers(code, factors, piece: gl.constexpr, kind: gl.constexpr, form: gl.constexpr, half: gl.constexpr,
             dtype: gl.constexpr):
    """The numbers [64, unit / 4] of a piece of a unit."""
    exact: gl.constexpr = form != "float" and half == (dtype == gl.float16)
    asm: gl.constexpr = _decoding(piece, kind, form, exact, dtype == gl.bfloat16)
    each = factors[piece * len(factors) // 4]
    if form == "shifts":
        found = gl.inline_asm_elementwise(asm, "=r,r,f,f,f,f", [code, each[0], each[1]], dtype=each[2].dtype,
                                          is_pure=True, pack=2)
    else:
        found = gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [code, each[0], each[1], each[2]], dtype=each[1].dtype,
                                          is_pure=True, pack=2)
    return found


@gluon.jit
def _prepared(word, words, codes, place, unit, after, own, spread, kind: gl.constexpr, form: gl.constexpr, half: gl.constexpr,
              scales: gl.constexpr, dtype: gl.constexpr, operand: gl.constexpr):
    """A unit's first piece of numbers, its codes of 64 rows, their factors, and the words of scales of the unit `after` it:
    they are read a turn before they are needed."""
    factors = _factors(word, unit, own, scales, form, half, dtype)
    word = _words(words, after, own, spread, scales, form)
    code = codes.index(place).load(operand)
    return _numbers(code, factors, 0, kind, form, half, dtype), code, factors, word


@gluon.jit
def _finished(sums, gains, bias, at, own, n):
    """Sums [64, rows of x] of the outputs `own`, times the gains `at`, plus the bias."""
    if gains is not None:
        sums = sums * gl.load(gains + at, mask=own < n, other=0.0)[:, None]
    if bias is not None:
        sums = sums + gl.load(bias + at, mask=own < n, other=0.0).to(gl.float32)[:, None]
    return sums


@gluon.jit
def _multiply(who: gl.constexpr, rooms, codes, full, empty, words, gains, bias, out, partial, tickets, row, panel, begin, units,
              rows, n, spread, stages: gl.constexpr, split: gl.constexpr, kind: gl.constexpr, form: gl.constexpr,
              half: gl.constexpr, scales: gl.constexpr, gate: gl.constexpr, dtype: gl.constexpr):
    """Warpgroup `who`: 64 rows of the matrix from panel + who on, gated also those n rows below. Numbers are decoded while the
    products of the piece before are computed."""
    tall: gl.constexpr = rooms.shape[1]
    parts: gl.constexpr = 1 if gate is None else 2
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tall, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    own = (panel + who) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
    totals, ready = (), ()
    mbarrier.wait(full.index(0), 0)
    for h in gl.static_range(parts):
        totals = totals + (gl.zeros([64, tall], gl.float32, sums),)  # noqa: RUF005
        word = _words(words, begin, own + h * n, spread, scales, form)
        ready = ready + (_prepared(word, words, codes, h * 2 + who, begin, begin + gl.minimum(1, units - 1), own + h * n,  # noqa: RUF005
                                   spread, kind, form, half, scales, dtype, operand),)
    for turn in range(units):
        numbers = ready
        for piece in gl.static_range(4):
            x, pending, following = rooms.index(turn % stages * 4 + piece).permute((1, 0)), (), ()
            for h in gl.static_range(parts):
                pending = pending + (hopper.warpgroup_mma(numbers[h][0], x, totals[h], is_async=True),)  # noqa: RUF005
            totals = pending
            if piece < 3:
                for h in gl.static_range(parts):
                    following = following + ((_numbers(ready[h][1], ready[h][2], piece + 1, kind, form, half, dtype),),)  # noqa: RUF005
                numbers = following
        # The last turn reads its own codes again.
        then, after = gl.minimum(turn + 1, units - 1), begin + gl.minimum(turn + 2, units - 1)
        mbarrier.wait(full.index(then % stages), then // stages & 1)
        prepared = ()
        for h in gl.static_range(parts):
            prepared = prepared + (_prepared(ready[h][3], words, codes, (then % stages * parts + h) * 2 + who, begin + then,  # noqa: RUF005
                                             after, own + h * n, spread, kind, form, half, scales, dtype, operand),)
        ready = prepared
        totals = hopper.warpgroup_mma_wait(0, deps=totals)
        if parts == 1:
            totals = (totals,)
        mbarrier.arrive(empty.index(turn % stages), count=1)
    total, last = totals[0], True
    if split > 1:
        tile = gl.program_id(0) * 2 + who
        mine = (gl.arange(0, 64, layout=gl.SliceLayout(1, sums))[:, None] * tall
                + gl.arange(0, tall, layout=gl.SliceLayout(0, sums))[None, :])
        room = partial + tile.to(gl.int64) * (split * 64 * tall)
        gl.store(room + gl.program_id(1) * (64 * tall) + mine, total)
        gl.thread_barrier()
        last = gl.atomic_add(tickets + tile, 1, sem="acq_rel") == split - 1
        if last:
            gl.store(tickets + tile, 0)
            total = gl.zeros([64, tall], gl.float32, sums)
            for i in range(split):
                total += gl.load(room + i * (64 * tall) + mine)
    if last:
        at = (panel + who) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
        y = _finished(total, gains, bias, at, at, n)
        if gate is not None:
            # Rounded first, as separate kernels do.
            z = _finished(totals[1], gains, bias, at + n, at, n).to(dtype)
            y = activate(y.to(dtype).to(gl.float32), gate) * z.to(gl.float32)
        flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        y = gl.convert_layout(y.to(out.dtype.element_ty), flat)
        at = (panel + who) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, flat))
        here = row + gl.arange(0, tall, layout=gl.SliceLayout(0, flat))
        gl.store(out + here.to(gl.int64)[None, :] * n + at[:, None], y, mask=(here < rows)[None, :] & (at < n)[:, None])


@gluon.jit
def _load(x, matrix, rooms, codes, full, empty, row, panel, below, begin, units, total, size: gl.constexpr,
          stages: gl.constexpr, parts: gl.constexpr):
    """The loading warp: x's columns of a unit in four pieces, and the unit's codes of each 64 rows."""
    for turn in range(units):
        stage = turn % stages
        mbarrier.wait(empty.index(stage), turn // stages & 1 ^ 1)
        mbarrier.expect(full.index(stage), (4 * rooms.shape[1] + parts * 2 * 64) * size * 2)
        for i in gl.static_range(2 * parts):
            first = panel + i if i < 2 else below + i - 2
            hopper.tma.async_copy_global_to_shared(matrix, [(first * total + begin + turn) * 64, 0], full.index(stage),
                                            codes.index(stage * parts * 2 + i))
        for i in gl.static_range(4):
            hopper.tma.async_copy_global_to_shared(x, [row, ((begin + turn) * 4 + i) * size], full.index(stage),
                                            rooms.index(stage * 4 + i))


@gluon.jit(do_not_specialize=("rows",))
def mixed(x, matrix, words, gains, bias, out, partial, tickets, rows, n, total, spread, split: gl.constexpr,
          stages: gl.constexpr, kind: gl.constexpr, form: gl.constexpr, half: gl.constexpr,
          scales: gl.constexpr, gate: gl.constexpr, linked: gl.constexpr):
    """out [rows, n] = x [rows, k] times a matrix of 4-bit codes, transposed, as of coded_kernels.py::product.

    x: a descriptor of boxes of rows and a quarter of a unit; matrix: one of codes [panels * total * 64, unit / 4], boxes of 64
    rows. total: units of a row. Grid: (tiles, split); tickets: two for each tile."""
    enter(linked)
    tall: gl.constexpr = x.block_type.shape[0]
    size: gl.constexpr = x.block_type.shape[1]
    parts: gl.constexpr = 1 if gate is None else 2
    dtype: gl.constexpr = x.dtype
    # Programs with the same rows of the matrix are neighbours.
    tile, down = gl.program_id(0), gl.cdiv(rows, tall)
    row, panel = tile % down * tall, tile // down * 2
    share = gl.cdiv(total, split)
    begin = gl.program_id(1) * share
    units = gl.minimum(share, total - begin)
    rooms = gl.allocate_shared_memory(x.dtype, [stages * 4, tall, size], x.layout)
    codes = gl.allocate_shared_memory(matrix.dtype, [stages * parts * 2, 64, size], matrix.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize([
        (_multiply, (0, rooms, codes, full, empty, words, gains, bias, out, partial, tickets, row, panel, begin, units, rows, n,
                     spread, stages, split, kind, form, half, scales, gate, dtype)),
        (_multiply, (1, rooms, codes, full, empty, words, gains, bias, out, partial, tickets, row, panel, begin, units, rows, n,
                     spread, stages, split, kind, form, half, scales, gate, dtype)),
        (_load, (x, matrix, rooms, codes, full, empty, row, panel, n // 64 + panel, begin, units, total, size, stages, parts)),
    ], [4, 1], [232, 24])
