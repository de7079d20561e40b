"""Paged attention for NVIDIA GPUs: one Triton kernel for decode, prefill and the reduction of split-K partial results.

A program computes one item (made on the host by `attention_work.py`) for one KV head: a tile of queries of one segment, or of
several segments with a shared prefix, with all query heads of the KV head, over a range of keys. `attention_triton.py` launches
it.

Draft trees have one more mask: from a segment's origin on, bits of each query select the keys that it sees."""

import triton
import triton.language as tl

from penstock.ops.codec_kernel import decoded, element, pieces, taken_apart, together
from penstock.ops.coded_kernels import bytewise
from penstock.ops.linked_kernel import enter

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(acc, peak, total, more_acc, more_peak, more_total):
    """Merges two partial softmax results (weighted sum of values, maximum score, sum of weights); scores are in base 2.

    Explicit FMAs fix the rounding, so that merging the same parts always gives the same bits."""
    top = tl.maximum(peak, more_peak)
    shift = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(peak - shift), tl.exp2(more_peak - shift)
    total = tl.fma(more_total, new, total * old)
    acc = tl.fma(more_acc, tl.broadcast_to(new[:, None], acc.shape), acc * old[:, None])
    return acc, top, total


@triton.jit
def _halves(x):
    """Both halves of x's columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _edited(scores, key, position, own, scale, softcap, window, highest, group: tl.constexpr, windowed: tl.constexpr,
            capped: tl.constexpr, sloped: tl.constexpr, masked: tl.constexpr):
    """Products of queries and keys [rows, keys] as scores, -inf where a query may not see a key (masked). If neither capped nor
    sloped, they still lack the scale. `own`: (slope, bits, origin) of the rows; sloped: 1 with slopes, 2 with bits, or both."""
    rows = tl.arange(0, scores.shape[0]) // group
    slope, bits, origin = own
    if capped:
        x = scores * (scale / softcap)
        small = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
        scores = (1.0 - small) / (1.0 + small) * tl.where(x < 0, -softcap * _LOG2E, softcap * _LOG2E)
    elif sloped % 2:
        away = key[None] - (position + rows)[:, None]
        scores = (scores * scale + slope[:, None] * away.to(tl.float32)) * _LOG2E
    if masked:
        mine = (position + rows)[:, None]
        seen = (key[None] <= mine) & (key < highest)[None]
        if windowed:
            seen = seen & (key[None] > mine - window)
        if sloped // 2:
            at = tl.minimum(tl.maximum(key - origin, 0), 63).to(tl.int64)
            seen = seen & ((key < origin)[None] | (((bits[:, None] >> at[None]) & 1) > 0))
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _scan_words(q, own, cache, start, stop, bounds, scale, softcap, window, group: tl.constexpr, size: tl.constexpr,
                page_size: tl.constexpr, block_n: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
                sloped: tl.constexpr, k_form: tl.constexpr, v_form: tl.constexpr, fast: tl.constexpr):
    """A masked `_scan` over codes of 8 or 4 bits: words of 16 bits become operands of float16, one for each code of a word."""
    k_cache, v_cache, table, page_stride, slot_stride, beside = cache
    lowest, highest, position = bounds
    block_m: tl.constexpr = q.shape[0]
    block_d: tl.constexpr = q.shape[1]
    count: tl.constexpr = 4 if k_form % 32 == 4 else 2
    offset = tl.arange(0, block_n)
    narrow_q = q.to(tl.float16)
    q_parts = pieces(narrow_q, k_form)
    sums = tl.sum(narrow_q.to(tl.float32), 1)
    acc = ()
    for _ in tl.static_range(count):
        acc = acc + (tl.zeros((block_m, block_d // count), tl.float32),)  # noqa: RUF005 (Triton has no starred expressions)
    peak = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    shifts = tl.zeros((block_m,), tl.float32)
    k_scales, v_scales, k_table, v_table, ks_page, ks_slot, vs_page, vs_slot, lift = beside
    k_words = (k_table,)
    v_words = (v_table,)
    if fast and k_form // 32 % 2:
        k_words = bytewise(k_table)
    if fast and v_form // 32 % 2:
        v_words = bytewise(v_table)
    page = tl.load(table + (start + offset) // page_size, mask=(start + offset >= lowest) & (start + offset < highest), other=0)
    for first in range(start, stop, block_n):
        key = first + offset
        here, inside = page.to(tl.int64), (key % page_size).to(tl.int64)
        page = tl.load(table + first // page_size + (first % page_size + offset + block_n) // page_size,
                       mask=key + block_n < tl.minimum(stop, highest), other=0)
        live, at = (key >= lowest) & (key < highest), here * page_stride + inside * slot_stride
        k, k_gain, k_shift = taken_apart(k_cache, at, k_scales, here * ks_page + inside * ks_slot, live, k_table, k_words, size,
                                         block_d, k_form, fast)
        v, v_gain, v_shift = taken_apart(v_cache, at, v_scales, here * vs_page + inside * vs_slot, live, v_table, v_words, size,
                                         block_d, v_form, fast)
        scores = tl.dot(q_parts[0], tl.trans(k[0]))
        for i in tl.static_range(1, count):
            scores = tl.dot(q_parts[i], tl.trans(k[i]), scores)
        if k_form // 256 % 2 and k_form // 512 == 0:
            scores *= k_gain[None, :]
        if k_form // 64 % 2:
            scores += sums[:, None] * k_shift[None, :]
        factor = 1.0 if capped or sloped % 2 else scale * _LOG2E
        scores = _edited(scores, key, position, own, scale, softcap, window, highest, group, windowed, capped, sloped, True)
        top = tl.maximum(peak, tl.max(scores, 1) * factor)
        shift = tl.where(top == float("-inf"), 0.0, top)
        old = tl.exp2(peak - shift)
        factors = tl.full(scores.shape, factor, tl.float32)
        weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(-shift[:, None], scores.shape)))
        total = tl.fma(total, old, tl.sum(weights, 1))
        if v_form // 64 % 2:
            shifts = tl.fma(shifts, old, tl.sum(weights * (v_shift * lift)[None, :], 1))
        if v_form // 256 % 2 and v_form // 512 == 0:
            weights *= (v_gain * lift)[None, :]
        else:
            weights *= lift
        narrow = weights.to(tl.float16)
        more = ()
        for i in tl.static_range(count):
            more = more + (tl.dot(narrow, v[i], acc[i] * old[:, None]),)  # noqa: RUF005
        acc = more
        peak = top
    return together(acc, v_form) + shifts[:, None], peak, total


@triton.jit
def _scan(q, q_tail, own, sums_so_far, begin, unit, cache, start, stop, bounds, scale, softcap, window, group: tl.constexpr,
          size: tl.constexpr, tail: tl.constexpr, page_size: tl.constexpr, block_n: tl.constexpr, windowed: tl.constexpr,
          capped: tl.constexpr, sloped: tl.constexpr, k_form: tl.constexpr, v_form: tl.constexpr, masked: tl.constexpr,
          closing: tl.constexpr):
    """Attends to keys [start, stop) in blocks, of which those in `bounds` may be read. masked: some queries may not see some
    keys of the range. closing (batch-invariant mode): at the end of each unit of keys the running sums are merged into the
    closed sums, which follow them in `sums_so_far`, and restarted.
    tail: keys have so many more elements, and their first `size` are the values: one load serves both, for few queries one of
    each half (decision 0292). k_form, v_form: the cache holds codes. Scales of whole keys multiply scores, those of values the
    weights; `beside` has them, tables, strides."""
    acc, peak, total, closed_acc, closed_peak, closed_total = sums_so_far
    k_cache, v_cache, table, page_stride, slot_stride, beside = cache
    lowest, highest, position = bounds
    block_m: tl.constexpr = q.shape[0]
    block_d: tl.constexpr = q.shape[1]
    block_t: tl.constexpr = q_tail.shape[1]
    offset, d = tl.arange(0, block_n), tl.arange(0, block_d)
    slots = (offset % page_size * slot_stride)[:, None]
    k_inside, v_inside = k_cache + slots + d[None], v_cache + slots + d[None]
    t = tl.arange(0, block_t)
    t_inside = k_cache + slots + size + t[None]
    halved: tl.constexpr = tail > 0 and k_form == 0 and size == block_d and block_m < 64 and masked and not closing
    half: tl.constexpr = block_d // 2
    if halved:
        k_inside = k_cache + slots + tl.arange(0, half)[None]
        q, second_q = _halves(q)
        acc, second_acc = _halves(acc)
    # A shift of a key adds itself times the sum of the query's elements to the score.
    sums = tl.sum(q.to(tl.float32), 1) if k_form // 64 % 2 else 0.0
    # Page ids are loaded one block ahead, so that the loads of keys and values do not wait for them.
    page = tl.load(table + (start + offset) // page_size, mask=(start + offset >= lowest) & (start + offset < highest), other=0)
    for first in range(start, stop, block_n):
        key = first + offset
        here = page.to(tl.int64)
        moved = 0 if block_n % page_size == 0 else (key % page_size - offset % page_size) * slot_stride
        jump = (here * page_stride + moved)[:, None]
        page = tl.load(table + first // page_size + (first % page_size + offset + block_n) // page_size,
                       mask=key + block_n < tl.minimum(stop, highest), other=0)
        if k_form > 0:
            k_scales, v_scales, k_table, v_table, ks_page, ks_slot, vs_page, vs_slot, lift = beside
            live, inside = (key >= lowest) & (key < highest), (key % page_size).to(tl.int64)
            at = here * page_stride + inside * slot_stride
            k, k_gain, k_shift = decoded(k_cache, at, k_scales, here * ks_page + inside * ks_slot, k_table, live, size, block_n,
                                         block_d, k_form, q.dtype)
            v, v_gain, v_shift = decoded(v_cache, at, v_scales, here * vs_page + inside * vs_slot, v_table, live, size, block_n,
                                         block_d, v_form, q.dtype)
        else:
            # Block table entries outside [lowest, highest) may be stale: neither they nor their pages may be read.
            wanted = ((key >= lowest) & (key < highest))[:, None] if masked else None
            if size < block_d:
                wanted = wanted & (d < size)[None] if masked else (d < size)[None]
            rest: tl.constexpr = 0.0 if masked or size < block_d else None
            k = tl.load(k_inside + jump, mask=wanted, other=rest)
            if halved:
                v = tl.load(k_inside + half + jump, mask=wanted, other=rest)
            else:
                v = k if tail > 0 else tl.load(v_inside + jump, mask=wanted, other=rest)
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if halved:  # subtracted, because Triton makes the first sum, if it is added, the start of the second, which then waits
            scores -= tl.dot(-second_q, tl.trans(v), input_precision="ieee")
        if k_form // 256 % 2 and k_form // 512 == 0:
            scores *= k_gain[None, :]
        if k_form // 64 % 2:
            scores += sums[:, None] * k_shift[None, :]
        if tail > 0:
            k_tail = tl.load(t_inside + jump, mask=((key >= lowest) & (key < highest))[:, None] & (t < tail)[None], other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail.to(q.dtype)), scores, input_precision="ieee")
        factor = 1.0 if capped or sloped % 2 else scale * _LOG2E
        scores = _edited(scores, key, position, own, scale, softcap, window, highest, group, windowed, capped, sloped, masked)
        full = (first % unit == 0) & (first > begin) if closing else False
        before = tl.where(full, float("-inf"), peak) if closing else peak
        top = tl.maximum(before, tl.max(scores, 1) * factor)
        shift = tl.where(top == float("-inf"), 0.0, top) if masked else top
        old = tl.exp2(before - shift)
        if closing and full:
            closed_acc, closed_peak, closed_total = _merge(closed_acc, closed_peak, closed_total, acc, peak, total)
            old = tl.zeros((block_m,), tl.float32)  # already 0; the assignment orders this after the scores
        factors = tl.full(scores.shape, factor, tl.float32)
        weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(-shift[:, None], scores.shape)))
        total = tl.fma(total, old, tl.sum(weights, 1))
        acc *= old[:, None]
        if v_form // 64 % 2:
            acc += tl.sum(weights * (v_shift * lift)[None, :], 1)[:, None]
        if v_form > 0:
            weights *= (v_gain * lift)[None, :]
        if halved:
            acc = tl.dot(weights.to(k.dtype), k, acc, input_precision="ieee")
            second_acc = tl.dot(weights.to(v.dtype), v, second_acc * old[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = top
    if halved:
        acc = tl.reshape(tl.permute(tl.join(acc, second_acc), (0, 2, 1)), (block_m, block_d))
    return acc, peak, total, closed_acc, closed_peak, closed_total


@triton.jit
def _attend(q, q_tail, own, cache, start, stop, unit, opened, closed, bounds, scale, softcap, window, group: tl.constexpr,
            size: tl.constexpr, tail: tl.constexpr, page_size: tl.constexpr, block_n: tl.constexpr, windowed: tl.constexpr,
            capped: tl.constexpr, sloped: tl.constexpr, k_form: tl.constexpr, v_form: tl.constexpr, edges: tl.constexpr,
            closing: tl.constexpr):
    """Returns a partial softmax result over keys [start, stop): weighted sum of values, maximum score, sum of weights.

    All queries of the tile see keys [opened, closed), whose bounds are multiples of the block; with `edges` these run unmasked.
    closing: the result is merged unit by unit, in order."""
    acc = tl.zeros(q.shape, tl.float32)
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    sums, begin = (acc, peak, total, acc, peak, total), start
    if edges:
        if windowed:
            sums = _scan(q, q_tail, own, sums, begin, unit, cache, start, tl.minimum(stop, opened), bounds, scale, softcap,
                         window, group, size, tail, page_size, block_n, windowed, capped, sloped, k_form, v_form, True, closing)
        sums = _scan(q, q_tail, own, sums, begin, unit, cache, tl.maximum(start, opened), tl.minimum(stop, closed), bounds,
                     scale, softcap, window, group, size, tail, page_size, block_n, windowed, capped, sloped, k_form, v_form,
                     False, closing)
        start = tl.maximum(start, closed)
    acc, peak, total, whole, whole_peak, whole_total = _scan(
        q, q_tail, own, sums, begin, unit, cache, start, stop, bounds, scale, softcap, window, group, size, tail, page_size,
        block_n, windowed, capped, sloped, k_form, v_form, True, closing)
    if closing:
        acc, peak, total = _merge(whole, whole_peak, whole_total, acc, peak, total)
    return acc, peak, total


@triton.jit
def _store_part(acc, peak, total, parts_acc, parts_sum, slot, queries, group: tl.constexpr):
    """Writes an item's part to scratch from `slot` on: per query one slot of `group` rows, with maximum scores and sums."""
    block_d: tl.constexpr = acc.shape[1]
    row = tl.arange(0, acc.shape[0])
    at = ((slot + row // group).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * group + row % group
    kept = row // group < queries
    tl.store(parts_acc + at[:, None] * block_d + tl.arange(0, block_d)[None], acc, mask=kept[:, None])
    tl.store(parts_sum + at * 2, peak, mask=kept)
    tl.store(parts_sum + at * 2 + 1, total, mask=kept)


@triton.jit
def _load_part(part, all_parts, group: tl.constexpr, block_m: tl.constexpr, block_d: tl.constexpr):
    """Reads a part that `_store_part` wrote, possibly on another multiprocessor: .cg bypasses the L1 cache.

    The first `parts` parts have a slot for each query of the tile; the own parts of each query follow."""
    parts_acc, parts_sum, first_slot, queries, parts, own_slot, own_parts = all_parts
    row = tl.arange(0, block_m)
    slot = tl.where(part < parts, first_slot + part * queries + row // group, own_slot + part - parts)
    kept = (row // group < queries) & (part < parts + own_parts)
    at = (slot.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * group + row % group
    acc = tl.load(parts_acc + at[:, None] * block_d + tl.arange(0, block_d)[None], mask=kept[:, None], other=0.0,
                  cache_modifier=".cg")
    peak = tl.load(parts_sum + at * 2, mask=kept, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(parts_sum + at * 2 + 1, mask=kept, other=0.0, cache_modifier=".cg")
    return acc, peak, total


@triton.jit
def _join(acc, peak, total, part, all_parts, group: tl.constexpr, count: tl.constexpr):
    """Merges `count` parts from `part` on, in order; all are loaded first. Parts beyond the last change nothing."""
    found = ()
    for i in tl.static_range(count):
        found = found + (_load_part(part + i, all_parts, group, acc.shape[0], acc.shape[1]),)  # noqa: RUF005
    for i in tl.static_range(count):
        acc, peak, total = _merge(acc, peak, total, *found[i])
    return acc, peak, total


@triton.jit
def _mate(mates, listed, query, queries, column: tl.constexpr, otherwise):
    """Returns a column of the query list for each row's `query`, in a tile listed from entry `listed` - 1 on; else `otherwise`.
    Columns: 0 the query's token, 1 the slot of its first own part, 2 the number of its own parts."""
    return tl.load(mates + (listed - 1 + query) * 3 + column, mask=(listed > 0) & (query < queries), other=otherwise)


@triton.jit
def _place(base, token_stride, head_stride, tile, first, queries, group: tl.constexpr, size: tl.constexpr,
           shared: tl.constexpr, block_m: tl.constexpr, block_d: tl.constexpr, form: tl.constexpr = 0):
    """Returns (head, mask, pointers) of a tile's rows from query `first` on, in q or out. Columns are in `form`'s order."""
    token, mates, listed = tile
    row, column = tl.arange(0, block_m), tl.arange(0, block_d)
    query = first + row // group
    tokens = token + query
    if shared:
        tokens = _mate(mates, listed, query, first + queries, 0, tokens)
    heads = tl.program_id(0) * group + row % group
    kept = (row // group < queries)[:, None] & (column < size)[None]
    place = tokens.to(tl.int64)[:, None] * token_stride + heads[:, None] * head_stride
    return heads, kept, base + place + element(column, size, form)[None]


@triton.jit
def _finish(acc, peak, total, out, logs, out_token, out_head, tile, first, queries, sinks, v_fixed, group: tl.constexpr,
            size: tl.constexpr, shared: tl.constexpr, sunk: tl.constexpr, v_form: tl.constexpr):
    """Divides by the sum of weights, sinks included, and writes the rows; with `logs` [tokens, heads], the natural logarithms
    of the sums too. v_fixed: the scale of all coded values."""
    block_m: tl.constexpr = acc.shape[0]
    block_d: tl.constexpr = acc.shape[1]
    heads, kept, out_at = _place(out, out_token, out_head, tile, first, queries, group, size, shared, block_m, block_d, v_form)
    if v_form > 0:
        acc *= v_fixed
    if sunk:
        sink = tl.load(sinks + heads).to(tl.float32) * _LOG2E
        top = tl.maximum(peak, sink)
        old = tl.exp2(peak - top)
        total = tl.fma(total, old, tl.exp2(sink - top))
        acc = acc * old[:, None]
        peak = top
    if logs is not None:
        count = tl.num_programs(0) * group
        _, present, at = _place(logs, count, 1, tile, first, queries, group, 1, shared, block_m, 16)
        tl.store(at, tl.broadcast_to(((peak + tl.log2(total)) / _LOG2E)[:, None], at.shape), mask=present)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["table", "table_stride", "begin", "end"])
def gather(k_cache, v_cache, k, v, table, table_stride, begin, end, page_stride, head_stride, slot_stride, k_scales, v_scales,
           k_table, v_table, k_fixed, v_fixed, ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot, size: tl.constexpr,
           page_size: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, k_form: tl.constexpr, v_form: tl.constexpr,
           linked: tl.constexpr):
    """Copies the keys and values of G rows of a block table from position `begin` on to contiguous k and v
    [G, N, KV heads, size]; writes zeros for positions from `end` on. Codes (k_form, v_form) are decoded.

    Grid (KV heads, N / block_n, G)."""
    enter(linked)
    head, segment = tl.program_id(0), tl.program_id(2).to(tl.int64)
    table += segment * table_stride
    of_segment = segment * tl.num_programs(1) * block_n * tl.num_programs(0) * size
    k, v = k + of_segment, v + of_segment
    place, d = tl.program_id(1) * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    key = begin + place
    page = tl.load(table + key // page_size, mask=key < end, other=0).to(tl.int64)
    here = (page * page_stride + key % page_size * slot_stride)[:, None] + head.to(tl.int64) * head_stride + d[None]
    there = (place.to(tl.int64) * tl.num_programs(0) + head)[:, None] * size + d[None]
    wide = tl.broadcast_to((d < size)[None], here.shape)
    if k_form > 0:
        inside, row = (key % page_size).to(tl.int64), (place.to(tl.int64) * tl.num_programs(0) + head)[:, None] * size
        at = page * page_stride + inside * slot_stride + head.to(tl.int64) * head_stride
        x, gain, shift = decoded(k_cache, at, k_scales, page * ks_page + inside * ks_slot + head.to(tl.int64) * ks_head,
                                 k_table, key < end, size, block_n, block_d, k_form, tl.float32)
        to = row + element(d, size, k_form)[None]
        tl.store(k + to, ((x * gain[:, None] + shift[:, None]) * k_fixed).to(k.dtype.element_ty), mask=wide)
        x, gain, shift = decoded(v_cache, at, v_scales, page * vs_page + inside * vs_slot + head.to(tl.int64) * vs_head,
                                 v_table, key < end, size, block_n, block_d, v_form, tl.float32)
        to = row + element(d, size, v_form)[None]
        tl.store(v + to, ((x * gain[:, None] + shift[:, None]) * v_fixed).to(v.dtype.element_ty), mask=wide)
    else:
        present = wide & (key < end)[:, None]
        tl.store(k + there, tl.load(k_cache + here, mask=present, other=0.0), mask=wide)
        tl.store(v + there, tl.load(v_cache + here, mask=present, other=0.0), mask=wide)


@triton.jit
def _add_part(acc, peak, total, part, lse, token_stride, lse_stride, at, head, kept, seen):
    """Merges one partial result of `join` into the running sums."""
    token = tl.program_id(0).to(tl.int64)
    more = tl.load(part + token * token_stride + at, mask=kept, other=0.0).to(tl.float32)
    score = tl.load(lse + head * lse_stride + token, mask=seen, other=float("-inf")) * _LOG2E
    return _merge(acc, peak, total, more, score, tl.full(score.shape, 1.0, tl.float32))


@triton.jit(do_not_specialize=["heads", "lse_head", "lse0_head", "lse1_head", "lse2_head", "lse3_head"])
def join(out, lse, part0, part1, part2, part3, lse0, lse1, lse2, lse3, heads, out_token, out_head, lse_head, part0_token,
         part1_token, part2_token, part3_token, lse0_head, lse1_head, lse2_head, lse3_head, size: tl.constexpr,
         count: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, linked: tl.constexpr):
    """Merges `count` attention results of the same queries over different keys. Each is [N, H, size], normalised by its own sum
    of weights, with the log-sum-exp (natural logarithm, as in FlashAttention) in [H, N]. Each token of a part is contiguous.

    Grid (N, H / block_h)."""
    enter(linked)
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * block_h + tl.arange(0, block_h), tl.arange(0, block_d)
    seen = head < heads
    kept = seen[:, None] & (d < size)[None]
    at = head[:, None] * size + d[None]
    acc = tl.zeros((block_h, block_d), tl.float32)
    peak = tl.full((block_h,), float("-inf"), tl.float32)
    total = tl.zeros((block_h,), tl.float32)
    acc, peak, total = _add_part(acc, peak, total, part0, lse0, part0_token, lse0_head, at, head, kept, seen)
    if count > 1:
        acc, peak, total = _add_part(acc, peak, total, part1, lse1, part1_token, lse1_head, at, head, kept, seen)
    if count > 2:
        acc, peak, total = _add_part(acc, peak, total, part2, lse2, part2_token, lse2_head, at, head, kept, seen)
    if count > 3:
        acc, peak, total = _add_part(acc, peak, total, part3, lse3, part3_token, lse3_head, at, head, kept, seen)
    total = tl.where(total == 0.0, 1.0, total)
    result = acc / total[:, None]
    tl.store(out + token * out_token + head[:, None] * out_head + d[None], result.to(out.dtype.element_ty), mask=kept)
    tl.store(lse + head * lse_head + token, (peak + tl.log2(total)) / _LOG2E, mask=seen)


@triton.jit(do_not_specialize=["items", "mates", "counters", "table_row", "scale", "softcap", "window"])
def attend(q, k_cache, v_cache, out, logs, table, sinks, slopes, origins, tree_bits, items, mates, counters, parts_acc,
           parts_sum, scale, softcap, window, q_token, q_head, page_stride, head_stride, slot_stride, out_token, out_head,
           table_row, k_scales, v_scales, k_table, v_table, ks_page, ks_head, ks_slot, vs_page, vs_head, vs_slot, v_fixed,
           lift, group: tl.constexpr, size: tl.constexpr, tail: tl.constexpr, page_size: tl.constexpr, block_m: tl.constexpr,
           block_n: tl.constexpr, block_d: tl.constexpr, block_t: tl.constexpr, rows: tl.constexpr, windowed: tl.constexpr,
           capped: tl.constexpr, sunk: tl.constexpr, sloped: tl.constexpr, fixed: tl.constexpr,
           edges: tl.constexpr, shared: tl.constexpr, k_form: tl.constexpr, v_form: tl.constexpr, linked: tl.constexpr,
           fields: tl.constexpr, words: tl.constexpr, fast: tl.constexpr):
    """Computes one item for one KV head. Grid (KV heads, items); an item without queries is inert.

    Rows are (query, head of the group), heads within a query. shared: tiles may hold single tokens of several segments,
    listed in `mates`: one item has all of them for the keys of the shared prefix, others one of them each for its own keys.
    edges: blocks whose keys all queries see run unmasked, which pays if most blocks are of this kind (prefill). fixed
    (batch-invariant mode): partial sums end at multiples of the item's `unit` of keys, so they do not depend on where an item
    begins or ends. words: codes are read by `_scan_words`. The program that completes a tile's last part merges all parts
    in order, so the result does not depend on which program that is."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * fields
    token, queries, position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    segment, begin, end = tl.load(item + 3).to(tl.int64), tl.load(item + 4), tl.load(item + 5)
    unit, ends = tl.load(item + 6), tl.load(item + 7)
    first, own_slot, listed = tl.load(item + 8), tl.load(item + 9), tl.load(item + 10)
    # Only one inert program must run the PDL wait: the next kernel takes this kernel's end for the end of all before it.
    if (queries == 0) & (tl.program_id(1) > 0):
        return
    places = (token, mates, listed)
    heads, kept, q_at = _place(q, q_token, q_head, places, first, queries, group, size, shared, block_m, block_d, k_form)
    # The work list was complete before the preceding kernel began; everything else may be that kernel's output.
    enter(linked)
    if queries == 0:
        return
    tile = tl.load(q_at, mask=kept, other=0.0)
    if k_form == 0 and tile.dtype != k_cache.dtype.element_ty:
        tile = tile.to(tl.float32)
    if tail > 0:
        _, kept, q_at = _place(q + size, q_token, q_head, places, first, queries, group, tail, shared, block_m, block_t)
        end_tile = tl.load(q_at, mask=kept, other=0.0).to(tile.dtype)
    else:
        end_tile = tile
    slope = tl.load(slopes + heads) if sloped % 2 else tl.zeros((block_m,), tl.float32)
    row = tl.arange(0, block_m) // group
    bits = tl.load(tree_bits + token + first + row, mask=row < queries, other=0) if sloped // 2 else tl.zeros((1,), tl.int64)
    origin = tl.load(origins + segment) if sloped // 2 else 0
    by_row = (slope, bits, origin)
    k_cache += head.to(tl.int64) * head_stride
    v_cache += head.to(tl.int64) * head_stride
    table += segment * table_row
    if k_form > 0:
        k_scales += head.to(tl.int64) * ks_head
        v_scales += head.to(tl.int64) * vs_head
    beside = (k_scales, v_scales, k_table, v_table, ks_page, ks_slot, vs_page, vs_slot, lift)
    cache = (k_cache, v_cache, table, page_stride, slot_stride, beside)

    highest = tl.minimum(end, position + queries)
    bounds = (tl.maximum(position - window + 1, 0) if windowed else 0, highest, position)
    opened = tl.cdiv(tl.maximum(position + queries - window, begin), block_n) * block_n if windowed else begin
    sure = tl.minimum(position + 1, origin) if sloped // 2 else position + 1
    closed = tl.maximum(sure // block_n * block_n, opened)

    done = 0
    if fixed:
        if ends == 1:
            # One loop over all units: a loop per unit would stall on its first loads each time.
            acc, peak, total = _attend(
                tile, end_tile, by_row, cache, begin, end, unit, opened, closed, bounds, scale, softcap, window, group, size,
                tail, page_size, block_n, windowed, capped, sloped, k_form, v_form, edges, True)
        else:
            acc = tl.zeros((block_m, block_d), tl.float32)
            peak = tl.full((block_m,), float("-inf"), tl.float32)
            total = tl.zeros((block_m,), tl.float32)
            for start in range(begin, end, unit):
                more = _attend(tile, end_tile, by_row, cache, start, tl.minimum(start + unit, end), unit, opened, closed,
                               bounds, scale, softcap, window, group, size, tail, page_size, block_n, windowed, capped, sloped,
                               k_form, v_form, edges, False)
                _store_part(*more, parts_acc, parts_sum, own_slot + done * queries, queries, group)
                done += 1
    else:
        if words:
            acc, peak, total = _scan_words(tile, by_row, cache, begin, end, bounds, scale, softcap, window, group, size,
                                           page_size, block_n, windowed, capped, sloped, k_form, v_form, fast)
        else:
            acc, peak, total = _attend(
                tile, end_tile, by_row, cache, begin, end, unit, opened, closed, bounds, scale, softcap, window, group, size,
                tail, page_size, block_n, windowed, capped, sloped, k_form, v_form, edges, False)
        if ends > 1:
            _store_part(acc, peak, total, parts_acc, parts_sum, own_slot, queries, group)
            done += 1
    if ends == 1:
        _finish(acc, peak, total, out, logs, out_token, out_head, places, first, queries, sinks, v_fixed, group, size, shared,
                sunk, v_form)
    else:
        # All threads write their part before one thread counts it, so the program that counts the last part sees all parts.
        tl.debug_barrier()
        counter = counters + tl.load(item + 11) * tl.num_programs(0) + head
        if tl.atomic_add(counter, done, sem="acq_rel", scope="gpu") + done == ends:
            tl.store(counter, 0)
            first_slot, joined, parts, most = (tl.load(item + 12), tl.load(item + 13), tl.load(item + 14), tl.load(item + 15))
            # Narrow tiles merge four parts at a time, so that their loads overlap.
            tall: tl.constexpr = block_m if edges else triton.next_power_of_2(rows)
            count: tl.constexpr = 1 if edges else 4
            whole = tl.zeros((tall, block_d), tl.float32)
            top = tl.full((tall,), float("-inf"), tl.float32)
            sums = tl.zeros((tall,), tl.float32)
            if shared:
                query = tl.arange(0, tall) // group
                own = _mate(mates, listed, query, joined, 1, 0)
                own_parts = _mate(mates, listed, query, joined, 2, 0)
            else:
                own = 0
                own_parts = 0
            all_parts = (parts_acc, parts_sum, first_slot, joined, parts, own, own_parts)
            for part in range(0, parts + most, count):
                whole, top, sums = _join(whole, top, sums, part, all_parts, group, count)
            _finish(whole, top, sums, out, logs, out_token, out_head, places, 0, joined, sinks, v_fixed, group, size, shared,
                    sunk, v_form)
