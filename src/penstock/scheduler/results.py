"""Reads the flat arrays of a step's result by segment."""

from __future__ import annotations

from itertools import accumulate

from penstock.core.plan import Logprobs, StepResult
from penstock.core.request import TokenLogprobs
from penstock.core.sequence import Sequence


def tokens(result: StepResult) -> list[list[int]]:
    """Returns the kept tokens of each segment."""
    found, kept = result.tokens.tolist(), result.kept.tolist()
    if len(found) == len(kept) == kept.count(1):
        return [[token] for token in found]
    ends = accumulate(kept)
    return [found[end - count:end] for end, count in zip(ends, kept, strict=True)]


def lines(given: Logprobs | None, sequences: list[Sequence], asked: str) -> dict[int, list[TokenLogprobs]]:
    """Groups a step's log probabilities by segment, in order of position, with as many alternatives as the request's parameter
    `asked` says."""
    found: dict[int, list[TokenLogprobs]] = {}
    if given is None:
        return found
    columns = zip(given.segments.tolist(), given.ids.tolist(), given.values.tolist(), given.ranks.tolist(), strict=True)
    for segment, ids, values, ranks in columns:
        width = 1 + (getattr(sequences[segment].request.params, asked) or 0)
        found.setdefault(segment, []).append(TokenLogprobs(ids[:width], values[:width], ranks[:width]))
    return found
