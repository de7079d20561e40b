"""The division of a step's tokens among ranks that divide contexts. No tensors.

A long segment is cut into twice as many pieces as there are ranks; rank r has the r-th from the front and the r-th from the end
(zigzag), so that all have equal work although later tokens see more. Other tokens are dealt in runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.ops.attention import Span

FEW = 8
"""The most queries of a segment whose keys stay where they are: each query goes to every rank's keys. For more, keys come."""


@dataclass(frozen=True)
class Division:
    """One rank's part of T tokens. All ranks have equally many; those with fewer repeat the first token."""

    own: npt.NDArray[np.int64]
    """[N] its tokens."""
    places: npt.NDArray[np.int64]
    """[T] where each token is among all ranks' tokens, one rank behind the other."""
    pieces: list[Span]
    """Its pieces of long segments; `first` is their place among its own tokens."""


def long_segments(counts: npt.NDArray[np.int32], context: npt.NDArray[np.int32]) -> list[Span]:
    """The segments of a step that are cut, as AttentionOps.library_spans names them."""
    first = np.cumsum(counts) - counts
    return [Span(int(s), int(first[s]), int(counts[s]), int(context[s] - counts[s])) for s in np.flatnonzero(counts > FEW)]


def divided(spans: Sequence[Span], tokens: int, rank: int, ranks: int) -> Division:
    """The part of one rank, given all long segments of a step of so many tokens."""
    lines: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(ranks)]
    pieces: list[Span] = []
    rest = np.ones(tokens, bool)
    for span in spans:
        rest[span.first:span.first + span.count] = False
        borders = [span.count * part // (2 * ranks) for part in range(2 * ranks + 1)]
        for part in (*range(ranks), *reversed(range(ranks, 2 * ranks))):
            low, high = borders[part], borders[part + 1]
            owner = min(part, 2 * ranks - 1 - part)
            if owner == rank and high > low:
                pieces.append(Span(span.segment, sum(map(len, lines[rank])), high - low, span.before + low))
            lines[owner].append(np.arange(span.first + low, span.first + high))
    for line, run in zip(lines, np.array_split(np.flatnonzero(rest), ranks), strict=True):
        line.append(run)
    whole = [np.concatenate(line) for line in lines]
    size = max(map(len, whole))
    places = np.zeros(tokens, np.int64)
    for number, tokens_of in enumerate(whole):
        places[tokens_of] = number * size + np.arange(len(tokens_of))
    own = np.zeros(size, np.int64)
    own[:len(whole[rank])] = whole[rank]
    return Division(own, places, pieces)
