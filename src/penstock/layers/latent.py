"""Multi-head latent attention (MLA, DeepSeek-AI 2024): keys and values of all heads are stored as one latent vector a position.

Two forms compute the same. Absorbed: queries are taken to the latent's space, and all heads read the latents as one KV head,
for decoding at the memory's rate. Expanded: the keys and values of a long prefill segment are computed from the latents, block
by block, for fewer operations; `AttentionOps.library_spans` names those segments, by their own lengths alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from penstock.core.state import Everything, Field, StateSpec
from penstock.layers.build import Build
from penstock.layers.linear import Linear, LinearSpec
from penstock.layers.norm import RMSNorm, RMSNormSpec
from penstock.layers.parameter import Parameter, Piece, Split
from penstock.layers.rope import RopeSpec
from penstock.layers.step import StateView, Step, Works
from penstock.ops.attention import Geometry, Span
from penstock.quant.scheme import PLAIN


@dataclass(frozen=True)
class LatentAttentionSpec:
    """A head's query and key have `key_size` elements without and `rope.dim` with rotation; the latter of a key are the same
    for all heads. `query_rank` 0: queries are one projection of x, else two with a norm between."""

    width: int
    heads: int
    rank: int
    """Elements of a latent without its rotated key."""
    key_size: int
    value_size: int
    scale: float
    rope: RopeSpec
    norm: RMSNormSpec
    """Of latents, and of the queries' inner vector."""
    query_rank: int = 0
    bias: bool = False
    """Of the projections of x, but the whole queries', and of the output."""

    name = "attention"

    @property
    def query_size(self) -> int:
        return self.key_size + self.rope.dim

    @property
    def latent_size(self) -> int:
        """Elements in the cache a position."""
        return self.rank + self.rope.dim

    @property
    def input(self) -> LinearSpec:
        """Latents, and with a query rank the queries' inner vectors before them."""
        pieces = (Piece("q_a", self.query_rank),) if self.query_rank else ()
        return LinearSpec(self.width, (*pieces, Piece("kv_a", self.latent_size)), self.bias)

    @property
    def input_name(self) -> str:
        return "a" if self.query_rank else "kv_a"

    @property
    def queries(self) -> LinearSpec:
        return LinearSpec(self.query_rank or self.width, (Piece("q", self.heads * self.query_size, self.query_size),), False,
                          Split.ROWS)

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.heads * self.value_size, (Piece("o", self.width),), self.bias, Split.COLUMNS, self.value_size)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.input.parameters(f"{path}.{self.input_name}")
        if self.query_rank:
            yield from self.norm.parameters(f"{path}.q_norm", self.query_rank)
        yield from self.queries.parameters(f"{path}.q")
        yield from self.norm.parameters(f"{path}.kv_norm", self.rank)
        size = self.key_size + self.value_size
        yield Parameter(f"{path}.kv_b.weight", (self.heads * size, self.rank), PLAIN, split=Split.ROWS, unit=size, decoded=True)
        yield from self.output.parameters(f"{path}.o")

    def share(self, ranks: int) -> LatentAttentionSpec:
        """Ranks divide the heads; all hold every latent."""
        return replace(self, heads=Piece("q", self.heads).room(ranks))

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        return (StateSpec((Field("latent", (1, self.latent_size), dtype, split="whole"),), Everything()),)

    def build(self, path: str, build: Build) -> LatentAttention:
        return LatentAttention(self, path, build)


class LatentAttention:
    """x [T, W] -> [T, W]. Every token's latent is written to the cache, and its queries read those before it."""

    looks_around = True
    group: int
    work: int

    def __init__(self, spec: LatentAttentionSpec, path: str, build: Build) -> None:
        self.spec = spec
        self.path = f"{path}.kv_b"
        self.a = Linear(spec.input, f"{path}.{spec.input_name}", build)
        self.q = Linear(spec.queries, f"{path}.q", build)
        self.q_norm = RMSNorm(spec.norm, f"{path}.q_norm", build) if spec.query_rank else None
        self.kv_norm = build.values.tensor(f"{path}.kv_norm.weight")
        self.kv_b = build.values.tensor(f"{path}.kv_b.weight")
        by_head = self.kv_b.view(spec.heads, spec.key_size + spec.value_size, spec.rank)
        self._kernels = build.kernels
        self.into = build.kernels.head_linear.pack(by_head[:, :spec.key_size])
        self.out_of = build.kernels.head_linear.pack(by_head[:, spec.key_size:].transpose(1, 2))
        self.o = Linear(spec.output, f"{path}.o", build)
        self.cos, self.sin = build.rope(spec.rope)

    @property
    def linears(self) -> Sequence[Linear]:
        return self.a, self.q, self.o

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        (view,) = views
        self.group, self.cache = view.group, view["latent"]
        geometry = Geometry(self.spec.heads, 1, self.spec.rank, self.cache.shape[2], itemsize=self.cache.element_size(),
                            tail=self.spec.rope.dim)
        self.work = works.index(view.group, geometry, self._kernels.attention)

    def leave_sum(self) -> bool:
        return self.o.leave_sum()

    def detach(self) -> None:
        del self.cache

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        spec, kernels, tokens = self.spec, self._kernels, x.shape[0]
        group, library = step.groups[self.group], step.library[self.work]
        a = self.a(x, step)
        inner = x if self.q_norm is None else self.q_norm(a[:, :spec.query_rank])
        q = self.q(inner, step).view(tokens, spec.heads, spec.query_size)
        absorbed = q.new_empty(tokens, spec.heads, spec.latent_size)
        kernels.latent_write(q, a[:, spec.query_rank:], self.kv_norm, spec.norm.eps, step.positions, group.slots, self.cache,
                             self.cos, self.sin, spec.rope.interleaved, absorbed)
        out = q.new_empty(tokens, spec.heads, spec.value_size)
        ranges = _outside(library, tokens)
        adapters = self._adapters(step)
        for first, last in ranges:
            kernels.head_linear.apply(q[first:last, :, :spec.key_size], self.into, absorbed[first:last, :, :spec.rank])
        for rows, a_, b in adapters:
            low = torch.einsum("thk,hkr->thr", q[rows, :, :spec.key_size], b[:, :spec.key_size])
            absorbed[rows, :, :spec.rank] = absorbed[rows, :, :spec.rank] + low @ a_
        if ranges:
            found = kernels.attention.apply(absorbed, self.cache, self.cache[..., :spec.rank], group.table, step.query_start,
                                            step.context, spec.scale, work=step.work[self.work], library=library)
            found = self._picked(x, inner, absorbed, found, step)
        for first, last in ranges:
            kernels.head_linear.apply(found[first:last], self.out_of, out[first:last])
        for rows, a_, b in adapters if ranges else ():
            out[rows] = out[rows] + torch.einsum("thr,hvr->thv", found[rows] @ a_.t(), b[:, spec.key_size:])
        if library:
            q = torch.cat((q[..., :spec.key_size], absorbed[..., spec.rank:]), -1)
        for span in library:
            own = [b.flatten(0, 1) @ a_ for rows, a_, b in adapters if bool((rows == span.first).any())]
            self._expand(q, span, group.table[span.segment], out[span.first:span.first + span.count], sum(own, self.kv_b))
        out = out.view(tokens, -1)
        return self.o(*step.narrow(out, ends))

    def _adapters(self, step: Step) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(rows, A [r, rank], B [H, key and value, r]) of the adapters of keys' and values' matrix: a query reads all
        latents as its own adapter has them, because a row has the same adapter from its first token on."""
        found = []
        for rows, (a, b) in () if step.delta is None else step.delta.apart(self.path):
            assert a is not None and b is not None
            found.append((rows, a, b.view(self.spec.heads, -1, b.shape[1])))
        return found

    def _picked(self, _x: torch.Tensor, _inner: torch.Tensor, _queries: torch.Tensor, found: torch.Tensor,
                _step: Step, /) -> torch.Tensor:
        """The results `found` [T, H, rank] of absorbed queries, changed where a query attends to fewer positions."""
        return found

    def _expand(self, q: torch.Tensor, span: Span, row: torch.Tensor, out: torch.Tensor, kv_b: torch.Tensor) -> None:
        """The expanded form of one segment. row: its block table row."""
        spec, page = self.spec, self.cache.shape[2]

        def rows(begin: int, end: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Positions behind the end have no pages: the last one's latent stands in, and nothing sees it.
            at = torch.arange(begin, begin + size, device=q.device).clamp_(max=end - 1)
            latent = self.cache[row[at // page].long(), 0, at % page]
            both = F.linear(latent[:, :spec.rank], kv_b).view(size, spec.heads, -1)
            turned = latent[:, None, spec.rank:].expand(-1, spec.heads, -1)
            return torch.cat((both[..., :spec.key_size], turned), -1), both[..., spec.key_size:]

        self._kernels.attention.expanded(q, rows, spec.scale, span, out)


def _outside(library: Sequence[Span], tokens: int) -> list[tuple[int, int]]:
    """The ranges of tokens that are in none of the spans, which are in order."""
    found, at = [], 0
    for first, last in (*((span.first, span.first + span.count) for span in library), (tokens, tokens)):
        if first > at:
            found.append((at, first))
        at = last
    return found
