"""Attention of a ragged batch over the paged KV cache. The step's own keys and values are already in the cache."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.ops.codec import Coding, Scales
from penstock.ops.table import register

if TYPE_CHECKING:
    from penstock.ops.attention_divider import Divider

_MASKED = 256
"""Queries at a time whose scores have addends: bounds the memory of those."""
_SCORES = 1 << 24
"""Maximum scores the reference computes at once. Bounds its memory to a few times 64 MiB for any prompt length."""


LEAST = -1e30
"""The logarithm of a sum of no keys, as finite numbers have it."""

Ints = npt.NDArray[np.int32]


class Stripe(NamedTuple):
    """One rank's positions of every page, where ranks divide contexts: the `number`-th of `of` equal runs."""

    number: int = 0
    of: int = 1

    def local(self, positions: Ints, size: int) -> Ints:
        """The number of those among the first `positions` of a context that are in the stripe, whose pages have `size`."""
        pages, at = np.divmod(positions, size * self.of)
        found: Ints = pages * size + np.clip(at - self.number * size, 0, size)
        return found

    def slots(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        """Places within the stripe, in pages of `size` positions, of slots in whole pages; -1 for those of other ranks."""
        page, at = slots // (size * self.of), slots % (size * self.of)
        return torch.where((slots >= 0) & (at // size == self.number), page * size + at % size, -1)


WHOLE = Stripe()
"""All positions."""


@dataclass(frozen=True)
class Geometry:
    """The parameters of a layer's attention that determine how its work is divided."""

    heads: int
    kv_heads: int
    head_size: int
    page: int
    window: int = 0
    itemsize: int = 2
    """Bytes per element of the KV cache."""
    plain: bool = True
    """True if the layer has neither softcap nor ALiBi slopes."""
    sloped: bool = False
    """True if the layer has ALiBi slopes."""
    tail: int = 0
    """Elements of a key behind its first `head_size`. If any, the cache holds latents, whose first are the value (MLA)."""
    codec: str = ""
    """The name of the cache's codec (`ops/codec.py`); empty: it holds plain numbers. `itemsize` is then the model's."""
    stripe: Stripe = WHOLE
    """The positions of every page that are here; `page` is their number. `prepare` then divides the work of `striped`."""


class Span(NamedTuple):
    """A long prefill segment of a step, which a vendor library computes instead of our kernel."""

    segment: int
    first: int
    """Index of its first token in the step."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Number of queries."""
    before: int = 0
    """Number of cached positions before its first query."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Shared prefixes (cascade attention): which single-query segments of a step begin with the same pages.

    Immutable; consumers may compare by identity to see that nothing changed."""

    segments: Ints
    """[N] segment indices, ordered so that long common prefixes are adjacent. Segments not listed share nothing."""
    common: Ints
    """[N - 1] positions that entries i and i + 1 share, fewer than either's context; entries i < j share min(common[i:j])."""


class Tree(NamedTuple):
    """The queries of a step that attend to their ancestors alone, not to all keys before them (draft trees)."""

    origin: torch.Tensor
    """[S] int32: the position from which on a segment's queries see only the keys of their bits; beyond its context: none."""
    bits: torch.Tensor
    """[T] int64: bit i of a query says whether it sees the key at origin + i."""

    def order(self, segment: int, query: int, keys: int) -> tuple[torch.Tensor, int]:
        """The first `keys` positions of a segment's context in an order in which this query sees the first ones, and the place
        of its own among them. That of a chain, so that its result is as if there were no tree."""
        at, origin = torch.arange(keys, device=self.bits.device), int(self.origin[segment])
        seen = (at < origin) | (((self.bits[query] >> (at - origin).clamp(0, 63)) & 1) > 0)
        return torch.argsort((~seen).int(), stable=True), int(seen.sum()) - 1


Rows = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
"""(begin, end, size) -> keys and values [size, KV, D] of a segment's positions from `begin` on, zeros from `end` on."""


Seen = Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""Returns results [N, H, D] of queries over some of their keys, with the logarithms of the softmax's sums [N, H] float32."""


class AttentionOps:
    """An implementation of `attention`: `prepare` divides a step's work on the host, `apply` runs it on the device."""

    invariant = False
    """Whether results are bitwise independent of the batch; then `prepare` takes no `slack`."""

    def library_spans(self, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        """Returns the long prefill segments of a step that a vendor library should compute; pass them to `prepare` and `apply`.

        For eager steps only: a captured CUDA graph must not depend on the composition of a step."""
        return []

    def divider(self, geometry: Geometry) -> "Divider | None":
        """An object that prepares consecutive decode steps by updating the last result; None if there is nothing to prepare."""
        return None

    def warm_up(self, device: torch.device) -> None:
        """Loads libraries whose first use would delay a request. May run in a separate thread."""

    def contexts(self, most: int) -> list[int]:
        """Returns context lengths, up to `most` positions, that together make long prefill segments launch every kernel and
        reach peak memory. Empty if neither depends on the context length."""
        return []

    def shares(self, geometry: Geometry) -> bool:
        """Whether `prepare` makes use of `shared`."""
        return False

    def prepare(self, geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int,
                library: Sequence[Span] = (), shared: SharedPrefixes | None = None, slack: Ints | None = None) -> Ints | None:
        """Returns the work list of a step for `apply` as a 1-D array, or None if the implementation needs none.

        counts and context [S] are the number of queries and of positions of each segment. `segments` >= S and `tokens` >=
        sum(counts) are the padded sizes (the bucket). The array's length and the launch grids depend only on the geometry and
        these two sizes, because a captured CUDA graph is replayed with other contents. `library` lists the segments that a
        vendor library computes. Without `shared`, each segment reads its shared prefix itself. With `slack` [S], context is an
        upper bound that may be up to slack[s] positions too long, and `move_step` must run on the device afterwards."""
        return None

    def items(self, geometry: Geometry, work: torch.Tensor, segments: int, tokens: int) -> list[torch.Tensor]:
        """Views [n, FIELDS] of the work items in a list that `prepare` made with `slack`, for `ops/step.py::move_step`, which
        moves them to where their segments are. `segments` and `tokens` are the arguments of `prepare`."""
        return []

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None, library: Sequence[Span] = (),
              slopes: torch.Tensor | None = None, scales: Scales | None = None, tree: Tree | None = None) -> torch.Tensor:
        """Causal attention: softmax(cap(q k^T * scale)) v, cap(s) = softcap * tanh(s / softcap) if softcap is not 0.

        q [T, H, D]; segment s owns queries query_start[s] to query_start[s + 1], the last of its context[s] positions. Tokens
        after the last segment are padding, and their results are unspecified.
        table [S, columns] int32: the page ids of each segment's row; position p lies in page table[s, p // page], slot
        p % page. k_cache, v_cache [pages, KV, page, D]. q and k_cache may have R more elements than v_cache, which is then
        a view of their first D (`Geometry.tail`). window w > 0: a query sees the w positions up to and with its own;
        pages entirely behind every window are not read, and their block table entries may be stale. sinks [H] float32: one
        extra score per head, as of a key with a zero value. slopes [H] float32: a score is raised by slope * (key's position
        - query's position) (ALiBi, Press et al. 2022). scales: k_cache and v_cache [pages, KV, page, bytes] hold the codes of
        its codec (there is no R then). H is a multiple of KV (grouped queries, Ainslie et al. 2023).
        `tree`: hides more keys, where there are neither windows nor slopes.
        query_start [S + 1] and context [S] are int32 on q's device; `work` is the result of `prepare`, on the same device, and
        `library` its argument. Returns [T, H, D] in q's dtype. Scores and sums are float32; the reference's result for a query
        does not depend on the other queries of the step."""
        return partial(q, k_cache, v_cache, table, query_start, context, scale, window, softcap, sinks, slopes, scales,
                       without={span.segment for span in library}, tree=tree)[0].to(q.dtype)

    def striped(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
                query_start: torch.Tensor, context: torch.Tensor, scale: float, softcap: float = 0.0,
                sinks: torch.Tensor | None = None, work: torch.Tensor | None = None, library: Sequence[Span] = (),
                slopes: torch.Tensor | None = None, scales: Scales | None = None,
                stripe: Stripe = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
        """`apply` over the keys of one stripe, for segments that are not in `library`; sinks count in the first stripe.

        Returns results [T, H, D] and the logarithms of the softmax's sums, [T, H] float32, LEAST where a query sees no key.
        `joined` makes of all stripes' attention over all keys."""
        out, sums = partial(q, k_cache, v_cache, table, query_start, context, scale, 0, softcap, sinks, slopes, scales, stripe,
                            {span.segment for span in library})
        return out, sums.clamp_(min=LEAST)

    def grain(self, geometry: Geometry, queries: int) -> int:
        """`segment` takes multiples of so many positions for so many queries; 0: it takes none."""
        return int(geometry.plain and not geometry.window)

    def segment(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: torch.Tensor, before: int, own: bool,
                scale: float, scales: Scales | None = None,
                seen: Seen = tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of queries q [N, H, D] to the first `before` positions of a row [columns] of the block table; with `own`
        also, causally, to the N positions behind them, which are theirs. `seen` returns results over other keys, to be joined.

        Returns results [N, H, D] in q's dtype and the logarithms of the softmax's sums [N, H] float32."""
        numbers = torch.tensor([0, len(q), before + len(q)], dtype=torch.int32, device=q.device)
        found = partial(q, k_cache, v_cache, row[None], numbers[:2], numbers[2:], scale, scales=scales,
                        most=before + own * len(q))
        parts, sums = (torch.stack(each) for each in zip(found, *((out.float(), of) for out, of in seen()), strict=True))
        out, sums = joined(parts, sums)
        return out.to(q.dtype), sums

    def whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, scale: float, window: int = 0,
              slopes: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of every token to all of its segment: of q [T, H, D] to the step's own k and v [T, KV, D], of which nothing
        is in the cache. `window` w > 0: to those nearer than w on either side. `slopes` [H] float32: a score loses slope *
        |key's position - query's position|. Returns [T, H, D]; of padding, unspecified."""
        out, grouped = torch.zeros_like(q), q.shape[1] != k.shape[1]
        for start, end in pairwise(query_start.tolist()):
            keys, values = (x[start:end].transpose(0, 1) for x in (k, v))
            near = slopes is None and not 0 < window < end - start
            for at in range(start, end, max(1, end - start) if near else _MASKED):
                queries = q[at:min(at + _MASKED, end) if not near else end].transpose(0, 1)
                mask = None if near else _addends(at - start, queries.shape[1], end - start, window, slopes, q)
                seen = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=grouped)
                out[at:at + queries.shape[1]] = seen.transpose(0, 1)
        return out

    def expanded(self, q: torch.Tensor, rows: Rows, scale: float, span: Span, out: torch.Tensor) -> None:
        """Computes one of the spans that `library_spans` named for latents: causal attention of the step's queries q [T, H, D]
        of that segment over keys and values that `rows` expands from them, written to out [count, H, values' D]."""
        length = span.before + span.count
        k, v = (x.transpose(0, 1)[None] for x in rows(0, length, length))
        numbers = torch.tensor([0, span.count, length], dtype=torch.int32, device=q.device)
        out.copy_(AttentionOps.apply(self, q[span.first:span.first + span.count], k, v, numbers[None, :1], numbers[:2],
                                     numbers[2:], scale))

    def prompts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, spans: Sequence[Span],
                out: torch.Tensor) -> None:
        """The same of several spans without a context, in order, whose keys and values [N, H, D] are one behind the other; each
        is written to its rows of out [T, H, values' D]."""
        at = 0
        for span in spans:
            own, rows = slice(span.first, span.first + span.count), slice(at, at + span.count)
            self.expanded(q, lambda *_, rows=rows: (k[rows], v[rows]), scale, span, out[own])
            at = rows.stop


def joined(parts: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys, given results [P, T, H, D] over parts of them and the logarithms of the softmax's sums [P, T, H]
    there: the results, weighted by the softmax of their logarithms, and the logarithm of all sums."""
    return (parts * sums.softmax(0)[..., None]).sum(0), sums.logsumexp(0)


def partial(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, query_start: torch.Tensor,
            context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
            slopes: torch.Tensor | None = None, scales: Scales | None = None, stripe: Stripe = WHOLE,
            without: Collection[int] = (), tree: Tree | None = None,
            most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, as `AttentionOps.apply`, over the keys of one stripe, or the first `most` of each segment, for the segments
    that are not in `without`; sinks count in the first stripe. Returns the results [T, H, D] and the logarithms of the
    softmax's sums [T, H], both float32."""
    size, kv_heads = k_cache.shape[2], k_cache.shape[1]
    whole = size * stripe.of
    out = torch.zeros(*q.shape[:2], v_cache.shape[3] if scales is None else q.shape[2], device=q.device)
    sums = torch.full(q.shape[:2], float("-inf"), device=q.device)
    starts, lengths = query_start.tolist(), context.tolist()
    for s, length in enumerate(lengths):
        lo, hi = starts[s], starts[s + 1]
        if lo == hi or s in without:
            continue
        first_query = length - (hi - lo)
        first = max(0, first_query - window + 1) // whole if window else 0
        pages = table[s, first:-(-length // whole)].long()
        places = torch.arange(len(pages) * size, device=q.device)
        key = (first + places // size) * whole + stripe.number * size + places % size
        key = key[key < (length if most is None else most)]
        keys, values = (_numbers(x, pages, len(key), *how) for x, how in zip((k_cache, v_cache), _codings(scales), strict=True))
        if window:
            # Stale slots of the first page may hold NaN, and zero weight times NaN is NaN.
            values = values.masked_fill((key <= first_query - window)[None, :, None], 0.0)
        if tree is not None and int(tree.origin[s]) < length:
            for query in range(lo, hi):
                order, own = tree.order(s, query, first_query + 1 + query - lo)
                numbers = torch.tensor([0, 0, 1, own + 1], dtype=torch.int32, device=q.device)
                mine, theirs = (x[None, :, order[:own + 1]] for x in (keys, values))
                out[query] = partial(q[query:query + 1], mine, theirs, numbers[None, :1], numbers[1:3], numbers[3:], scale, 0,
                                     softcap, sinks)[0][0]
            continue
        block = max(1, _SCORES // (q.shape[1] * max(1, len(key))))
        for at in range(lo, hi, block):
            queries = q[at:min(hi, at + block)].unflatten(1, (kv_heads, -1)).float()
            scores = torch.einsum("tgnd,gkd->gntk", queries, keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(first_query + at - lo, first_query + at - lo + len(queries), device=q.device)[:, None]
            if slopes is not None:
                scores = scores + slopes.view(kv_heads, -1, 1, 1) * (key - position)
            hidden = key > position
            if window:
                hidden |= key <= position - window
            scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None and not stripe.number:
                scores = torch.cat((scores, sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
            weights = scores.softmax(-1)[..., :len(key)]
            if stripe.of > 1 or most is not None:
                found = scores.logsumexp(-1)
                # A query may see none of the stripe's keys.
                weights = weights.masked_fill(found.isneginf()[..., None], 0.0)
                sums[at:at + len(queries)] = found.permute(2, 0, 1).flatten(1)
            out[at:at + len(queries)] = torch.einsum("gntk,gkd->tgnd", weights, values).flatten(1, 2)
    return out, sums


def _addends(first: int, queries: int, keys: int, window: int, slopes: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The addends of `AttentionOps.whole` by the distance of query and key, for queries from position `first` on."""
    at = torch.arange(keys, device=like.device)
    far = (at[first:first + queries, None] - at).abs()
    found = torch.zeros(far.shape, dtype=torch.float32, device=like.device)
    if slopes is not None:
        found = -slopes[:, None, None] * far
    if window:
        found = found.masked_fill(far >= window, -torch.inf)
    return found.to(like.dtype)


def _codings(scales: Scales | None) -> list[tuple[Coding | None, torch.Tensor | None, float]]:
    """Coding, scales and fixed scale of keys and of values."""
    if scales is None:
        return [(None, None, 1.0)] * 2
    codec = scales.codec
    return [(codec.key, scales.k, codec.scales[0]), (codec.value, scales.v, codec.scales[1])]


def _numbers(cache: torch.Tensor, pages: torch.Tensor, count: int, coding: Coding | None, scales: torch.Tensor | None,
             fixed: float) -> torch.Tensor:
    """The first `count` keys or values of these pages: float32 [KV, count, D]."""
    def rows(x: torch.Tensor) -> torch.Tensor:
        # By bytes: not every device picks FP8 by index.
        picked = x.view(torch.uint8)[pages].view(x.dtype) if x.element_size() == 1 else x[pages]
        return picked.transpose(0, 1).flatten(1, 2)[:, :count]

    found = rows(cache)
    return found.float() if coding is None else coding.decode(found, None if scales is None else rows(scales), fixed)


register("attention", "reference", rank=0, capturable=False)(AttentionOps())
