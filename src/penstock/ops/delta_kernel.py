"""The Triton kernels of ops/delta_triton.py, in the order of their launches.

`mixed` [T + most x S, key_heads, channels] and `updates` [T + most x S, heads, 2] are float32. Row t < T is token t; row
T + i S + s is input i that the page of segment s keeps. `wide`, `high` and `full` cover key_size, value_size and `kept`."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import enter


@triton.jit
def _segment(at, table, query_start, context, segment, group, at_page, table_row, most: tl.constexpr, page: tl.constexpr):
    """(first token, tokens, positions before, the page that it continues, kept inputs that it runs over before its tokens,
    inputs behind which the state is kept, the first and the last page that keep it)."""
    first = tl.load(query_start + segment)
    count = tl.load(query_start + segment + 1) - first
    length = tl.load(context + segment)
    begin, pages = length - count, table + segment.to(tl.int64) * table_row
    source = tl.load(pages + (begin - 1) // page, mask=begin > 0, other=0).to(tl.int64)
    replayed = begin - tl.load(at + source * at_page + group, mask=begin > 0, other=0)
    replayed = tl.minimum(tl.maximum(replayed, 0), most)
    short = count <= 1 + most
    last = tl.load(pages + (length - 1) // page, mask=count > 0, other=0).to(tl.int64)
    other = tl.load(pages + tl.where(short, begin, length - 1) // page, mask=count > 0, other=0).to(tl.int64)
    return first, count, begin, source, replayed, replayed + tl.where(short, 1, count), other, last


@triton.jit
def _input(x, inputs, index, segment, group, place, inside, x_token, inputs_page, key_heads: tl.constexpr, shared: tl.constexpr,
           key_size: tl.constexpr, value_size: tl.constexpr, kernel: tl.constexpr, most: tl.constexpr):
    """Input `index` of a segment, at `place`: first come those that its page keeps, then those of its tokens."""
    first, _, begin, source, replayed, _, _, _ = segment
    channels: tl.constexpr = 2 * key_size + shared * value_size
    unit: tl.constexpr = channels + shared * value_size
    behind = index - kernel + 1 - replayed
    old = inputs + source * inputs_page + (group * (kernel - 1 + most) + index) * (channels + 2 * shared) + place
    found = tl.load(old, mask=inside & (behind < 0) & (begin > 0), other=0.0)
    new = x + (first + behind).to(tl.int64) * x_token
    new += tl.where(place < channels, group * unit, key_heads * unit + group * 2 * shared - channels) + place
    return found + tl.load(new, mask=inside & (behind >= 0), other=0.0)


@triton.jit(do_not_specialize=("tokens", "segments", "table_row"))
def mix(x, conv, decay, step, inputs, at, table, query_start, context, mixed, updates, tokens, segments, scale, x_token,
        inputs_page, at_page, table_row, wide: tl.constexpr, key_heads: tl.constexpr, shared: tl.constexpr,
        key_size: tl.constexpr, value_size: tl.constexpr, kernel: tl.constexpr, most: tl.constexpr, page: tl.constexpr,
        linked: tl.constexpr):
    """Grid: (rows of `mixed`, key heads, 2 + shared). The convolution of a query, a key or a value, and a value head's decay
    and step size."""
    enter(linked)
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    segment = tl.maximum(row - tokens, 0) % segments
    if row < tokens:
        for start in range(1, segments + 1, 64):
            places = start + tl.arange(0, 64)
            ends = tl.load(query_start + places, mask=places <= segments, other=tokens)
            segment += tl.sum((ends <= row).to(tl.int32))
    padding = segment == segments
    segment = tl.minimum(segment, segments - 1)
    found = _segment(at, table, query_start, context, segment, group, at_page, table_row, most, page)
    first, count, _, _, replayed, _, _, _ = found
    index = tl.where(row < tokens, replayed + row - first, (row - tokens) // segments)
    if (padding == 0) & (index < tl.where(row < tokens, replayed + count, replayed)):
        channels: tl.constexpr = 2 * key_size + shared * value_size
        is_value, lane = part >= 2, tl.arange(0, wide)
        inside = lane < tl.where(is_value, value_size, key_size)
        channel = tl.where(is_value, 2 * key_size + (part - 2) * value_size, part * key_size) + lane
        y = tl.zeros((wide,), tl.float32)
        for tap in tl.static_range(kernel):
            one = _input(x, inputs, index + tap, found, group, channel, inside, x_token, inputs_page, key_heads, shared,
                         key_size, value_size, kernel, most)
            weight = tl.load(conv + (group * channels + channel) * kernel + tap, mask=inside, other=0.0)
            y += one.to(tl.float32) * weight.to(tl.float32)
        y *= tl.sigmoid(y)
        unit = tl.where(part == 0, scale, 1.0) * tl.rsqrt(tl.sum(y * y) + 1e-6)
        line = row.to(tl.int64) * key_heads + group
        tl.store(mixed + line * channels + channel, tl.where(is_value, y, y * unit), mask=inside)
        if is_value:
            head, which = group * shared + part - 2, tl.arange(0, 2)
            # Of both: the step size's input, and the decay's.
            given = _input(x, inputs, index + kernel - 1, found, group, channels + which * shared + part - 2, which < 2,
                           x_token, inputs_page, key_heads, shared, key_size, value_size, kernel, most).to(tl.float32)
            given += tl.where(which == 1, tl.load(step + head), 0.0)
            grown = tl.where(given > 20.0, given, tl.log(1.0 + tl.exp(tl.minimum(given, 20.0))))
            gate = tl.where(which == 1, tl.exp(-tl.exp(tl.load(decay + head)) * grown), tl.sigmoid(given))
            tl.store(updates + (line * shared + part - 2) * 2 + which, gate)


@triton.jit(do_not_specialize=("tokens", "segments", "table_row"), do_not_specialize_on_alignment=("state",))
def advance(state, at, table, query_start, context, mixed, updates, tokens, segments, state_page, at_page, table_row,
            wide: tl.constexpr, some: tl.constexpr, key_heads: tl.constexpr, shared: tl.constexpr, key_size: tl.constexpr,
            value_size: tl.constexpr, most: tl.constexpr, page: tl.constexpr, linked: tl.constexpr):
    """Grid: (value_size / some, value heads, segments). The state of `some` values stays in registers while the inputs of its
    segment pass, one by one. Results replace the values in `mixed`.

    `state` counts as unaligned: a thread then holds single values of many keys, and sums over keys need few exchanges."""
    enter(linked)
    head, segment = tl.program_id(1), tl.program_id(2)
    first, count, begin, source, replayed, kept, other, last = _segment(at, table, query_start, context, segment,
                                                                        head // shared, at_page, table_row, most, page)
    if count > 0:
        # Keys in rows of four, whose sums do not wait for each other.
        d = tl.arange(0, wide // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        e = tl.program_id(0) * some + tl.arange(0, some)
        in_d, in_e = (d < key_size) | (key_size == wide), (e < value_size) | (value_size % some == 0)
        cells = (head * key_size + d[:, :, None]) * value_size + e[None, None, :]
        whole = in_d[:, :, None] & in_e[None, None, :]
        matrix = tl.load(state + source * state_page + cells, mask=whole & (begin > 0), other=0.0)
        ran = replayed + count
        for rejectable in tl.static_range(2):
            # Inputs are on their way to shared memory while those before them are computed.
            for t in tl.range(kept if rejectable else 0, ran if rejectable else kept, num_stages=4):
                row = tl.where(t < replayed, tokens + t * segments + segment, first + t - replayed).to(tl.int64)
                both = mixed + (row * key_heads + head // shared) * (2 * key_size + shared * value_size)
                own = both + 2 * key_size + head % shared * value_size + e
                gate = updates + (row * key_heads * shared + head) * 2 + 0 * e
                q, k = tl.load(both + d, mask=in_d, other=0.0), tl.load(both + key_size + d, mask=in_d, other=0.0)
                v, size, stays = tl.load(own, mask=in_e, other=0.0), tl.load(gate), tl.load(gate + 1)
                product = tl.sum(tl.sum(q * k, 1), 0)
                q, k = q[:, :, None], k[:, :, None]
                change = size * (v - stays * tl.sum(tl.sum(matrix * k, 1), 0))
                result = stays * tl.sum(tl.sum(matrix * q, 1), 0) + product * change
                matrix = stays[None, None, :] * matrix + k * change[None, None, :]
                tl.store(own, result, mask=in_e)
            if not rejectable:
                tl.store(state + last * state_page + cells, matrix, mask=whole)
                if other != last:
                    tl.store(state + other * state_page + cells, matrix, mask=whole)


@triton.jit(do_not_specialize=("tokens", "segments", "table_row"))
def finish(x, norm, inputs, at, table, query_start, context, mixed, out, tokens, segments, eps, x_token, inputs_page, at_page,
           table_row, high: tl.constexpr, full: tl.constexpr, key_heads: tl.constexpr, shared: tl.constexpr,
           key_size: tl.constexpr, value_size: tl.constexpr, kernel: tl.constexpr, most: tl.constexpr, page: tl.constexpr,
           linked: tl.constexpr):
    """Grid: (T + S, key heads). A token's norm and gates; or what is kept of a segment's inputs, which nothing else reads."""
    enter(linked)
    row, group = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * key_size + shared * value_size
    if row < tokens:
        e = tl.arange(0, high)
        there = (e < value_size) & (row < tl.load(query_start + segments))  # padding gets zeros
        weight = tl.load(norm + e, mask=there, other=0.0).to(tl.float32)
        line = row.to(tl.int64) * key_heads + group
        gates = x + row.to(tl.int64) * x_token + group * (channels + shared * value_size) + channels + e
        for place in tl.static_range(shared):
            y = tl.load(mixed + line * channels + 2 * key_size + place * value_size + e, mask=there, other=0.0)
            y *= tl.rsqrt(tl.sum(y * y) / value_size + eps) * weight
            z = tl.load(gates + place * value_size, mask=there, other=0.0).to(tl.float32)
            y *= z * tl.sigmoid(z)
            tl.store(out + (line * shared + place) * value_size + e, y.to(out.dtype.element_ty), mask=e < value_size)
    else:
        found = _segment(at, table, query_start, context, row - tokens, group, at_page, table_row, most, page)
        _, count, begin, _, replayed, kept, other, last = found
        place, size = tl.arange(0, full), channels + 2 * shared
        for i in range(tl.where(count > 0, replayed + count - kept + kernel - 1, 0)):
            one = _input(x, inputs, kept + i, found, group, place, place < size, x_token, inputs_page, key_heads, shared,
                         key_size, value_size, kernel, most)
            # Input kept + i has been read before a thread writes over it.
            tl.debug_barrier()
            to = inputs + (group * (kernel - 1 + most) + i) * size + place
            tl.store(to + last * inputs_page, one, mask=place < size)
            tl.store(to + other * inputs_page, one, mask=place < size)
        tl.store(at + last * at_page + group, begin - replayed + kept, mask=count > 0)
        tl.store(at + other * at_page + group, begin - replayed + kept, mask=count > 0)
