"""The Triton kernels for quantized matrices. `ops/coded_triton.py` packs the matrices and chooses and launches kernels.

Imported late: Triton is not on every machine, and takes 0.3 s where it is."""

import triton
import triton.language as tl

from penstock.ops.activation_kernel import rounded
from penstock.ops.linear_kernels import _dot, _finish, _place, _together
from penstock.ops.linked_kernel import await_previous, enter, follow, launch


@triton.jit
def quarters(code, kind: tl.constexpr, dtype: tl.constexpr, fast: tl.constexpr):
    """The bits of float numbers for the four 4-bit codes of 16, the lowest first, as `dtype`.

    int4: 128 + code (bfloat16) or 1024 + code (float16), whose last bit stands for one: fewer instructions than a conversion.
    e2m1: the number itself times 2^-126 or 2^-14, as its exponent keeps its bias. Other types: plain arithmetic."""
    wide: tl.constexpr = dtype == tl.bfloat16
    if fast and kind == "int4" and dtype != tl.float32:
        if wide:
            a, b, c, d = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA; shr.b32 t, $4, 4; "
                "lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA; shr.b32 t, $4, 8; lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA; "
                "shr.b32 t, $4, 12; lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA; }", "=r,=r,=r,=r,r", [code],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA; shr.b32 t, $4, 4; "
                "lop3.b32 $1, t, 0x000F000F, 0x64006400, 0xEA; shr.b32 t, $4, 8; lop3.b32 $2, t, 0x000F000F, 0x64006400, 0xEA; "
                "shr.b32 t, $4, 12; lop3.b32 $3, t, 0x000F000F, 0x64006400, 0xEA; }", "=r,=r,=r,=r,r", [code],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)
    elif fast and wide:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 s, m; shl.b32 s, $4, 12; shl.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; "
            "lop3.b32 $0, s, 0x80008000, m, 0xEA; shl.b32 s, $4, 8; shl.b32 m, $4, 2; and.b32 m, m, 0x01C001C0; "
            "lop3.b32 $1, s, 0x80008000, m, 0xEA; shl.b32 s, $4, 4; shr.b32 m, $4, 2; and.b32 m, m, 0x01C001C0; "
            "lop3.b32 $2, s, 0x80008000, m, 0xEA; shr.b32 m, $4, 6; and.b32 m, m, 0x01C001C0; "
            "lop3.b32 $3, $4, 0x80008000, m, 0xEA; }", "=r,=r,=r,=r,r", [code],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        a, b = _bits(code & 15, kind, dtype), _bits((code >> 4) & 15, kind, dtype)
        c, d = _bits((code >> 8) & 15, kind, dtype), _bits(code >> 12, kind, dtype)
    return a, b, c, d


@triton.jit
def bytewise(table):
    """The words of ops/bits.py::with_bytes."""
    at = table.to(tl.pointer_type(tl.int32), bitcast=True) + 16
    words = ()
    for i in tl.static_range(8):
        words = words + (tl.load(at + i),)  # noqa: RUF005 (Triton has no starred expressions)
    return words


@triton.jit
def looked_up(code, table, words, dtype: tl.constexpr, fast: tl.constexpr):
    """The numbers of `table` for the four 4-bit codes of 16, the lowest first. fast: from `words` of their bytes, of which a
    permutation takes one for each of four codes, once for codes below 8 and once for the others."""
    if fast and dtype != tl.float32:
        # Operands of 32 bits come twice, as one for each of two packed codes: those of words are $5, $7 and so on.
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 k, s, m, t, p, q, u, v, a, b, c, d; mov.b32 k, 0x0000FF00; "
            "and.b32 s, $4, 0x77777777; shr.b32 m, $4, 3; and.b32 m, m, 0x11111111; prmt.b32 t, k, k, m; "
            "prmt.b32 p, $5, $7, s; prmt.b32 q, $9, $11, s; lop3.b32 p, t, q, p, 0xCA; "
            "prmt.b32 u, $13, $15, s; prmt.b32 v, $17, $19, s; lop3.b32 u, t, v, u, 0xCA; "
            "prmt.b32 a, p, u, 0x5140; prmt.b32 b, p, u, 0x7362; "
            "shr.b32 s, s, 16; shr.b32 m, m, 16; prmt.b32 t, k, k, m; "
            "prmt.b32 p, $5, $7, s; prmt.b32 q, $9, $11, s; lop3.b32 p, t, q, p, 0xCA; "
            "prmt.b32 u, $13, $15, s; prmt.b32 v, $17, $19, s; lop3.b32 u, t, v, u, 0xCA; "
            "prmt.b32 c, p, u, 0x5140; prmt.b32 d, p, u, 0x7362; prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; "
            "prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632; }", "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [code, words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2)
        a, b, c, d = a.to(dtype, bitcast=True), b.to(dtype, bitcast=True), c.to(dtype, bitcast=True), d.to(dtype, bitcast=True)
    else:
        a, b = tl.load(table + (code & 15)).to(dtype), tl.load(table + ((code >> 4) & 15)).to(dtype)
        c, d = tl.load(table + ((code >> 8) & 15)).to(dtype), tl.load(table + ((code >> 12) & 15)).to(dtype)
    return a, b, c, d


@triton.jit
def _bits(code, kind: tl.constexpr, dtype: tl.constexpr):
    """One code as `quarters` gives it."""
    if kind == "int4":
        if dtype == tl.float32:
            found = code.to(tl.float32)
        else:
            found = (code | (0x4300 if dtype == tl.bfloat16 else 0x6400)).to(dtype, bitcast=True)
    elif dtype == tl.float32:
        found = (((code & 8).to(tl.uint32) << 28) | ((code & 7).to(tl.uint32) << 22)).to(tl.float32, bitcast=True)
    else:
        found = (((code & 8) << 12) | ((code & 7) << (6 if dtype == tl.bfloat16 else 9))).to(tl.uint16).to(dtype, bitcast=True)
    return found


@triton.jit
def _numbers(bits, zero, kind: tl.constexpr, dtype: tl.constexpr):
    """The numbers that the bits of `quarters` stand for, less `zero` if they are integers: exact."""
    if kind == "int4":
        base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0
        found = bits - (zero + base).to(dtype)
    else:
        found = bits * tl.full((1, 1), 2.0**14 if dtype == tl.float16 else 2.0**126, dtype)
    return found


@triton.jit
def _lower(word, half: tl.constexpr):
    """The lower of the two numbers of a word of scales, which are float16 (`half`) or bfloat16, as float32."""
    if half:
        found = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        found = (word << 16).to(tl.float32, bitcast=True)
    return found


@triton.jit
def _upper(word, half: tl.constexpr):
    return _lower(word >> 16, half)


@triton.jit
def _either(word, place, odd: tl.constexpr):
    """A word that two units share, with the scale of unit `place` below, where a step has only one of them (`odd`)."""
    return tl.where(place % 2 == 1, word >> 16, word) if odd else word


@triton.jit
def _times(w, x, total):
    """The products of rows w [n, k] and x [m, k] added to sums of `_dot`; of one row x, to those of each column: [n, k]."""
    if x.shape[0] == 1:
        total += w.to(tl.float32) * x.to(tl.float32)
    else:
        total = _dot(w, x, total, True)
    return total


@triton.jit
def _unit(total, code, x, words, xs, table, table_words, second: tl.constexpr, kind: tl.constexpr, form: tl.constexpr,
          half: tl.constexpr, scales: tl.constexpr, grouped: tl.constexpr, fast: tl.constexpr):
    """Adds the product of a unit of columns to the sums. x: its columns, by quarters where the codes have 4 bits.

    `words` has the unit's scales, of which that of a `second` unit is in the upper half; `xs` x's scales, if it has one a unit.
    """
    dtype: tl.constexpr = x[0].dtype
    four: tl.constexpr = len(x) == 4
    pieces: tl.constexpr = len(x) // scales
    if kind == "table4":
        found = looked_up(code, table, table_words, dtype, fast)
    elif four:
        found = quarters(code, kind, dtype, fast)
    for g in tl.static_range(scales):
        part = total if form == "row" else tl.zeros_like(total)
        word = words[g // 2 if form == "halves" else g]
        zero = tl.full((1, 1), 0.0 if form == "shifts" or not four else 8.0, tl.float32)
        if form == "zeros":
            zero = _upper(word, half)[:, None]
        for i in tl.static_range(g * pieces, (g + 1) * pieces):
            if kind == "plain":
                w = code
            elif kind == "table4":
                w = found[i]
            elif four:
                w = _numbers(found[i], zero, kind, dtype)
            else:
                w = (code.to(tl.float32) - zero).to(dtype)
            part = _times(w, x[i], part)
        if form == "row":
            total = part
        else:
            if form == "float":
                factor = word.to(tl.float32, bitcast=True)
            else:
                factor = _upper(word, half) if second or (form == "halves" and g % 2 == 1) else _lower(word, half)
            if grouped:
                part = part * xs[None, :]
            total += part * factor[:, None]
            if form == "shifts":
                whole = x[g * pieces].to(tl.float32)
                for i in tl.static_range(g * pieces + 1, (g + 1) * pieces):
                    whole += x[i].to(tl.float32)
                if x[0].shape[0] > 1:
                    whole = tl.sum(whole, 1)[None, :]
                total += _upper(word, half)[:, None] * whole
    return total


@triton.jit
def _columns(v, within, here, k, rk, size: tl.constexpr, pieces: tl.constexpr, even: tl.constexpr):
    """x's columns of the unit from `here` on, in pieces of `size`. `even`: k ends with a unit."""
    a = ()
    for i in tl.static_range(pieces):
        mask = within if even else within & (here + i * size + rk < k)[None, :]
        a = a + (tl.load(v + here + i * size, mask=mask, other=0.0),)  # noqa: RUF005
    return a


@triton.jit
def _scales(line, place, spread, lines: tl.constexpr, odd: tl.constexpr):
    """The words of a unit's scales, which begin at `line`."""
    word = ()
    for i in tl.static_range(lines):
        word = word + (_either(tl.load(line + i * spread), place, odd),)  # noqa: RUF005
    return word


@triton.jit
def _walk(x, within, at, beside, xs, row, rows, words, own, n, table, k, begin, end, share, spread, height: tl.constexpr,
          width: tl.constexpr, unit: tl.constexpr, count: tl.constexpr, stages: tl.constexpr, even: tl.constexpr,
          kind: tl.constexpr, form: tl.constexpr, half: tl.constexpr, scales: tl.constexpr, scaled: tl.constexpr,
          gated: tl.constexpr, joined: tl.constexpr, fast: tl.constexpr):
    """A tile's sums over the columns [begin, end), `count` units a step, and gated those of the rows n below.

    x, at and beside point to column 0 of x's rows, which are rows `row` of xs, and of both halves' codes; `own` are the rows
    of the matrix. joined: the parts of split-K, of `share` columns each, are added in order."""
    size: tl.constexpr = at.shape[1]
    per: tl.constexpr = 2 if form == "pairs" else 1
    odd: tl.constexpr = form == "pairs" and count == 1
    lines: tl.constexpr = scales // 2 if form == "halves" else scales
    step: tl.constexpr = unit if size == unit else 64 * size
    sums: tl.constexpr = tl.int32 if kind == "plain" and x.dtype.element_ty == tl.int8 and x.shape[0] > 1 else tl.float32
    rk = tl.arange(0, size)
    total = tl.zeros((height, width), sums)
    other = tl.zeros((height, width), sums)
    table_words = (own,)
    if kind == "table4" and fast:
        table_words = bytewise(table)
    if joined:
        whole = tl.zeros((height, width), sums)
    # The number of stages is said here too: else loads that no product uses, as of scales, are waited for in every step.
    for start in tl.range(begin, end, unit * count, num_stages=stages):
        for u in tl.static_range(count):
            here = start + u * unit
            place = here // unit
            a = _columns(x, within[:, None], here, k, rk, size, unit // size, even)
            factor = row
            if scaled == "group":
                factor = tl.load(xs + place.to(tl.int64) * rows + row, mask=within, other=0.0)
            if form == "row":
                word = (own,)
                other_word = word
            elif u % per == 0:
                line = words + (place // per * lines).to(tl.int64) * spread + own
                word = _scales(line, place, spread, lines, odd)
                if gated:
                    other_word = _scales(line + n, place, spread, lines, odd)
            code = tl.load(at + place.to(tl.int64) * step)
            total = _unit(total, code, a, word, factor, table, table_words, u % per == 1, kind, form, half, scales,
                          scaled == "group", fast)
            if gated:
                code = tl.load(beside + place.to(tl.int64) * step)
                other = _unit(other, code, a, other_word, factor, table, table_words, u % per == 1, kind, form, half, scales,
                              scaled == "group", fast)
        if joined and (start + unit * count) % share == 0:
            whole += total
            total = tl.zeros((height, width), sums)
    if joined:
        total = whole + total
    return total, other


@triton.jit(do_not_specialize=("rows", "stride"))
def product(x, xs, codes, words, gains, table, bias, out, partial, tickets, rows, n, k, stride, padded, spread,
            tall: tl.constexpr, wide: tl.constexpr, unit: tl.constexpr, count: tl.constexpr, split: tl.constexpr,
            joined: tl.constexpr, even: tl.constexpr, align: tl.constexpr, group: tl.constexpr,
            kind: tl.constexpr, form: tl.constexpr, half: tl.constexpr, scales: tl.constexpr, scaled: tl.constexpr,
            four: tl.constexpr, gate: tl.constexpr, linked: tl.constexpr, stages: tl.constexpr, fast: tl.constexpr):
    """out [rows, n] = x [rows, k] times the coded matrix, transposed; with a `gate` the matrix is [2 n, k] and out =
    gate(first half) * second half. n, with a gate, is a multiple of 64.

    The forms of codes, words, gains and table are those of ops/coded_forms.py::CodedWeight; `spread` is the number of rows that
    words have, `scales` the scales of a unit and row. xs: float32, one a row of x (scaled "token") or [padded / unit, rows]
    ("group"). Split-K, tickets and `joined` are as in ops/linear_kernels.py::tiles. A loop's step is `count` units."""
    tile = tl.program_id(0)
    row, column = _place(tile, tl.cdiv(rows, tall), tl.cdiv(n, wide), group)
    rm, rn = row * tall + tl.arange(0, tall), column * wide + tl.arange(0, wide)
    kept = tl.minimum(rn, n - 1)
    size: tl.constexpr = unit // 4 if four else unit
    rk = tl.arange(0, size)
    share = tl.cdiv(padded, 256 * split) * 256 if split > 1 else padded
    begin = tl.program_id(1) * share
    end = padded if joined else tl.minimum(begin + share, padded)
    if four:
        at = codes + (rn // 64).to(tl.int64)[:, None] * (padded * 16) + (rn % 64 * size)[:, None] + rk[None, :]
        beside = at + tl.cast(n, tl.int64) * (padded // 4)
    else:
        at = codes + kept.to(tl.int64)[:, None] * padded + rk[None, :]
        beside = at + tl.cast(n, tl.int64) * padded
    follow(linked)
    v = x + rm.to(tl.int64)[:, None] * (stride.to(tl.int64) * align) + rk[None, :]
    total, other = _walk(v, rm < rows, at, beside, xs, rm, rows, words, kept, n, table, k, begin, end, share, spread, wide,
                         tall, unit, count, stages, even, kind, form, half, scales, scaled, gate is not None, joined, fast)
    last = True
    if split > 1 and not joined:
        last, total, other = _together(total, other, partial, tickets, tile, split, gate is not None, wide, tall)
    if last:
        y, z = total.T.to(tl.float32), other.T.to(tl.float32)
        if scaled == "token":
            each = tl.load(xs + rm, mask=rm < rows, other=0.0)[:, None]
            y, z = y * each, z * each
        y = _finish(y, z, gains, bias, kept, n, out.dtype.element_ty, gate)
        tl.store(out + rm.to(tl.int64)[:, None] * n + rn[None, :], y.to(out.dtype.element_ty),
             mask=(rm < rows)[:, None] & (rn < n)[None, :])


def _multiply(kind: str) -> tl.constexpr:
    """The instructions of `_multiplied`: two products of 16 columns."""
    name = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
    return tl.constexpr(f"{name} {{$4, $8, $5, $9}}, {{$12, $13}}, {{$16, $17, $18, $19}}; "
                        f"{name} {{$6, $10, $7, $11}}, {{$14, $15}}, {{$0, $1, $2, $3}};")


_BRAIN, _HALF = _multiply("bf16"), _multiply("f16")


@triton.jit
def _multiplied(total, a, b, x, half: tl.constexpr, fast: tl.constexpr):
    """total + w x^T over 32 columns, for 16 rows w of a matrix and 8 rows x.

    All are [.., 128]: what the lanes of a warp hold in registers, four words each. a (the first 8 rows of w), b (the next 8)
    and x have pairs of 16-bit numbers: lane 4 g + t has columns 8 t to 8 t + 7 of row g. Of the sums it has those of row g with
    rows 2 t and 2 t + 1 of x, and then of row g + 8. An instruction multiplies the same columns of both operands, so
    their order does not matter."""
    if fast:
        total = tl.inline_asm_elementwise(_HALF if half else _BRAIN, "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
                                          [a, b, x, total], dtype=tl.float32, is_pure=False, pack=4)
    else:
        count: tl.constexpr = a.shape[0]
        v = tl.reshape(x, (count, 1, 8, 16))
        first, second = tl.reshape(a, (count, 8, 1, 16)), tl.reshape(b, (count, 8, 1, 16))
        first = tl.sum(_lower(first, half) * _lower(v, half) + _upper(first, half) * _upper(v, half), 3)
        second = tl.sum(_lower(second, half) * _lower(v, half) + _upper(second, half) * _upper(v, half), 3)
        found = tl.permute(tl.reshape(tl.join(first, second), (count, 8, 4, 2, 2)), (0, 1, 2, 4, 3))
        total += tl.reshape(found, (count, 128))
    return total


@triton.jit
def _spread(code, piece: tl.constexpr, half: tl.constexpr, fast: tl.constexpr):
    """The codes of a piece of 32 columns as 16-bit numbers: each code plus 128, or plus 1024 (float16)."""
    bits: tl.constexpr = 0x64006400 if half else 0x43004300
    code = code >> (4 * piece)
    if fast:
        code = tl.inline_asm_elementwise("lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r", [code, bits], dtype=tl.int32,
                                         is_pure=True, pack=1)
    else:
        code = (code & 0x000F000F) | bits
    return code


@triton.jit
def _lanes(pairs, here, inside, column, k):
    """x's columns of the units from `here` on: four pieces of 32 columns, as `_multiplied` takes them."""
    found = ()
    for i in tl.static_range(4):
        found = found + (tl.load(pairs + here * 64 + 16 * i, mask=inside & (here * 128 + column + 32 * i < k), other=0),)  # noqa: RUF005
    return found


@triton.jit
def _word(at, fast: tl.constexpr):
    """The words at addresses. fast: in the layout of the sums, which Triton gives up for loads of words that lie apart."""
    if fast:
        found = tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1)
    else:
        found = tl.load(at)
    return found


@triton.jit
def _codes(at, beside, words, here, units, each, spread, n, own, count: tl.constexpr, groups: tl.constexpr,
           parts: tl.constexpr, lines: tl.constexpr, form: tl.constexpr, fast: tl.constexpr):
    """Of each 16 rows: the codes of `count` units from `here` on, 8 rows at a time, and then the words of their scales."""
    found = ()
    place = tl.minimum(here + each, units - 1)
    for g in tl.static_range(groups):
        row = tl.minimum(own + 16 * g, n - 1)
        for h in tl.static_range(parts):
            for u in tl.static_range(count):
                for half in tl.static_range(2):
                    found = found + (tl.load(at + (here + u) * 1024 + h * beside + (2 * g + half) * 128,  # noqa: RUF005
                                             mask=here + u < units, other=0),)
            for i in tl.static_range(lines):
                line = (place // 2 if form == "pairs" else place * lines + i) * spread + h * n
                found = found + (_word(words + line + row, fast),)  # noqa: RUF005
    return found


@triton.jit
def _scaled(part, whole, word, odd, form: tl.constexpr, half: tl.constexpr, base: tl.constexpr):
    """Sums of a group of columns with their scale and zero; `whole`: the sums of x's columns."""
    if form == "pairs" or form == "halves":
        word = tl.where(odd, word >> 16, word)
    scale = word.to(tl.float32, bitcast=True) if form == "float" else _lower(word, half)
    if form == "shifts":
        found = (part - base * whole) * scale + _upper(word, half) * whole
    elif form == "zeros":
        found = (part - (_upper(word, half) + base) * whole) * scale
    else:
        found = (part - (base + 8.0) * whole) * scale
    return found


@triton.jit
def _step(total, x, codes, each, odd, count: tl.constexpr, scales: tl.constexpr, lines: tl.constexpr, form: tl.constexpr,
          half: tl.constexpr, narrow: tl.constexpr, fast: tl.constexpr):
    """Adds the products of `count` units of columns to the sums of each 16 rows. x has another unit in each `count`th part of
    its rows, of whose sums one is right for each unit of codes: that of unit `each`. odd: where these have the upper half of a
    word of two units."""
    one = tl.full(x[0].shape, 0x3C003C00 if narrow else 0x3F803F80, tl.int32)
    none = tl.zeros(x[0].shape, tl.float32)
    # Products with ones remove what spread codes have too much, as they do zeros.
    base: tl.constexpr = 1024.0 if narrow else 128.0
    for s in tl.static_range(scales):
        whole, more = none, ()
        for i in tl.static_range(s * (4 // scales), (s + 1) * (4 // scales)):
            whole = _multiplied(whole, one, one, x[i], narrow, fast)
        for g in tl.static_range(len(total)):
            own, right = codes[g * (2 * count + lines):], none
            for u in tl.static_range(count):
                part = none
                for i in tl.static_range(s * (4 // scales), (s + 1) * (4 // scales)):
                    a, b = _spread(own[2 * u], i, narrow, fast), _spread(own[2 * u + 1], i, narrow, fast)
                    part = _multiplied(part, a, b, x[i], narrow, fast)
                right = tl.where(each == u, part, right)
            if form == "row":
                part = right - (base + 8.0) * whole
            else:
                upper = odd if form == "pairs" else s % 2 == 1
                part = _scaled(right, whole, own[2 * count + s * lines // scales], upper, form, half, base)
            more = more + (total[g] + part,)  # noqa: RUF005
        total = more
    return total


@triton.jit(do_not_specialize=("rows",))
def fragments(x, codes, words, gains, bias, out, rows, n, k, padded, spread, stride, tall: tl.constexpr, groups: tl.constexpr,
              span: tl.constexpr, ahead: tl.constexpr, once: tl.constexpr, scales: tl.constexpr, form: tl.constexpr,
              half: tl.constexpr, gate: tl.constexpr, linked: tl.constexpr, fast: tl.constexpr):
    """As `product` for int4 and at most `tall` rows of x (a power of two up to 8), 16-bit numbers in rows 8 * `stride` apart.

    A program takes 16 * `groups` rows of the matrix, `span` times 8 / tall units of columns a step, of which each warp
    multiplies 8 / tall alone: a lane reads 16 bytes of a row's codes, operands of the tensor cores once their bits are
    spread. The other operand has 8 rows: `tall` rows of x for each unit. Codes and x are read `ahead` steps before they are
    multiplied, the first codes before the wait for the kernel that writes x; `once`: there is one step. codes: int32; k is
    a multiple of 8."""
    first = tl.program_id(0) * (16 * groups)
    parts: tl.constexpr = 1 if gate is None else 2
    lines: tl.constexpr = 0 if form == "row" else scales // 2 if form == "halves" else scales
    count: tl.constexpr = 8 // tall
    size: tl.constexpr = groups * parts * (2 * count + lines)
    narrow: tl.constexpr = x.dtype.element_ty == tl.float16
    units = padded // 128
    unit, index = tl.arange(0, span)[:, None] * count, tl.arange(0, 128)[None, :]
    at = codes + (first // 64).to(tl.int64) * (padded * 8) + (first % 64 * 16 + index)
    beside = tl.cast(n, tl.int64) * (padded // 8)
    # Of sums, the unit and the row of the matrix; of x, the row and the column.
    each, own = (index // 4 % 4 * 2 + index % 2) // tall, first + index // 16 + index % 4 // 2 * 8
    odd = (unit + each) % 2 == 1
    row, column = index // 16 % tall, index // 16 // tall * 128 + (index // 4 - index // 16 * 4) * 8
    launch(linked)
    read = ()
    for t in tl.static_range(ahead):
        read = read + _codes(at, beside, words, t * (span * count) + unit, units, each, spread, n, own, count, groups, parts,
                             lines, form, fast)
    await_previous(linked)
    # Written so that the compiler sees which addresses follow each other.
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True) + (row.to(tl.int64) * (stride * 4) + index // 16 // tall * 64
                                                             - index // 16 * 16 + index)
    v = ()
    for t in tl.static_range(ahead):
        v = v + _lanes(pairs, t * (span * count) + unit, row < rows, column, k)
    total = ()
    for _ in tl.static_range(groups * parts):
        total = total + (tl.zeros((span, 128), tl.float32),)  # noqa: RUF005
    if once:
        if units > 0:  # a branch, before which all is read: else the compiler reads some of x late
            total = _step(total, v, read, each, odd, count, scales, lines, form, half, narrow, fast)
    else:
        for start in tl.range(0, units, span * count):
            here = start + ahead * (span * count) + unit
            v = v + _lanes(pairs, here, row < rows, column, k)
            read = read + _codes(at, beside, words, here, units, each, spread, n, own, count, groups, parts, lines, form, fast)
            total = _step(total, v, read, each, odd, count, scales, lines, form, half, narrow, fast)
            v = v[4:]
            read = read[size:]
    rm = tl.arange(0, tall)[:, None]
    for g in tl.static_range(groups):
        rn = first + 16 * g + tl.arange(0, 16)
        y, z = _rows(total[g * parts], tall), _rows(total[g * parts + parts - 1], tall)
        y = _finish(y, z, gains, bias, tl.minimum(rn, n - 1), n, out.dtype.element_ty, gate)
        tl.store(out + rm.to(tl.int64) * n + rn[None, :], y.to(out.dtype.element_ty), mask=(rn < n)[None, :] & (rm < rows))


@triton.jit
def _rows(total, tall: tl.constexpr):
    """The sums [warps, 128] of `_multiplied` over warps and units: [tall, 16 rows of the matrix]."""
    found = tl.permute(tl.reshape(tl.sum(total, 0), (8, 4, 2, 2)), (1, 3, 2, 0))
    return tl.sum(tl.reshape(found, (8 // tall, tall, 16)), 0)


@triton.jit
def decode(codes, words, gains, table, ids, out, n, k, padded, spread, unit: tl.constexpr, kind: tl.constexpr,
           form: tl.constexpr, half: tl.constexpr, scales: tl.constexpr, four: tl.constexpr):
    """out [n, k] = the matrix's numbers, or those of its rows `ids` [n], rounded once. A program takes the columns of one
    scale, 64 rows of them."""
    rn, place, g = tl.program_id(0) * 64 + tl.arange(0, 64), tl.program_id(1) // scales, tl.program_id(1) % scales
    kept = tl.minimum(rn, n - 1)
    if ids is not None:
        kept = tl.load(ids + kept).to(tl.int32)
    size: tl.constexpr = unit // 4 if four else unit
    pieces: tl.constexpr = (4 if four else 1) // scales
    gain = tl.full((64,), 1.0, tl.float32)
    if gains is not None:
        gain = tl.load(gains + kept)
    zero, shift = tl.full((64,), 8.0 if kind == "int4" else 0.0, tl.float32), tl.zeros_like(gain)
    if form != "row":
        line = (place * scales + g) // (2 if form == "pairs" or form == "halves" else 1)
        word = tl.load(words + line.to(tl.int64) * spread + kept)
        if form == "float":
            gain *= word.to(tl.float32, bitcast=True)
        elif form == "pairs" or form == "halves":
            gain *= tl.where((place * scales + g) % 2 == 1, _upper(word, half), _lower(word, half))
        else:
            if form == "zeros":
                zero = _upper(word, half)
            else:
                zero, shift = tl.zeros_like(gain), _upper(word, half) * gain
            gain *= _lower(word, half)
    rk = tl.arange(0, size)
    if four:
        at = codes + (kept // 64).to(tl.int64)[:, None] * (padded * 16) + (kept % 64 * size)[:, None] + place * 64 * size
    else:
        at = codes + kept.to(tl.int64)[:, None] * padded + place * unit
    code = tl.load(at + rk[None, :])
    for i in tl.static_range(pieces):
        if four:
            one = (code >> (4 * (g * pieces + i))) & 15
            if kind == "table4":
                number = tl.load(table + one)
            elif kind == "e2m1":
                number = _numbers(_bits(one, kind, tl.float32), 0.0, kind, tl.float32)
            else:
                number = one.to(tl.float32)
        else:
            number = code.to(tl.float32)
        number = (number - zero[:, None]) * gain[:, None] + shift[:, None]
        column = place * unit + (g * pieces + i) * size + rk
        tl.store(out + rn.to(tl.int64)[:, None] * k + column[None, :], number.to(out.dtype.element_ty),
                 mask=(rn < n)[:, None] & (column < k)[None, :])


@triton.jit(do_not_specialize=("stride",))
def quantize(x, codes, scales, fixed, stride, k, block: tl.constexpr, span: tl.constexpr, align: tl.constexpr,
             most: tl.constexpr, linked: tl.constexpr):
    """codes [rows, k] and scales [programs of a row, rows] of x: see `rounded`. A program takes `span` columns of a row."""
    enter(linked)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * span + tl.arange(0, block)
    inside = (tl.arange(0, block) < span) & (column < k)
    v = tl.load(x + row * (stride.to(tl.int64) * align) + column, mask=inside, other=0.0).to(tl.float32)
    code, scale = rounded(v, fixed, 0, most, codes.dtype.element_ty)
    tl.store(scales + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + row, scale)
    tl.store(codes + row * k + column, code, mask=inside)
