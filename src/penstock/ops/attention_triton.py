"""Paged attention on NVIDIA GPUs in Triton: the two implementations of the operation and their launches.

"triton" chooses split-K boundaries by the load of the step, and leaves long prefill segments to `attention_library.py`.
"triton-invariant" splits keys at fixed positions, so that a query's result is bitwise independent of the rest of the batch.
`attention_work.py` divides the work, and `attention_kernel.py` holds the kernels."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from penstock.ops import attention_library, attention_work, gpu
from penstock.ops.attention import LEAST, WHOLE, AttentionOps, Geometry, Ints, Rows, Seen, SharedPrefixes, Span, Stripe, Tree
from penstock.ops.attention_divider import Divider
from penstock.ops.attention_work import Launch, Shape
from penstock.ops.codec import Scales
from penstock.ops.codec_triton import decoding
from penstock.ops.table import register


class TritonAttention(AttentionOps):
    """AttentionOps (ops/attention.py) in Triton. `invariant`: results are bitwise independent of the batch."""

    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant

    def library_spans(self, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        # The two forms of a latent's attention round differently, so the batch-invariant mode has one of them only.
        return [] if self.invariant else attention_library.spans(geometry, counts, context)

    def divider(self, geometry: Geometry) -> Divider | None:
        return None if geometry.stripe.of > 1 else Divider(geometry, self.invariant, partial(self.prepare, geometry))

    def warm_up(self, device: torch.device) -> None:
        if not self.invariant:
            attention_library.warm_up(device)

    def contexts(self, most: int) -> list[int]:
        return [] if self.invariant else [before for before in attention_library.CONTEXTS if before <= most]

    def shares(self, geometry: Geometry) -> bool:
        return attention_work.shares(geometry, self.invariant)

    def prepare(self, geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int,
                library: Sequence[Span] = (), shared: SharedPrefixes | None = None, slack: Ints | None = None) -> Ints:
        if geometry.stripe.of > 1:
            assert slack is None, "the keys of a stripe that a query sees are counted on the host"
            return attention_work.singles(geometry, counts, context, tokens, self.invariant, [span.segment for span in library])
        assert slack is None or not self.invariant, "batch-invariant split-K boundaries need exact positions"
        return attention_work.prepare(geometry, counts, context, segments, tokens, self.invariant,
                                      [span.segment for span in library], shared, slack)

    def items(self, geometry: Geometry, work: torch.Tensor, segments: int, tokens: int) -> list[torch.Tensor]:
        layout, fields = attention_work.layout(geometry, segments, tokens, self.invariant), attention_work.FIELDS
        return [work[launch.offset:launch.offset + launch.items * fields].view(-1, fields)
                for launch in (layout.narrow, layout.broad) if launch is not None]

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None, library: Sequence[Span] = (),
              slopes: torch.Tensor | None = None, scales: Scales | None = None, tree: Tree | None = None) -> torch.Tensor:
        """Without `work` it is prepared here, which synchronises the device. Counters in `work` are zero before and after."""
        tokens, heads, _ = q.shape
        _, kv_heads, page, size = v_cache.shape
        stride, tail, itemsize = k_cache.stride(), k_cache.shape[3] - size, k_cache.element_size()
        if scales is not None:
            size, itemsize = q.shape[2], q.element_size()
        assert v_cache.stride() == stride and stride[3] == 1, "keys and values have equal strides, and each entry is contiguous"
        assert not tail or (v_cache.data_ptr() == k_cache.data_ptr() and kv_heads == 1), "longer keys begin with their values"
        geometry = Geometry(heads, kv_heads, size, page, window, itemsize, sloped=slopes is not None, tail=tail,
                            codec=scales.codec.name if scales is not None else "")
        segments = context.shape[0]
        if (not tail and len(library) == segments and attention_library.exact(library)
                and len(attention_library.groups(library)) == 1):
            whole = attention_library.whole_prompts(q, k_cache, v_cache, table, scale, library, scales, sinks)
            return whole.flatten(0, 1).contiguous()
        if work is None:
            found = self.prepare(geometry, np.diff(query_start.cpu().numpy()), context.cpu().numpy(), segments, tokens, library)
            work = torch.from_numpy(found).to(q.device)
        layout = attention_work.layout(geometry, segments, tokens, self.invariant)
        out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
        for launch in (layout.narrow, layout.broad):
            if launch is not None and len(library) < segments:
                self._launch(launch, geometry, launch is layout.broad, q, k_cache, v_cache, table, scale, softcap, sinks,
                             slopes, work, out, scales, tree=tree)
        if not tail:
            attention_library.attend(q, k_cache, v_cache, table, scale, library, out, scales, sinks)
        return out

    def striped(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
                query_start: torch.Tensor, context: torch.Tensor, scale: float, softcap: float = 0.0,
                sinks: torch.Tensor | None = None, work: torch.Tensor | None = None, library: Sequence[Span] = (),
                slopes: torch.Tensor | None = None, scales: Scales | None = None,
                stripe: Stripe = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
        """Results are in q's dtype. Without `work` it is prepared here, which synchronises the device."""
        assert slopes is None, "a slope needs the key's own position"
        tokens, heads, width = q.shape
        size = width if scales is not None else v_cache.shape[3]
        geometry = Geometry(heads, k_cache.shape[1], size, k_cache.shape[2],
                            itemsize=(q if scales is not None else k_cache).element_size(), tail=width - size,
                            codec=scales.codec.name if scales is not None else "", stripe=stripe)
        if work is None:
            found = self.prepare(geometry, np.diff(query_start.cpu().numpy()), context.cpu().numpy(), tokens, tokens, library)
            work = torch.from_numpy(found).to(q.device)
        out, sums = q.new_zeros(tokens, heads, size), torch.full((tokens, heads), LEAST, device=q.device)
        launch = attention_work.layout(geometry, tokens, tokens, self.invariant).narrow
        self._launch(launch, geometry, False, q, k_cache, v_cache, table, scale, softcap, None if stripe.number else sinks,
                     None, work, out, scales, sums)
        return out, sums

    def grain(self, geometry: Geometry, queries: int) -> int:
        long = queries >= attention_library.LONG and not self.invariant and attention_library.takes(geometry)
        return attention_library.BLOCKS[-1] if long else 0

    def segment(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: torch.Tensor, before: int, own: bool,
                scale: float, scales: Scales | None = None,
                seen: Seen = tuple) -> tuple[torch.Tensor, torch.Tensor]:
        rows = partial(attention_library.gathered, q, k_cache, v_cache, scales, row)
        return attention_library.segment(q, rows, scale, before, own, seen)

    def expanded(self, q: torch.Tensor, rows: Rows, scale: float, span: Span, out: torch.Tensor) -> None:
        attention_library.continued(q, rows, scale, span, out)

    def prompts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, spans: Sequence[Span],
                out: torch.Tensor) -> None:
        attention_library.prompts(q, k, v, scale, spans, out)

    def _launch(self, launch: Launch, geometry: Geometry, broad: bool, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor, table: torch.Tensor, scale: float, softcap: float, sinks: torch.Tensor | None,
                slopes: torch.Tensor | None, work: torch.Tensor, out: torch.Tensor, scales: Scales | None,
                logs: torch.Tensor | None = None, tree: Tree | None = None) -> None:
        from penstock.ops.attention_kernel import attend  # triton takes 0.3 s to import, and may be absent

        geometry = attention_work.served(geometry)
        shape, size, kv_heads = launch.shape, geometry.head_size, geometry.kv_heads
        k_cache = k_cache.expand(-1, kv_heads, -1, -1)
        group = geometry.heads // kv_heads
        block_d = _block(size)
        room = launch.slots * kv_heads * group
        parts = torch.empty(room * (block_d + 2), dtype=torch.float32, device=q.device)
        given, forms, fixed = decoding(scales, k_cache, v_cache, q)
        # Float16 has no room for small weights times small scales.
        words = not broad and not self.invariant and _by_words(scales, k_cache, q)
        lift = 64.0 if words or (scales is not None and q.dtype is torch.float16) else 1.0
        attend[(kv_heads, launch.items)](
            q, k_cache, v_cache, out, logs, table, out if sinks is None else sinks, out if slopes is None else slopes,
            *((out, out) if tree is None else tree), work[launch.offset:], work[launch.mates:],
            work[launch.counters:], parts, parts[room * block_d:], scale * fixed[0], softcap, geometry.window,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], out.stride(0), out.stride(1),
            table.stride(0), *given, fixed[1] / lift, lift, **forms, group=group, size=size, tail=geometry.tail,
            page_size=geometry.page, block_m=shape.block_m, block_n=shape.block_n, block_d=block_d,
            block_t=_block(geometry.tail), rows=shape.queries * group, windowed=geometry.window > 0,
            capped=softcap != 0.0, sunk=sinks is not None, sloped=(slopes is not None) + 2 * (tree is not None),
            fixed=self.invariant, edges=broad, shared=launch.shared, fields=attention_work.FIELDS, words=words,
            fast=q.device.type != "cpu", num_warps=shape.warps, num_stages=_stages(shape, geometry, q.device),
            **gpu.linked(q.device))


def _by_words(scales: Scales | None, cache: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether the kernel reads codes as words of 16 bits: those of 8 or 4 bits, at strides of whole loads, if a product's
    operand has the 16 columns that tensor cores take at least."""
    if scales is None or q.dtype is torch.float32 or any(stride % 16 for stride in cache.stride()[:3]):
        return False
    return scales.codec.key.bits in (4, 8) and _block(q.shape[2]) * scales.codec.key.bits >= 256


def _stages(shape: Shape, geometry: Geometry, device: torch.device) -> int:
    """Pipeline stages: those of the shape, or as many as fit in shared memory. A stage holds a block of keys and of values; of
    latents, which are both, one stage less is held."""
    row = _block(geometry.head_size)
    tail = _block(geometry.tail) if geometry.tail else 0
    room = gpu.shared_bytes(device) - shape.block_m * (row + tail) * geometry.itemsize
    held = room // (shape.block_n * (row + (tail or row)) * geometry.itemsize)
    return max(1, min(shape.stages, held + (1 if tail and shape.block_m < 64 else 0)))


def _block(size: int) -> int:
    return max(16, gpu.covering(size))


TRITON = TritonAttention(invariant=False)
INVARIANT = TritonAttention(invariant=True)
register("attention", "triton", rank=10, supports=gpu.supports, batch_invariant=False)(TRITON)
register("attention", "triton-invariant", rank=5, supports=gpu.supports)(INVARIANT)
