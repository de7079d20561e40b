"""The Triton kernels of filters: where to cut each line's logits so that top_k, top_p and min_p hold, without sorting.

A cut is found by counting. Which tokens stay is the same question for top_k and for top_p: those that less than so much is
larger than, in number or in probability (`ops/sample.py::SampleOps.threshold`). With the values as integers in their order
(`ordered`), the cut is the lowest key of which that holds, and it lies between `low`, of which it does not hold, and `high`, of
which it does. One or two passes over the logits count above several pivots each, which leaves few values in between; another
puts these aside, and the last kernel goes on among them alone. Where too many are left, it goes on among the whole line.

Whatever is summed up in float32 is within one tile of a line, and tiles are cut at fixed places: what is found does not depend
on the other lines of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.ops.sample import WIDTH, Column, Feature
from penstock.ops.sample_kernels import enter, ordered, real, unordered

_WIDTH = tl.constexpr(WIDTH)
_FEATURES = tl.constexpr(int(Column.FEATURES))
_INVERSE_TEMPERATURE = tl.constexpr(int(Column.INVERSE_TEMPERATURE))
_LOG_MIN_P = tl.constexpr(int(Column.LOG_MIN_P))
_TOP_K = tl.constexpr(int(Column.TOP_K))
_TOP_P = tl.constexpr(int(Column.TOP_P))
_FILTER_ROW = tl.constexpr(int(Feature.FILTER))
PIVOTS = 16
_PIVOTS = tl.constexpr(PIVOTS)
_BY_MASS, _BY_COUNT, _BY_PEAK, _NOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""What cuts a line: top_p alone (and min_p), top_k first, min_p alone, nothing."""
STATE = 8 + PIVOTS
"""Numbers of a line's state, float64: mode, peak, low, high, what is above high, what is above low, target, whether low and
high are close enough; then the pivots. "What" is a number of values, or a sum of their exponentials over the peak's, by the
mode."""
_STATE = tl.constexpr(STATE)


@triton.jit
def _words(table, row, line):
    """The parameters of a line; those of some row where the line is padding."""
    return table + tl.maximum(tl.load(row + line), 0).to(tl.int64) * _WIDTH


@triton.jit
def _scaled(logits, ids, n, inverse):
    """Scaled logits; what is not there is -inf, and a NaN is +inf."""
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
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    if part == 0:
        tl.store(counters + line, 0)
    inverse = real(tl.load(words + _INVERSE_TEMPERATURE))
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
    top_k, top_p = tl.load(words + _TOP_K), real(tl.load(words + _TOP_P))
    mode = tl.where((top_k > 0) & (top_k < finite), _BY_COUNT, tl.where(top_p < 1, _BY_MASS, _BY_PEAK))
    mode = tl.where((peak < float("inf")) & (peak > float("-inf")), mode, _NOT)
    low = ordered(least) - 1
    floor = ordered(peak + real(tl.load(words + _LOG_MIN_P))) - 1
    low = tl.where(mode == _BY_MASS, tl.maximum(low, floor), low)
    # The target of a mass is known once the whole mass is.
    target = tl.where(mode == _BY_COUNT, top_k.to(tl.float64), -1.0)
    none = tl.zeros((), tl.float64)
    return mode, peak, low, ordered(peak), none, none, target, none


@triton.jit
def _pivots(words, mode, low, high, opening: tl.constexpr, vocab: tl.constexpr):
    """Keys [_PIVOTS]: low itself, so that the whole is known, and values from there up to high.

    At equal distances; but in the opening pass closer to one another towards high if top_k cuts, which is mostly small. The cut
    of top_p is not further below the peak than where the whole vocabulary would have 1 - top_p of the peak's probability.
    """
    j = tl.arange(0, _PIVOTS)
    least, most = unordered(low), unordered(high)
    part = 1.0 - tl.maximum(j - 1, 0).to(tl.float32) / (_PIVOTS - 1)
    if opening:
        possible = most - tl.log(vocab / (1.0 - real(tl.load(words + _TOP_P)))) - 0.01
        least = tl.where(mode == _BY_MASS, tl.maximum(least, possible), least)
        part = tl.where(mode == _BY_COUNT, part * part * part, part)
    key = ordered(most - (most - least) * part)
    return tl.where(j == 0, low, tl.minimum(tl.maximum(key, low + 1), high - 1))


@triton.jit
def _continue(words, state, tallies, tiles, room: tl.constexpr, wide: tl.constexpr):
    """The state after a pass, from the state before it and [tiles, _PIVOTS] of what is above each pivot in each tile."""
    mode, peak = tl.load(state).to(tl.int32), tl.load(state + 1).to(tl.float32)
    low, high = tl.load(state + 2).to(tl.int32), tl.load(state + 3).to(tl.int32)
    above, beyond, target, close = tl.load(state + 4), tl.load(state + 5), tl.load(state + 6), tl.load(state + 7)
    if (close == 0) & (mode < _BY_PEAK):
        j = tl.arange(0, _PIVOTS)
        tile = tl.arange(0, wide)[:, None]
        found = tl.sum(tl.load(tallies + tile * _PIVOTS + j[None, :], mask=tile < tiles, other=0.0).to(tl.float64), 0)
        target = tl.where(target < 0, tl.max(found, 0) * real(tl.load(words + _TOP_P)).to(tl.float64), target)
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
    """One pass: what is above each pivot in `each` tiles, program (line, part) -> tallies [S, tiles, _PIVOTS], and the state
    that they belong to, after [S, STATE]. Nothing to do for lines that are close enough.

    The state comes from what `extremes` left in `partial` if opening, else from the state `before` and its tallies, `partial`.
    """
    enter(linked)
    line, part = tl.program_id(0), tl.program_id(1)
    words = _words(table, row, line)
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    tiles: tl.constexpr = (vocab + tile - 1) // tile
    if opening:
        parts = tl.num_programs(1)
        mode, peak, low, high, above, beyond, target, close = _begin(words, partial + line * parts * 3, parts, wide)
    else:
        mode, peak, low, high, above, beyond, target, close = _continue(
            words, before + line * _STATE, partial + line * tiles * _PIVOTS, tiles, room, wide)
    pivot = _pivots(words, mode, low, high, opening, vocab)
    if part == 0:
        after += line * _STATE
        tl.store(after, mode.to(tl.float64))
        tl.store(after + 1, peak.to(tl.float64))
        tl.store(after + 2, low.to(tl.float64))
        tl.store(after + 3, high.to(tl.float64))
        tl.store(after + 4, above)
        tl.store(after + 5, beyond)
        tl.store(after + 6, target)
        tl.store(after + 7, close)
        tl.store(after + 8 + tl.arange(0, _PIVOTS), pivot.to(tl.float64))
    if (mode >= _BY_PEAK) | (close > 0):
        return
    inverse = real(tl.load(words + _INVERSE_TEMPERATURE))
    logits += line.to(tl.int64) * stride * align
    for one in range(part * each, tl.minimum((part + 1) * each, tiles)):
        x = _scaled(logits, one * tile + tl.arange(0, tile), vocab, inverse)
        weight = tl.where(mode == _BY_COUNT, 1.0, tl.exp(x - peak))
        found = tl.sum(tl.where(ordered(x)[None, :] > pivot[:, None], weight[None, :], 0.0), 1)
        tl.store(tallies + (line * tiles + one) * _PIVOTS + tl.arange(0, _PIVOTS), found)


@triton.jit
def _highest(mode, high, beyond, room: tl.constexpr):
    """The highest key that is put aside: any, where there is room for all values above low; top_p after top_k needs them."""
    return tl.where((mode == _BY_COUNT) & (beyond <= room), 0x7FFFFFFF, high)


@triton.jit(do_not_specialize=["stride", "each", "row"])
def gather(logits, stride, each, table, row, before, tallies, counters, kept, room: tl.constexpr, wide: tl.constexpr,
           tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Puts the values of a line that may be the cut aside in kept [S, room], in any order, as far as there is room, and counts
    them in counters [S]: all those above low, or those between low and high."""
    enter(linked)
    line, part = tl.program_id(0), tl.program_id(1)
    words = _words(table, row, line)
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    tiles: tl.constexpr = (vocab + tile - 1) // tile
    mode, _, low, high, _, beyond, _, _ = _continue(words, before + line * _STATE, tallies + line * tiles * _PIVOTS, tiles,
                                                    room, wide)
    if mode >= _BY_PEAK:
        return
    highest = _highest(mode, high, beyond, room)
    inverse = real(tl.load(words + _INVERSE_TEMPERATURE))
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
    """The lowest key above which there is less than the target, among the values at hand; `already` is above all of them."""
    while high > low + 1:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low) // 2).to(tl.int32)
        holds = already + tl.sum(tl.where(key > middle, weight, 0.0), 0) < target
        high = tl.where(holds, middle, high)
        low = tl.where(holds, low, middle)
    return high


@triton.jit
def _above(logits, inverse, peak, by_count, key, tile: tl.constexpr, vocab: tl.constexpr):
    """How many of a line's values, or how much, is above a key."""
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
    """Program line -> out [S], the threshold. What was put aside is summed in float64, so that its order does not show."""
    enter(linked)
    line = tl.program_id(0)
    words = _words(table, row, line)
    tl.store(out + line, float("-inf"))
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    tiles: tl.constexpr = (vocab + tile - 1) // tile
    mode, peak, low, high, above, beyond, target, _ = _continue(
        words, before + line * _STATE, tallies + line * tiles * _PIVOTS, tiles, room, wide)
    if mode == _NOT:
        return
    cut = ordered(peak + real(tl.load(words + _LOG_MIN_P)))
    if mode != _BY_PEAK:
        inverse, top_p = real(tl.load(words + _INVERSE_TEMPERATURE)), real(tl.load(words + _TOP_P)).to(tl.float64)
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
