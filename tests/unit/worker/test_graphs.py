"""Which steps are captured, as a function of options alone."""

from __future__ import annotations

import numpy as np

from penstock.config.resolve import graph_tokens
from penstock.core.plan import StepPlan, Want
from penstock.worker.graphs import Buckets


def test_what_is_captured_depends_on_how_long_launching_takes() -> None:
    """Steps that keep a GPU busy for long need no graph: a large model's are fewer."""
    small, large = graph_tokens(int(0.6e9)), graph_tokens(int(8e9))
    assert (small, large) == (8192, 1024) and graph_tokens(int(70e9)) == 256
    of_small, of_large = (Buckets(tokens, 2048, 16384) for tokens in (small, large))
    assert of_small.decode[-1] == 1024 and of_large.decode[-1] == 512
    assert of_small.mixed[-1] == 8192 and of_large.mixed[-1] == 1024
    assert len(Buckets(large, 1024, 16384).all()) < len(Buckets(small, 1024, 16384).all()) < 70
    mixture = graph_tokens(int(3.3e9))
    assert mixture == 2048 and Buckets(mixture, 2048, 16384).decode[-1] == 1024


def test_the_last_decode_step_has_all_rows() -> None:
    for tokens in (256, 1024, 2048, 4096):
        for rows in (1, 3, 64, 100, 500, 512, 513, 600, 1000, 1024, 4000):
            sizes = Buckets(tokens, rows, 16384).decode
            assert sizes == sorted(set(sizes)) and sizes[-1] == min(rows, max(512, min(1024, tokens // 2)))


def test_mixed_steps_have_fewer_segments_than_tokens() -> None:
    for tokens, rows, longest in ((4096, 1024, 16384), (512, 3, 100), (2048, 1, 50_000)):
        for bucket in Buckets(tokens, rows, longest).all():
            assert bucket.segments <= min(rows, bucket.tokens) and bucket.tokens <= max(tokens, rows)
            assert bucket.segments == bucket.tokens or bucket.tokens <= rows * (longest - 1)


def test_drafts_of_all_rows_are_verified_by_a_captured_step() -> None:
    """Every token of such a step has a logits row, also where they fill a bucket, and where they are more than its segments."""
    buckets = Buckets(1024, 512, 1000, drafts=True)
    for rows in (1, 8, 30, 32, 64, 128, 200):
        for drafts in range(1, 8):
            counts = np.full(rows, 1 + drafts, np.int32)
            tokens = rows * (1 + drafts)
            plan = StepPlan(0, rows=np.arange(rows, dtype=np.int32), counts=counts, starts=0 * counts,
                            wants=np.full(rows, int(Want.SAMPLE | Want.EACH), np.int32))
            found = buckets.of(plan, tokens)
            assert (found is not None) == (tokens <= 1024)
            assert found is None or (found.tokens >= tokens and max(found.segments, found.picks) >= tokens)
