"""The Triton kernel by which GPUs that can write into each other's memory exchange short messages: pushed at once to every peer
(one-shot), no host and no library between. `parallel/peer.py` owns the memory.

A block exchanges its own run of the message in its own places and by its own flags, so blocks never wait for each other. Its
epoch counts its exchanges. Data has two places, used in turn: who is two epochs ahead has seen that all have read the older."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _exchanged(value, at, there, buffers, flags, epoch, rank, place, each, size: tl.constexpr, most: tl.constexpr):
    """Pushes this rank's value to `at` in its part of every peer's memory, and waits for theirs. Returns where in this rank's
    memory those of rank 0 are; each further rank's lie `each` elements behind. `place`: of the flags."""
    half = (epoch & 1) * size
    for peer in tl.static_range(size):
        if peer != rank:
            buffer = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(value.dtype)), 16)
            tl.store(buffer + (half + rank) * each + at, value, mask=there)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    for peer in tl.static_range(size):
        if peer != rank:
            flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flag + rank * most + place, epoch, sem="release", scope="sys")
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for source in tl.static_range(size):
        if source != rank:
            seen = tl.atomic_add(own + source * most + place, 0, sem="acquire", scope="sys")
            # The difference is right even where epochs have wrapped.
            while seen - epoch < 0:
                seen = tl.atomic_add(own + source * most + place, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(value.dtype)), 16) + half * each + at


@triton.jit(do_not_specialize=["count", "rank"])
def exchange(x, out, buffers, flags, epochs, count, rank, size: tl.constexpr, most: tl.constexpr, run: tl.constexpr,
             room: tl.constexpr, gather: tl.constexpr, linked: tl.constexpr):
    """x [count] of `size` ranks -> out: their sum in the order of the ranks, rounded once, or with `gather` [size, count].

    buffers, flags [size] int64: the ranks' memory, [2, size, most, room] of x's type and [size, most] int32. epochs [most]
    int32 is this rank's own. Program b exchanges `run` elements from b x run on; `room` >= run."""
    if linked:
        gdc_launch_dependents()
        gdc_wait()
    block, at = tl.program_id(0), tl.arange(0, run)
    epoch = tl.load(epochs + block) + 1
    there = block * run + at < count
    value = tl.load(x + block * run + at, mask=there, other=0.0)
    parts = _exchanged(value, block * room + at, there, buffers, flags, epoch, rank, block, most * room, size, most)
    total = tl.zeros((run,), tl.float32)
    for source in tl.static_range(size):
        part = tl.load(parts + source * most * room, mask=there & (source != rank), other=0.0, cache_modifier=".cg")
        part = tl.where(source == rank, value, part)
        if gather:
            tl.store(out + source * count + block * run + at, part, mask=there)
        else:
            total += part.to(tl.float32)
    if not gather:
        tl.store(out + block * run + at, total.to(x.dtype.element_ty), mask=there)
    tl.store(epochs + block, epoch)


@triton.jit(do_not_specialize=["rank", "residual_stride"])
def add_norm(x, residual, weight, out, buffers, flags, epochs, rank, residual_stride, eps, offset, size: tl.constexpr,
             most: tl.constexpr, room: tl.constexpr, width: tl.constexpr, block: tl.constexpr, linked: tl.constexpr):
    """x [rows, width] of `size` ranks, residual and out [rows, width]: residual becomes the sum of the ranks' x, in their order
    and rounded once, plus residual; out its RMS norm times (offset + weight). Bits are those of `exchange` and a norm after it.

    buffers, flags [size] int64: the ranks' memory, [2, size, room] of x's type and [size, most] int32; epochs [most] int32.
    Program b exchanges row b."""
    row, at = tl.program_id(0), tl.arange(0, block)
    there = at < width
    gain = tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + offset
    if linked:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epochs + row) + 1
    value = tl.load(x + row * width + at, mask=there, other=0.0)
    before = residual + row * residual_stride.to(tl.int64) + at
    # On its way while the ranks' parts are.
    stream = tl.load(before, mask=there, other=0.0)
    parts = _exchanged(value, row * width + at, there, buffers, flags, epoch, rank, row, room, size, most)
    total = tl.zeros((block,), tl.float32)
    for source in tl.static_range(size):
        part = tl.load(parts + source * room, mask=there & (source != rank), other=0.0, cache_modifier=".cg")
        total += tl.where(source == rank, value, part).to(tl.float32)
    # Rounded as often as by kernels one after another.
    stream = (total.to(x.dtype.element_ty).to(tl.float32) + stream.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(before, stream, mask=there)
    wide = stream.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps) * gain
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=there)
    tl.store(epochs + row, epoch)
