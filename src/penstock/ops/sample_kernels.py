"""The Triton kernels that choose tokens, edit logits and compute log probabilities. `ops/sample_triton.py` launches them,
`ops/sample.py` defines what they compute; the kernels of filters are in ops/threshold_kernels.py. A line is a row of logits.

Imported late: Triton is not on every machine, and takes 0.3 s where it is."""

from collections import namedtuple
from enum import IntEnum

import triton
import triton.language as tl
from triton.language.extra import libdevice

from penstock.core.plan import NOT_FINITE
from penstock.ops.linked_kernel import enter
from penstock.ops.sample_table import EDIT_WIDTH, M1, M2, STEP, WIDTH, Column, Edit, Feature

_NOT_FINITE = tl.constexpr(NOT_FINITE)
_WIDTH, _EDIT_WIDTH = tl.constexpr(WIDTH), tl.constexpr(EDIT_WIDTH)


def named(kind: type[IntEnum]) -> tl.constexpr:
    """The numbers of an enumeration by their names, as a constant whose value is part of the keys of compiled kernels."""
    return tl.constexpr(namedtuple(kind.__name__, kind.__members__)(*map(int, kind.__members__.values())))


COLUMN, FEATURE, _EDIT = named(Column), named(Feature), named(Edit)
_M1, _M2 = tl.constexpr(M1), tl.constexpr(M2)
_STEP = tl.constexpr(STEP)
_NONE = tl.constexpr(-(2**63))
"""Below every `_ranked`."""
_TAKEN = tl.constexpr(-(2**31))
"""Below every `ordered`."""


@triton.jit
def real(word):
    """The float32 whose bits an int32 holds."""
    return word.to(tl.float32, bitcast=True)


@triton.jit
def ordered(x):
    """Maps float32 to int32 that sort alike: both zeros are equal, NaN may be anywhere."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    return real(key ^ ((key >> 31) & 0x7FFFFFFF))


@triton.jit
def _mix(x):
    """noise._mix on uint32."""
    x = (x ^ (x >> 16)) * _M1
    x = (x ^ (x >> 15)) * _M2
    return x ^ (x >> 16)


@triton.jit
def _log(x, fast: tl.constexpr):
    return libdevice.fast_logf(x) if fast else tl.log(x)


@triton.jit
def _exponential(key, ids, fast: tl.constexpr):
    """noise.exponential. Where u is close to 1, -log(u) is computed by its series: the hardware's fast logarithm has a large
    relative error there, and the smallest variates win the race. Elsewhere its error is 4e-6, far below that of logits."""
    bits = _mix(_mix(ids.to(tl.uint32) * _STEP + key) ^ key)
    u = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.99999994
    v = 1.0 - u
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return tl.where(v < 0.0625, series, -_log(u, fast))


@triton.jit(do_not_specialize=["stride", "tiles", "row", "position", "begins"])
def race(logits, stride, tiles, table, row, position, threshold, begins, values, places, tile: tl.constexpr,
         vocab: tl.constexpr, align: tl.constexpr, fast: tl.constexpr, linked: tl.constexpr):
    """Argmax over `tiles` tiles of a line: program (line, part) -> values, places [S, parts]. Ids are counted from `begins`.

    The value is the logit, or for random rows the scaled logit minus the logarithm of an exponential variate (Gumbel-max). A
    NaN logit counts as +inf."""
    enter(linked)
    line, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    mine = tl.load(row + line)
    if mine < 0:
        return
    words = table + mine.to(tl.int64) * _WIDTH
    logits += line.to(tl.int64) * stride * align
    best = tl.full((tile,), float("-inf"), tl.float32)
    place = tl.zeros((tile,), tl.int32)
    first = part * tiles * tile
    last = tl.minimum(first + tiles * tile, vocab)
    if tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.RANDOM:
        inverse = real(tl.load(words + COLUMN.value.INVERSE_TEMPERATURE))
        lowest = float("-inf")
        if threshold is not None:
            lowest = tl.load(threshold + line)
        at = tl.load(position + line).to(tl.uint32)
        key = _mix(at * _STEP + tl.load(words + COLUMN.value.SEED_KEY).to(tl.uint32, bitcast=True))
        for begin in range(first, last, tile):
            ids = begin + tl.arange(0, tile)
            x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * inverse
            value = tl.where(x < lowest, float("-inf"), x - _log(_exponential(key, ids + begins, fast), fast))
            value = tl.where(x == x, value, float("inf"))
            better = value > best
            best, place = tl.where(better, value, best), tl.where(better, ids, place)
    else:
        for begin in range(first, last, tile):
            ids = begin + tl.arange(0, tile)
            x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            value = tl.where(x == x, x, float("inf"))
            better = value > best
            best, place = tl.where(better, value, best), tl.where(better, ids, place)
    most = tl.max(best, 0)
    tl.store(values + line * parts + part, most)
    tl.store(places + line * parts + part, begins + tl.min(tl.where(best == most, place, 0x3FFFFFFF), 0))


@triton.jit(do_not_specialize=["parts", "length", "row", "position", "tokens", "out", "shift"])
def decide(values, places, parts, row, position, tokens, length, out, shift, wide: tl.constexpr, linked: tl.constexpr):
    """Reduces the parts of a line to its token: program line -> out [S] (`shift` behind, if given), and tokens [R, length]."""
    enter(linked)
    line = tl.program_id(0)
    mine = tl.load(row + line)
    if mine < 0:
        return
    part = tl.arange(0, wide)
    value = tl.load(values + line * parts + part, mask=part < parts, other=float("-inf"))
    place = tl.load(places + line * parts + part, mask=part < parts, other=0x7FFFFFFF)
    most = tl.max(value, 0)
    token = tl.min(tl.where(value == most, place, 0x7FFFFFFF), 0)
    token = tl.where((most < float("inf")) & (most > float("-inf")), token, _NOT_FINITE)
    if shift is not None:
        out += tl.load(shift)
    tl.store(out + line, token)
    at = tl.load(position + line)
    tl.store(tokens + mine.to(tl.int64) * length + at, tl.maximum(token, 0), mask=at < length)


@triton.jit(do_not_specialize=["length", "first", "row", "position", "lines", "tokens"])
def count(lines, first, table, row, position, tokens, length, counts, tile: tl.constexpr, vocab: tl.constexpr,
          linked: tl.constexpr):
    """Counts the tokens of a line's row: 2 per occurrence in the output, plus 1 if the token is in the prompt.

    Program (line, part) -> counts [lines, vocab], which must be zero before."""
    enter(linked)
    line = tl.load(lines + first + tl.program_id(0))
    mine = tl.load(row + line)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    known = tl.load(position + line)
    if tl.program_id(1) * tile >= known:
        return
    prompt = tl.load(table + mine.to(tl.int64) * _WIDTH + COLUMN.value.PROMPT)
    token = tl.load(tokens + mine.to(tl.int64) * length + at, mask=at < known, other=0)
    counts += tl.program_id(0).to(tl.int64) * vocab
    tl.atomic_or(counts + token, 1, mask=at < prompt, sem="relaxed")
    tl.atomic_add(counts + token, 2, mask=(at >= prompt) & (at < known), sem="relaxed")


@triton.jit(do_not_specialize=["length", "first", "stride", "row", "position", "lines", "tokens"])
def penalize(lines, first, table, row, position, tokens, length, counts, logits, stride, tile: tl.constexpr,
             vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Applies penalties to the tokens of a line's row, by their counts: program (line, part).

    Where a token occurs several times, the first occurrence to be processed takes its count and applies the penalty once."""
    enter(linked)
    line = tl.load(lines + first + tl.program_id(0))
    mine = tl.load(row + line)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    known = tl.load(position + line)
    if tl.program_id(1) * tile >= known:
        return
    words = table + mine.to(tl.int64) * _WIDTH
    token = tl.load(tokens + mine.to(tl.int64) * length + at, mask=at < known, other=0)
    found = tl.atomic_xchg(counts + tl.program_id(0).to(tl.int64) * vocab + token, 0, mask=at < known, sem="relaxed")
    first_one = (at < known) & (found > 0)
    logits += line.to(tl.int64) * stride * align
    x = tl.load(logits + token, mask=first_one, other=0.0)
    repetition = real(tl.load(words + COLUMN.value.REPETITION))
    x = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    generated = found >> 1
    x -= generated.to(tl.float32) * real(tl.load(words + COLUMN.value.FREQUENCY))
    x -= tl.where(generated > 0, real(tl.load(words + COLUMN.value.PRESENCE)), 0.0)
    tl.store(logits + token, x, mask=first_one)


@triton.jit
def _exclude(logits, word, token, vocab: tl.constexpr):
    """Adds -inf to the logits of tokens whose bit of their `word` is not set."""
    out = (((word >> (token & 31)) & 1) == 0) & (token < vocab)
    tl.store(logits, tl.load(logits, mask=out, other=0.0) + float("-inf"), mask=out)


@triton.jit(do_not_specialize=["stride", "row", "lines", "lists"])
def allow(lines, table, lists, row, logits, stride, tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr,
          linked: tl.constexpr):
    """Adds -inf to the logits of tokens outside of allowed_token_ids: program (line, part)."""
    enter(linked)
    line = tl.load(lines + tl.program_id(0))
    words = table + tl.load(row + line).to(tl.int64) * _WIDTH
    if (tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.ALLOWED) == 0:
        return
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at // 32 < tl.load(words + COLUMN.value.ALLOWED_WORDS)
    word = tl.load(lists + tl.load(words + COLUMN.value.ALLOWED) + at // 32, mask=inside, other=0)
    _exclude(logits + line.to(tl.int64) * stride * align + at, word, at, vocab)


@triton.jit(do_not_specialize=["stride", "lines", "bits", "words"])
def mask(lines, bits, words, logits, stride, tile: tl.constexpr, vocab: tl.constexpr, align: tl.constexpr,
         linked: tl.constexpr):
    """Adds -inf to the logits of tokens that a bit mask of `words` words excludes: program (line, part)."""
    enter(linked)
    one = tl.program_id(0)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    word = tl.load(bits + one.to(tl.int64) * words + at // 32, mask=at // 32 < words, other=0)
    _exclude(logits + tl.load(lines + one).to(tl.int64) * stride * align + at, word, at, vocab)


@triton.jit(do_not_specialize=["length", "stride", "row", "position", "lines", "tokens", "lists"])
def edit(lines, table, lists, row, position, tokens, length, logits, stride, tile: tl.constexpr, align: tl.constexpr,
         linked: tl.constexpr):
    """Adds the values of the edits that apply: program line."""
    enter(linked)
    line = tl.load(lines + tl.program_id(0))
    mine = tl.load(row + line).to(tl.int64)
    words = table + mine * _WIDTH
    if (tl.load(words + COLUMN.value.FEATURES) & FEATURE.value.EDIT) == 0:
        return
    logits += line.to(tl.int64) * stride * align
    known = tl.load(position + line)
    end = tokens + mine * length + known
    generated = known - tl.load(words + COLUMN.value.PROMPT)
    lists += tl.load(words + COLUMN.value.EDITS)
    edits = tl.load(words + COLUMN.value.EDIT_COUNT)
    for begin in range(0, edits, tile):
        at = begin + tl.arange(0, tile)
        there = at < edits
        one = lists + at * _EDIT_WIDTH
        suffix = tl.load(one + _EDIT.value.LENGTH, mask=there, other=0)
        holds = there & (generated < tl.load(one + _EDIT.value.UNTIL, mask=there, other=0)) & (suffix <= generated)
        wanted = lists + tl.load(one + _EDIT.value.SUFFIX, mask=there, other=0) + suffix
        for back in range(1, tl.minimum(tl.max(suffix, 0), generated) + 1):
            inside = there & (back <= suffix)
            holds &= (tl.load(wanted - back, mask=inside, other=0) == tl.load(end - back)) | (back > suffix)
        token = tl.load(one + _EDIT.value.TOKEN, mask=there, other=0)
        value = real(tl.load(one + _EDIT.value.VALUE, mask=there, other=0))
        tl.atomic_add(logits + token, value, mask=holds, sem="relaxed")


@triton.jit
def _ranked(key, ids):
    """Maps (key, id) to int64 that sort by key, and among equal keys by lower id first."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit(do_not_specialize=["stride", "top", "lines", "tokens"])
def survey(logits, stride, lines, tokens, top, largest, sums, above, most, tile: tl.constexpr, slots: tl.constexpr,
           vocab: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Partial softmax of a tile: program (line, part) -> [L, parts] of its largest logit, the sum of exponentials relative to
    it and the number of logits above the token's, and [L, parts, slots] of its `top` largest as `_ranked`."""
    enter(linked)
    one, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    line = one
    if lines is not None:
        line = tl.load(lines + one)
    logits += line.to(tl.int64) * stride * align
    ids = part * tile + tl.arange(0, tile)
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    at = one * parts + part
    tl.store(largest + at, peak)
    # A tile of nothing but -inf has no exponentials.
    tl.store(sums + at, tl.sum(tl.where(x > float("-inf"), tl.exp(x - peak), 0.0), 0))
    mine = tl.load(logits + tl.maximum(tl.load(tokens + one), 0)).to(tl.float32)
    tl.store(above + at, tl.sum((x > mine).to(tl.int32), 0))
    rest = tl.where(ids < vocab, ordered(x), _TAKEN)
    most += at.to(tl.int64) * slots
    for k in range(top):
        best = tl.max(rest, 0)
        first = tl.min(tl.where(rest == best, ids, 0x7FFFFFFF), 0)
        tl.store(most + k, _ranked(best, first))
        rest = tl.where(ids == first, _TAKEN, rest)


@triton.jit(do_not_specialize=["stride", "parts", "top", "lines", "tokens"])
def score(logits, stride, parts, lines, tokens, top, largest, sums, above, most, ids, values, ranks, wide: tl.constexpr,
          slots: tl.constexpr, align: tl.constexpr, linked: tl.constexpr):
    """Merges the tiles of a line: program line -> ids, values, ranks [L, 1 + top]."""
    enter(linked)
    one = tl.program_id(0)
    line = one
    if lines is not None:
        line = tl.load(lines + one)
    part = tl.arange(0, wide)
    peaks = tl.load(largest + one * parts + part, mask=part < parts, other=float("-inf"))
    peak = tl.max(peaks, 0)
    total = tl.sum(tl.load(sums + one * parts + part, mask=part < parts, other=0.0) * tl.exp(peaks - peak), 0)
    logarithm = tl.log(total)
    token = tl.maximum(tl.load(tokens + one), 0)
    mine = tl.load(logits + line.to(tl.int64) * stride * align + token).to(tl.float32)
    out = one.to(tl.int64) * (1 + top)
    tl.store(ids + out, token)
    tl.store(values + out, mine - peak - logarithm)
    tl.store(ranks + out, 1 + tl.sum(tl.load(above + one * parts + part, mask=part < parts, other=0), 0))
    slot = tl.arange(0, wide * slots)
    there = (slot // slots < parts) & (slot % slots < top)
    rest = tl.load(most + one.to(tl.int64) * parts * slots + slot, mask=there, other=_NONE)
    for k in range(top):
        best = tl.max(rest, 0)
        rest = tl.where(rest == best, _NONE, rest)
        tl.store(ids + out + 1 + k, (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
        tl.store(values + out + 1 + k, unordered((best >> 32).to(tl.int32)) - peak - logarithm)
        tl.store(ranks + out + 1 + k, 1 + k)
