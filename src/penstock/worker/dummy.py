"""Dummy plans, for measuring memory, capturing CUDA graphs, rehearsing kernel launches, and idle ranks."""

import numpy as np

from penstock.core.plan import Enter, Ints, StepPlan, Want
from penstock.core.sampling import SamplingParams
from penstock.core.state import CacheLayout

_EVERYTHING = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
"""Sampling parameters that take the most memory."""


def spread(tokens: int, segments: int) -> Ints:
    """Returns the tokens of each segment: equal shares; the first segment gets the remainder."""
    counts = np.full(segments, tokens // segments, np.int32)
    counts[0] += tokens - int(counts.sum())
    return counts


def filled(tokens: int, longest: int) -> Ints:
    """Returns the tokens of each segment for as few segments as possible, none longer than `longest`."""
    whole, rest = divmod(tokens, longest)
    return np.array([longest] * whole + [rest] * (rest > 0), np.int32)


def dummy_plan(counts: Ints, before: int = 0, layout: CacheLayout | None = None) -> StepPlan:
    """Returns a plan whose segment i runs `counts[i]` positions of row i after `before` others. Without `layout` it has only
    the shape, and no token is chosen. With `layout` the rows enter, get pages, and sample a token each with all reports on."""
    rows = np.arange(len(counts), dtype=np.int32)
    plan = StepPlan(-1, rows=rows, starts=np.full_like(counts, before), counts=counts, wants=np.zeros_like(counts))
    if layout is not None:
        lengths = (counts + before).tolist()
        plan.enter = [Enter(row, [0] * length, length, _EVERYTHING, row, []) for row, length in enumerate(lengths)]
        pages = np.array([-(-length // layout.page) for length in lengths])
        row, index = np.repeat(rows, pages), np.concatenate([np.arange(count) for count in pages])
        for group in layout.groups:
            # Rows may share pages, because their content does not matter.
            page = np.arange(len(row)) % (layout.slabs * group.per_slab)
            plan.edits.append(np.stack((row, index, page), 1).astype(np.int32))
        plan.wants = np.full_like(counts, int(Want.SAMPLE))
    return plan


def dummy_round(rows: int, drafts: int, groups: int) -> StepPlan:
    """A plan that verifies so many drafts for each of the first rows, with one token and any pages. `groups`: the cache's."""
    counts = np.full(rows, 1 + drafts, np.int32)
    return StepPlan(-1, rows=np.arange(rows, dtype=np.int32), starts=np.zeros_like(counts), counts=counts,
                    wants=np.full_like(counts, int(Want.SAMPLE | Want.EACH)), edits=[np.zeros((0, 3), np.int32)] * groups)
