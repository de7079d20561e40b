"""Attention of a ragged step over the paged cache. The step's own keys and values are in the cache already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.ops.registry import register

_SCORES = 1 << 24
"""Scores held at a time, which bounds the reference's memory to a few times 64 MiB whatever the prompt."""


Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Geometry:
    """What a layer's attention looks like, as far as the division of its work depends on it."""

    heads: int
    kv_heads: int
    head_size: int
    page: int
    window: int = 0
    itemsize: int = 2
    """Bytes of a cached number."""
    plain: bool = True
    """Neither softcap nor sinks."""


class Span(NamedTuple):
    """A long prefill segment of a step, for implementations that serve such segments in another way."""

    segment: int
    first: int
    """Its first token among the step's."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Its queries."""
    before: int = 0
    """Positions of context before them."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Which of a step's segments of one query begin with the same pages. The same object, the same content."""

    segments: Ints
    """[N] in an order in which those that share most are neighbours. Others share nothing."""
    common: Ints
    """[N - 1] how many first positions each shares with the next one, fewer than the context of either. Any two of them share
    the least of what is between them."""


class Divides(Protocol):
    """Divides decode steps that follow one another."""

    def decode(self, counts: Ints, context: Ints, segments: int, shared: SharedPrefixes | None) -> Ints:
        """`AttentionOps.prepare` of a step of single queries padded to `segments`. Valid until the next call."""
        ...


class AttentionOps:
    """The functions of an implementation of `attention`: dividing the work of a step on the host, and doing it."""

    def library_spans(self, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        """Long prefill segments of a step, which are served faster if the host names them to `prepare` and `apply`.

        Only for steps that run eagerly: what is captured must not depend on what a step consists of.
        """
        return []

    def divider(self, geometry: Geometry) -> Divides | None:
        """For a caller that divides decode steps one after another: does what `prepare` does, faster, as it remembers the last
        one. None if there is nothing to remember."""
        return None

    def warm_up(self, device: torch.device) -> None:
        """Loads what a library loads at its first use, if it takes so long that a request would notice. May run in a thread of
        its own."""

    def contexts(self, most: int) -> list[int]:
        """Contexts, of up to `most` positions, with which long prefill segments between them launch every kernel and take the
        most memory; none if neither depends on the context."""
        return []

    def shares(self, geometry: Geometry) -> bool:
        """Whether `prepare` has any use for `shared`."""
        return False

    def prepare(self, geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int,
                library: Sequence[Span] = (), shared: SharedPrefixes | None = None, slack: Ints | None = None) -> Ints | None:
        """How the step's work is divided, for `apply`, or None if there is nothing to divide.

        counts and context [S] are the segments' queries and positions; `segments` >= S and `tokens` >= sum(counts) are what the
        step is padded to. A 1-D array whose length, and every grid that follows from it, depends on the geometry and the two
        capacities alone: a captured graph runs again with other contents. `shared` may be left out: what segments share is
        then read once for each. With `slack` [S] the contexts are upper bounds: in truth they are up to so many positions
        shorter, and `correct` must follow on the device.
        """
        return None

    def correct(self, geometry: Geometry, work: torch.Tensor | None, lag: torch.Tensor, segments: int, tokens: int) -> None:
        """Adapts in place what `prepare` gave for upper bounds, once it is on the device: `lag` [segments] int32 says how many
        positions shorter each context is. `segments` and `tokens` are what `prepare` was given."""

    def apply(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor,
              query_start: torch.Tensor, context: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
              sinks: torch.Tensor | None = None, work: torch.Tensor | None = None,
              library: Sequence[Span] = ()) -> torch.Tensor:
        """Causal attention: softmax(cap(q k^T * scale)) v, cap(s) = softcap * tanh(s / softcap) if softcap is not 0.

        q [T, H, D]; segment s owns queries query_start[s] to query_start[s + 1], the last of its context[s] positions; what
        lies beyond the last segment is padding, whose result may be anything.
        table [S, columns] int32: the page ids of each segment's row; position p lies in page table[s, p // page], slot
        p % page. k_cache, v_cache [pages, KV, page, D]. window w > 0: a query sees the w positions up to and with its own;
        pages wholly behind every window are not read and their table entries may be stale. sinks [H] float32: one more
        score a head, as if of a key without value. H is a multiple of KV (grouped queries, Ainslie et al. 2023).
        query_start [S + 1] and context [S] are int32 on q's device; `work` is what `prepare` gave, there too, and `library`
        what it was given. Returns [T, H, D] in q's dtype; scores and sums are float32, and a query's result does not depend
        on its neighbours.
        """
        size, kv_heads = k_cache.shape[2], k_cache.shape[1]
        out = torch.empty_like(q)
        starts, lengths = query_start.tolist(), context.tolist()
        for s, length in enumerate(lengths):
            lo, hi = starts[s], starts[s + 1]
            if lo == hi:
                continue
            first_query = length - (hi - lo)
            first = max(0, first_query - window + 1) // size if window else 0
            pages = table[s, first:-(-length // size)].long()
            keys = k_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length - first * size].float()
            values = v_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length - first * size].float()
            key = torch.arange(first * size, length, device=q.device)
            if window:
                # Stale slots inside the first page may hold anything, even NaN, and zero weight times NaN is NaN.
                values = values.masked_fill((key <= first_query - window)[None, :, None], 0.0)
            block = max(1, _SCORES // (q.shape[1] * len(key)))
            for at in range(lo, hi, block):
                queries = q[at:min(hi, at + block)].unflatten(1, (kv_heads, -1)).float()
                scores = torch.einsum("tgnd,gkd->gntk", queries, keys) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                position = torch.arange(first_query + at - lo, first_query + at - lo + len(queries), device=q.device)[:, None]
                hidden = key > position
                if window:
                    hidden |= key <= position - window
                scores.masked_fill_(hidden, float("-inf"))
                if sinks is not None:
                    scores = torch.cat((scores, sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
                weights = scores.softmax(-1)[..., :len(key)]
                out[at:at + len(queries)] = torch.einsum("gntk,gkd->tgnd", weights, values).flatten(1, 2).to(q.dtype)
        return out


register("attention", "reference", rank=0, capturable=False)(AttentionOps())
