"""The kernel of paged attention on NVIDIA GPUs: one Triton function for decode, prompts and the combination of split keys.

A program works on one item (`attention_work.py`, which makes them on the host) for one KV head: a tile of queries of one
segment, all query heads of the KV head beside each other, and a range of their keys. Launched by `attention_triton.py`.

Trees of drafted tokens fit in here as one more mask: where `_scan` compares a key with the query's position, keys of the
segment itself would be looked up in a set of bits that each query brings; nothing else would change.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.attention_work import FIELDS

_FIELDS = tl.constexpr(FIELDS)
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
def _scan(q, acc, peak, total, whole_acc, whole_peak, whole_total, slot, k_cache, v_cache, table, parts_acc, parts_sum,
          start, stop, lowest, highest, end, unit, parts, position, scale, softcap, window, page_stride, slot_stride,
          group: tl.constexpr, size: tl.constexpr, page_size: tl.constexpr, block_n: tl.constexpr, windowed: tl.constexpr,
          capped: tl.constexpr, fixed: tl.constexpr, rows: tl.constexpr, masked: tl.constexpr):
    """Attends to keys [start, stop) in blocks. masked: some keys of the range may be hidden from some queries."""
    block_m: tl.constexpr = q.shape[0]
    block_d: tl.constexpr = q.shape[1]
    offset, d = tl.arange(0, block_n), tl.arange(0, block_d)
    # Page ids are read one block ahead, or keys and values could not be asked for in time.
    page = tl.load(table + (start + offset) // page_size, mask=(start + offset >= lowest) & (start + offset < highest), other=0)
    for first in range(start, stop, block_n):
        key = first + offset
        at = (page.to(tl.int64) * page_stride + (key % page_size) * slot_stride)[:, None] + d[None]
        page = tl.load(table + (key + block_n) // page_size, mask=key + block_n < tl.minimum(stop, highest), other=0)
        if masked:
            # Entries outside may be stale: neither they nor what they point to may be read.
            kept = (key >= lowest) & (key < highest)
            if size == block_d:
                inside = kept[:, None]
            else:
                inside = kept[:, None] & (d < size)[None]
            k, v = tl.load(k_cache + at, mask=inside, other=0.0), tl.load(v_cache + at, mask=inside, other=0.0)
        elif size == block_d:
            k, v = tl.load(k_cache + at), tl.load(v_cache + at)
        else:
            inside = (d < size)[None]
            k, v = tl.load(k_cache + at, mask=inside, other=0.0), tl.load(v_cache + at, mask=inside, other=0.0)
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
        top = tl.maximum(peak, tl.max(scores, 1) * factor)
        shift = tl.where(top == float("-inf"), 0.0, top) if masked else top
        old = tl.exp2(peak - shift)
        factors = tl.full(scores.shape, factor, tl.float32)
        weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(-shift[:, None], scores.shape)))
        total = tl.fma(total, old, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        peak = top
        if fixed:  # noqa: SIM102
            # Two ifs: the outer one is decided when the kernel is compiled.
            if ((first + block_n) % unit == 0) | (first + block_n >= end):
                if parts == 1:
                    whole_acc, whole_peak, whole_total = _merge(whole_acc, whole_peak, whole_total, acc, peak, total)
                else:
                    _store_part(acc, peak, total, parts_acc, parts_sum, slot, rows)
                    slot += 1
                acc = tl.zeros_like(acc)
                peak = tl.full(peak.shape, float("-inf"), tl.float32)
                total = tl.zeros_like(total)
    return acc, peak, total, whole_acc, whole_peak, whole_total, slot


@triton.jit
def _store_part(acc, peak, total, parts_acc, parts_sum, slot, rows: tl.constexpr):
    """Writes part `slot` of this KV head: `rows` rows of the accumulator, their peaks and their totals."""
    block_d: tl.constexpr = acc.shape[1]
    row = tl.arange(0, acc.shape[0])
    at = (slot * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    kept = row < rows
    tl.store(parts_acc + (at * rows + row)[:, None] * block_d + tl.arange(0, block_d)[None], acc, mask=kept[:, None])
    tl.store(parts_sum + at * 2 * rows + row, peak, mask=kept)
    tl.store(parts_sum + at * 2 * rows + rows + row, total, mask=kept)


@triton.jit
def _load_part(parts_acc, parts_sum, slot, kept, block_m: tl.constexpr, block_d: tl.constexpr, rows: tl.constexpr):
    """Reads what `_store_part` wrote, perhaps on another multiprocessor: past the first level of cache."""
    row = tl.arange(0, block_m)
    at = (slot * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    kept = kept & (row < rows)
    acc = tl.load(parts_acc + (at * rows + row)[:, None] * block_d + tl.arange(0, block_d)[None], mask=kept[:, None],
                  other=0.0, cache_modifier=".cg")
    peak = tl.load(parts_sum + at * 2 * rows + row, mask=kept, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(parts_sum + at * 2 * rows + rows + row, mask=kept, other=0.0, cache_modifier=".cg")
    return acc, peak, total


@triton.jit
def _join(acc, peak, total, parts_acc, parts_sum, first_slot, part, parts, kept, rows: tl.constexpr, count: tl.constexpr):
    """Joins `count` parts from `part` on, in order; those beyond the last change nothing."""
    block_m: tl.constexpr = acc.shape[0]
    block_d: tl.constexpr = acc.shape[1]
    if count == 1:
        more_acc, more_peak, more_total = _load_part(parts_acc, parts_sum, first_slot + part, kept, block_m, block_d, rows)
        return _merge(acc, peak, total, more_acc, more_peak, more_total)
    acc0, peak0, total0 = _load_part(parts_acc, parts_sum, first_slot + part, kept, block_m, block_d, rows)
    more = kept & (part + 1 < parts)
    acc1, peak1, total1 = _load_part(parts_acc, parts_sum, first_slot + part + 1, more, block_m, block_d, rows)
    more = kept & (part + 2 < parts)
    acc2, peak2, total2 = _load_part(parts_acc, parts_sum, first_slot + part + 2, more, block_m, block_d, rows)
    more = kept & (part + 3 < parts)
    acc3, peak3, total3 = _load_part(parts_acc, parts_sum, first_slot + part + 3, more, block_m, block_d, rows)
    acc, peak, total = _merge(acc, peak, total, acc0, peak0, total0)
    acc, peak, total = _merge(acc, peak, total, acc1, peak1, total1)
    acc, peak, total = _merge(acc, peak, total, acc2, peak2, total2)
    return _merge(acc, peak, total, acc3, peak3, total3)


@triton.jit
def _finish(acc, peak, total, out_at, kept, sinks, lane, sunk: tl.constexpr):
    """Divides by the sum of weights, that of the sinks included, and writes the rows."""
    if sunk:
        sink = tl.load(sinks + lane).to(tl.float32) * _LOG2E
        top = tl.maximum(peak, sink)
        old = tl.exp2(peak - top)
        total = tl.fma(total, old, tl.exp2(sink - top))
        acc = acc * old[:, None]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_at, result.to(out_at.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["items", "counters", "table_row", "scale", "softcap", "window"])
def attend(q, k_cache, v_cache, out, table, sinks, items, counters, parts_acc, parts_sum, scale, softcap, window,
           q_token, q_head, page_stride, head_stride, slot_stride, out_token, out_head, table_row,
           group: tl.constexpr, size: tl.constexpr, page_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
           block_d: tl.constexpr, rows: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, sunk: tl.constexpr,
           fixed: tl.constexpr, edges: tl.constexpr):
    """One item for one KV head. Grid (KV heads, items); an item without queries is inert.

    Rows of the tile are (query, head of the group), heads within a query. edges: blocks in which every key is seen by every
    query are attended to without masks, which pays where there are many of them for few others. fixed: sums are closed at
    multiples of the item's `unit` of keys, so that they do not depend on where an item begins or ends. The program that
    finishes a tile's last part joins them all, in their order, so the result does not depend on which one that is.
    """
    head = tl.program_id(0)
    item = items + tl.program_id(1) * _FIELDS
    queries = tl.load(item + 1)
    if queries == 0:
        return
    token, position, segment = tl.load(item).to(tl.int64), tl.load(item + 2), tl.load(item + 3).to(tl.int64)
    begin, end, unit = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    slot, first_slot, parts = tl.load(item + 7), tl.load(item + 8), tl.load(item + 9)

    row, d = tl.arange(0, block_m), tl.arange(0, block_d)
    lane = head * group + row % group
    kept = row // group < queries
    whole = kept[:, None] & (d < size)[None]
    wide = (token + row // group)[:, None]
    tile = tl.load(q + wide * q_token + lane[:, None] * q_head + d[None], mask=whole, other=0.0)
    if tile.dtype != k_cache.dtype.element_ty:
        tile = tile.to(tl.float32)
    out_at = out + wide * out_token + lane[:, None] * out_head + d[None]
    k_cache += head.to(tl.int64) * head_stride
    v_cache += head.to(tl.int64) * head_stride
    table += segment * table_row

    acc, whole_acc = tl.zeros((block_m, block_d), tl.float32), tl.zeros((block_m, block_d), tl.float32)
    peak, whole_peak = tl.full((block_m,), float("-inf"), tl.float32), tl.full((block_m,), float("-inf"), tl.float32)
    total, whole_total = tl.zeros((block_m,), tl.float32), tl.zeros((block_m,), tl.float32)
    highest = tl.minimum(end, position + queries)
    lowest = tl.maximum(position - window + 1, 0) if windowed else 0
    # [begin, open) and [close, end) need masks, [open, close) does not.
    opened = begin
    closed = begin
    if edges:
        if windowed:
            opened = tl.cdiv(tl.maximum(position + queries - window, begin), block_n) * block_n
            opened = tl.minimum(opened, tl.cdiv(end, block_n) * block_n)
        closed = tl.maximum(tl.minimum(position + 1, end) // block_n * block_n, opened)
    for phase in tl.static_range(3):
        if phase == 0:
            start, stop = begin, opened
        elif phase == 1:
            start, stop = opened, closed
        else:
            start, stop = closed, end
        if (phase == 2) or (edges and ((phase == 1) or windowed)):
            acc, peak, total, whole_acc, whole_peak, whole_total, slot = _scan(
                tile, acc, peak, total, whole_acc, whole_peak, whole_total, slot, k_cache, v_cache, table, parts_acc, parts_sum,
                start, stop, lowest, highest, end, unit, parts, position, scale, softcap, window, page_stride, slot_stride,
                group, size, page_size, block_n, windowed, capped, fixed, rows, phase != 1)
    if parts == 1:
        if fixed:
            acc, peak, total = whole_acc, whole_peak, whole_total
        _finish(acc, peak, total, out_at, whole, sinks, lane, sunk)
    else:
        if not fixed:
            _store_part(acc, peak, total, parts_acc, parts_sum, slot, rows)
            slot += 1
        mine = slot - tl.load(item + 7)
        # Every thread's part is written before one thread counts it; who counts the last one sees all others' parts.
        tl.debug_barrier()
        counter = counters + first_slot * tl.num_programs(0) + head
        if tl.atomic_add(counter, mine, sem="acq_rel", scope="gpu") + mine == parts:
            tl.store(counter, 0)
            acc = tl.zeros((block_m, block_d), tl.float32)
            peak = tl.full((block_m,), float("-inf"), tl.float32)
            total = tl.zeros((block_m,), tl.float32)
            # Narrow parts four at a time: their loads wait for memory together.
            for part in range(0, parts, 1 if edges else 4):
                acc, peak, total = _join(acc, peak, total, parts_acc, parts_sum, first_slot, part, parts, kept, rows,
                                         1 if edges else 4)
            _finish(acc, peak, total, out_at, whole, sinks, lane, sunk)
