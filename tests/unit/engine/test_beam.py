"""What callers hear of beam searches: answers, and nothing of the requests that they are made of."""

from __future__ import annotations

from penstock.core.request import Request, Update
from penstock.core.sampling import SamplingParams
from penstock.engine.beam import BeamSearches


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
