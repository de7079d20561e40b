"""The kernel of paged attention on NVIDIA GPUs: one Triton function for decode, prompts and the combination of split keys.

A program works on one item (`attention_work.py`, which makes them on the host) for one KV head: a tile of queries of one
segment, or of several that share the item's keys, all query heads of the KV head beside each other, and a range of their keys.
Launched by `attention_triton.py`.

Trees of drafted tokens fit in here as one more mask: where `_scan` compares a key with the query's position, keys of the
segment itself would be looked up in a set of bits that each query brings; nothing else would change.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(acc, peak, total, more_acc, more_peak, more_total):
    """Joins two partial softmaxes (sum of weighted values, greatest score, sum of weights), scores in units of log 2.

    Which product is rounded and which is fused is written out, so that whoever joins the same parts gets the same bits.
    """
    top = tl.maximum(peak, more_peak)
    shift = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(peak - shift), tl.exp2(more_peak - shift)
    total = tl.fma(more_total, new, total * old)
    acc = tl.fma(more_acc, tl.broadcast_to(new[:, None], acc.shape), acc * old[:, None])
    return acc, top, total


@triton.jit
def _scan(q, acc, peak, total, closed_acc, closed_peak, closed_total, begin, unit, k_cache, v_cache, table, start, stop,
          lowest, highest, position, scale, softcap, window, page_stride, slot_stride, group: tl.constexpr, size: tl.constexpr,
          page_size: tl.constexpr, block_n: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, masked: tl.constexpr,
          closing: tl.constexpr):
    """Attends to keys [start, stop) in blocks. masked: some keys of the range may be hidden from some queries. closing: the
    sums, which have all keys since `begin` or since they were last closed, are closed where a unit of keys ends, and joined
    with those closed before."""
    block_m: tl.constexpr = q.shape[0]
    block_d: tl.constexpr = q.shape[1]
    offset, d = tl.arange(0, block_n), tl.arange(0, block_d)
    inside = (offset % page_size * slot_stride)[:, None] + d[None]
    k_inside, v_inside = k_cache + inside, v_cache + inside
    # Page ids are read one block ahead, or keys and values could not be asked for in time.
    page = tl.load(table + (start + offset) // page_size, mask=(start + offset >= lowest) & (start + offset < highest), other=0)
    for first in range(start, stop, block_n):
        key = first + offset
        if block_n % page_size == 0:
            jump = (page.to(tl.int64) * page_stride)[:, None]
        else:
            jump = (page.to(tl.int64) * page_stride + (key % page_size - offset % page_size) * slot_stride)[:, None]
        page = tl.load(table + first // page_size + (first % page_size + offset + block_n) // page_size,
                       mask=key + block_n < tl.minimum(stop, highest), other=0)
        if masked:
            # Entries outside may be stale: neither they nor what they point to may be read.
            kept = (key >= lowest) & (key < highest)
            if size == block_d:
                wanted = kept[:, None]
            else:
                wanted = kept[:, None] & (d < size)[None]
            k, v = tl.load(k_inside + jump, mask=wanted, other=0.0), tl.load(v_inside + jump, mask=wanted, other=0.0)
        elif size == block_d:
            k, v = tl.load(k_inside + jump), tl.load(v_inside + jump)
        else:
            wanted = (d < size)[None]
            k, v = tl.load(k_inside + jump, mask=wanted, other=0.0), tl.load(v_inside + jump, mask=wanted, other=0.0)
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if capped:
            x = scores * (scale / softcap)
            small = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
            scores = (1.0 - small) / (1.0 + small) * tl.where(x < 0, -softcap * _LOG2E, softcap * _LOG2E)
            factor = 1.0
        else:
            factor = scale * _LOG2E
        if masked:
            mine = (position + tl.arange(0, block_m) // group)[:, None]
            seen = (key[None] <= mine) & (key < highest)[None]
            if windowed:
                seen = seen & (key[None] > mine - window)
            scores = tl.where(seen, scores, float("-inf"))
        full = (first % unit == 0) & (first > begin) if closing else False
        before = tl.where(full, float("-inf"), peak) if closing else peak
        top = tl.maximum(before, tl.max(scores, 1) * factor)
        shift = tl.where(top == float("-inf"), 0.0, top) if masked else top
        old = tl.exp2(before - shift)
        if full:
            closed_acc, closed_peak, closed_total = _merge(closed_acc, closed_peak, closed_total, acc, peak, total)
            old = tl.zeros((block_m,), tl.float32)  # as it is already: so this comes after the scores, when `acc` is complete
        factors = tl.full(scores.shape, factor, tl.float32)
        weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(-shift[:, None], scores.shape)))
        total = tl.fma(total, old, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        peak = top
    return acc, peak, total, closed_acc, closed_peak, closed_total


@triton.jit
def _attend(q, k_cache, v_cache, table, start, stop, unit, opened, closed, lowest, highest, position, scale, softcap, window,
            page_stride, slot_stride, group: tl.constexpr, size: tl.constexpr, page_size: tl.constexpr, block_n: tl.constexpr,
            windowed: tl.constexpr, capped: tl.constexpr, edges: tl.constexpr, closing: tl.constexpr):
    """A partial softmax: the sum of weighted values, the greatest score and the sum of weights over keys [start, stop).

    Keys of [opened, closed), multiples of the block, are seen by all queries of the tile; that matters if there are edges.
    closing: it is that of each unit of keys, joined in their order.
    """
    acc = tl.zeros(q.shape, tl.float32)
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    whole, whole_peak, whole_total, begin = acc, peak, total, start
    if edges:
        if windowed:
            acc, peak, total, whole, whole_peak, whole_total = _scan(
                q, acc, peak, total, whole, whole_peak, whole_total, begin, unit, k_cache, v_cache, table, start,
                tl.minimum(stop, opened), lowest, highest, position, scale, softcap, window, page_stride, slot_stride, group,
                size, page_size, block_n, windowed, capped, True, closing)
        acc, peak, total, whole, whole_peak, whole_total = _scan(
            q, acc, peak, total, whole, whole_peak, whole_total, begin, unit, k_cache, v_cache, table,
            tl.maximum(start, opened), tl.minimum(stop, closed), lowest, highest, position, scale, softcap, window, page_stride,
            slot_stride, group, size, page_size, block_n, windowed, capped, False, closing)
        start = tl.maximum(start, closed)
    acc, peak, total, whole, whole_peak, whole_total = _scan(
        q, acc, peak, total, whole, whole_peak, whole_total, begin, unit, k_cache, v_cache, table, start, stop, lowest, highest,
        position, scale, softcap, window, page_stride, slot_stride, group, size, page_size, block_n, windowed, capped, True,
        closing)
    if closing:
        acc, peak, total = _merge(whole, whole_peak, whole_total, acc, peak, total)
    return acc, peak, total


@triton.jit
def _store_part(acc, peak, total, parts_acc, parts_sum, slot, queries, group: tl.constexpr):
    """Writes an item's part from `slot` on: of each query, one slot of `group` rows, their greatest scores and their sums."""
    block_d: tl.constexpr = acc.shape[1]
    row = tl.arange(0, acc.shape[0])
    at = ((slot + row // group).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * group + row % group
    kept = row // group < queries
    tl.store(parts_acc + at[:, None] * block_d + tl.arange(0, block_d)[None], acc, mask=kept[:, None])
    tl.store(parts_sum + at * 2, peak, mask=kept)
    tl.store(parts_sum + at * 2 + 1, total, mask=kept)


@triton.jit
def _load_part(parts_acc, parts_sum, part, first_slot, queries, parts, own_slot, own_parts, group: tl.constexpr,
               block_m: tl.constexpr, block_d: tl.constexpr):
    """Reads what `_store_part` wrote, perhaps on another multiprocessor: past the first level of cache.

    The tile's `parts` have a slot for each of its queries; behind them come those that each query has to itself.
    """
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
def _join(acc, peak, total, parts_acc, parts_sum, part, first_slot, queries, parts, own_slot, own_parts, group: tl.constexpr,
          count: tl.constexpr):
    """Joins `count` (1 or 4) parts from `part` on, in order; those beyond the last change nothing."""
    tall: tl.constexpr = acc.shape[0]
    wide: tl.constexpr = acc.shape[1]
    acc0, peak0, total0 = _load_part(parts_acc, parts_sum, part, first_slot, queries, parts, own_slot, own_parts, group, tall,
                                     wide)
    if count == 4:
        acc1, peak1, total1 = _load_part(parts_acc, parts_sum, part + 1, first_slot, queries, parts, own_slot, own_parts,
                                         group, tall, wide)
        acc2, peak2, total2 = _load_part(parts_acc, parts_sum, part + 2, first_slot, queries, parts, own_slot, own_parts,
                                         group, tall, wide)
        acc3, peak3, total3 = _load_part(parts_acc, parts_sum, part + 3, first_slot, queries, parts, own_slot, own_parts,
                                         group, tall, wide)
    acc, peak, total = _merge(acc, peak, total, acc0, peak0, total0)
    if count == 4:
        acc, peak, total = _merge(acc, peak, total, acc1, peak1, total1)
        acc, peak, total = _merge(acc, peak, total, acc2, peak2, total2)
        acc, peak, total = _merge(acc, peak, total, acc3, peak3, total3)
    return acc, peak, total


@triton.jit
def _mate(mates, listed, query, queries, column: tl.constexpr, otherwise):
    """What the step's list says of each row's `query`, in a tile whose queries are listed from line `listed` - 1 on; else
    `otherwise`. The columns: a query's token, the slot of the first part it has to itself, how many of those there are."""
    return tl.load(mates + (listed - 1 + query) * 3 + column, mask=(listed > 0) & (query < queries), other=otherwise)


@triton.jit
def _place(base, token_stride, head_stride, token, mates, listed, first, queries, group: tl.constexpr, size: tl.constexpr,
           shared: tl.constexpr, block_m: tl.constexpr, block_d: tl.constexpr):
    """Of a tile's rows from query `first` on in q or out: which head each has, which entries exist, and where they are."""
    row, d = tl.arange(0, block_m), tl.arange(0, block_d)
    query = first + row // group
    tokens = token + query
    if shared:
        tokens = _mate(mates, listed, query, first + queries, 0, tokens)
    heads = tl.program_id(0) * group + row % group
    kept = (row // group < queries)[:, None] & (d < size)[None]
    return heads, kept, base + tokens.to(tl.int64)[:, None] * token_stride + heads[:, None] * head_stride + d[None]


@triton.jit
def _finish(acc, peak, total, out, out_token, out_head, token, mates, listed, first, queries, sinks, group: tl.constexpr,
            size: tl.constexpr, shared: tl.constexpr, sunk: tl.constexpr):
    """Divides by the sum of weights, that of the sinks included, and writes the rows."""
    block_m: tl.constexpr = acc.shape[0]
    block_d: tl.constexpr = acc.shape[1]
    heads, kept, out_at = _place(out, out_token, out_head, token, mates, listed, first, queries, group, size, shared, block_m,
                                 block_d)
    if sunk:
        sink = tl.load(sinks + heads).to(tl.float32) * _LOG2E
        top = tl.maximum(peak, sink)
        old = tl.exp2(peak - top)
        total = tl.fma(total, old, tl.exp2(sink - top))
        acc = acc * old[:, None]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["table", "begin", "end"])
def gather(k_cache, v_cache, k, v, table, begin, end, page_stride, head_stride, slot_stride, size: tl.constexpr,
           page_size: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, linked: tl.constexpr):
    """Keys and values of a block table's row from position `begin` on, in order, and zeros from `end` on: k and v
    [N, KV heads, size].

    Grid (KV heads, N / block_n).
    """
    if linked:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    place, d = tl.program_id(1) * block_n + tl.arange(0, block_n), tl.arange(0, block_d)
    key = begin + place
    page = tl.load(table + key // page_size, mask=key < end, other=0).to(tl.int64)
    here = (page * page_stride + key % page_size * slot_stride)[:, None] + head.to(tl.int64) * head_stride + d[None]
    there = (place.to(tl.int64) * tl.num_programs(0) + head)[:, None] * size + d[None]
    wide = tl.broadcast_to((d < size)[None], here.shape)
    present = wide & (key < end)[:, None]
    tl.store(k + there, tl.load(k_cache + here, mask=present, other=0.0), mask=wide)
    tl.store(v + there, tl.load(v_cache + here, mask=present, other=0.0), mask=wide)


@triton.jit
def _add_part(acc, peak, total, part, lse, token_stride, lse_stride, at, head, kept, seen):
    """Joins one partial result of `join` to those before it."""
    token = tl.program_id(0).to(tl.int64)
    more = tl.load(part + token * token_stride + at, mask=kept, other=0.0).to(tl.float32)
    score = tl.load(lse + head * lse_stride + token, mask=seen, other=float("-inf")) * _LOG2E
    return _merge(acc, peak, total, more, score, tl.full(score.shape, 1.0, tl.float32))


@triton.jit(do_not_specialize=["heads", "lse_head", "lse0_head", "lse1_head", "lse2_head", "lse3_head"])
def join(out, lse, part0, part1, part2, part3, lse0, lse1, lse2, lse3, heads, out_token, out_head, lse_head, part0_token,
         part1_token, part2_token, part3_token, lse0_head, lse1_head, lse2_head, lse3_head, size: tl.constexpr,
         count: tl.constexpr, block_h: tl.constexpr, block_d: tl.constexpr, linked: tl.constexpr):
    """Joins `count` partial softmaxes of the same queries over different keys, each [N, H, size] divided by its own sum of
    weights, with the natural logarithm of that sum in [H, N] (FlashAttention's log-sum-exp). A part's token is contiguous.

    Grid (N, H / block_h).
    """
    if linked:
        gdc_launch_dependents()
        gdc_wait()
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
def attend(q, k_cache, v_cache, out, table, sinks, items, mates, counters, parts_acc, parts_sum, scale, softcap, window,
           q_token, q_head, page_stride, head_stride, slot_stride, out_token, out_head, table_row,
           group: tl.constexpr, size: tl.constexpr, page_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
           block_d: tl.constexpr, rows: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, sunk: tl.constexpr,
           fixed: tl.constexpr, edges: tl.constexpr, shared: tl.constexpr, linked: tl.constexpr, fields: tl.constexpr):
    """One item for one KV head. Grid (KV heads, items); an item without queries is inert.

    Rows are (query, head of the group), heads within a query. shared: there may be tiles whose queries are single tokens of
    several segments, which `mates` lists: one item has all of them for keys that lie in the same pages, others one of them each
    for the rest. edges: blocks in which every key is seen by every query are attended to without masks, which pays where there
    are many of them for few others. fixed: sums are closed at multiples of the item's `unit` of keys, so that they do not
    depend on where an item begins or ends. The program that finishes a tile's last part joins them all, in their order, so the
    result does not depend on which one that is.
    """
    head = tl.program_id(0)
    item = items + tl.program_id(1) * fields
    token, queries, position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    segment, begin, end = tl.load(item + 3).to(tl.int64), tl.load(item + 4), tl.load(item + 5)
    unit, ends = tl.load(item + 6), tl.load(item + 7)
    first, own_slot, listed = tl.load(item + 8), tl.load(item + 9), tl.load(item + 10)
    # An inert program need not wait, as long as one does: the next kernel takes this one's end for that of all before.
    if (queries == 0) & (tl.program_id(1) > 0):
        return
    _, kept, q_at = _place(q, q_token, q_head, token, mates, listed, first, queries, group, size, shared, block_m, block_d)
    if linked:
        # The step's array was there before the kernel ahead began; all else may be of its making.
        gdc_launch_dependents()
        gdc_wait()
    if queries == 0:
        return
    tile = tl.load(q_at, mask=kept, other=0.0)
    if tile.dtype != k_cache.dtype.element_ty:
        tile = tile.to(tl.float32)
    k_cache += head.to(tl.int64) * head_stride
    v_cache += head.to(tl.int64) * head_stride
    table += segment * table_row

    highest = tl.minimum(end, position + queries)
    lowest = tl.maximum(position - window + 1, 0) if windowed else 0
    opened = tl.cdiv(tl.maximum(position + queries - window, begin), block_n) * block_n if windowed else begin
    closed = tl.maximum((position + 1) // block_n * block_n, opened)

    done = 0
    if fixed:
        if ends == 1:
            # One loop over all units: were it one for each, each would wait for its first keys.
            acc, peak, total = _attend(
                tile, k_cache, v_cache, table, begin, end, unit, opened, closed, lowest, highest, position, scale, softcap,
                window, page_stride, slot_stride, group, size, page_size, block_n, windowed, capped, edges, True)
        else:
            acc = tl.zeros((block_m, block_d), tl.float32)
            peak = tl.full((block_m,), float("-inf"), tl.float32)
            total = tl.zeros((block_m,), tl.float32)
            for start in range(begin, end, unit):
                more_acc, more_peak, more_total = _attend(
                    tile, k_cache, v_cache, table, start, tl.minimum(start + unit, end), unit, opened, closed, lowest, highest,
                    position, scale, softcap, window, page_stride, slot_stride, group, size, page_size, block_n, windowed,
                    capped, edges, False)
                _store_part(more_acc, more_peak, more_total, parts_acc, parts_sum, own_slot + done * queries, queries, group)
                done += 1
    else:
        acc, peak, total = _attend(
            tile, k_cache, v_cache, table, begin, end, unit, opened, closed, lowest, highest, position, scale, softcap, window,
            page_stride, slot_stride, group, size, page_size, block_n, windowed, capped, edges, False)
        if ends > 1:
            _store_part(acc, peak, total, parts_acc, parts_sum, own_slot, queries, group)
            done += 1
    if ends == 1:
        _finish(acc, peak, total, out, out_token, out_head, token, mates, listed, first, queries, sinks, group, size, shared,
                sunk)
    else:
        # Every thread's part is written before one thread counts it; who counts the last one sees all others' parts.
        tl.debug_barrier()
        counter = counters + tl.load(item + 11) * tl.num_programs(0) + head
        if tl.atomic_add(counter, done, sem="acq_rel", scope="gpu") + done == ends:
            tl.store(counter, 0)
            first_slot, joined, parts, most = (tl.load(item + 12), tl.load(item + 13), tl.load(item + 14), tl.load(item + 15))
            # Narrow parts four at a time: their loads wait for memory together.
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
            for part in range(0, parts + most, count):
                whole, top, sums = _join(whole, top, sums, parts_acc, parts_sum, part, first_slot, joined, parts, own,
                                         own_parts, group, count)
            _finish(whole, top, sums, out, out_token, out_head, token, mates, listed, 0, joined, sinks, group, size, shared,
                    sunk)
