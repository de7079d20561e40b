"""The Triton kernel of ops/step_triton.py."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import enter


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
