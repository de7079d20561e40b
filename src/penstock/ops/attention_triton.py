"""Paged attention on NVIDIA GPUs in Triton: the two implementations of the operation and their launches.

"triton" divides the keys of a step freely, and has cuDNN serve long prompts that it is told of; "triton-invariant" divides
keys at fixed places, so that the bits of a query's result do not depend on its company. The division is `attention_work.py`,
the kernels are in `attention_kernel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from penstock.ops import attention_work, gpu
from penstock.ops.attention import Alike, AttentionOps, Geometry, Ints, Span
from penstock.ops.attention_work import Launch, Shape
from penstock.ops.registry import register

_LONG = 1024
"""Tokens of a prompt from which on cuDNN serves it: 612 TFLOP/s of the causal triangle at 8,192 against 440, and 514 at four
times 2,048 against 335 (bench/results); at 512 what the calls cost has eaten the gain."""

_GRAIN = 512
"""Prompts are padded to a multiple of this for cuDNN, which takes 30 ms to plan for a length that it has not seen."""


class TritonAttention(AttentionOps):
    """whole, shares, prepare and apply of ops/attention.py."""

    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant

    def whole(self, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        served = not self.invariant and geometry.plain and not geometry.window and geometry.itemsize == 2
        if not served or geometry.head_size > 128 or geometry.head_size % 8 or not _cudnn():
            return []
        # Not those for which padding costs more than cuDNN gains.
        padded = -(-counts // _GRAIN) * _GRAIN
        found = np.flatnonzero((counts >= _LONG) & (counts == context) & (padded.astype(float) ** 2 < 1.25 * counts ** 2.0))
        first = np.cumsum(counts) - counts
        return [Span(int(s), int(first[s]), int(counts[s])) for s in found]

    def shares(self, geometry: Geometry) -> bool:
        return attention_work.shares(geometry, self.invariant)

    def prepare(self, geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int,
                whole: Sequence[Span] = (), alike: Alike | None = None) -> Ints:
        return attention_work.prepare(geometry, counts, context, segments, tokens, self.invariant,
                                      [span.segment for span in whole], alike)

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None, whole: Sequence[Span] = ()) -> torch.Tensor:
        """`work` without a value is prepared here, which waits for the device. Its counters are used and left at zero."""
        tokens, heads, size = q.shape
        _, kv_heads, page, _ = k_cache.shape
        stride = k_cache.stride()
        assert v_cache.stride() == stride and stride[3] == 1, "keys and values lie in the same way, each entry contiguous"
        geometry = Geometry(heads, kv_heads, size, page, window, k_cache.element_size())
        segments = context.shape[0]
        groups = _groups(whole)
        if len(groups) == 1 and len(whole) == segments and _exact(groups[0]):
            return _library(q, k_cache, v_cache, table, scale, groups[0]).flatten(0, 1).contiguous()
        if work is None:
            found = self.prepare(geometry, np.diff(query_start.cpu().numpy()), context.cpu().numpy(), segments, tokens, whole)
            work = torch.from_numpy(found).to(q.device)
        layout = attention_work.layout(geometry, segments, tokens, self.invariant)
        out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
        for launch in (layout.narrow, layout.broad):
            if launch is not None and len(whole) < segments:
                self._launch(launch, geometry, launch is layout.broad, q, k_cache, v_cache, table, scale, softcap, sinks, work,
                             out)
        for group in groups:
            for span, found in zip(group, _library(q, k_cache, v_cache, table, scale, group), strict=True):
                out[span.first:span.first + span.count] = found[:span.count]
        return out

    def _launch(self, launch: Launch, geometry: Geometry, broad: bool, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor, table: torch.Tensor, scale: float, softcap: float, sinks: torch.Tensor | None,
                work: torch.Tensor, out: torch.Tensor) -> None:
        from penstock.ops.attention_kernel import attend  # triton takes 0.3 s to import, and may be absent

        shape, size, kv_heads = launch.shape, geometry.head_size, geometry.kv_heads
        group = geometry.heads // kv_heads
        block_d = _block(size)
        room = launch.slots * kv_heads * group
        parts = torch.empty(room * (block_d + 2), dtype=torch.float32, device=q.device)
        linked = gpu.linked(q.device)
        attend[(kv_heads, launch.items)](
            q, k_cache, v_cache, out, table, out if sinks is None else sinks, work[launch.offset:], work[launch.mates:],
            work[launch.counters:], parts, parts[room * block_d:], scale, softcap, geometry.window,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], out.stride(0), out.stride(1),
            table.stride(0), group=group, size=size, page_size=geometry.page, block_m=shape.block_m, block_n=shape.block_n,
            block_d=block_d, rows=shape.queries * group, windowed=geometry.window > 0, capped=softcap != 0.0,
            sunk=sinks is not None, fixed=self.invariant, edges=broad, shared=launch.shared, linked=linked,
            fields=attention_work.FIELDS, num_warps=shape.warps,
            num_stages=_stages(shape, block_d, geometry.itemsize, q.device), launch_pdl=linked)


@cache
def _cudnn() -> bool:
    """Whether cuDNN's attention is there, and faster than ours: it was compared on Hopper."""
    return torch.cuda.is_available() and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def _stages(shape: Shape, block_d: int, itemsize: int, device: torch.device) -> int:
    """As many stages as the shape has, or as fit: a stage is a block of keys and one of values."""
    room = gpu.shared_bytes(device) - shape.block_m * block_d * itemsize
    return max(1, min(shape.stages, room // (2 * shape.block_n * block_d * itemsize)))


def _block(size: int) -> int:
    return max(16, gpu.covering(size))


def _padded(span: Span) -> int:
    return -(-span.count // _GRAIN) * _GRAIN


def _groups(whole: Sequence[Span]) -> list[list[Span]]:
    """Prompts of one padded length that follow one another, in powers of two: one call each, and few sizes to plan for."""
    groups: list[list[Span]] = []
    for span in whole:
        if groups and groups[-1][-1].segment == span.segment - 1 and _padded(groups[-1][-1]) == _padded(span):
            groups[-1].append(span)
        else:
            groups.append([span])
    cut = []
    for group in groups:
        while group:
            size = 1 << (len(group).bit_length() - 1)
            cut.append(group[:size])
            group = group[size:]
    return cut


def _exact(group: list[Span]) -> bool:
    """Whether no prompt of the group is padded."""
    return all(span.count == _padded(span) for span in group)


def _library(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, scale: float,
             group: list[Span]) -> torch.Tensor:
    """The attention of a group of whole prompts by a library, over keys and values gathered from their pages: [G, N, H, D]."""
    from penstock.ops.attention_kernel import gather  # as above

    _, kv_heads, page, size = k_cache.shape
    length = _padded(group[0])
    k = torch.empty(len(group), length, kv_heads, size, dtype=k_cache.dtype, device=q.device)
    v = torch.empty_like(k)
    linked = gpu.linked(q.device)
    for place, span in enumerate(group):
        gather[(kv_heads, length // 64)](k_cache, v_cache, k[place], v[place], table[span.segment], span.count,
                                         *k_cache.stride()[:3], size=size, page_size=page, block_n=64, block_d=_block(size),
                                         linked=linked, num_warps=4, launch_pdl=linked)
    if _exact(group):
        queries = q[group[0].first:group[0].first + len(group) * length].unflatten(0, (len(group), length))
    else:
        # Queries behind a prompt's last see nothing that others need, and are dropped; no other query sees their keys.
        queries = q.new_zeros(len(group), length, *q.shape[1:])
        for place, span in enumerate(group):
            queries[place, :span.count] = q[span.first:span.first + span.count]
    ready = [x.transpose(1, 2) for x in (queries, k, v)]
    if q.device.type == "cpu":
        found = F.scaled_dot_product_attention(*ready, is_causal=True, scale=scale, enable_gqa=True)
    else:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(*ready, None, False, 0.0, True, False, scale=scale)[0]
    return found.transpose(1, 2)


TRITON = TritonAttention(invariant=False)
INVARIANT = TritonAttention(invariant=True)
register("attention", "triton", rank=10, supports=gpu.supports)(TRITON)
register("attention", "triton-invariant", rank=-1, supports=gpu.supports)(INVARIANT)
