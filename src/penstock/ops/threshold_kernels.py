"""The Triton kernels of filters: where to cut each line's logits so that top_k, top_p and min_p hold, without sorting.

A cut is found by counting. Which tokens stay is the same question for top_k and for top_p: those that less than so much is
larger than, in number or in probability (`ops/sample.py::SampleOps.threshold`). With the values as integers in their order
(`ordered`), the cut is the lowest key of which that holds, and it lies between `low`, of which it does not hold, and `high`, of
which it does. Two passes over the logits count above several pivots each, which leaves few values in between; a third puts
these aside, and the last kernel goes on among them alone. Where too many are left, it goes on among all of the line's logits.

A line's logits are cut into tiles of fixed size, so what is found does not depend on the other lines of the step.
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
_LOWEST = tl.constexpr(-0x7F800001)
"""ordered(-inf)."""
PIVOTS = 16
_PIVOTS = tl.constexpr(PIVOTS)
_BY_MASS, _BY_COUNT, _BY_PEAK, _NOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""What cuts a line: top_p alone (and min_p), top_k first, min_p alone, nothing."""
STATE = 7
"""Numbers of a line's state, float64: mode, peak, low, high, how many and how much are above high, target."""
_STATE = tl.constexpr(STATE)


@triton.jit
def _tile(logits, ids, n, inverse):
    """Scaled logits; what is not there is -inf, and a NaN is +inf."""
    x = tl.load(logits + ids, mask=ids < n, other=float("-inf")).to(tl.float32) * inverse
    return tl.where(x == x, x, float("inf"))


@triton.jit(do_not_specialize=["stride", "row"])
def extremes(logits, stride, table, row, partial, counters, tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr,
             linked: tl.constexpr):
    """Program (line, part) -> partial [S, parts, 3]: the largest scaled logit, the least finite one, how many are finite."""
    enter(linked)
    line, part = tl.program_id(0), tl.program_id(1)
    words = table + tl.maximum(tl.load(row + line), 0).to(tl.int64) * _WIDTH
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    if part == 0:
        tl.store(counters + line, 0)
    x = _tile(logits + line.to(tl.int64) * stride * align, part * tile + tl.arange(0, tile), vocab,
              real(tl.load(words + _INVERSE_TEMPERATURE)))
    partial += (line * tl.num_programs(1) + part) * 3
    finite = x > float("-inf")
    tl.store(partial, tl.max(x, 0))
    tl.store(partial + 1, tl.min(tl.where(finite, x, float("inf")), 0))
    tl.store(partial + 2, tl.sum(finite.to(tl.float32), 0))


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
    none = tl.zeros((), tl.float64)
    # The target of a mass is known once the whole mass is.
    return mode, peak, low, ordered(peak), none, none, tl.where(mode == _BY_COUNT, top_k.to(tl.float64), -1.0)


@triton.jit
def _load_state(state):
    return (tl.load(state).to(tl.int32), tl.load(state + 1).to(tl.float32), tl.load(state + 2).to(tl.int32),
            tl.load(state + 3).to(tl.int32), tl.load(state + 4), tl.load(state + 5), tl.load(state + 6))


@triton.jit
def _pivot(low, high, j):
    """Pivot j of `_PIVOTS`: low itself, then values at equal distances up to high."""
    below, above = unordered(low), unordered(high)
    key = ordered(below + (above - below) * (j.to(tl.float32) / _PIVOTS))
    return tl.where(j == 0, low, tl.minimum(tl.maximum(key, low + 1), high - 1))


@triton.jit
def _select(words, state, tallies, parts, wide: tl.constexpr):
    """The state after a pass, given the state before it and [parts, _PIVOTS, 2] of how many and how much is above each pivot.

    Also how many values are above the new low.
    """
    mode, peak, low, high, above_count, above_mass, target = _load_state(state)
    j = tl.arange(0, _PIVOTS)
    part = tl.arange(0, wide)[:, None]
    at = tallies + (part * _PIVOTS + j[None, :]) * 2
    number = tl.sum(tl.load(at, mask=part < parts, other=0.0).to(tl.float64), 0)
    mass = tl.sum(tl.load(at + 1, mask=part < parts, other=0.0).to(tl.float64), 0)
    whole = tl.max(mass, 0)
    target = tl.where(target < 0, whole * real(tl.load(words + _TOP_P)).to(tl.float64), target)
    pivot = _pivot(low, high, j)
    holds = (j > 0) & (tl.where(mode == _BY_COUNT, number, mass) < target)
    above_count = tl.max(tl.where(holds, number, above_count), 0)
    above_mass = tl.max(tl.where(holds, mass, above_mass), 0)
    high = tl.min(tl.where(holds, pivot, high), 0)
    low = tl.max(tl.where(holds, low, pivot), 0)
    beyond = tl.min(tl.where(holds, float("inf"), number), 0)
    return mode, peak, low, high, above_count, above_mass, target, beyond


@triton.jit(do_not_specialize=["stride", "row"])
def narrow(logits, stride, table, row, partial, before, after, tallies, wide: tl.constexpr, tile: tl.constexpr,
           opening: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """One pass: program (line, part) -> tallies [S, parts, _PIVOTS, 2], and the state that they belong to, after [S, STATE].

    The state comes from `extremes` if opening, and otherwise from the state `before` and its tallies, which are in `partial`.
    """
    enter(linked)
    line, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    words = table + tl.maximum(tl.load(row + line), 0).to(tl.int64) * _WIDTH
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    if opening:
        mode, peak, low, high, above_count, above_mass, target = _begin(words, partial + line * parts * 3, parts, wide)
    else:
        mode, peak, low, high, above_count, above_mass, target, _ = _select(
            words, before + line * _STATE, partial + line * parts * _PIVOTS * 2, parts, wide)
    if part == 0:
        after += line * _STATE
        tl.store(after, mode.to(tl.float64))
        tl.store(after + 1, peak.to(tl.float64))
        tl.store(after + 2, low.to(tl.float64))
        tl.store(after + 3, high.to(tl.float64))
        tl.store(after + 4, above_count)
        tl.store(after + 5, above_mass)
        tl.store(after + 6, target)
    if mode >= _BY_PEAK:
        return
    x = _tile(logits + line.to(tl.int64) * stride * align, part * tile + tl.arange(0, tile), vocab,
              real(tl.load(words + _INVERSE_TEMPERATURE)))
    key, weight = ordered(x), tl.exp(x - peak)
    tallies += (line * parts + part) * _PIVOTS * 2
    for j in tl.static_range(_PIVOTS):
        above = key > _pivot(low, high, tl.full((), j, tl.int32))
        tl.store(tallies + 2 * j, tl.sum(above.to(tl.float32), 0))
        tl.store(tallies + 2 * j + 1, tl.sum(tl.where(above, weight, 0.0), 0))


@triton.jit(do_not_specialize=["stride", "row"])
def gather(logits, stride, table, row, before, tallies, counters, kept, wide: tl.constexpr, tile: tl.constexpr,
           room: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Puts the values of a line that may be the cut aside in kept [S, room], in any order, if there is room: all those above
    low, or those between low and high."""
    enter(linked)
    line, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    words = table + tl.maximum(tl.load(row + line), 0).to(tl.int64) * _WIDTH
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    mode, _, low, high, above_count, _, _, beyond = _select(words, before + line * _STATE,
                                                            tallies + line * parts * _PIVOTS * 2, parts, wide)
    beyond, _, most = _aside(beyond, above_count, high, room)
    if (mode >= _BY_PEAK) | (beyond > room):
        return
    ids = part * tile + tl.arange(0, tile)
    logits += line.to(tl.int64) * stride * align
    key = ordered(_tile(logits, ids, vocab, real(tl.load(words + _INVERSE_TEMPERATURE))))
    chosen = (key > low) & (key <= most)
    number = chosen.to(tl.int32)
    place = tl.atomic_add(counters + line, tl.sum(number, 0), sem="relaxed") + tl.cumsum(number, 0) - 1
    tl.store(kept + line * room + place, tl.load(logits + ids, mask=chosen, other=0.0), mask=chosen)


@triton.jit
def _aside(beyond, above_count, high, room: tl.constexpr):
    """How many values `gather` has to put aside, how many above high it leaves out, and the highest key that it takes."""
    without = tl.where(beyond > room, above_count, 0.0)
    return (beyond - without).to(tl.int32), without, tl.where(beyond > room, high, 0x7FFFFFFF)


@triton.jit
def _above(source, n, inverse, peak, by_count, pivot, tile: tl.constexpr):
    """How many of n values, or how much, is above a pivot; float64, so that the order of the values does not show."""
    total = tl.zeros((), tl.float64)
    for begin in range(0, n, tile):
        x = _tile(source, begin + tl.arange(0, tile), n, inverse)
        weight = tl.where(by_count, 1.0, tl.exp(x - peak)).to(tl.float64)
        total += tl.sum(tl.where(ordered(x) > pivot, weight, 0.0), 0)
    return total


@triton.jit
def _search(source, n, inverse, peak, by_count, already, target, low, high, tile: tl.constexpr):
    """The lowest key above which there is less than the target; `already` is what lies above all n values."""
    while high > low + 1:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low) // 2).to(tl.int32)
        holds = already + _above(source, n, inverse, peak, by_count, middle, tile) < target
        high = tl.where(holds, middle, high)
        low = tl.where(holds, low, middle)
    return high


@triton.jit(do_not_specialize=["stride", "parts", "row"])
def solve(logits, stride, table, row, parts, before, tallies, kept, out, wide: tl.constexpr, tile: tl.constexpr,
          room: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Program line -> out [S], the threshold."""
    enter(linked)
    line = tl.program_id(0)
    words = table + tl.maximum(tl.load(row + line), 0).to(tl.int64) * _WIDTH
    tl.store(out + line, float("-inf"))
    if (tl.load(words + _FEATURES) & _FILTER_ROW) == 0:
        return
    mode, peak, low, high, above_count, above_mass, target, beyond = _select(
        words, before + line * _STATE, tallies + line * parts * _PIVOTS * 2, parts, wide)
    if mode == _NOT:
        return
    inverse, top_p = real(tl.load(words + _INVERSE_TEMPERATURE)), real(tl.load(words + _TOP_P))
    cut = ordered(peak + real(tl.load(words + _LOG_MIN_P)))
    if mode != _BY_PEAK:
        by_count = mode == _BY_COUNT
        both = by_count & (top_p < 1)
        source, n = logits + line.to(tl.int64) * stride * align, tl.full((), vocab, tl.int32)
        already = tl.zeros((), tl.float64)
        left, without, _ = _aside(beyond, above_count, high, room)
        # The probability of all that top_k leaves is known only where all of it was put aside.
        if left <= tl.where(both & (without > 0), 0, room):
            source, n = kept + line * room, left
            already = tl.where(without > 0, tl.where(by_count, above_count, above_mass), 0.0)
        cut = tl.maximum(cut, _search(source, n, inverse, peak, by_count, already, target, low, high, tile))
        if both:
            whole = _above(source, n, inverse, peak, False, cut - 1, tile)
            cut = _search(source, n, inverse, peak, False, tl.zeros((), tl.float64), whole * top_p.to(tl.float64), cut - 1,
                          ordered(peak), tile)
    tl.store(out + line, unordered(cut))
