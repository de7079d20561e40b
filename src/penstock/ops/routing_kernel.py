"""The Triton kernel of ops/routing_triton.py."""

import triton
import triton.language as tl

from penstock.ops.linked_kernel import follow


@triton.jit
def _best_groups(ranked, size: tl.constexpr, groups: tl.constexpr, picked: tl.constexpr, two: tl.constexpr):
    """`ranked` with -inf for experts outside of the best groups, which are chosen one by one."""
    grouped = tl.reshape(ranked, (groups, size))
    worth = tl.max(grouped, 1)
    if two:
        first = tl.argmax(grouped, 1)
        worth += tl.max(tl.where(tl.arange(0, size)[None, :] == first[:, None], float("-inf"), grouped), 1)
    number = tl.arange(0, groups)
    allowed = number < 0
    for _ in tl.static_range(picked):
        group = tl.argmax(tl.where(allowed, float("-inf"), worth), 0)
        allowed = allowed | (number == group)
    return tl.reshape(tl.where(allowed[:, None], grouped, float("-inf")), (groups * size,))


@triton.jit
def route(logits, correction, picks, weights, counts, live, experts: tl.constexpr, block: tl.constexpr, count: tl.constexpr,
          slots: tl.constexpr, score: tl.constexpr, normalise: tl.constexpr, scale: tl.constexpr, least: tl.constexpr,
          groups: tl.constexpr, picked: tl.constexpr, two: tl.constexpr, linked: tl.constexpr):
    """A program routes a token: `count` times the best expert that is left, the lowest index of equals."""
    follow(linked)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    inside = expert < experts
    x = tl.load(logits + token * experts + expert, mask=inside, other=float("-inf"))
    scores = x
    if score == "softmax":
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    elif score == "sigmoid":
        scores = tl.sigmoid(x)
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + expert, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    if groups > 1:
        ranked = _best_groups(ranked, block // groups, groups, picked, two)
    slot = tl.arange(0, slots)
    found = tl.zeros((slots,), tl.int32)
    value = tl.full((slots,), float("-inf") if score == "softmax_after" else 0.0, tl.float32)
    for i in tl.static_range(count):
        most, best = tl.max(ranked, 0, return_indices=True)
        if correction is not None or groups > 1:
            most = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        found = tl.where(slot == i, best, found)
        value = tl.where(slot == i, most, value)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if score == "softmax_after":
        value = tl.exp(value - tl.max(value, 0))
        value = value / tl.sum(value, 0)
    elif score == "sigmoid_after":
        value = tl.sigmoid(value)
    if normalise:
        value = value / tl.maximum(tl.sum(tl.where(slot < count, value, 0.0), 0), least)
    at = token * count + slot
    tl.store(picks + at, found, mask=slot < count)
    tl.store(weights + at, value * scale, mask=slot < count)
    if counts is not None:
        there = slot < count
        if live is not None:
            there = there & (token < tl.load(live))
        tl.atomic_add(counts + found, tl.full((slots,), 1, tl.int64), mask=there, sem="relaxed")
