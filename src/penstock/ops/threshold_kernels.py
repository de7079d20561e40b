"""The Triton kernels of top_k, top_p and min_p: they find each line's threshold without sorting.

The threshold is found by counting above several pivots at a time. top_k and top_p ask the same question: a token stays if
the tokens with larger logits are fewer than k, or have less probability than p (`ops/sample.py::SampleOps.threshold`). Logits
are mapped to integers that sort alike (`ordered`); the threshold is the lowest key for which the condition holds, and lies
between `low`, for which it fails, and `high`, for which it holds. One or two passes over the logits count what is above each of
several pivots, which leaves few values in between. The next pass collects these, and the last kernel continues among them
alone; if they do not fit, it continues over the whole line.

float32 sums stay within one tile, and tile borders are fixed, so the result does not depend on the other lines of the step."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import enter
from penstock.ops.sample_kernels import _WIDTH, COLUMN, FEATURE, ordered, real, unordered

PIVOTS = 16
_PIVOTS = tl.constexpr(PIVOTS)
_BY_MASS, _BY_COUNT, _BY_PEAK, _NOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""The filter that decides a line's threshold: top_p alone (and min_p), top_k first, min_p alone, none."""
STATE = 8 + PIVOTS
"""Elements of a line's state, float64: mode, peak, low, high, amount above high, amount above low, target, whether low and high
are close enough; then the pivots. An amount is a number of values, or the sum of their exponentials relative to the peak's,
depending on the mode."""
_STATE = tl.constexpr(STATE)


@triton.jit
def _words(table, row, line):
    """The parameters of a line's row. Padding lines read those of an arbitrary row."""
    return table + tl.maximum(tl.load(row + line), 0).to(tl.int64) * _WIDTH


@triton.jit
def _scaled(logits, ids, n, inverse):
    """Scaled logits; -inf beyond the vocabulary, +inf for NaN."""
    x = tl.load(logits + ids, mask=ids < n, other=float("-inf")).to(tl.float32) * inverse
    return tl.where(x == x, x, float("inf"))


@triton.jit(do_not_specialize=["stride", "each", "row"])
def extremes(logits, stride, each, table, row, partial, counters, tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr,
             linked: tl.constexpr):
    """Of `each` tiles of a line the largest scaled logit, the least finite one, and how many are finite: program (line, part)
    -> partial [S, parts, 3]. Counters [S] become 0."""
    enter(linked)
    line, part = tl.program_id(0), tl.program_id(1)
    words = _words(table, row, line)
    if (tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.FILTER) == 0:
        return
    if part == 0:
        tl.store(counters + line, 0)
    inverse = real(tl.load(words + COLUMN.value.INVERSE_TEMPERATURE))
    logits += line.to(tl.int64) * stride * align
    most, least = tl.full((tile,), float("-inf"), tl.float32), tl.full((tile,), float("inf"), tl.float32)
    finite = tl.zeros((tile,), tl.int32)
    for begin in range(part * each * tile, tl.minimum((part + 1) * each * tile, vocab), tile):
        x = _scaled(logits, begin + tl.arange(0, tile), vocab, inverse)
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
        finite += (x > float("-inf")).to(tl.int32)
    partial += (line * tl.num_programs(1) + part) * 3
    tl.store(partial, tl.max(most, 0))
    tl.store(partial + 1, tl.min(least, 0))
    tl.store(partial + 2, tl.sum(finite, 0).to(tl.float32))


@triton.jit
def _begin(words, partial, parts, wide: tl.constexpr):
    """The state before the first pass."""
    part = tl.arange(0, wide)
    there = part < parts
    peak = tl.max(tl.load(partial + part * 3, mask=there, other=float("-inf")), 0)
    least = tl.min(tl.load(partial + part * 3 + 1, mask=there, other=float("inf")), 0)
    finite = tl.sum(tl.load(partial + part * 3 + 2, mask=there, other=0.0), 0)
    top_k, top_p = tl.load(words + COLUMN.value.TOP_K), real(tl.load(words + COLUMN.value.TOP_P))
    mode = tl.where((top_k > 0) & (top_k < finite), _BY_COUNT, tl.where(top_p < 1, _BY_MASS, _BY_PEAK))
    mode = tl.where((peak < float("inf")) & (peak > float("-inf")), mode, _NOT)
    low = ordered(least) - 1
    floor = ordered(peak + real(tl.load(words + COLUMN.value.LOG_MIN_P))) - 1
    low = tl.where(mode == _BY_MASS, tl.maximum(low, floor), low)
    # The target of a mass is known once the whole mass is.
    target = tl.where(mode == _BY_COUNT, top_k.to(tl.float64), -1.0)
    none = tl.zeros((), tl.float64)
    return mode, peak, low, ordered(peak), none, none, target, none


@triton.jit
def _pivots(words, mode, low, high, opening: tl.constexpr, vocab: tl.constexpr):
    """Pivot keys [_PIVOTS]: low itself, to know the total, and values from there up to high.

    They are evenly spaced, except in the opening pass with top_k, where they are denser towards high because k is mostly small.
    The threshold of top_p lies no further below the peak than where the whole vocabulary would have 1 - top_p of the peak's
    probability."""
    j = tl.arange(0, _PIVOTS)
    least, most = unordered(low), unordered(high)
    part = 1.0 - tl.maximum(j - 1, 0).to(tl.float32) / (_PIVOTS - 1)
    if opening:
        possible = most - tl.log(vocab / (1.0 - real(tl.load(words + COLUMN.value.TOP_P)))) - 0.01
        least = tl.where(mode == _BY_MASS, tl.maximum(least, possible), least)
        part = tl.where(mode == _BY_COUNT, part * part * part, part)
    key = ordered(most - (most - least) * part)
    return tl.where(j == 0, low, tl.minimum(tl.maximum(key, low + 1), high - 1))


@triton.jit
def _continue(words, state, tallies, tiles, room: tl.constexpr, wide: tl.constexpr):
    """The state after a pass, from the state before it and the amounts above each pivot in each tile [tiles, _PIVOTS]."""
    mode, peak = tl.load(state).to(tl.int32), tl.load(state + 1).to(tl.float32)
    low, high = tl.load(state + 2).to(tl.int32), tl.load(state + 3).to(tl.int32)
    above, beyond, target, close = tl.load(state + 4), tl.load(state + 5), tl.load(state + 6), tl.load(state + 7)
    if (close == 0) & (mode < _BY_PEAK):
        j = tl.arange(0, _PIVOTS)
        tile = tl.arange(0, wide)[:, None]
        found = tl.sum(tl.load(tallies + tile * _PIVOTS + j[None, :], mask=tile < tiles, other=0.0).to(tl.float64), 0)
        target = tl.where(target < 0, tl.max(found, 0) * real(tl.load(words + COLUMN.value.TOP_P)).to(tl.float64), target)
        pivot = tl.load(state + 8 + j).to(tl.int32)
        holds = (j > 0) & (found < target)
        above = tl.max(tl.where(holds, found, above), 0)
        beyond = tl.min(tl.where(holds, float("inf"), found), 0)
        high = tl.min(tl.where(holds, pivot, high), 0)
        low = tl.max(tl.where(holds, low, pivot), 0)
        # No value above low has less mass than this.
        least = tl.where(mode == _BY_COUNT, 1.0, tl.exp(unordered(low) - peak)).to(tl.float64)
        most = beyond - tl.where(mode == _BY_COUNT, 0.0, above)
        close = tl.where(most <= room * least, 1.0, 0.0).to(tl.float64)
    return mode, peak, low, high, above, beyond, target, close


@triton.jit(do_not_specialize=["stride", "each", "row"])
def narrow(logits, stride, each, table, row, partial, before, after, tallies, opening: tl.constexpr, room: tl.constexpr,
           wide: tl.constexpr, tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """One pass: program (line, part) -> tallies [S, tiles, _PIVOTS], the amount above each pivot in `each` tiles, and the state
    that they belong to, after [S, STATE]. Lines whose low and high are close enough are skipped.

    The opening pass derives the state from the results of `extremes` in `partial`, later ones from the state `before` and its
    tallies in `partial`."""
    enter(linked)
    line, part = tl.program_id(0), tl.program_id(1)
    words = _words(table, row, line)
    if (tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.FILTER) == 0:
        return
    tiles: tl.constexpr = (vocab + tile - 1) // tile
    if opening:
        parts = tl.num_programs(1)
        state = _begin(words, partial + line * parts * 3, parts, wide)
    else:
        state = _continue(words, before + line * _STATE, partial + line * tiles * _PIVOTS, tiles, room, wide)
    mode, peak, low, high, _, _, _, close = state
    pivot = _pivots(words, mode, low, high, opening, vocab)
    if part == 0:
        after += line * _STATE
        for i in tl.static_range(8):
            tl.store(after + i, state[i].to(tl.float64))
        tl.store(after + 8 + tl.arange(0, _PIVOTS), pivot.to(tl.float64))
    if (mode >= _BY_PEAK) | (close > 0):
        return
    inverse = real(tl.load(words + COLUMN.value.INVERSE_TEMPERATURE))
    logits += line.to(tl.int64) * stride * align
    for one in range(part * each, tl.minimum((part + 1) * each, tiles)):
        x = _scaled(logits, one * tile + tl.arange(0, tile), vocab, inverse)
        weight = tl.where(mode == _BY_COUNT, 1.0, tl.exp(x - peak))
        found = tl.sum(tl.where(ordered(x)[None, :] > pivot[:, None], weight[None, :], 0.0), 1)
        tl.store(tallies + (line * tiles + one) * _PIVOTS + tl.arange(0, _PIVOTS), found)


@triton.jit
def _highest(mode, high, beyond, room: tl.constexpr):
    """The highest key that is collected. With room for all values above low there is no limit: top_p after top_k needs them."""
    return tl.where((mode == _BY_COUNT) & (beyond <= room), 0x7FFFFFFF, high)


@triton.jit(do_not_specialize=["stride", "each", "row"])
def gather(logits, stride, each, table, row, before, tallies, counters, kept, room: tl.constexpr, wide: tl.constexpr,
           tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Collects the values of a line that may be the threshold in kept [S, room], in any order, as far as there is room, and
    counts them in counters [S]: all those above low, or those between low and high."""
    enter(linked)
    line, part = tl.program_id(0), tl.program_id(1)
    words = _words(table, row, line)
    if (tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.FILTER) == 0:
        return
    tiles: tl.constexpr = (vocab + tile - 1) // tile
    mode, _, low, high, _, beyond, _, _ = _continue(words, before + line * _STATE, tallies + line * tiles * _PIVOTS, tiles,
                                                    room, wide)
    if mode >= _BY_PEAK:
        return
    highest = _highest(mode, high, beyond, room)
    inverse = real(tl.load(words + COLUMN.value.INVERSE_TEMPERATURE))
    logits += line.to(tl.int64) * stride * align
    for one in range(part * each, tl.minimum((part + 1) * each, tiles)):
        x = _scaled(logits, one * tile + tl.arange(0, tile), vocab, inverse)
        key = ordered(x)
        chosen = (key > low) & (key <= highest)
        number = chosen.to(tl.int32)
        total = tl.sum(number, 0)
        if total > 0:
            place = tl.atomic_add(counters + line, total, sem="relaxed") + tl.cumsum(number, 0) - 1
            tl.store(kept + line * room + place, x, mask=chosen & (place < room))


@triton.jit
def _cut(key, weight, already, target, low, high):
    """The lowest key with less than the target above it, among the given values; `already` is the amount above all of them."""
    while high > low + 1:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low) // 2).to(tl.int32)
        holds = already + tl.sum(tl.where(key > middle, weight, 0.0), 0) < target
        high = tl.where(holds, middle, high)
        low = tl.where(holds, low, middle)
    return high


@triton.jit
def _above(logits, inverse, peak, by_count, key, tile: tl.constexpr, vocab: tl.constexpr):
    """The amount of a line's values above a key."""
    total = tl.zeros((), tl.float64)
    for begin in range(0, vocab, tile):
        x = _scaled(logits, begin + tl.arange(0, tile), vocab, inverse)
        weight = tl.where(by_count, 1.0, tl.exp(x - peak)).to(tl.float64)
        total += tl.sum(tl.where(ordered(x) > key, weight, 0.0), 0)
    return total


@triton.jit
def _cut_line(logits, inverse, peak, by_count, target, low, high, tile: tl.constexpr, vocab: tl.constexpr):
    """`_cut` among all values of a line."""
    while high > low + 1:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low) // 2).to(tl.int32)
        holds = _above(logits, inverse, peak, by_count, middle, tile, vocab) < target
        high = tl.where(holds, middle, high)
        low = tl.where(holds, low, middle)
    return high


@triton.jit(do_not_specialize=["stride", "row"])
def solve(logits, stride, table, row, before, tallies, counters, kept, out, room: tl.constexpr, wide: tl.constexpr,
          tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Program line -> out [S], the threshold. Collected values are summed in float64, so that their order does not matter."""
    enter(linked)
    line = tl.program_id(0)
    words = _words(table, row, line)
    tl.store(out + line, float("-inf"))
    if (tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.FILTER) == 0:
        return
    tiles: tl.constexpr = (vocab + tile - 1) // tile
    mode, peak, low, high, above, beyond, target, _ = _continue(
        words, before + line * _STATE, tallies + line * tiles * _PIVOTS, tiles, room, wide)
    if mode == _NOT:
        return
    cut = ordered(peak + real(tl.load(words + COLUMN.value.LOG_MIN_P)))
    if mode != _BY_PEAK:
        inverse = real(tl.load(words + COLUMN.value.INVERSE_TEMPERATURE))
        top_p = real(tl.load(words + COLUMN.value.TOP_P)).to(tl.float64)
        logits += line.to(tl.int64) * stride * align
        by_count = mode == _BY_COUNT
        every = _highest(mode, high, beyond, room) > high
        n = tl.load(counters + line)
        at = tl.arange(0, room)
        x = tl.load(kept + line * room + at, mask=at < n, other=float("-inf"))
        key, weight = ordered(x), tl.exp(x - peak).to(tl.float64)
        if n <= room:
            already = tl.where(every, 0.0, above)
            cut = tl.maximum(cut, _cut(key, tl.where(by_count, 1.0, weight), already, target, low, high))
        else:
            cut = tl.maximum(cut, _cut_line(logits, inverse, peak, by_count, target, low, high, tile, vocab))
        if by_count & (top_p < 1):
            if every:
                whole = tl.sum(tl.where(key >= cut, weight, 0.0), 0)
                cut = _cut(key, weight, tl.zeros((), tl.float64), whole * top_p, cut - 1, ordered(peak))
            else:
                whole = _above(logits, inverse, peak, False, cut - 1, tile, vocab)
                cut = _cut_line(logits, inverse, peak, False, whole * top_p, cut - 1, ordered(peak), tile, vocab)
    tl.store(out + line, unordered(cut))
