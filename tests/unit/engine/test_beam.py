"""Callers of beam searches hear answers, and nothing of the requests that they are made of."""

from __future__ import annotations

from penstock.core.request import Request, TokenLogprobs, Update
from penstock.core.sampling import SamplingParams
from penstock.engine.beam import BeamSearch, BeamSearches


def test_parts_are_heard_of_by_nobody() -> None:
    """Also when their search has ended before them, and whether or not others run."""
    parts: list[Request] = []
    searches = BeamSearches(parts.append, lambda ids: None)
    other = Update("other", 0, [7])
    searches.start(Request("search", [1, 2], SamplingParams(beam_width=2, n=2, max_tokens=4, logprobs=0, seed=0)), 100)
    late = [Update(part.id, 0, [], finish_reason="abort") for part in parts]
    assert late
    searches.abort(["search"])
    assert other in searches.through([other, *late])
    assert not searches.busy
    assert searches.through([*late, other]) == [other]


def test_no_beam_ends_before_min_tokens() -> None:
    """The end-of-sequence token is the most likely one every time, and is not taken before it may be."""
    search = BeamSearch(SamplingParams(beam_width=2, max_tokens=4, min_tokens=2), stops=[0])
    for length in (1, 2, 3):
        lines = [TokenLogprobs([-1, 0, 5, 6], [0.0, -0.1, -2.0, -3.0], [0, 1, 2, 3]) for _ in search.open]
        search.advance(lines)
        ended = [found for found in search.found if found.stopped]
        assert bool(ended) == (length > 2)
    assert all(len(found.beginning.tokens) > 2 for found in search.found)
