"""Long prefill segments by a vendor library (cuDNN): which segments it serves, and how their attention is put together.

The library knows no block tables and, for a causal call, no context: keys and values are gathered from their pages, a segment's
own keys are one causal call, its context is cut into blocks of few sizes, each one call without a mask, and the partial
results are joined by their log-sum-exp. Everything else of a step's attention is `attention_triton.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from penstock.ops import gpu
from penstock.ops.attention import Geometry, Ints, Span

LONG = 1024
"""Queries of a segment from which on the library serves it: 612 TFLOP/s of the causal triangle at 8,192 against 440, and 514 at
four times 2,048 against 335 (bench/results); at 512 the cost of the calls has eaten the gain."""

GRAIN = 512
"""Queries are padded to a multiple of this: cuDNN takes 70 ms to plan for a shape that it has not seen."""

BLOCKS = (16384, 4096)
"""Keys of a context's blocks, the larger ones first. Few sizes, for the same reason; from 4,096 on cuDNN reaches 670 to 690
TFLOP/s without a mask."""

PARTS = 4
"""Most partial results that are held before they are joined, which bounds their memory."""

CONTEXTS = (1, BLOCKS[1], 2 * BLOCKS[1], BLOCKS[0] + 2 * BLOCKS[1])
"""Contexts that between them join every number of parts; the last one holds most memory."""

_WASTE = 1.25
"""Most query-key pairs that the library may compute, as a multiple of those that are needed: by more it is slower."""


class _Part(NamedTuple):
    """Attention of a segment's queries to some of its keys."""

    out: torch.Tensor
    """[queries, H, D], each token contiguous."""
    lse: torch.Tensor
    """[H, queries] float32: natural logarithm of the sum of the exponentials of the scaled scores."""


def spans(geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
    """The segments of a step that the library serves (AttentionOps.library_spans)."""
    if not geometry.plain or geometry.window or geometry.itemsize != 2 or geometry.head_size > 256 or geometry.head_size % 8:
        return []
    if not available():
        return []
    first, before = np.cumsum(counts) - counts, context - counts
    behind = before % BLOCKS[-1]
    computed = (np.ceil((behind + counts) / GRAIN) * GRAIN) ** 2 / 2 + np.ceil(counts / GRAIN) * GRAIN * (before - behind)
    needed = counts * (before + counts / 2.0)
    return [Span(int(s), int(first[s]), int(counts[s]), int(before[s]))
            for s in np.flatnonzero((counts >= LONG) & (computed < _WASTE * needed))]


@cache
def available() -> bool:
    """Whether cuDNN's attention is there, and faster than our kernel: it was compared on Hopper."""
    return torch.cuda.is_available() and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def warm_up(device: torch.device) -> None:
    """Loads the library by one small call, on a stream of its own: 0.7 to 0.9 s that the first long prompt would wait."""
    if device.type != "cuda" or not available():
        return
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        q, k, v = (torch.zeros(1, GRAIN, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
        _call(q, k, v, 1.0, causal=True)
        torch.cuda.current_stream().synchronize()


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, scale: float,
           chosen: Sequence[Span], out: torch.Tensor) -> None:
    """Writes the attention of the chosen segments to their tokens of `out` [T, H, D]; arguments as AttentionOps.apply's."""
    for group in groups([span for span in chosen if not span.before]):
        found = whole_prompts(q, k_cache, v_cache, table, scale, group)
        for span, one in zip(group, found, strict=True):
            out[span.first:span.first + span.count] = one[:span.count]
    for span in chosen:
        if span.before:
            _continued(q, k_cache, v_cache, table[span.segment], scale, span, out[span.first:span.first + span.count])


def groups(chosen: Sequence[Span]) -> list[list[Span]]:
    """Prompts of one padded length that follow one another, in powers of two: one call each, and few shapes to plan for."""
    found: list[list[Span]] = []
    for span in chosen:
        if found and found[-1][-1].segment == span.segment - 1 and _padded(found[-1][-1].count) == _padded(span.count):
            found[-1].append(span)
        else:
            found.append([span])
    cut = []
    for group in found:
        while group:
            size = 1 << (len(group).bit_length() - 1)
            cut.append(group[:size])
            group = group[size:]
    return cut


def exact(group: Sequence[Span]) -> bool:
    """Whether all of the group are prompts from position 0 on that need no padding."""
    return all(span.count == _padded(span.count) and not span.before for span in group)


def whole_prompts(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, scale: float,
                  group: Sequence[Span]) -> torch.Tensor:
    """The attention of a group of prompts that begin at position 0: [G, N, H, D], rows beyond a prompt's last are padding."""
    length = _padded(group[0].count)
    _, kv_heads, _, size = k_cache.shape
    k = torch.empty(len(group), length, kv_heads, size, dtype=k_cache.dtype, device=q.device)
    v = torch.empty_like(k)
    for place, span in enumerate(group):
        _gather(k_cache, v_cache, table[span.segment], 0, span.count, k[place], v[place])
    if exact(group):
        queries = q[group[0].first:group[0].first + len(group) * length].unflatten(0, (len(group), length))
    else:
        # Padding queries see nothing that others need, and are dropped; no other query sees their keys.
        queries = q.new_zeros(len(group), length, *q.shape[1:])
        for place, span in enumerate(group):
            queries[place, :span.count] = q[span.first:span.first + span.count]
    return _call(queries, k, v, scale, causal=True)[0]


def _continued(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: torch.Tensor, scale: float, span: Span,
               out: torch.Tensor) -> None:
    """A segment behind `span.before` positions of context. `row` is its line of the block table, `out` [count, H, D]."""
    blocks = list(_blocks(span.before))
    # The library's triangle begins with its first key. The keys between the last block and the segment's own belong to it as
    # well; queries that nobody asked for stand before the segment's own, at their places.
    behind = span.before - sum(blocks)
    padded, length = _padded(span.count), _padded(behind + span.count)
    queries = q[span.first:span.first + span.count]
    if behind or padded != span.count:
        queries = q.new_zeros(max(length, behind + padded), *q.shape[1:])
        queries[behind:behind + span.count] = q[span.first:span.first + span.count]
    parts: list[_Part] = []
    begin = 0
    for size in (*blocks, length):
        causal = begin == span.before - behind
        at = slice(0, length) if causal else slice(behind, behind + padded)
        k = torch.empty(1, size, *k_cache.shape[1::2], dtype=k_cache.dtype, device=q.device)
        v = torch.empty_like(k)
        _gather(k_cache, v_cache, row, begin, span.before + span.count if causal else begin + size, k[0], v[0])
        found, lse = _call(queries[None, at], k, v, scale, causal)
        own = slice(behind, behind + span.count) if causal else slice(0, span.count)
        parts.append(_Part(found[0, own], lse[0, :, own]))
        begin += size
        if len(parts) == PARTS and not causal:
            parts = [_join(parts, torch.empty_like(out, memory_format=torch.contiguous_format))]
    _join(parts, out)


def _blocks(before: int) -> Iterator[int]:
    """The sizes of a context's blocks, from position 0 on; fewer keys than the smallest are left."""
    for size in BLOCKS:
        while before >= size:
            yield size
            before -= size


def _gather(k_cache: torch.Tensor, v_cache: torch.Tensor, row: torch.Tensor, begin: int, end: int, k: torch.Tensor,
            v: torch.Tensor) -> None:
    """Keys and values of positions from `begin` on to k and v [N, KV, D]; zeros from position `end` on."""
    from penstock.ops.attention_kernel import gather  # triton takes 0.3 s to import, and may be absent

    _, kv_heads, page, size = k_cache.shape
    linked = gpu.linked(k.device)
    gather[(kv_heads, k.shape[0] // 64)](k_cache, v_cache, k, v, row, begin, end, *k_cache.stride()[:3], size=size,
                                         page_size=page, block_n=64, block_d=max(16, gpu.covering(size)), linked=linked,
                                         num_warps=4, launch_pdl=linked)


def _call(queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
          causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's attention of [B, N, H, D] to [B, M, KV, D]: (result [B, N, H, D], log-sum-exp [B, H, N])."""
    q, k, v = (x.transpose(1, 2) for x in (queries, k, v))
    if q.device.type == "cpu":
        return _plain(q, k, v, scale, causal)
    found: torch.Tensor
    found, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 (the public one gives no log-sum-exp)
        q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    found = found.transpose(1, 2)
    assert found.stride(2) == found.shape[3] and found.stride(3) == 1, "results lie as the queries do"
    return found, lse.view(lse.shape[:3])


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch, for tests where there is no GPU."""
    group = q.shape[1] // k.shape[1]
    scores = (q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2)) * scale
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    found = scores.softmax(-1) @ v.float().repeat_interleave(group, 1)
    return found.to(q.dtype).transpose(1, 2).contiguous(), scores.logsumexp(-1)


def _join(parts: Sequence[_Part], out: torch.Tensor) -> _Part:
    """Joins up to `PARTS` partial results: softmax over all their keys, written to `out` [N, H, D]."""
    from penstock.ops.attention_kernel import join  # as above

    tokens, heads, size = out.shape
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    block_d, linked = gpu.covering(size), gpu.linked(out.device)
    block_h = max(1, min(gpu.covering(heads), 2048 // block_d))
    given = [*parts, *[parts[0]] * (PARTS - len(parts))]
    join[(tokens, -(-heads // block_h))](
        out, lse, *(part.out for part in given), *(part.lse for part in given), heads, out.stride(0), out.stride(1),
        lse.stride(0), *(part.out.stride(0) for part in given), *(part.lse.stride(0) for part in given), size=size,
        count=len(parts), block_h=block_h, block_d=block_d, linked=linked, num_warps=4, launch_pdl=linked)
    return _Part(out, lse)


def _padded(count: int) -> int:
    return -(-count // GRAIN) * GRAIN
