"""Requests that pool hidden states: what their segments report, and the vector that comes of it. They choose no tokens."""

import numpy as np

from penstock.core.plan import StepResult, Want
from penstock.core.request import Floats, Pool, Sequence

_WANTS = {"all": Want.HIDDEN, "mean": Want.HIDDEN | Want.SUM, "last": Want.HIDDEN | Want.LAST, "labels": Want.LABELS,
          "tokens": Want.LABELS | Want.HIDDEN}


def want(pool: Pool, start: int, end: int, prompt_len: int) -> int:
    """The outputs of a segment [start, end) of a prompt that is pooled."""
    if pool.kind == "cls":
        return int(Want.HIDDEN if start == 0 else Want.NOTHING)
    return int(Want.NOTHING if pool.from_end and end < prompt_len else _WANTS[pool.kind])


def lines(result: StepResult) -> dict[int, Floats]:
    """The reported vectors of each segment, [lines, width]."""
    found = {segment: np.atleast_2d(logits) for segment, logits in result.labels}
    if result.hidden is not None:
        segments, firsts = np.unique(result.hidden.segments, return_index=True)
        order = np.argsort(firsts)
        found.update(zip(segments[order].tolist(), np.split(result.hidden.values, firsts[order][1:]), strict=True))
    return found


def pooled(sequence: Sequence) -> Floats | None:
    """The result of a sequence whose prompt is computed: [width], of each position [prompt, width]. None if not finite."""
    pool = sequence.request.pool
    assert pool is not None
    found = np.concatenate(sequence.pooled)
    if pool.kind == "mean":
        found = found.sum(0) / np.float32(sequence.prompt_len)
    elif not pool.each:
        found = found[0]
    return found if np.isfinite(found).all() else None
