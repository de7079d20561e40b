"""Attention of long prefill segments by a vendor library (cuDNN): selects the segments and merges the library's results.

The library supports neither block tables nor, in causal calls, a context before the queries. So keys and values are gathered
from their pages. A segment's own keys are one causal call; its context is cut into blocks of few sizes, one unmasked call each;
the partial results are merged by their log-sum-exp. `attention_triton.py` computes all other segments."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from penstock.ops import gpu
from penstock.ops.attention import Geometry, Ints, Rows, Seen, Span
from penstock.ops.codec import Scales
from penstock.ops.codec_triton import decoding

kernels = gpu.Kernels("attention_kernel")

LONG = 1024
"""Minimum queries of a segment that the library computes: 612 TFLOP/s of the causal triangle at 8,192 queries against 440 of
our kernel, and 514 against 335 at 4 x 2,048 (bench/results). At 512 the overhead of the calls outweighs the gain; over latents,
where our kernel does some three times as much, it does not."""

GRAIN = 512
"""Queries are padded to a multiple of this, because cuDNN takes 70 ms to plan for each new shape."""

BLOCKS = (16384, 4096)
"""Block sizes of a context in keys, largest first, few for the same reason; cuDNN has 670 to 690 TFLOP/s from 4,096 on."""

PARTS = 4
"""Maximum number of partial results held before they are merged. Bounds their memory."""

CONTEXTS = (1, BLOCKS[1], 2 * BLOCKS[1], BLOCKS[0] + 2 * BLOCKS[1])
"""Context lengths that together merge every possible number of parts; the last one takes the most memory."""

_WASTE = 1.25
"""Maximum ratio of computed to needed query-key pairs; above it our kernel is faster."""


class _Part(NamedTuple):
    """Partial attention result: a segment's queries over some of its keys."""

    out: torch.Tensor
    """[queries, H, D], each token contiguous."""
    lse: torch.Tensor
    """[H, queries] float32: natural log-sum-exp of the scaled scores."""


def takes(geometry: Geometry) -> bool:
    """Whether the library computes attention of such heads."""
    if not geometry.plain or geometry.window or geometry.itemsize != 2:
        return False
    return bool(geometry.tail or not (geometry.head_size > 256 or geometry.head_size % 8)) and available()


def spans(geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
    """Returns the segments of a step that the library computes (AttentionOps.library_spans)."""
    if not takes(geometry):
        return []
    first, before = np.cumsum(counts) - counts, context - counts
    behind = before % BLOCKS[-1]
    computed = (np.ceil((behind + counts) / GRAIN) * GRAIN) ** 2 / 2 + np.ceil(counts / GRAIN) * GRAIN * (before - behind)
    needed = counts * (before + counts / 2.0)
    return [Span(int(s), int(first[s]), int(counts[s]), int(before[s]))
            for s in np.flatnonzero((counts >= (GRAIN if geometry.tail else LONG)) & (computed < _WASTE * needed))]


@cache
def available() -> bool:
    """Whether cuDNN's attention is available and faster than our kernel, which was measured on Hopper."""
    return torch.cuda.is_available() and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def warm_up(device: torch.device) -> None:
    """Loads the library by one small call on a separate stream; the first long prompt would otherwise wait 0.7 to 0.9 s."""
    if device.type != "cuda" or not available():
        return
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        q, k, v = (torch.zeros(1, GRAIN, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
        _call(q, k, v, 1.0, causal=True)
        torch.cuda.current_stream().synchronize()


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, scale: float,
           chosen: Sequence[Span], out: torch.Tensor, scales: Scales | None = None, sinks: torch.Tensor | None = None) -> None:
    """Writes the attention of the chosen segments to their rows of `out` [T, H, D]. Other arguments: AttentionOps.apply."""
    for group in groups([span for span in chosen if not span.before]):
        found = whole_prompts(q, k_cache, v_cache, table, scale, group, scales, sinks)
        for span, one in zip(group, found, strict=True):
            out[span.first:span.first + span.count] = one[:span.count]
    for span in chosen:
        if span.before:
            rows = partial(gathered, q, k_cache, v_cache, scales, table[span.segment])
            continued(q, rows, scale, span, out[span.first:span.first + span.count], sinks)


def groups(chosen: Sequence[Span]) -> list[list[Span]]:
    """Groups consecutive prompts of equal padded length in powers of two: one call per group, few shapes to plan."""
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
    """Whether all spans of the group begin at position 0 and need no padding."""
    return all(span.count == _padded(span.count) and not span.before for span in group)


def whole_prompts(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, scale: float,
                  group: Sequence[Span], scales: Scales | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the attention of a group of prompts that begin at position 0: [G, N, H, D], padded to N rows per prompt."""
    length = _padded(group[0].count)
    k, v = q.new_empty(2, len(group), length, k_cache.shape[1], q.shape[2])
    # One launch for all, unless they end at different positions: launches are what prompts of small models wait for.
    equal = len({span.count for span in group}) == 1
    for at, span in enumerate(group[:1] if equal else group):
        some = slice(at, None if equal else at + 1)
        _gather(k_cache, v_cache, scales, table[span.segment:], 0, span.count, k[some], v[some])
    if exact(group):
        queries = q[group[0].first:group[0].first + len(group) * length].unflatten(0, (len(group), length))
    else:
        # Padding queries are dropped, and the causal mask hides their keys from all other queries.
        queries = q.new_zeros(len(group), length, *q.shape[1:])
        for place, span in enumerate(group):
            queries[place, :span.count] = q[span.first:span.first + span.count]
    found, lse = _call(queries, k, v, scale, causal=True)
    return found if sinks is None else _sunk(found, lse, sinks)


def prompts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, chosen: Sequence[Span], out: torch.Tensor) -> None:
    """`AttentionOps.prompts`: one call for each group of equal length."""
    at = 0
    for group in groups(chosen):
        shape, first, last = (len(group), _padded(group[0].count)), group[0].first, group[-1].first + group[-1].count
        some = slice(at, at + last - first)
        if exact(group):
            queries, keys, values = (x.unflatten(0, shape) for x in (q[first:last], k[some], v[some]))
            out[first:last] = _call(queries, keys, values, scale, causal=True)[0].flatten(0, 1)
        else:
            queries, keys, values = (x.new_zeros(*shape, *x.shape[1:]) for x in (q, k, v))
            for place, span in enumerate(group):
                begin = at + span.first - first
                queries[place, :span.count] = q[span.first:span.first + span.count]
                keys[place, :span.count] = k[begin:begin + span.count]
                values[place, :span.count] = v[begin:begin + span.count]
            for span, one in zip(group, _call(queries, keys, values, scale, causal=True)[0], strict=True):
                out[span.first:span.first + span.count] = one[:span.count]
        at = some.stop


def continued(q: torch.Tensor, rows: Rows, scale: float, span: Span, out: torch.Tensor, sinks: torch.Tensor | None = None,
              seen: Seen = tuple) -> _Part:
    """Computes a segment that follows `span.before` positions of context, from the keys and values of `rows`, and merges it
    with what was `seen`. q [T, H, D] of the step; out [count, H, D], where D is the values'."""
    blocks = list(_blocks(span.before))
    # The library's causal mask begins at its first key. The keys between the last block and the segment's own keys belong to
    # the causal call too, so padding queries are inserted before the segment's own for these positions.
    behind = span.before - sum(blocks)
    padded, length = _padded(span.count), _padded(behind + span.count)
    queries = q[span.first:span.first + span.count]
    if behind or padded != span.count:
        queries = q.new_zeros(max(length, behind + padded), *q.shape[1:])
        queries[behind:behind + span.count] = q[span.first:span.first + span.count]
    parts = _over(queries[behind:behind + padded], span.count, rows, blocks, scale)
    k, v = rows(sum(blocks), span.before + span.count, length)
    found, lse = _call(queries[None, :length], k[None], v[None], scale, causal=True)
    own = slice(behind, behind + span.count)
    others = (_Part(one, sums.t().contiguous()) for one, sums in seen())
    whole = _join(_few([*parts, _Part(found[0, own], lse[0, :, own]), *others], PARTS), out)
    if sinks is not None:
        _sunk(out, whole.lse, sinks)
    return whole


def segment(q: torch.Tensor, rows: Rows, scale: float, before: int, own: bool, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """`AttentionOps.segment`, given the keys and values; without `own`, `before` is a multiple of the smallest block."""
    out, count = torch.empty_like(q), len(q)
    if own:
        return out, continued(q, rows, scale, Span(0, 0, count, before), out, None, seen).lse.t()
    queries = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, _padded(count) - count))
    return out, _join(_over(queries, count, rows, _blocks(before), scale), out).lse.t()


def _over(queries: torch.Tensor, count: int, rows: Rows, blocks: Iterable[int], scale: float) -> list[_Part]:
    """The results of the first `count` queries over blocks of keys, all of which they see."""
    parts, begin = list[_Part](), 0
    for size in blocks:
        k, v = rows(begin, begin + size, size)
        found, lse = _call(queries[None], k[None], v[None], scale, causal=False)
        parts, begin = _few([*parts, _Part(found[0, :count], lse[0, :, :count])]), begin + size
    return parts


def _few(parts: list[_Part], most: int = PARTS - 1) -> list[_Part]:
    """Merges the first ones until there are at most so many."""
    while len(parts) > most:
        merged = _join(parts[:PARTS], torch.empty_like(parts[0].out, memory_format=torch.contiguous_format))
        parts = [merged, *parts[PARTS:]]
    return parts


def _blocks(before: int) -> Iterator[int]:
    """Yields the block sizes of a context from position 0 on; fewer keys than the smallest size remain."""
    for size in BLOCKS:
        while before >= size:
            yield size
            before -= size


def gathered(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales | None, row: torch.Tensor,
             begin: int, end: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Rows` of a block table row of a cache of keys and values."""
    k, v = q.new_empty(2, 1, size, k_cache.shape[1], q.shape[2])
    _gather(k_cache, v_cache, scales, row[None], begin, end, k, v)
    return k[0], v[0]


def _gather(k_cache: torch.Tensor, v_cache: torch.Tensor, scales: Scales | None, table: torch.Tensor, begin: int, end: int,
            k: torch.Tensor, v: torch.Tensor) -> None:
    """Copies keys and values of the first G rows of `table` from `begin` on to k and v [G, N, KV, D]; zeros from `end` on."""
    kv_heads, page, size = *k_cache.shape[1:3], k.shape[3]
    given, forms, fixed = decoding(scales, k_cache, v_cache, k)
    kernels.gather[(kv_heads, k.shape[1] // 64, len(k))](
        k_cache, v_cache, k, v, table, table.stride(0), begin, end, *k_cache.stride()[:3], *given[:4], *fixed, *given[4:],
        **forms, size=size, page_size=page, block_n=64, block_d=max(16, gpu.covering(size)), num_warps=4,
        **gpu.linked(k.device))


def _call(queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
          causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the library: queries [B, N, H, D], keys [B, M, KV, D]. Returns (out [B, N, H, D], log-sum-exp [B, H, N])."""
    q, k, v = (x.transpose(1, 2) for x in (queries, k, v))
    if q.is_meta:  # a rehearsal: for the shapes torch would import sympy, which takes a second or two
        return queries.new_empty(*queries.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    found: torch.Tensor
    found, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 (the public one returns no log-sum-exp)
        q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    found = found.transpose(1, 2)
    assert found.stride(2) == found.shape[3] and found.stride(3) == 1, "the result has the queries' layout"
    return found, lse.view(lse.shape[:3])


def _sunk(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Takes the share of the heads' sinks [H] off results [..., N, H, D] of softmaxes whose log-sum-exp is [..., H, N]."""
    return out.mul_(torch.sigmoid(lse.transpose(-1, -2) - sinks)[..., None])


def _join(parts: Sequence[_Part], out: torch.Tensor) -> _Part:
    """Merges up to `PARTS` partial results into the softmax over all their keys, written to `out` [N, H, D]."""
    tokens, heads, size = out.shape
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    block_d = gpu.covering(size)
    block_h = max(1, min(gpu.covering(heads), 2048 // block_d))
    given = [*parts, *[parts[0]] * (PARTS - len(parts))]
    kernels.join[(tokens, -(-heads // block_h))](
        out, lse, *(part.out for part in given), *(part.lse for part in given), heads, out.stride(0), out.stride(1),
        lse.stride(0), *(part.out.stride(0) for part in given), *(part.lse.stride(0) for part in given), size=size,
        count=len(parts), block_h=block_h, block_d=block_d, num_warps=4, **gpu.linked(out.device))
    return _Part(out, lse)


def _padded(count: int) -> int:
    return -(-count // GRAIN) * GRAIN
