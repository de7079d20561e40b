"""Multi-head latent attention (MLA, DeepSeek-AI 2024): keys and values of all heads are stored as one latent vector a position.

Two forms compute the same. Absorbed: queries are taken to the latent's space, and all heads read the latents as one KV head,
for decoding at the memory's rate. Expanded: the keys and values of a long prefill segment are computed from the latents, block
by block, for fewer operations; `AttentionOps.library_spans` names those segments, by their own lengths alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from penstock.core.state import Everything, Field, StateSpec
from penstock.layers.attention import attend, gathered
from penstock.layers.block import LayerNormSpec, RMSNorm, RMSNormSpec, build_norm
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece, Split, TokenMixer
from penstock.layers.rope import RopeSpec
from penstock.layers.step import StateView, Step, Works
from penstock.ops.attention import WHOLE, Geometry, Span, Stripe, joined
from penstock.ops.codec import sylvester
from penstock.ops.rope import rotate
from penstock.parallel.group import Group
from penstock.quant.scheme import FP8_MAX, PLAIN

Held = tuple[Span, torch.Tensor, torch.Tensor]
"""A long segment or a piece of one, a cache of latents [pages, 1, page, D], and the row of the block table for it."""


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
    stripes: int = 1
    """Ranks that each hold a run of every page's positions."""

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
        """Queries, or with a query rank their inner vectors, and latents, which every rank has."""
        latents = Piece("kv_a", self.latent_size, self.latent_size, copied=True)
        if self.query_rank:
            return LinearSpec(self.width, (Piece("q_a", self.query_rank), latents), self.bias)
        return LinearSpec(self.width, (self._heads("q"), latents), split=Split.ROWS)

    @property
    def queries(self) -> LinearSpec:
        """Of inner vectors."""
        return LinearSpec(self.query_rank, (self._heads("q_b"),), False, Split.ROWS)

    def _heads(self, name: str) -> Piece:
        return Piece(name, self.heads * self.query_size, self.query_size)

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.heads * self.value_size, (Piece("o", self.width),), self.bias, Split.COLUMNS, self.value_size)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.input.parameters(f"{path}.a")
        if self.query_rank:
            yield from self.norm.parameters(f"{path}.q_norm", self.query_rank)
            yield from self.queries.parameters(f"{path}.q_b")
        elif self.bias:
            yield Parameter(f"{path}.kv_a.bias", (self.latent_size,))
        yield from self.norm.parameters(f"{path}.kv_norm", self.rank)
        size = self.key_size + self.value_size
        yield Parameter(f"{path}.kv_b.weight", (self.heads * size, self.rank), PLAIN, split=Split.ROWS, unit=size, decoded=True)
        yield from self.output.parameters(f"{path}.o")

    def share(self, ranks: int) -> "LatentAttentionSpec":
        """Ranks divide the heads; all hold every latent."""
        return replace(self, heads=Piece("q", self.heads).room(ranks))

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        return (StateSpec((Field("latent", (1, self.latent_size), dtype, stripes=self.stripes),), Everything()),)

    def build(self, path: str, build: Build) -> "LatentAttention":
        return LatentAttention(self, path, build)


class LatentAttention(TokenMixer):
    """x [T, W] -> [T, W]. Every token's latent is written to the cache, and its queries read those before it."""

    plain = True
    """`Geometry.plain`."""
    group: int
    work: int

    def __init__(self, spec: LatentAttentionSpec, path: str, build: Build) -> None:
        self.spec = spec
        self.path = f"{path}.kv_b"
        self.a = Linear(spec.input, f"{path}.a", build)
        self.q = Linear(spec.queries, f"{path}.q_b", build) if spec.query_rank else None
        self.q_norm = RMSNorm(spec.norm, f"{path}.q_norm", build) if spec.query_rank else None
        self.latent_bias = build.values.tensor(f"{path}.kv_a.bias") if spec.bias and not spec.query_rank else None
        self.kv_norm = build.values.tensor(f"{path}.kv_norm.weight")
        self.kv_b = build.values.tensor(f"{path}.kv_b.weight")
        by_head = self.kv_b.view(spec.heads, spec.key_size + spec.value_size, spec.rank)
        self._kernels = build.kernels
        self.into = build.kernels.head_linear.pack(by_head[:, :spec.key_size])
        self.out_of = build.kernels.head_linear.pack(by_head[:, spec.key_size:].transpose(1, 2))
        self.o = Linear(spec.output, f"{path}.o", build)
        self.cos, self.sin = build.rope(spec.rope)
        self._ranks = build.context if spec.stripes > 1 else None
        self._stripe = WHOLE if self._ranks is None else Stripe(self._ranks.rank, self._ranks.size)

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        (view,) = views
        self.group, self.cache = view.group, view["latent"]
        self.work = works.index(view.group, self._geometry(self.cache.shape[2], self._stripe), self._kernels.attention)

    def _geometry(self, page: int, stripe: Stripe = WHOLE) -> Geometry:
        return Geometry(self.spec.heads, 1, self.spec.rank, page, itemsize=self.cache.element_size(), plain=self.plain,
                        tail=self.spec.rope.dim, stripe=stripe)

    def detach(self) -> None:
        del self.cache

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        spec, kernels, tokens = self.spec, self._kernels, x.shape[0]
        group, library = step.groups[self.group], step.library[self.work]
        inner, latents = self.a(x, step).split([self.a.weight.n - spec.latent_size, spec.latent_size], -1)
        if self.q is not None and self.q_norm is not None:
            inner = self.q_norm(inner)
        q = (inner if self.q is None else self.q(inner, step)).view(tokens, spec.heads, spec.query_size)
        absorbed = q.new_empty(tokens, spec.heads, spec.latent_size)
        self._write(q, latents if self.latent_bias is None else latents + self.latent_bias, step, absorbed)
        out, (spans, others) = q.new_empty(tokens, spec.heads, spec.value_size), self._held(step)
        ranges = _outside([span for span, *_ in spans], tokens)
        adapters = self._adapters(step)
        for first, last in ranges:
            kernels.head_linear.apply(q[first:last, :, :spec.key_size], self.into, absorbed[first:last, :, :spec.rank])
        for rows, a_, b in adapters:
            low = torch.einsum("thk,hkr->thr", q[rows, :, :spec.key_size], b[:, :spec.key_size])
            absorbed[rows, :, :spec.rank] = absorbed[rows, :, :spec.rank] + low @ a_
        if self._ranks is not None:
            found = self._joined(absorbed, others, step, self._ranks)
        elif ranges:
            found = kernels.attention.apply(absorbed, self.cache, self.cache[..., :spec.rank], group.table, step.query_start,
                                            step.context, spec.scale, work=step.work[self.work], library=library)
            found = self._picked(x, inner, absorbed, found, step)
        for first, last in ranges:
            kernels.head_linear.apply(found[first:last], self.out_of, out[first:last])
        for rows, a_, b in adapters if ranges else ():
            out[rows] = out[rows] + torch.einsum("thr,hvr->thv", found[rows] @ a_.t(), b[:, spec.key_size:])
        if spans:  # nothing reads what is not rotated any more
            q[..., spec.key_size:] = absorbed[..., spec.rank:]
        prompts = [] if self._ranks is not None or adapters else [span for span, *_ in spans if not span.before]
        if prompts:
            self._expand_prompts(q, prompts, step, out)
        for held in [one for one in spans if one[0].before] if prompts else spans:
            first, last = held[0].first, held[0].first + held[0].count
            own = [b.flatten(0, 1) @ a_ for rows, a_, b in adapters if bool((rows == first).any())]
            self._expand(q, held, out[first:last], sum(own, self.kv_b))
        out = out.view(tokens, -1)
        return self.o(*step.narrow(out, ends))

    def _write(self, q: torch.Tensor, latents: torch.Tensor, step: Step, absorbed: torch.Tensor) -> None:
        """Writes the latents of the step's tokens to the cache, and the rotated ends of q to `absorbed`."""
        slots, at, division, write = step.groups[self.group].slots, step.positions, step.division, self._kernels.latent_write
        norm, eps, cache, cos, sin = self.kv_norm, self.spec.norm.eps, self.cache, self.cos, self.sin
        interleaved = self.spec.rope.interleaved
        if self._ranks is not None:
            slots = self._stripe.slots(slots, cache.shape[2])
            if division is not None:
                # q is of this rank's tokens, while it writes its run of each page for all tokens.
                own = at.index_select(0, division.own)
                nowhere = torch.full_like(own, -1, dtype=torch.int64)
                write(q, latents, norm, eps, own, nowhere, cache, cos, sin, interleaved, absorbed)
                latents = division.whole(latents, self._ranks)
                q, absorbed = latents[:, None], torch.empty_like(latents)[:, None]
        write(q, latents, norm, eps, at, slots, cache, cos, sin, interleaved, absorbed)

    def _held(self, step: Step) -> tuple[list[Held], list[Held]]:
        """Long segments, or this rank's pieces of them over all ranks' latents: those of the expanded form, and others."""
        found, division, ranks = list[Held](), step.division, self._ranks
        for span in step.library[self.work]:
            found.append((span, self.cache, step.groups[self.group].table[span.segment]))
            if division is not None and ranks is not None:
                whole = gathered(*found.pop()[1:], span.before + span.count, ranks)
                numbers = torch.arange(len(whole), dtype=torch.int32, device=whole.device)
                found += [(piece, whole, numbers) for piece in division.pieces if piece.segment == span.segment]
        if ranks is None or not found:
            return found, []
        sizes = np.array([(one.count, one.before + one.count) for one, *_ in found], np.int32).T
        geometry = self._geometry(self.cache.shape[2] * ranks.size)
        named = {one.segment for one in self._kernels.attention.library_spans(geometry, *sizes)}
        return [one for i, one in enumerate(found) if i in named], [one for i, one in enumerate(found) if i not in named]

    def _joined(self, absorbed: torch.Tensor, others: Sequence[Held], step: Step, ranks: Group) -> torch.Tensor:
        """The results of absorbed queries where each rank has some of the latents, as `Attention._joined`."""
        spec, ops, division = self.spec, self._kernels.attention, step.division
        if division is None or division.few:
            every = absorbed if division is None else division.whole(absorbed, ranks)
            parts, sums = ops.striped(every, self.cache, self.cache[..., :spec.rank], step.groups[self.group].table,
                                      step.query_start, step.context, spec.scale, work=step.work[self.work],
                                      library=step.library[self.work], stripe=self._stripe)
            found = joined(ranks.gather(parts), ranks.gather(sums))[0].to(absorbed.dtype)
            found = found if division is None else found.index_select(0, division.own)
        else:
            found = absorbed.new_zeros(len(absorbed), spec.heads, spec.rank)
        for piece, whole, _ in others:
            rows = slice(piece.first, piece.first + piece.count)
            found[rows] = attend(ops, self._geometry(whole.shape[2]), piece, absorbed[rows], whole, whole[..., :spec.rank],
                                 spec.scale)
        return found

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

    def _expand(self, q: torch.Tensor, held: Held, out: torch.Tensor, kv_b: torch.Tensor) -> None:
        """The expanded form of one segment."""
        spec, (span, cache, row) = self.spec, held
        page = cache.shape[2]

        def rows(begin: int, end: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Positions behind the end have no pages: the last one's latent stands in, and nothing sees it.
            at = torch.arange(begin, begin + size, device=q.device).clamp_(max=end - 1)
            return self._keys(cache[row[at // page].long(), 0, at % page], kv_b)

        self._kernels.attention.expanded(q, rows, spec.scale, span, out)

    def _expand_prompts(self, q: torch.Tensor, prompts: Sequence[Span], step: Step, out: torch.Tensor) -> None:
        """The same of prompts without a context, whose keys are expanded together: small models' prompts wait for launches."""
        slots, page = step.groups[self.group].slots, self.cache.shape[2]
        slots = torch.cat([slots[span.first:span.first + span.count] for span in prompts])
        keys, values = self._keys(self.cache[slots // page, 0, slots % page], self.kv_b)
        self._kernels.attention.prompts(q, keys, values, self.spec.scale, prompts, out)

    def _keys(self, latents: torch.Tensor, kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [N, H, D] of latents [N, D]."""
        spec = self.spec
        both = F.linear(latents[:, :spec.rank], kv_b).view(len(latents), spec.heads, -1)
        keys = both.new_empty(len(latents), spec.heads, spec.query_size)
        # Faster than torch.cat of strided tensors.
        keys[..., :spec.key_size], keys[..., spec.key_size:] = both[..., :spec.key_size], latents[:, None, spec.rank:]
        return keys, both[..., spec.key_size:]


def _outside(library: Sequence[Span], tokens: int) -> list[tuple[int, int]]:
    """The ranges of tokens that are in none of the spans, which are in order."""
    found, at = [], 0
    for first, last in (*((span.first, span.first + span.count) for span in library), (tokens, tokens)):
        if first > at:
            found.append((at, first))
        at = last
    return found


_ELEMENTS = 1 << 24
"""Maximum elements of the picked latents, or of scores, that are held at once."""


@dataclass(frozen=True)
class SparseLatentAttentionSpec(LatentAttentionSpec):
    """Latent attention of each query to `picks` positions: those with the largest sum, over the indexer's heads, of weight *
    relu(index query * index key). The first elements of index queries and keys are rotated, in two halves."""

    index_heads: int = 64
    index_size: int = 128
    picks: int = 2048
    index_interleaved: bool = False
    """Neighbours rotate together instead (GLM-5)."""

    eager = True
    """It reads lengths on the host."""
    index_norm = LayerNormSpec(1e-6)

    @property
    def index_linears(self) -> dict[str, LinearSpec]:
        """By their names: of the queries' inner vector, and two of x."""
        return {"index_q": LinearSpec(self.query_rank, (Piece("index_q", self.index_heads * self.index_size),)),
                "index_k": LinearSpec(self.width, (Piece("index_k", self.index_size),)),
                "index_weights": LinearSpec(self.width, (Piece("index_weights", self.index_heads),))}

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from super().parameters(path)
        for name, linear in self.index_linears.items():
            yield from linear.parameters(f"{path}.{name}")
        yield from self.index_norm.parameters(f"{path}.index_norm", self.index_size)

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        # In 16-bit models, index keys are FP8 codes with a scale each: 132 bytes of DeepSeek V3.2's 128 elements.
        index = Field("index", (1, self.index_size), dtype if dtype == "float32" else "float8_e4m3fn")
        scales = () if dtype == "float32" else (Field("index_scale", (1, 1), "float32"),)
        return (StateSpec((Field("latent", (1, self.latent_size), dtype), index, *scales), Everything()),)

    def build(self, path: str, build: Build) -> "SparseLatentAttention":
        return SparseLatentAttention(self, path, build)


class SparseLatentAttention(LatentAttention):
    """x [T, W] -> [T, W] (DeepSeek V3.2). Latents and index keys of all tokens are written to the cache.

    Queries of contexts no longer than the number of picks attend to all, by the kernels of `LatentAttention`. Others' picks are
    gathered and attended to in plain PyTorch, by blocks of queries, which read lengths on the host: in no CUDA graph."""

    spec: SparseLatentAttentionSpec
    plain = False
    """No vendor library may take a long segment, which would attend to all."""

    def __init__(self, spec: SparseLatentAttentionSpec, path: str, build: Build) -> None:
        super().__init__(spec, path, build)
        self.index_q, self.index_k, self.index_weights = (Linear(linear, f"{path}.{name}", build)
                                                          for name, linear in spec.index_linears.items())
        self.index_norm = build_norm(spec.index_norm, f"{path}.index_norm", build)
        self._spread = hadamard(spec.index_size, build.device)

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        super().attach(views, works)
        (view,) = views
        self.index = view["index"]
        self.index_scale = view["index_scale"] if self.index.dtype is torch.float8_e4m3fn else None

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
        turn = partial(rotate, cos=self.cos[at], sin=self.sin[at], interleaved=spec.index_interleaved)
        key = turn(self.index_norm(self.index_k(x, step))[:, None])
        here = group.slots >= 0
        self.keep(group.slots[here], key[here, 0])
        starts, lengths = step.query_start.tolist(), step.context.tolist()
        if max(lengths, default=0) <= spec.picks:
            return found
        asked = self.asked(turn(self.index_q(inner, step).view(len(x), spec.index_heads, spec.index_size)))
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
                picks = largest(scores.masked_fill_(position > own, float("-inf")), spec.picks)
                latents = self.cache[page[picks], 0, slot[picks]].float()
                shares = (torch.einsum("thd,tkd->thk", queries[rows].float(), latents) * spec.scale).softmax(-1)
                found[rows] = torch.einsum("thk,tkd->thd", shares, latents[..., :spec.rank]).to(found.dtype)
        return found


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places [T, count] of the largest of scores [T, K], in order. Of equal ones, which are common where few heads score
    above 0, it is the first, however many positions the scores of a segment reach (torch.topk's choice depends on that)."""
    least = scores.topk(count, -1).values[:, -1:]
    above, equal = scores > least, scores == least
    chosen = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return (chosen * torch.arange(scores.shape[1], 0, -1, device=scores.device)).topk(count, -1).indices


def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """An orthogonal matrix [size, size] that spreads large elements over all, so that they round better; the identity if `size`
    is no power of two."""
    return torch.eye(size, device=device) if size & (size - 1) else sylvester(size).to(device).div_(size**0.5)
