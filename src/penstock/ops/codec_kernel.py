"""The Triton kernel that writes codes to the KV cache, and the decoding that attention has in its inner loop."""

import triton
import triton.language as tl

from penstock.ops.coded_kernels import looked_up, quarters
from penstock.ops.linked_kernel import enter


@triton.jit
def element(column, size: tl.constexpr, form: tl.constexpr):
    """The element of a vector that is in a column of a decoded tile: both codes of a byte come one after the other."""
    return column // 2 + column % 2 * (size // 2) if form % 32 == 4 else column


@triton.jit
def _numbers(code, table, at_scale, place, kept, form: tl.constexpr, dtype: tl.constexpr):
    """Codes as numbers in units of the vector's scale or, where groups have scales of their own, as the elements."""
    x = tl.load(table + code.to(tl.int32)) if form // 32 % 2 else code.to(tl.float32) if form // 128 % 2 else code
    if form // 128 % 2:
        x -= 8.0
    group: tl.constexpr = form // 512
    if group > 0:
        x = x.to(tl.float32) * tl.load(at_scale[:, None] + (place // group)[None, :], mask=kept, other=0.0).to(tl.float32)
    return x.to(dtype)


@triton.jit
def decoded(codes, at, scales, at_scale, table, kept, size: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
            form: tl.constexpr, dtype: tl.constexpr):
    """Vectors at codes + at [N] as (tile [N, block_d], scales [N], shifts [N]): vector = tile * scale + shift, its columns in
    the order of `element`. Vectors that are not kept are read as codes and scales of 0."""
    bits: tl.constexpr = form % 32
    if bits == 4:
        place = tl.arange(0, block_d // 2)
        mask = kept[:, None] & (place < size // 2)[None, :]
        byte = tl.load(codes + at[:, None] + place[None, :], mask=mask, other=0)
        low = _numbers(byte & 15, table, scales + at_scale, place, mask, form, dtype)
        high = _numbers(byte >> 4, table, scales + at_scale, place + size // 2, mask, form, dtype)
        tile = tl.reshape(tl.join(low, high), (block_n, block_d))
    else:
        place = tl.arange(0, block_d)
        mask = kept[:, None] & (place < size)[None, :]
        if bits == 3:
            first = place * 3 // 8
            byte = tl.load(codes + at[:, None] + first[None, :], mask=mask, other=0).to(tl.int32)
            crossing = mask & (place % 8 < 6)[None, :]
            after = tl.load(codes + at[:, None] + first[None, :] + 1, mask=crossing, other=0).to(tl.int32)
            code = ((byte | after << 8) >> (place * 3 % 8)[None, :]) & 7
        else:
            code = tl.load(codes + at[:, None] + place[None, :], mask=mask, other=0.0)
        tile = _numbers(code, table, scales + at_scale, place, mask, form, dtype)
    gain = tl.full((block_n,), 1.0, tl.float32)
    shift = tl.zeros((block_n,), tl.float32)
    if form // 256 % 2 and form // 512 == 0:
        gain = tl.load(scales + at_scale, mask=kept, other=0.0).to(tl.float32)
        if form // 64 % 2:
            shift = tl.load(scales + at_scale + 1, mask=kept, other=0.0).to(tl.float32)
    return tile, gain, shift


@triton.jit
def halved(codes, at, kept, size: tl.constexpr, block_d: tl.constexpr, fast: tl.constexpr):
    """Vectors of 8-bit codes at codes + at [N] as two tiles [N, block_d / 2] of float16, in units of the scale: their even
    elements, their odd ones. Strides are multiples of 16 bytes.

    Codes are loaded as words of two: shared memory has no transposed reads of single bytes, which values need."""
    kind: tl.constexpr = codes.dtype.element_ty
    place = tl.arange(0, block_d // 2)
    words = codes.to(tl.pointer_type(tl.uint16), bitcast=True) + tl.multiple_of(at // 2, 8)[:, None]
    word = tl.load(words + place[None, :], mask=kept[:, None] & (place < size // 2)[None, :], other=0)
    if fast and kind == tl.float8e4nv:
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }", "=r,=r,r", [word], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2)
    elif fast and kind == tl.float8e5:
        even, odd = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xFF00FF00;", "=&r,=r,r", [word], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2)
    elif fast and kind == tl.int8:
        # The bits of 1024 + (code + 128), of which the float subtraction is exact.
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 t; xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, 0x64646464, 0x4240; "
            "prmt.b32 $1, t, 0x64646464, 0x4341; }", "=&r,=&r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        even, odd = even - 1152.0, odd - 1152.0
    else:
        even = (word & 255).to(tl.uint8).to(kind, bitcast=True).to(tl.float16)
        odd = (word >> 8).to(tl.uint8).to(kind, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def _quartered(codes, at, kept, table, table_words, size: tl.constexpr, block_d: tl.constexpr, form: tl.constexpr,
               fast: tl.constexpr):
    """The same for codes of 4 bits: four tiles [N, block_d / 4], of the even elements of the first half, of the second, and
    the odd elements of both."""
    place = tl.arange(0, block_d // 4)
    words = codes.to(tl.pointer_type(tl.uint16), bitcast=True) + tl.multiple_of(at // 2, 8)[:, None]
    word = tl.load(words + place[None, :], mask=kept[:, None] & (place < size // 4)[None, :], other=0)
    if form // 32 % 2:
        a, b, c, d = looked_up(word, table, table_words, tl.float16, fast)
    else:
        a, b, c, d = quarters(word, "int4", tl.float16, fast)
        base: tl.constexpr = 1032.0 if form // 128 % 2 else 1024.0
        a, b, c, d = a - base, b - base, c - base, d - base
    return a, b, c, d


@triton.jit
def taken_apart(codes, at, scales, at_scale, kept, table, table_words, size: tl.constexpr, block_d: tl.constexpr,
                form: tl.constexpr, fast: tl.constexpr):
    """Vectors at codes + at [N] as 2 (8 bits) or 4 (4 bits) tiles of float16, to whose columns `pieces` cuts other vectors;
    also their scales [N] and shifts [N], which are 1 and 0 where the tiles have them already."""
    count: tl.constexpr = 4 if form % 32 == 4 else 2
    group: tl.constexpr = form // 512
    if count == 4:
        tiles = _quartered(codes, at, kept, table, table_words, size, block_d, form, fast)
    else:
        tiles = halved(codes, at, kept, size, block_d, fast)
    gain = tl.full(kept.shape, 1.0, tl.float32)
    shift = tl.zeros(kept.shape, tl.float32)
    if group > 0:
        first = tl.arange(0, block_d // count) * 2
        mask = kept[:, None] & (first < size * 2 // count)[None, :]
        low = tl.load(scales + at_scale[:, None] + (first // group)[None, :], mask=mask, other=0.0).to(tl.float16)
        high = low
        if count == 4:
            second = (first + size // 2) // group
            high = tl.load(scales + at_scale[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float16)
        scaled = ()
        for i in tl.static_range(count):
            scaled = scaled + (tiles[i] * (low if i % 2 == 0 else high),)  # noqa: RUF005
        tiles = scaled
    elif form // 256 % 2:
        gain = tl.load(scales + at_scale, mask=kept, other=0.0).to(tl.float32)
        if form // 64 % 2:
            shift = tl.load(scales + at_scale + 1, mask=kept, other=0.0).to(tl.float32)
    return tiles, gain, shift


@triton.jit
def pieces(x, form: tl.constexpr):
    """Vectors x [N, D], columns in the order of `element`, cut as `taken_apart` does."""
    if form % 32 == 4:
        low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
        a, c = tl.split(low)
        b, d = tl.split(high)
        found = (a, b, c, d)
    else:
        found = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return found


@triton.jit
def together(x, form: tl.constexpr):
    """The inverse of `pieces`."""
    rows: tl.constexpr = x[0].shape[0]
    if form % 32 == 4:
        whole = tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (rows, x[0].shape[1] * 4))
    else:
        whole = tl.reshape(tl.join(x[0], x[1]), (rows, x[0].shape[1] * 2))
    return whole


@triton.jit
def _rounded(x):
    """To the nearest integer, halves to even: 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _codes(x, table, peak: tl.constexpr, form: tl.constexpr, rule: tl.constexpr, signed: tl.constexpr, gguf: tl.constexpr):
    """Numbers in units of their scale as integer codes."""
    bits: tl.constexpr = form % 32
    half: tl.constexpr = 1 << (bits - 1)
    if form // 32 % 2:
        found = tl.zeros(x.shape, tl.int32)
        size = tl.abs(x)
        for i in tl.static_range(half - 1):
            middle = (tl.load(table + i) + tl.load(table + i + 1)) * 0.5
            found += (size >= middle if i % 2 else size > middle).to(tl.int32)
        found += (x < 0).to(tl.int32) * half
    elif rule == "signed":
        found = tl.minimum(tl.maximum(x + 8.5, 0.0), peak).to(tl.int32)
    else:
        size = tl.abs(x)
        whole = tl.where(x < 0, -tl.floor(size + 0.5), tl.floor(size + 0.5)) if gguf else _rounded(x)
        found = tl.minimum(tl.maximum(whole, -peak if signed else 0.0), peak).to(tl.int32)
    return found


@triton.jit
def _encode(x, codes, scales, table, fixed, kept, stored, size: tl.constexpr, form: tl.constexpr, rule: tl.constexpr,
            peak: tl.constexpr, least: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr, gguf: tl.constexpr):
    """Encodes the vector at x into codes and scales. A tile's rows are the codes of a word, its columns the words."""
    bits: tl.constexpr = form % 32
    group: tl.constexpr = form // 512
    words: tl.constexpr = size // tall
    signed: tl.constexpr = codes.dtype.element_ty == tl.int8
    row, column = tl.arange(0, tall)[:, None], tl.arange(0, wide)[None, :]
    place = column * tall + row if bits == 3 else row * words + column
    inside = kept & (column < words)
    number = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if rule == "fixed":
        y = number / fixed
    else:
        y = number
        for g in tl.static_range(size // group if group > 0 else 1):
            own = inside & (place // group == g) if group > 0 else inside
            top = tl.max(tl.max(tl.where(own, tl.abs(number), 0.0), 1), 0)
            if rule == "range":
                low = tl.min(tl.min(tl.where(own, number, float("inf")), 1), 0).to(scales.dtype.element_ty)
                tl.store(scales + 1, low, mask=stored)
                y = number - low.to(tl.float32)
                top = tl.max(tl.max(tl.where(own, y, 0.0), 1), 0)
            elif rule == "norm":
                top = tl.sqrt(tl.sum(tl.sum(tl.where(own, number * number, 0.0), 1), 0) / size) * peak
            if rule == "signed":
                # Of two numbers of largest size the first decides, as the reference has it.
                first = tl.min(tl.min(tl.where(own & (tl.abs(number) == top), place, size), 1), 0)
                scale = tl.sum(tl.sum(tl.where(own & (place == first), number, 0.0), 1), 0) * -peak / 8.0 / peak
            else:
                scale = top / peak
            if not gguf:
                scale = tl.maximum(scale, least)
            narrow = scale.to(scales.dtype.element_ty)
            if not gguf:
                scale = narrow.to(tl.float32)
            inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
            y = tl.where(own, y * inverse, y)
            if rule == "norm":
                value = tl.load(table + _codes(y, table, peak, form, rule, signed, gguf))
                length = tl.sqrt(tl.sum(tl.sum(tl.where(own, value * value, 0.0), 1), 0))
                norm = tl.sqrt(tl.sum(tl.sum(tl.where(own, number * number, 0.0), 1), 0))
                narrow = (norm / length).to(scales.dtype.element_ty)
            tl.store(scales + g * (2 if rule == "range" else 1), narrow, mask=stored)
    if bits == 8:
        if codes.dtype.element_ty == tl.int8:
            found = _codes(y, table, peak, form, rule, signed, gguf)
        else:
            found = tl.minimum(tl.maximum(y, -peak), peak)
        tl.store(codes + place, found.to(codes.dtype.element_ty), mask=inside & stored)
    else:
        code = tl.where(inside, _codes(y, table, peak, form, rule, signed, gguf), 0)
        word = tl.sum(code << (bits * row), 0)
        at = tl.arange(0, wide)
        for i in tl.static_range(1 if bits == 4 else 3):
            tl.store(codes + at * (1 if bits == 4 else 3) + i, ((word >> (8 * i)) & 255).to(tl.uint8),
                     mask=stored & (at < words))


@triton.jit
def cache_write(k, v, slots, k_cache, v_cache, k_scales, v_scales, k_table, v_table, k_fixed, v_fixed, k_token, k_head, v_token,
                v_head, k_page, k_row, k_slot, v_page, v_row, v_slot, ks_page, ks_row, ks_slot, vs_page, vs_row, vs_slot,
                size: tl.constexpr, page: tl.constexpr, k_form: tl.constexpr, v_form: tl.constexpr, k_rule: tl.constexpr,
                v_rule: tl.constexpr, k_peak: tl.constexpr, v_peak: tl.constexpr, k_least: tl.constexpr, v_least: tl.constexpr,
                k_tall: tl.constexpr, v_tall: tl.constexpr, k_wide: tl.constexpr, v_wide: tl.constexpr, gguf: tl.constexpr,
                linked: tl.constexpr):
    """Grid (tokens, KV heads)."""
    enter(linked)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    stored = slot >= 0
    place, inside = slot // page, slot % page
    _encode(k + token * k_token + head * k_head, k_cache + place * k_page + head * k_row + inside * k_slot,
            k_scales + place * ks_page + head * ks_row + inside * ks_slot, k_table, k_fixed, stored, stored, size, k_form,
            k_rule, k_peak, k_least, k_tall, k_wide, gguf)
    _encode(v + token * v_token + head * v_head, v_cache + place * v_page + head * v_row + inside * v_slot,
            v_scales + place * vs_page + head * vs_row + inside * vs_slot, v_table, v_fixed, stored, stored, size, v_form,
            v_rule, v_peak, v_least, v_tall, v_wide, gguf)
