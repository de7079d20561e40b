"""The Triton kernel of ops/gather_triton.py."""

import triton
import triton.language as tl


@triton.jit
def gather(ids, table, out, width: tl.constexpr, block: tl.constexpr):
    """out [T, width] = table[ids]. A program copies a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    found = tl.load(ids + row).to(tl.int64)
    tl.store(out + row * width + column, tl.load(table + found * width + column, mask=inside), mask=inside)
