"""The Triton kernels of ops/rows_triton.py. Some of their arguments may be None, and then have no code."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.activation_kernel import store_rounded
from penstock.ops.linked_kernel import await_previous, enter, follow, launch


@triton.jit
def gather(ids, table, out, width: tl.constexpr, block: tl.constexpr):
    """out [T, width] = table[ids]. A program copies a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    found = tl.load(ids + row).to(tl.int64)
    tl.store(out + row * width + column, tl.load(table + found * width + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=("rows", "x_stride", "residual_stride"))
def normalise(x, residual, weight, bias, out, codes, scales, fixed, rows, x_stride, residual_stride, eps, offset,
              width: tl.constexpr, block: tl.constexpr, tall: tl.constexpr, align: tl.constexpr, centred: tl.constexpr,
              parts: tl.constexpr, span: tl.constexpr, most: tl.constexpr, linked: tl.constexpr):
    """out [rows, width] = norm(x + residual) * (offset + weight) + bias; the sum, rounded, replaces residual. x has `parts`
    rows for each, whose float32 sum, in order, is rounded first, as in ops/experts_kernels.py::add_up. With a `span` that
    divides the block also out's codes, see ops/activation_kernel.py::store_rounded.

    Residual and bias may be None. A program takes `tall` rows, each of which fits in a block. Strides are in units of `align`
    elements, so that loads can be vectorised."""
    row = (tl.program_id(0) * tall + tl.arange(0, tall)).to(tl.int64)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < width)
    launch(linked)
    w = 1.0 if weight is None else tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    await_previous(linked)
    line = x_stride.to(tl.int64) * align
    v = tl.load(x + row * parts * line + column, mask=inside, other=0.0)
    if parts > 1:
        total = v.to(tl.float32)
        for i in tl.static_range(1, parts):
            total += tl.load(x + (row * parts + i) * line + column, mask=inside, other=0.0).to(tl.float32)
        v = total.to(v.dtype)
    if residual is not None:
        at = residual + row * (residual_stride.to(tl.int64) * align) + column
        v = (v.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(at, v, mask=inside)
    v = v.to(tl.float32)
    if centred:
        v = tl.where(inside, v - tl.sum(v, 1)[:, None] / width, 0.0)
    y = v * tl.rsqrt(tl.sum(v * v, 1)[:, None] / width + eps) * w
    if bias is not None:
        y += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + row * width + column, y, mask=inside)
    if span > 0:
        store_rounded(tl.where(inside, y, 0.0), row, column, inside, rows, width, codes, scales, fixed, span, most)


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


@triton.jit
def _turn_latent(x, out, cos, sin, kept, half: tl.constexpr, near: tl.constexpr, interleaved: tl.constexpr):
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
        _turn_latent(q + token * q_token + head * q_head + start, out + token * out_token + head * out_head + width, c, s,
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
            _turn_latent(from_ + width + one, to + width + one, c, s, one == 0, half, near, interleaved)


@triton.jit
def head_linear(x, weight, out, tokens, x_token, x_head, w_head, w_k, w_n, out_token, out_head, n: tl.constexpr,
                k: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, ahead: tl.constexpr,
                linked: tl.constexpr):
    """Grid: (blocks of tokens, heads, blocks of columns). The first `ahead` blocks of the weight, which k must have in whole,
    are loaded before the wait for the kernel that writes x."""
    launch(linked)
    row = tl.program_id(0).to(tl.int64) * block_m + tl.arange(0, block_m)
    head = tl.program_id(1).to(tl.int64)
    column, d = tl.program_id(2) * block_n + tl.arange(0, block_n), tl.arange(0, block_k)
    x += row[:, None] * x_token + head * x_head
    weight += head * w_head + column[None, :] * w_n
    here, across = (row < tokens)[:, None], (column < n)[None, :]
    blocks = ()
    for i in tl.static_range(ahead):
        blocks = blocks + (tl.load(weight + (i * block_k + d)[:, None] * w_k, mask=across, other=0.0),)  # noqa: RUF005
    await_previous(linked)
    acc = tl.zeros((block_m, block_n), tl.float32)
    for i in tl.static_range(ahead):
        left = tl.load(x + (i * block_k + d)[None, :], mask=here, other=0.0)
        acc = tl.dot(left, blocks[i], acc, input_precision="ieee")
    for first in range(ahead * block_k, k, block_k):
        at = first + d
        left = tl.load(x + at[None, :], mask=here & (at < k)[None, :], other=0.0)
        right = tl.load(weight + at[:, None] * w_k, mask=(at < k)[:, None] & across, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(out + row[:, None] * out_token + head * out_head + column[None, :], acc.to(out.dtype.element_ty),
             mask=here & across)


@triton.jit
def _best_groups(ranked, size: tl.constexpr, groups: tl.constexpr, picked: tl.constexpr, two: tl.constexpr):
    """`ranked` with -inf for experts outside of the best groups, which are chosen one by one."""
    grouped = tl.reshape(ranked, (groups, size))
    worth = tl.max(grouped, 1)
    if two:
        first = tl.argmax(grouped, 1)
        worth += tl.max(tl.where(tl.arange(0, size)[None, :] == first[:, None], float("-inf"), grouped), 1)
    number = tl.arange(0, groups)
    allowed = number < 0
    for _ in tl.static_range(picked):
        group = tl.argmax(tl.where(allowed, float("-inf"), worth), 0)
        allowed = allowed | (number == group)
    return tl.reshape(tl.where(allowed[:, None], grouped, float("-inf")), (groups * size,))


@triton.jit
def route(logits, correction, picks, weights, counts, live, experts: tl.constexpr, block: tl.constexpr, count: tl.constexpr,
          slots: tl.constexpr, score: tl.constexpr, normalise: tl.constexpr, scale: tl.constexpr, least: tl.constexpr,
          groups: tl.constexpr, picked: tl.constexpr, two: tl.constexpr, shared: tl.constexpr, linked: tl.constexpr):
    """A program routes a token: `count` times the best expert that is left, the lowest index of equals; then all `shared`."""
    follow(linked)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    inside = expert < experts
    x = tl.load(logits + token * experts + expert, mask=inside, other=float("-inf"))
    scores = x
    if score == "softmax":
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    elif score == "sigmoid":
        scores = tl.sigmoid(x)
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + expert, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    if groups > 1:
        ranked = _best_groups(ranked, block // groups, groups, picked, two)
    slot = tl.arange(0, slots)
    found = tl.zeros((slots,), tl.int32)
    value = tl.full((slots,), float("-inf") if score == "softmax_after" else 0.0, tl.float32)
    # Numbers are compared as integers in their order, of which a warp finds the greatest in one instruction.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    left = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    for i in tl.static_range(count):
        top = tl.max(left, 0)
        best = tl.min(tl.where(left == top, expert, block), 0)
        if correction is not None or groups > 1:
            most = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        else:
            most = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        found = tl.where(slot == i, best, found)
        value = tl.where(slot == i, most, value)
        left = tl.where(expert == best, -0x80000000, left)
    if score == "softmax_after":
        value = tl.exp(value - tl.max(value, 0))
        value = value / tl.sum(value, 0)
    elif score == "sigmoid_after":
        value = tl.sigmoid(value)
    if normalise:
        value = value / tl.maximum(tl.sum(tl.where(slot < count, value, 0.0), 0), least)
    at = token * (count + shared) + slot
    tl.store(picks + at, tl.where(slot < count, found, experts - count + slot), mask=slot < count + shared)
    tl.store(weights + at, tl.where(slot < count, value * scale, 1.0), mask=slot < count + shared)
    if counts is not None:
        there = slot < count
        if live is not None:
            there = there & (token < tl.load(live))
        tl.atomic_add(counts + found, tl.full((slots,), 1, tl.int64), mask=there, sem="relaxed")


@triton.jit(do_not_specialize=("size",))
def bring(host, there, size, block: tl.constexpr):
    """there [size] = host [size], which the host may have changed since the last kernel."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(there + at, tl.load(host + at, mask=at < size, cache_modifier=".cv"), mask=at < size)


@triton.jit(do_not_specialize=("segments", "tokens", "columns", "halvings", "pieces", "known_row", "table_row", "cut_row"))
def build_step(known, row, start, query_start, tables, tokens_out, positions_out, tables_out, slots_out, segments, tokens,
               columns, halvings, pieces, known_row, table_row, cut_row, page: tl.constexpr, block: tl.constexpr,
               wide: tl.constexpr, linked: tl.constexpr):
    """Programs of `block` tokens each, followed by `pieces` programs per segment, each for `wide` columns of its block tables.

    tables, tables_out and slots_out are tuples, one entry a cache group. 2^halvings > segments."""
    enter(linked)
    first = tl.cdiv(tokens, block)
    if tl.program_id(0) < first:
        at = tl.program_id(0) * block + tl.arange(0, block)
        wanted, inside = at < tokens, at < tl.load(query_start + segments)
        low = tl.zeros((block,), tl.int32)
        high = low + segments
        for _ in range(halvings):  # the last segment that begins at or before the token; empty ones before it begin there too
            middle = (low + high) // 2
            before = tl.load(query_start + middle) <= at
            low, high = tl.where(before, middle, low), tl.where(before, high, middle)
        mine = tl.load(row + low).to(tl.int64)
        position = tl.where(inside, tl.load(start + low) + at - tl.load(query_start + low), 0)
        token = tl.load(known + mine * known_row + position, mask=inside, other=0)
        tl.store(tokens_out + at, token, mask=wanted)
        tl.store(positions_out + at, position, mask=wanted)
        for g in tl.static_range(len(tables)):
            index = tl.load(tables[g] + mine * table_row + position // page, mask=inside, other=0).to(tl.int64)
            slot = tl.where(inside, index * page + position % page, -1)
            tl.store(slots_out[g] + at, slot, mask=wanted)
    else:
        piece = tl.program_id(0) - first
        segment = piece // pieces
        column = piece % pieces * wide + tl.arange(0, wide)
        count = tl.load(query_start + segment + 1) - tl.load(query_start + segment)
        used = tl.minimum(tl.cdiv(tl.load(start + segment) + count, page), columns)
        whose = tl.load(row + segment).to(tl.int64)
        if piece % pieces * wide < used:
            for g in tl.static_range(len(tables)):
                pages = tl.load(tables[g] + whose * table_row + column, mask=column < used)
                tl.store(tables_out[g] + segment.to(tl.int64) * cut_row + column, pages, mask=column < used)


@triton.jit
def _by(segment, inside, row, start, slack, behind, left, length, first: tl.constexpr):
    """By how many positions these segments move."""
    passes = tl.load(left + segment, mask=inside, other=0)
    by = (passes > 1).to(tl.int32)
    if first:
        known = tl.load(length + tl.load(row + segment, mask=inside, other=0), mask=inside, other=0)
        place = known - 1 - tl.load(behind + segment, mask=inside, other=0)
        unsure = tl.load(slack + segment, mask=inside, other=0) > 0
        by = tl.where(unsure, place - tl.load(start + segment, mask=inside, other=0), tl.minimum(1 - passes, 0))
    return by


@triton.jit(do_not_specialize=("items", "lines", "segments"))
def move_step(work, row, start, context, slack, behind, left, line_row, line_position, line_segment, length, items, lines,
              segments, first: tl.constexpr, last: tl.constexpr, block: tl.constexpr, linked: tl.constexpr,
              fields: tl.constexpr, place: tl.constexpr, whose: tl.constexpr, queries: tl.constexpr, listed: tl.constexpr):
    """As ops/step.py has it; `first`: by `length`. The last launch for a step moves all but the work items, too."""
    enter(linked)
    for begin in range(0, items, block):
        at = begin + tl.arange(0, block)
        inside = at < items
        one = work + at * fields
        by = _by(tl.load(one + whose, mask=inside, other=0), inside, row, start, slack, behind, left, length, first)
        own = (tl.load(one + listed, mask=inside, other=0) == 0) | (tl.load(one + queries, mask=inside, other=0) == 1)
        tl.store(one + place, tl.load(one + place, mask=inside, other=0) + tl.where(own, by, 0), mask=inside)
    if last:
        for begin in range(0, lines, block):
            at = begin + tl.arange(0, block)
            inside = at < lines
            segment = tl.load(line_segment + at, mask=inside, other=0)
            by = _by(segment, inside, row, start, slack, behind, left, length, first)
            tl.store(line_position + at, tl.load(line_position + at, mask=inside, other=0) + by, mask=inside)
            if not first:
                tl.store(line_row + at, tl.full((block,), -1, tl.int32), mask=inside & (by == 0))
        # The places of segments change once nothing reads them any more.
        tl.debug_barrier()
        for begin in range(0, segments, block):
            at = begin + tl.arange(0, block)
            inside = at < segments
            by = _by(at, inside, row, start, slack, behind, left, length, first)
            tl.store(start + at, tl.load(start + at, mask=inside, other=0) + by, mask=inside)
            tl.store(context + at, tl.load(context + at, mask=inside, other=0) + by, mask=inside)
            if not first:
                tl.store(left + at, tl.load(left + at, mask=inside, other=0) - 1, mask=inside)
