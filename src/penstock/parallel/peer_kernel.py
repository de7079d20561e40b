"""The Triton kernel by which GPUs that can write into each other's memory exchange short messages: pushed at once to every peer
(one-shot), or sums to the rank that adds them up and from it to all (two-shot), no host and no library between.
`parallel/peer.py` owns the memory.

A program exchanges its own run of the message in its own place and by its own flags, so programs never wait for each other. Its
epoch counts its exchanges. Data has two places, used in turn: who is two epochs ahead has seen that all have read the older."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import enter


@triton.jit
def _give(value, to, at, there, buffers, flags, epoch, rank, place, each, size: tl.constexpr, most: tl.constexpr):
    """Writes `value` to `at` of this rank's part of the memory of rank `to`, of every other rank if that is -1, and says so by
    the flag `place` there. A rank's part begins `each` elements behind the one before it."""
    for peer in tl.static_range(size):
        if (peer != rank) & ((to < 0) | (peer == to)):
            buffer = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(value.dtype)), 16)
            tl.store(buffer + ((epoch & 1) * size + rank) * each + at, value, mask=there)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    for peer in tl.static_range(size):
        if (peer != rank) & ((to < 0) | (peer == to)):
            flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flag + rank * most + place, epoch, sem="release", scope="sys")


@triton.jit
def _take(value, source, at, there, buffers, flags, epoch, rank, place, each, size: tl.constexpr, most: tl.constexpr):
    """The value of rank `source`, which is waited for; `value` if that is this rank. Zeros if the host has ended the wait."""
    flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + source * most + place
    seen = epoch
    if source != rank:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        # The difference is right even where epochs have wrapped.
        while seen - epoch < 0:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    own = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(value.dtype)), 16)
    # A rank that lives is at most one epoch ahead.
    here = there & (source != rank) & (seen - epoch < 2)
    part = tl.load(own + ((epoch & 1) * size + source) * each + at, mask=here, other=0.0, cache_modifier=".cg")
    return tl.where(source == rank, value, part)


@triton.jit
def _summed(value, at, there, buffers, flags, epoch, rank, place, each, size: tl.constexpr, most: tl.constexpr,
            shares: tl.constexpr):
    """The sum of the ranks' values in the order of the ranks, rounded once. `shares`: one rank, by `place`, gets all values and
    gives their sum to all; else each gets all values."""
    adds = rank
    if shares:
        adds = place % size
        if rank != adds:
            _give(value, adds, at, there, buffers, flags, epoch, rank, place, each, size, most)
    else:
        _give(value, -1, at, there, buffers, flags, epoch, rank, place, each, size, most)
    total = value
    if rank == adds:
        wide = tl.zeros(value.shape, tl.float32)
        for source in tl.static_range(size):
            wide += _take(value, source, at, there, buffers, flags, epoch, rank, place, each, size, most).to(tl.float32)
        total = wide.to(value.dtype)
        if shares:
            _give(total, -1, at, there, buffers, flags, epoch, rank, place, each, size, most)
    else:
        total = _take(value, adds, at, there, buffers, flags, epoch, rank, place, each, size, most)
    return total


@triton.jit(do_not_specialize=["count", "rank", "residual_stride"])
def exchange(x, residual, weight, out, buffers, flags, epochs, count, rank, residual_stride, eps, offset, size: tl.constexpr,
             most: tl.constexpr, room: tl.constexpr, width: tl.constexpr, block: tl.constexpr, kind: tl.constexpr,
             even: tl.constexpr, shares: tl.constexpr, linked: tl.constexpr):
    """x [count] of `size` ranks -> out, by `kind`: "gather" [size, count]; "sum" (`_summed`); "norm": residual [rows, width]
    becomes the sum plus residual, out its RMS norm times (offset + weight), with the bits of a sum and a norm after it.

    buffers, flags [size] int64: the ranks' memory, [2, size, room] of x's type and [size, most] int32. epochs [most] int32 is
    this rank's own. Program b exchanges `width` elements from b x width on; the last one has fewer, but not with "norm".
    `even`: 16 divides the count; then elements are loaded and stored in vectors."""
    if even:
        count = count // 16 * 16
    row, at = tl.program_id(0), tl.arange(0, block)
    place = row * width + at
    there = at < width
    if kind == "norm":
        gain = tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + offset
    else:
        there = place < count
    enter(linked)
    epoch = tl.load(epochs + row) + 1
    value = tl.load(x + place, mask=there, other=0.0)
    if kind == "gather":
        _give(value, -1, place, there, buffers, flags, epoch, rank, row, room, size, most)
        for source in tl.static_range(size):
            part = _take(value, source, place, there, buffers, flags, epoch, rank, row, room, size, most)
            tl.store(out + source * count + place, part, mask=there)
    elif kind == "sum":
        total = _summed(value, place, there, buffers, flags, epoch, rank, row, room, size, most, shares)
        tl.store(out + place, total, mask=there)
    else:
        before = residual + row * residual_stride.to(tl.int64) + at
        # On its way while the ranks' parts are.
        stream = tl.load(before, mask=there, other=0.0)
        total = _summed(value, place, there, buffers, flags, epoch, rank, row, room, size, most, shares)
        # Rounded as often as by kernels one after another.
        stream = (total.to(tl.float32) + stream.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(before, stream, mask=there)
        wide = stream.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps) * gain
        tl.store(out + place, normed.to(out.dtype.element_ty), mask=there)
    tl.store(epochs + row, epoch)
