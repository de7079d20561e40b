"""Paged attention on NVIDIA GPUs in Triton: the two implementations of the operation and their launches.

"triton" divides the keys of a step freely; "triton-invariant" at fixed places, so that the bits of a query's result do not
depend on its company. The division is `attention_work.py`, the kernel `attention_kernel.py`.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.ops import attention_work, gpu
from penstock.ops.attention import AttentionOps, Geometry, Ints
from penstock.ops.attention_work import Launch
from penstock.ops.registry import register


class TritonAttention(AttentionOps):
    """prepare and apply of ops/attention.py."""

    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant

    def prepare(self, geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int) -> Ints:
        return attention_work.prepare(geometry, counts, context, segments, tokens, self.invariant)

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None) -> torch.Tensor:
        """`work` without a value is prepared here, which waits for the device. Its counters are used and left at zero."""
        tokens, heads, size = q.shape
        _, kv_heads, page, _ = k_cache.shape
        geometry = Geometry(heads, kv_heads, size, page, window, k_cache.element_size())
        segments = context.shape[0]
        if work is None:
            found = self.prepare(geometry, np.diff(query_start.cpu().numpy()), context.cpu().numpy(), segments, tokens)
            work = torch.from_numpy(found).to(q.device)
        layout = attention_work.layout(geometry, segments, tokens, self.invariant)
        out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
        for launch in (layout.narrow, layout.broad):
            if launch is not None and launch.items:
                self._launch(launch, geometry, launch is layout.broad, q, k_cache, v_cache, table, scale, softcap, sinks, work,
                             out)
        return out

    def _launch(self, launch: Launch, geometry: Geometry, broad: bool, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor, table: torch.Tensor, scale: float, softcap: float, sinks: torch.Tensor | None,
                work: torch.Tensor, out: torch.Tensor) -> None:
        from penstock.ops.attention_kernel import attend  # triton takes 0.3 s to import, and may be absent

        shape, size, kv_heads = launch.shape, geometry.head_size, geometry.kv_heads
        group = geometry.heads // kv_heads
        rows = shape.queries * group
        block_d = max(16, 1 << (size - 1).bit_length())
        parts = torch.empty(launch.slots * kv_heads * rows * (block_d + 2), dtype=torch.float32, device=q.device)
        linked = gpu.linked(q.device)
        stride = k_cache.stride()
        assert v_cache.stride() == stride and stride[3] == 1, "keys and values lie in the same way, each entry contiguous"
        attend[(kv_heads, launch.items)](
            q, k_cache, v_cache, out, table, out if sinks is None else sinks, work[launch.offset:], work[launch.counters:],
            parts, parts[launch.slots * kv_heads * rows * block_d:], scale, softcap, geometry.window,
            q.stride(0), q.stride(1), *stride[:3], out.stride(0), out.stride(1),
            table.stride(0), group=group, size=size, page_size=geometry.page, block_m=shape.block_m, block_n=shape.block_n,
            block_d=block_d, rows=rows, windowed=geometry.window > 0, capped=softcap != 0.0, sunk=sinks is not None,
            fixed=self.invariant, edges=broad, linked=linked, fields=attention_work.FIELDS, num_warps=shape.warps,
            num_stages=shape.stages, launch_pdl=linked)


TRITON = TritonAttention(invariant=False)
INVARIANT = TritonAttention(invariant=True)
register("attention", "triton", rank=10, supports=gpu.supports)(TRITON)
register("attention", "triton-invariant", rank=-1, supports=gpu.supports)(INVARIANT)
