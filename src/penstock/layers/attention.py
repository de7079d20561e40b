"""Self-attention with keys and values in the paged cache: its description, and the layer."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ModelError
from penstock.core.state import Everything, Field, StateSpec, Window
from penstock.layers.block import LayerNorm, NoNorm, NormSpec, RMSNorm, RMSNormSpec, build_norm
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece, Split, TokenMixer
from penstock.layers.rope import RopeSpec
from penstock.layers.step import StateView, Step, TokenShare, Works
from penstock.ops.attention import WHOLE, AttentionOps, Geometry, Span, Stripe, joined
from penstock.ops.codec import Codec, Scales, hadamard
from penstock.ops.linear import Weight
from penstock.parallel.group import Group
from penstock.quant.scheme import PLAIN, pack


@dataclass(frozen=True)
class QueryKeyNorm:
    norm: NormSpec
    whole: bool = False
    """Of all heads together, not of each alone."""
    own: bool = False
    """Each head has weights of its own."""
    after: bool = False
    """After the rotation, not before it."""

    @property
    def fused(self) -> bool:
        """Whether the kernel that rotates can do it."""
        return isinstance(self.norm, RMSNormSpec) and not (self.whole or self.own or self.after)


@dataclass(frozen=True)
class Divided:
    """The number of heads of all ranks, where a spec describes one rank's part."""

    ranks: int
    heads: int
    kv_heads: int

    def copies(self, rank: int) -> int:
        """The number of ranks that hold this rank's KV head."""
        held = [other * self.kv_heads // self.ranks for other in range(self.ranks)]
        return held.count(held[rank]) if self.kv_heads < self.ranks else 1


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped queries, causal unless said otherwise. `window` 0: all; `softcap` 0, `rope` None: none."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    rope: RopeSpec | None = None
    window: int = 0
    softcap: float = 0.0
    norm: QueryKeyNorm | None = None
    bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax and has no value (gpt-oss)."""
    slopes: tuple[float, ...] = ()
    """A head's ALiBi slope: what a score loses for each position between query and key."""
    clip: float = 0.0
    """Queries, keys and values are clamped to its either side, before anything else; 0: they are not."""
    growth: tuple[float, int] | None = None
    """(b, n): queries are multiplied by 1 + b log(1 + floor(position / n)) after the rotation."""
    gate: bool = False
    """Results are multiplied by the sigmoid of one more projection of x, element by element."""
    paired: bool = False
    """That projection is the queries' own: behind each head's query it gives the head's gate (Qwen3-Next)."""
    divided: Divided | None = None
    codec: Codec | None = None
    """The way in which keys and values are stored; None: as they are, in the model's dtype."""
    aged: Codec | None = None
    """The way in which tiers behind the device store them, where the device has plain ones; None: as the device does."""
    stripes: int = 1
    """Ranks that each hold a run of every page's positions."""
    causal: bool = True
    """False: every token sees all of its segment, which has to be the whole prompt; nothing is read from the cache."""
    reads: int | None = None
    """The number of an earlier layer whose keys and values it reads: it projects queries alone. None: it has its own."""
    keys_only: bool = False
    """There is no projection of values: keys, before their norm and rotation, are the values, too."""
    value_eps: float = 0.0
    """Values are divided by the root of their mean square plus this; 0: they are not."""

    name = "attention"

    @property
    def eager(self) -> bool:
        """Whether it needs the segments' borders on the host, so that it cannot be in a CUDA graph."""
        return not self.causal

    @property
    def qkv(self) -> LinearSpec:
        q, gate = self._queries("q", 1 + self.paired), (self._queries("gate"),) if self.gate and not self.paired else ()
        own = () if self.reads is not None else (self._keys("k"),) if self.keys_only else (self._keys("k"), self._keys("v"))
        return LinearSpec(self.width, (q, *own, *gate), self.bias, Split.ROWS)

    @property
    def entry(self) -> str:
        """The path of the first projection, which has the name of its only matrix, or joins several."""
        return "qkv" if len(self.qkv.outputs) > 1 else "q"

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.heads * self.head_size, (Piece("o", self.width),), self.output_bias, Split.COLUMNS,
                          self.head_size, self.kv_heads)

    def _queries(self, name: str, times: int = 1) -> Piece:
        return Piece(name, times * self.heads * self.head_size, times * self.head_size, groups=self.kv_heads)

    def _keys(self, name: str) -> Piece:
        return Piece(name, self.kv_heads * self.head_size, self.head_size, copied=True)

    def share(self, ranks: int) -> "AttentionSpec":
        if self.norm is not None and self.norm.whole and not isinstance(self.norm.norm, RMSNormSpec):
            raise ModelError("a LayerNorm of all heads together cannot be divided; use tensor_parallel_size 1")
        heads, kv_heads = (piece.room(ranks) // self.head_size for piece in (self._queries("q"), self._keys("k")))
        return replace(self, heads=heads, kv_heads=kv_heads, divided=Divided(ranks, self.heads, self.kv_heads))

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.qkv.parameters(f"{path}.{self.entry}")
        if self.norm is not None:
            each = self.norm.whole or self.norm.own
            for piece in (self._queries("q_norm"), self._keys("k_norm"))[:1 if self.reads is not None else 2]:
                for parameter in self.norm.norm.parameters(f"{path}.{piece.name}", piece.rows if each else self.head_size):
                    kind = parameter.name.rpartition(".")[2]
                    heads = tuple(Piece(f"{path}.{piece.name}.{i}.{kind}", self.head_size)
                                  for i in range(piece.rows // self.head_size if self.norm.own else 0))
                    yield replace(parameter, split=Split.ROWS, unit=piece.unit, groups=piece.groups,
                                  copied=piece.copied, pieces=heads, listed=True) if each else parameter
        if self.sinks:
            yield Parameter(f"{path}.sinks", (self.heads,), split=Split.ROWS, groups=self.kv_heads)
        yield from self.output.parameters(f"{path}.o")

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        if self.reads is not None:
            return ()
        shape = (self.kv_heads, self.head_size)
        # Where nothing is read from the cache, all layers may share one group.
        keep = Window(self.window) if self.window and self.causal else Everything()
        plain = Field("k", shape, dtype), Field("v", shape, dtype)
        fields = plain if self.codec is None else self.codec.fields(*shape)
        aged = () if self.aged is None else self.aged.fields(*shape)
        fields, aged = (tuple(replace(field, stripes=self.stripes) for field in some) for some in (fields, aged))
        return (StateSpec(fields, keep, aged),)

    def build(self, path: str, build: Build) -> "Attention":
        return Attention(self, path, build)


class Attention(TokenMixer):
    """x [T, W] -> [T, W]. Every token's key and value are written to the cache, and its query reads those before it."""

    group: int
    work: int

    def __init__(self, spec: AttentionSpec, path: str, build: Build) -> None:
        self.spec = spec
        self.qkv = Linear(spec.qkv, f"{path}.{spec.entry}", build)
        self.o = Linear(spec.output, f"{path}.o", build)
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        if spec.rope is not None:
            self.cos, self.sin = build.rope(spec.rope)
        self.q_norm: torch.Tensor | None = None
        self.k_norm: torch.Tensor | None = None
        self.eps, self.offset = 1e-6, 0.0
        self._norms: tuple[HeadNorm, HeadNorm] | None = None
        if spec.norm is not None and spec.norm.fused:
            assert isinstance(spec.norm.norm, RMSNormSpec)
            if spec.norm.norm.weight:
                names = ("q_norm", "k_norm") if spec.reads is None else ("q_norm",) * 2
                self.q_norm, self.k_norm = (build.values.tensor(f"{path}.{name}.weight") for name in names)
            else:
                self.q_norm = self.k_norm = torch.ones(spec.head_size, dtype=self.qkv.weight.dtype, device=build.device)
            self.eps, self.offset = spec.norm.norm.eps, spec.norm.norm.offset
        elif spec.norm is not None:
            self._norms = HeadNorm(spec, f"{path}.q_norm", build), HeadNorm(spec, f"{path}.k_norm", build, keys=True)
        self._ones = torch.ones(spec.head_size, dtype=self.qkv.weight.dtype, device=build.device) if spec.value_eps else None
        self.sinks = build.values.tensor(f"{path}.sinks").float() if spec.sinks else None
        self.slopes = torch.tensor(_own_slopes(spec, build), dtype=torch.float32, device=build.device) if spec.slopes else None
        self._kernels = build.kernels
        if spec.slopes and spec.stripes > 1 and build.device.type == "cuda":
            raise ModelError("context_parallel_size is not possible with ALiBi on GPUs, as a slope needs each key's own "
                             "position; use tensor_parallel_size")
        self._ranks = build.context
        self._context = build.context if spec.stripes > 1 else None
        self._stripe = WHOLE if self._context is None else Stripe(self._context.rank, self._context.size)
        self._rotations: list[Weight] = []
        if spec.codec is not None and spec.codec.key.rotated:
            dtype = self.qkv.weight.dtype
            self._rotations = [pack(PLAIN, (spec.head_size, spec.head_size), {"weight": one.to(build.device, dtype)}, dtype,
                                    build.kernels) for one in hadamard(spec.head_size)]

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        (view,) = views
        self.group, self.k, self.v = view.group, view["k"], view["v"]
        spec = self.spec
        self.scales: Scales | None = None
        if spec.codec is not None:
            self.scales = Scales(spec.codec, *(view.fields.get(f"{name}_scale") for name in "kv"))
        geometry = self._geometry(view.page // spec.stripes, self._stripe)
        self.work = works.index(view.group, geometry, self._kernels.attention)

    def _geometry(self, page: int, stripe: Stripe = WHOLE) -> Geometry:
        spec = self.spec
        return Geometry(spec.heads, spec.kv_heads, spec.head_size, page, spec.window, self.qkv.weight.dtype.itemsize,
                        plain=not (spec.softcap or spec.slopes), sloped=bool(spec.slopes),
                        codec=spec.codec.name if spec.codec else "", stripe=stripe)

    def detach(self) -> None:
        del self.k, self.v, self.scales

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        spec, kernels = self.spec, self._kernels
        group, division, ranks = step.groups[self.group], step.division, self._ranks
        heads, kv_heads = spec.heads, spec.kv_heads
        joined = self.qkv(x, step)
        if division is not None and ranks is not None:
            # Each rank has projected its own tokens; all write the cache, and a query may be anyone's.
            joined = division.whole(joined, ranks)
        tokens = joined.shape[0]
        qkv = joined.view(tokens, joined.shape[1] // spec.head_size, spec.head_size)
        if spec.paired:
            q, gate, k, v = qkv[:, :2 * heads:2], qkv[:, 1:2 * heads:2], *qkv[:, 2 * heads:].chunk(2, 1)
        else:
            keys = 0 if spec.reads is not None else kv_heads
            values = 0 if spec.keys_only else keys
            q, k, v, gate = qkv.split((heads, keys, values, qkv.shape[1] - heads - keys - values), 1)
            v = k if spec.keys_only else v
        if spec.clip:
            qkv.clamp_(-spec.clip, spec.clip)
        cos, sin = self.cos, self.sin
        if self._norms is not None:
            assert spec.norm is not None
            if spec.norm.after and cos is not None:
                # Heads of no keys: rotated, and nothing is written.
                qk = kernels.rope_write(qkv[:, :heads + kv_heads], k[:, :0], None, step.positions, None,
                                        k[:, :0, None], None, cos, sin, interleaved=self.interleaved)
                q, k, cos, sin = qk[:, :heads], qk[:, heads:], None, None
            q, k = self._norms[0](q), self._norms[1](k)
        if not spec.causal:
            q, k = self._turned(q, k, step, cos, sin)
            out = kernels.attention.whole(q, k, v, step.query_start, spec.scale, spec.window, self.slopes)
            return self.o(*step.narrow(out.view(tokens, -1), ends))
        q = self._enter(q, k, v, step, cos, sin)
        if spec.growth is not None:
            steepness, length = spec.growth
            q = q * (1.0 + steepness * torch.log1p((step.positions // length).float())).to(q.dtype)[:, None, None]
        if self._context is not None:
            out = self._joined(q, step, self._context)
        else:
            out = kernels.attention.apply(q, self.k, self.v, group.table, step.query_start, step.context, spec.scale,
                                          spec.window, spec.softcap, self.sinks, step.work[self.work],
                                          step.library[self.work], self.slopes, self.scales, step.tree)
        if spec.gate:
            out = out * torch.sigmoid(gate)
        out = out.view(tokens, -1)
        if division is not None:
            out = out.index_select(0, division.own)
        return self.o(out, step) if ends is None else self.o(*step.narrow(out, ends))

    def inject(self, x: torch.Tensor, step: Step) -> None:
        """Writes the keys and values of x [T, W] to the cache at the step's tokens, and computes nothing else."""
        spec, qkv = self.spec, self.qkv(x, step).view(len(x), -1, self.spec.head_size)
        q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
        self._enter(q, k, v, step, self.cos, self.sin)

    def _joined(self, q: torch.Tensor, step: Step, ranks: Group) -> torch.Tensor:
        """Attention where each rank has some of the keys. Of few queries, the ranks' results are joined by the logarithms of
        their sums."""
        spec, table, library = self.spec, step.groups[self.group].table, step.library[self.work]
        if step.division is None or step.division.few:
            parts, sums = self._kernels.attention.striped(
                q, self.k, self.v, table, step.query_start, step.context, spec.scale, spec.softcap, self.sinks,
                step.work[self.work], library, self.slopes, self.scales, self._stripe)
            out = joined(ranks.gather(parts), ranks.gather(sums))[0].to(q.dtype)
        else:
            out = torch.zeros_like(q)
        if step.division is not None:
            self._long(q, library, table, step.division, ranks, out)
        return out

    def _long(self, q: torch.Tensor, library: Sequence[Span], table: torch.Tensor, division: TokenShare, ranks: Group,
              out: torch.Tensor) -> None:
        """Long segments. Each rank attends with all of their queries to its own keys of their contexts, and the ranks exchange
        the results, as far as `AttentionOps.grain` allows. The keys behind come to each rank, for its own queries."""
        spec, ops, page = self.spec, self._kernels.attention, self.k.shape[2] * ranks.size
        geometry, apart = self._geometry(page), [0] * len(library)
        for i, span in enumerate(library if self.sinks is None else ()):
            if grain := ops.grain(geometry, span.count // (2 * ranks.size)):
                apart[i] = span.before - span.before % math.lcm(page, ranks.size * grain)
        come = list[Callable[[], Sequence[torch.Tensor]]]()
        if any(apart):
            parts = q.new_zeros(ranks.size * len(division.own), *q.shape[1:])
            sums = torch.zeros(parts.shape[:2], device=q.device)
            for span, first in zip(library, apart, strict=True):
                if first:
                    some = slice(span.first, span.first + span.count)
                    both = ops.segment(q[some], self.k, self.v, table[span.segment], first // ranks.size, False, spec.scale,
                                       self.scales)
                    for every, one in zip((parts, sums), both, strict=True):
                        every.index_copy_(0, division.places[some], one)
            come = [ranks.exchange(one.unflatten(0, (ranks.size, -1))) for one in (parts, sums)]
        for span, first in zip(library, apart, strict=True):
            row, length = table[span.segment, first // page:], span.before + span.count - first
            k, v, *beside = (None if one is None else gathered(one, row, length, ranks)
                             for one in (self.k, self.v, *((self.scales.k, self.scales.v) if self.scales else ())))
            assert k is not None and v is not None
            scales = self.scales and Scales(self.scales.codec, *beside)
            for piece in division.pieces:
                if piece.segment == span.segment:
                    some = slice(piece.first, piece.first + piece.count)
                    own = division.own[some]
                    queries = q.index_select(0, own)
                    if first:
                        found = ops.segment(queries, k, v, torch.arange(len(k), dtype=torch.int32, device=q.device),
                                            piece.before - first, True, spec.scale, scales, partial(_arrived, come, some))[0]
                    else:
                        found = attend(ops, geometry, piece, queries, k, v, spec.scale, softcap=spec.softcap, sinks=self.sinks,
                                       slopes=self.slopes, scales=scales)
                    out.index_copy_(0, own, found)

    def _enter(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step, cos: torch.Tensor | None,
               sin: torch.Tensor | None) -> torch.Tensor:
        """Writes keys and values, if it has its own, to the cache, normed and rotated as the queries that it returns."""
        slots, kernels = step.groups[self.group].slots, self._kernels
        if self.spec.reads is not None:
            q = self._turned(q, k, step, cos, sin)[0]
            return self._rotations[0].ops.apply(q.flatten(0, 1), self._rotations[0]).view(q.shape) if self._rotations else q
        if self._context is not None:
            slots = self._stripe.slots(slots, self.k.shape[2])
        if self._ones is not None:
            v = kernels.rms_norm(v, self._ones, self.spec.value_eps)
        if self.scales is None:
            return kernels.rope_write(q, k, v, step.positions, slots, self.k, self.v, cos, sin, self.q_norm, self.k_norm,
                                      self.eps, self.offset, self.interleaved)
        q, keys = self._turned(q, k, step, cos, sin)
        if self._rotations:
            q, keys = (one.ops.apply(x.flatten(0, 1), one).view(x.shape) for x, one in
                       zip((q, keys), self._rotations, strict=True))
        kernels.cache_write(keys, v, slots, self.k, self.v, self.scales)
        return q

    def _turned(self, q: torch.Tensor, k: torch.Tensor, step: Step, cos: torch.Tensor | None,
                sin: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normed and rotated."""
        keys = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        q = self._kernels.rope_write(q, k, None, step.positions, None, keys[:, :, None], None, cos, sin, self.q_norm,
                                     self.k_norm, self.eps, self.offset, self.interleaved)
        return q, keys


def _arrived(come: Sequence[Callable[[], Sequence[torch.Tensor]]], some: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of each rank's results and sums, which are waited for."""
    parts, sums = (each() for each in come)
    return [(part[some], of[some]) for part, of in zip(parts, sums, strict=True)]


def gathered(cache: torch.Tensor, row: torch.Tensor, length: int, ranks: Group) -> torch.Tensor:
    """All ranks' entries [pages, KV, page, D] of a segment's pages, given its row of the block table and its positions."""
    pages = row[:-(-length // (cache.shape[2] * ranks.size))].long()
    # By bytes: not every device picks FP8 by index. Then stripe by stripe within each page.
    stripes = ranks.gather(cache.view(torch.uint8)[pages] if cache.element_size() == 1 else cache[pages])
    return stripes.movedim(0, 2).flatten(2, 3).contiguous().view(cache.dtype)


def attend(ops: AttentionOps, geometry: Geometry, piece: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
           **how: Any) -> torch.Tensor:
    """The results of a piece's queries q [count, H, D] over k and v, page behind page from the segment's first position on.
    `geometry`: of these pages. `how`: other arguments of `AttentionOps.apply`."""
    counts, contexts = np.array([[piece.count], [piece.before + piece.count]], np.int32)
    library = ops.library_spans(geometry, counts, contexts)
    found = None if library else ops.prepare(geometry, counts, contexts, 1, piece.count)
    work = q.new_zeros(1) if library else None if found is None else torch.from_numpy(found).to(q.device)
    numbers = torch.arange(len(k), dtype=torch.int32, device=q.device)[None]
    # Numbers from host memory would have the host wait for the device.
    borders = torch.arange(2, dtype=torch.int32, device=q.device) * piece.count
    context = torch.full((1,), piece.before + piece.count, dtype=torch.int32, device=q.device)
    return ops.apply(q, k, v, numbers, borders, context, scale, work=work, library=library, **how)


class HeadNorm:
    """The norm of queries or of keys [T, heads, D]."""

    def __init__(self, spec: AttentionSpec, path: str, build: Build, keys: bool = False) -> None:
        assert spec.norm is not None
        self._spec = spec.norm
        self._norm = build_norm(spec.norm.norm, path, build)
        self._group, self._count, self._copies = build.group, 0, 1
        if build.group is not None and spec.divided is not None:
            self._count = (spec.divided.kv_heads if keys else spec.divided.heads) * spec.head_size
            # Key heads that several ranks hold count once.
            self._copies = spec.divided.copies(build.group.rank) if keys else 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._spec.whole:
            flat = x.flatten(1)
            return (self._norm(flat) if self._group is None else self._together(flat, self._group)).view(x.shape)
        if not self._spec.own:
            return self._norm(x.flatten(0, 1)).view(x.shape)
        norm, wide = self._norm, x.float()
        assert not isinstance(norm, NoNorm)
        if isinstance(norm, LayerNorm):
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        if norm.weight is not None:
            wide = wide * (norm.weight.float() + (norm.offset if isinstance(norm, RMSNorm) else 0.0)).view(x.shape[1:])
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            wide = wide + norm.bias.float().view(x.shape[1:])
        return wide.to(x.dtype)

    def _together(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """RMSNorm of the heads of all ranks together."""
        norm, wide = self._norm, x.float()
        assert isinstance(norm, RMSNorm)
        squares = group.reduce(wide.pow(2).sum(-1, keepdim=True) / self._copies)
        return (wide * torch.rsqrt(squares / self._count + norm.eps) * (norm.weight.float() + norm.offset)).to(x.dtype)


def _own_slopes(spec: AttentionSpec, build: Build) -> list[float]:
    """The slopes of a rank's heads; those of heads that only fill up are 0."""
    if build.group is None or spec.divided is None:
        return list(spec.slopes)
    whole = Piece("slopes", spec.divided.heads, groups=spec.divided.kv_heads)
    first, last = whole.share(build.group.rank, spec.divided.ranks)
    return [*spec.slopes[first:last], *[0.0] * (spec.heads - last + first)]
