"""Paged attention on NVIDIA GPUs in Triton: the two implementations of the operation and their launches.

"triton" chooses split-K boundaries by the load of the step, and leaves long prefill segments to `attention_library.py`.
"triton-invariant" splits keys at fixed positions, so that a query's result is bitwise independent of the rest of the batch.
`attention_work.py` divides the work, and `attention_kernel.py` holds the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from penstock.ops import attention_library, attention_work, gpu
from penstock.ops.attention import AttentionOps, Divides, Geometry, Ints, SharedPrefixes, Span
from penstock.ops.attention_divider import Divider
from penstock.ops.attention_work import Launch, Shape
from penstock.ops.registry import register


class TritonAttention(AttentionOps):
    """AttentionOps (ops/attention.py) in Triton. `invariant`: results are bitwise independent of the batch."""

    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant

    def library_spans(self, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        return [] if self.invariant else attention_library.spans(geometry, counts, context)

    def divider(self, geometry: Geometry) -> Divides:
        return Divider(geometry, self.invariant, partial(self.prepare, geometry))

    def warm_up(self, device: torch.device) -> None:
        if not self.invariant:
            attention_library.warm_up(device)

    def contexts(self, most: int) -> list[int]:
        return [] if self.invariant else [before for before in attention_library.CONTEXTS if before <= most]

    def shares(self, geometry: Geometry) -> bool:
        return attention_work.shares(geometry, self.invariant)

    def prepare(self, geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int,
                library: Sequence[Span] = (), shared: SharedPrefixes | None = None, slack: Ints | None = None) -> Ints:
        assert slack is None or not self.invariant, "batch-invariant split-K boundaries need exact positions"
        return attention_work.prepare(geometry, counts, context, segments, tokens, self.invariant,
                                      [span.segment for span in library], shared, slack)

    def correct(self, geometry: Geometry, work: torch.Tensor | None, lag: torch.Tensor, segments: int, tokens: int) -> None:
        assert work is not None
        attention_work.correct(work, attention_work.layout(geometry, segments, tokens, self.invariant), lag)

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None,
              library: Sequence[Span] = ()) -> torch.Tensor:
        """Without `work` it is prepared here, which synchronises the device. Counters in `work` are zero before and after."""
        tokens, heads, size = q.shape
        _, kv_heads, page, _ = k_cache.shape
        stride = k_cache.stride()
        assert v_cache.stride() == stride and stride[3] == 1, "keys and values have equal strides, and each entry is contiguous"
        geometry = Geometry(heads, kv_heads, size, page, window, k_cache.element_size())
        segments = context.shape[0]
        if len(library) == segments and attention_library.exact(library) and len(attention_library.groups(library)) == 1:
            return attention_library.whole_prompts(q, k_cache, v_cache, table, scale, library).flatten(0, 1).contiguous()
        if work is None:
            found = self.prepare(geometry, np.diff(query_start.cpu().numpy()), context.cpu().numpy(), segments, tokens, library)
            work = torch.from_numpy(found).to(q.device)
        layout = attention_work.layout(geometry, segments, tokens, self.invariant)
        out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
        for launch in (layout.narrow, layout.broad):
            if launch is not None and len(library) < segments:
                self._launch(launch, geometry, launch is layout.broad, q, k_cache, v_cache, table, scale, softcap, sinks, work,
                             out)
        attention_library.attend(q, k_cache, v_cache, table, scale, library, out)
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


def _stages(shape: Shape, block_d: int, itemsize: int, device: torch.device) -> int:
    """Pipeline stages: those of the shape, or as many as fit in shared memory. A stage holds a block of keys and of values."""
    room = gpu.shared_bytes(device) - shape.block_m * block_d * itemsize
    return max(1, min(shape.stages, room // (2 * shape.block_n * block_d * itemsize)))


def _block(size: int) -> int:
    return max(16, gpu.covering(size))


TRITON = TritonAttention(invariant=False)
INVARIANT = TritonAttention(invariant=True)
register("attention", "triton", rank=10, supports=gpu.supports, batch_invariant=False)(TRITON)
register("attention", "triton-invariant", rank=5, supports=gpu.supports)(INVARIANT)
