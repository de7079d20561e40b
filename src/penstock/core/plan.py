"""Everything a worker is ever told, and everything it answers.

A plan says what changed (rows entering and leaving, page edits, page copies) and which segments to run. Counts and tables
are flat int32 arrays, so a step of a thousand rows costs no thousand objects. The engine half and the worker half share
these two types and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.sampling import SamplingParams
from penstock.core.transfer import LoadResult, Transfer, WriteResult

Ints = npt.NDArray[np.int32]


class Want(IntFlag):
    """The outputs of a segment, besides the cache entries that it writes. Flags add up."""

    NOTHING = 0
    SAMPLE = 1
    """Choose the token that follows the segment's last position and append it to the row."""
    SCORE = 2
    """Report the log probability of the known token that follows each of the segment's positions."""
    EACH = 4
    """With SAMPLE: choose a token behind each of the segment's positions. Behind its first position the segment holds drafted
    tokens; those that agree with what is chosen are kept, and the first chosen token that does not."""
    HIDDEN = 8
    """Report the hidden state of each of the segment's positions."""


class Enter(NamedTuple):
    """A request takes a row. `tokens` is all that is known of it: its prompt, and after preemption its output so far."""

    row: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    banned_until: list[int]
    """Tokens that cannot be chosen before `params.min_tokens`: end-of-sequence and stop tokens."""


class Proposal(NamedTuple):
    """Drafted tokens that the host knows, written to a row behind its known tokens, from `position` on."""

    row: int
    position: int
    tokens: list[int]


class Move(NamedTuple):
    """Copy one page of a cache group to another, before anything of the step is computed."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """One step. Segment i is `counts[i]` positions of `rows[i]` from `starts[i]` on; the order is the batch's order.

    edits[g] is an int32 array [edits, 3] of (row, page index within the row, page id) for cache group g.
    """

    id: int
    enter: list[Enter] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    edits: list[Ints] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    starts: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    counts: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    wants: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    masked: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Segments, by index, whose tokens are chosen under a mask. The forward pass does not wait for the masks, choosing does."""
    slack: Ints | None = None
    """[segments] how many positions before `starts[i]` a segment may in truth begin, because drafts are still being checked:
    it begins at the last token that its row has by then, which the device knows. None: all begin where `starts` says."""
    proposals: list[Proposal] = field(default_factory=list)
    draft: Ints | None = None
    """[segments] how many tokens the worker's drafter should write behind what the segment keeps, for the row's next segment.
    None: no drafts for anybody."""
    transfers: list[Transfer] = field(default_factory=list)
    """Pages to save to other tiers before `moves`, and to load from them after. Made by `cache/tiers`, carried out by the
    worker's movers; a step without segments that finds loads under way waits until one of them has landed."""

    @property
    def idle(self) -> bool:
        """Nothing to compute; rows may still leave and pages move."""
        return len(self.rows) == 0


@dataclass(slots=True)
class Masks:
    """Which tokens may be chosen by a plan's masked segments. Given to the executor after the plan, before the next plan."""

    bits: Ints
    """[lines, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if token t may be chosen; tokens beyond the last word
    may not. One line for each token that a masked segment chooses, in the order of `StepPlan.masked`."""


@dataclass(slots=True)
class Logprobs:
    """Log probabilities for some positions of a step, one line each.

    `segments[i]` and `positions[i]` say which token line i is about (the token AT that position of the row); ids, values
    and ranks are [lines, 1 + k]: the token itself, then the k most likely, k the largest number any row asked for.
    """

    segments: Ints
    positions: Ints
    ids: Ints
    values: npt.NDArray[np.float32]
    ranks: Ints


@dataclass(slots=True)
class Hidden:
    """Hidden states after the last norm, of all positions of the segments that want them, segment after segment."""

    segments: Ints
    """[lines] whose each line is."""
    values: npt.NDArray[np.float32]
    """[lines, width]"""


@dataclass(slots=True)
class StepResult:
    """The result of a plan: the tokens that each segment adds to its row."""

    id: int
    tokens: Ints
    """Of all segments, one after another; NOT_FINITE where the logits are not."""
    kept: Ints
    """[segments] how many of them each segment has: 0 if it wants none, 1, or up to 1 + drafts where drafts were checked."""
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None
    hidden: Hidden | None = None
    seconds: float = 0.0
    """The whole of the worker's `run`."""
    kernel_seconds: float = 0.0
    """The part of it inside the model."""
    load_results: list[LoadResult] = field(default_factory=list)
    """Loads that have ended since the last result."""
    write_results: list[WriteResult] = field(default_factory=list)
    """Pages that were written to stores since, or could not be."""


MOST_DEPTH = 4
"""Plans in flight; with two, planning overlaps with running, and more gain nothing."""
NOT_FINITE = -2
"""In place of a token where no token can be chosen."""
