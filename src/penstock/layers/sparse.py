"""Sparse attention over latents (DeepSeek V3.2): an indexer scores the earlier positions, and queries attend to the best.

Queries of contexts that are no longer than the number of picks attend to all, by the kernels of `latent.py`. The others' picks
are gathered and attended to in plain PyTorch, by blocks of queries, which read lengths on the host: in no CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.core.state import Everything, Field, StateSpec
from penstock.layers.build import Build
from penstock.layers.latent import LatentAttention, LatentAttentionSpec
from penstock.layers.linear import Linear, LinearSpec
from penstock.layers.norm import LayerNormSpec, build_norm
from penstock.layers.parameter import Parameter, Piece
from penstock.layers.step import StateView, Step, Works
from penstock.ops.attention import Geometry
from penstock.ops.rope import rotate
from penstock.quant.activations import FP8_MAX

_ELEMENTS = 1 << 24
"""Maximum elements of the picked latents, or of scores, that are held at once."""


@dataclass(frozen=True)
class SparseLatentAttentionSpec(LatentAttentionSpec):
    """Latent attention of each query to `picks` positions: those with the largest sum, over the indexer's heads, of weight *
    relu(index query * index key). The first elements of index queries and keys are rotated, in two halves."""

    index_heads: int = 64
    index_size: int = 128
    picks: int = 2048

    eager = True
    """It reads lengths on the host."""

    @property
    def index_linears(self) -> dict[str, LinearSpec]:
        """By their names: of the queries' inner vector, and two of x."""
        return {"index_q": LinearSpec(self.query_rank, (Piece("index_q", self.index_heads * self.index_size),)),
                "index_k": LinearSpec(self.width, (Piece("index_k", self.index_size),)),
                "index_weights": LinearSpec(self.width, (Piece("index_weights", self.index_heads),))}

    @property
    def index_norm(self) -> LayerNormSpec:
        return LayerNormSpec(1e-6)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from super().parameters(path)
        for name, linear in self.index_linears.items():
            yield from linear.parameters(f"{path}.{name}")
        yield from self.index_norm.parameters(f"{path}.index_norm", self.index_size)

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        # In 16-bit models, index keys are FP8 codes with a scale each: 132 bytes of DeepSeek V3.2's 128 elements.
        index = Field("index", (1, self.index_size), dtype if dtype == "float32" else "float8_e4m3fn", split="whole")
        scales = () if dtype == "float32" else (Field("index_scale", (1, 1), "float32", split="whole"),)
        return (StateSpec((Field("latent", (1, self.latent_size), dtype, split="whole"), index, *scales), Everything()),)

    def build(self, path: str, build: Build) -> SparseLatentAttention:
        return SparseLatentAttention(self, path, build)


class SparseLatentAttention(LatentAttention):
    """x [T, W] -> [T, W]. Latents and index keys of all tokens are written to the cache."""

    spec: SparseLatentAttentionSpec

    def __init__(self, spec: SparseLatentAttentionSpec, path: str, build: Build) -> None:
        super().__init__(spec, path, build)
        self.index_q, self.index_k, self.index_weights = (Linear(linear, f"{path}.{name}", build)
                                                          for name, linear in spec.index_linears.items())
        self.index_norm = build_norm(spec.index_norm, f"{path}.index_norm", build)
        self._spread = hadamard(spec.index_size, build.device)

    @property
    def linears(self) -> Sequence[Linear]:
        return *super().linears, self.index_q, self.index_k, self.index_weights

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        (view,) = views
        self.group, self.cache, self.index = view.group, view["latent"], view["index"]
        self.index_scale = view["index_scale"] if self.index.dtype is torch.float8_e4m3fn else None
        # Not plain: no vendor library may take a long segment, which would attend to all.
        geometry = Geometry(self.spec.heads, 1, self.spec.rank, self.cache.shape[2], itemsize=self.cache.element_size(),
                            plain=False, tail=self.spec.rope.dim)
        self.work = works.index(view.group, geometry, self._kernels.attention)

    def detach(self) -> None:
        super().detach()
        del self.index, self.index_scale

    def keep(self, slots: torch.Tensor, key: torch.Tensor) -> None:
        """Writes index keys [N, size] to cache slots [N]."""
        page, slot = slots // self.index.shape[2], slots % self.index.shape[2]
        if self.index_scale is None:
            self.index[page, 0, slot] = key.to(self.index.dtype)
            return
        spread = key.float() @ self._spread
        scale = spread.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
        self.index.view(torch.uint8)[page, 0, slot] = (spread / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        self.index_scale[page, 0, slot] = scale

    def kept(self, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """The index keys [N, size] in these places, float32. Where they are FP8, they are spread as `asked` queries are."""
        if self.index_scale is None:
            return self.index[page, 0, slot].float()
        found = self.index.view(torch.uint8)[page, 0, slot].view(torch.float8_e4m3fn).float()
        found *= self.index_scale[page, 0, slot]
        return found

    def asked(self, queries: torch.Tensor) -> torch.Tensor:
        """Index queries [T, H, size] as they meet the keys, float32."""
        return queries.float() if self.index_scale is None else queries.float() @ self._spread

    def _picked(self, x: torch.Tensor, inner: torch.Tensor, queries: torch.Tensor, found: torch.Tensor,
                step: Step, /) -> torch.Tensor:
        spec, group, size = self.spec, step.groups[self.group], self.cache.shape[2]
        at = step.positions.long()
        cos, sin = self.cos[at], self.sin[at]
        key = rotate(self.index_norm(self.index_k(x, step))[:, None], cos, sin)
        here = group.slots >= 0
        self.keep(group.slots[here], key[here, 0])
        starts, lengths = step.query_start.tolist(), step.context.tolist()
        if max(lengths, default=0) <= spec.picks:
            return found
        asked = self.asked(rotate(self.index_q(inner, step).view(len(x), spec.index_heads, spec.index_size), cos, sin))
        weights = self.index_weights(x, step).float() * (spec.index_heads**-0.5 * spec.index_size**-0.5)
        block = max(1, _ELEMENTS // max(spec.picks * spec.latent_size, spec.index_heads * max(lengths)))
        for s, length in enumerate(lengths):
            first, last = starts[s], starts[s + 1]
            # Queries at the beginning of a prompt see no more than the picks: they keep what they have.
            first = max(first, last - length + spec.picks)
            if first >= last:
                continue
            position = torch.arange(length, device=x.device)
            page, slot = group.table[s].long()[position // size], position % size
            keys = self.kept(page, slot)
            for begin in range(first, last, block):
                rows = slice(begin, min(last, begin + block))
                scores = torch.einsum("th,thk->tk", weights[rows], torch.einsum("thd,kd->thk", asked[rows], keys).relu_())
                own = length - last + torch.arange(rows.start, rows.stop, device=x.device)[:, None]
                picks = scores.masked_fill_(position > own, float("-inf")).topk(spec.picks, -1).indices
                latents = self.cache[page[picks], 0, slot[picks]].float()
                shares = (torch.einsum("thd,tkd->thk", queries[rows].float(), latents) * spec.scale).softmax(-1)
                found[rows] = torch.einsum("thk,tkd->thd", shares, latents[..., :spec.rank]).to(found.dtype)
        return found


def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """An orthogonal matrix [size, size] that spreads large elements over all (Sylvester's construction), so that they round
    better; the identity if `size` is no power of two."""
    found = torch.ones(1, 1, device=device)
    if size & (size - 1):
        return torch.eye(size, device=device)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found.div_(size**0.5)
