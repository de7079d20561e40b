"""The division of a step's tokens among ranks that divide contexts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.parallel.contexts import FEW, divided, long_segments


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("counts", [[100], [9], [1, 64, 3, 1000], [FEW + 1, 500, 1, 1]])
def test_every_token_has_one_rank_and_all_have_equal_work(counts: list[int], ranks: int) -> None:
    context = np.array(counts, np.int32) + 7
    spans = long_segments(np.array(counts, np.int32), context)
    assert [span.count for span in spans] == [count for count in counts if count > FEW]
    tokens = sum(counts) + 5  # padding
    parts = [divided(spans, tokens, rank, ranks) for rank in range(ranks)]
    gathered = np.concatenate([part.own for part in parts])
    assert (gathered[parts[0].places] == np.arange(tokens)).all()
    assert all((part.places == parts[0].places).all() and len(part.own) == len(parts[0].own) for part in parts)
    work = []
    for part in parts:
        work.append(sum(sum(range(piece.before + 1, piece.before + piece.count + 1)) for piece in part.pieces))
        for piece in part.pieces:
            own = part.own[piece.first:piece.first + piece.count]
            span = next(span for span in spans if span.segment == piece.segment)
            assert (own == span.first + piece.before - span.before + np.arange(piece.count)).all()
    if min(span.count for span in spans) > 60:
        assert max(work) < 1.2 * min(work)


def test_short_segments_are_not_cut() -> None:
    assert not long_segments(np.array([1, FEW, 0], np.int32), np.array([500, FEW, 0], np.int32))
