"""The messages between engine and worker: step plans, token masks and step results.

A plan says what changed (rows entering and leaving, page edits, page copies) and which segments to run. Counts and tables
are flat int32 arrays, so that a step of a thousand rows does not create a thousand objects. Nothing else is exchanged.

With a plan go transfers between the device and tiers behind it, in the order of plans; with its result what became of them. A
page behind the device lies in a slot of the host's arena, cut as the device's (`core/state.py`), or in a store by its name."""

from dataclasses import dataclass, field
from enum import IntFlag
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.core.sampling import SamplingParams


class PageName(NamedTuple):
    """Names a page in every store by its contents: the cache group, and the key of the context that it ends."""

    group: int
    key: bytes


class Save(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Copy a page of the device to a slot of the host, as it is before the plan's own copies, loads and step. The slots of a
    plan's saves share no byte, so these may be carried out in any order."""

    group: int
    page: int
    slot: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Write a slot of the host to a store. Answered by a WriteResult, until which the slot must not change."""

    id: int
    store: int
    """Index of the store, in the order in which the engine was given them."""
    name: PageName
    slot: int


class Piece(NamedTuple):
    name: PageName
    page: int
    """Destination page on the device."""
    slot: int
    """Source slot on the host, -1 if it comes from a store."""
    store: int
    """Index of the source store, -1 if it is on the host."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Fill pages of the device. Answered by a LoadResult with the ticket, until which its slots must not change."""

    ticket: int
    pieces: list[Piece]
    patience: float
    """Timeout in seconds."""


Transfer = Save | Write | Load


class LoadResult(NamedTuple):
    ticket: int
    ok: bool
    """All of its pages that are not `lost` hold what was asked for. If not, none of them is used."""
    seconds: float = 0.0
    """Service time of the load in seconds, without queueing."""
    lost: tuple[PageName, ...] = ()
    """Pages that were missing or damaged."""
    missed: tuple[int, ...] = ()
    """The stores that did not answer, or not before the load's patience had run out."""


class WriteResult(NamedTuple):
    id: int
    ok: bool
    seconds: float
    """Duration of the write alone."""


Ints = npt.NDArray[np.int32]


class Want(IntFlag):
    """The outputs of a segment, besides the cache entries that it writes. Flags add up."""

    NOTHING = 0
    SAMPLE = 1
    """Choose the token that follows the segment's last position and append it to the row."""
    SCORE = 2
    """Report the log probability of the known token that follows each of the segment's positions."""
    EACH = 4
    """With SAMPLE: choose a token after each position. All but the first hold drafts: the row's `Proposal`, or the worker's
    drafter's, written before the forward pass. Drafts that equal the chosen tokens are kept, and the first that differs."""
    HIDDEN = 8
    """Report the hidden state of each of the segment's positions."""
    LAST = 16
    """With HIDDEN: of the last position only."""
    SUM = 32
    """With HIDDEN: only their sum, in float32."""
    LABELS = 64
    """Report the head's logits after the last position, with HIDDEN after each: of the row's `Enter.labels`, or all."""


class Enter(NamedTuple):
    """A sequence takes a row. `tokens` are its known tokens: the prompt and, after preemption, the output so far."""

    row: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    banned_until: list[int]
    """Tokens that cannot be chosen before `params.min_tokens`: end-of-sequence and stop tokens."""
    labels: list[int] = []
    """The logits that Want.LABELS reports, by their index in the head; empty for all."""
    adapter: int = 0
    """The slot of its adapter; 0: none."""
    owner: int = 0
    """Rows of equal numbers may be drafted for from each other's outputs."""
    adapted_from: int = 0
    """The first position that its adapter computes."""


class Proposal(NamedTuple):
    """Drafted tokens from the host, written to a row after its known tokens, from `position` on."""

    row: int
    position: int
    tokens: list[int]


class Move(NamedTuple):
    """Copies one page of a cache group to another before the step computes anything."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """One step. Segment i is `counts[i]` positions of `rows[i]` from `starts[i]` on; the order is the batch's order.

    edits[g] is an int32 array [edits, 3] of (row, page index within the row, page id) for cache group g."""

    id: int
    enter: list[Enter] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    adapters: list[tuple[int, str]] = field(default_factory=list)
    """(slot, digest) of the adapters to put into slots before the step."""
    edits: list[Ints] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    starts: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    counts: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    wants: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    masked: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Indices of the segments whose tokens are chosen under a mask. Sampling waits for the masks; the forward pass does not."""
    slack: Ints | None = None
    """[segments] number of positions by which the true start may lie before `starts[i]`, because drafts are still being
    verified. The segment begins at its row's last known token, which only the device knows. None: all starts are exact."""
    proposals: list[Proposal] = field(default_factory=list)
    rests: bool = False
    """Whether the worker's drafter takes no part, and costs nothing. It drafts worse behind positions not followed."""
    transfers: list[Transfer] = field(default_factory=list)
    """Pages to save to other tiers before `moves`, and to load from them after. Made by `cache/tiers`, carried out by the
    worker's movers; a step without segments that finds loads under way waits until one of them has landed."""

    @property
    def idle(self) -> bool:
        """Whether the plan has no segments. Rows may still leave and pages move."""
        return len(self.rows) == 0

    @property
    def drafted(self) -> npt.NDArray[np.int64]:
        """[D] indices of the segments whose drafts the worker's drafter writes."""
        checked = (self.wants & int(Want.EACH)) > 0
        if self.proposals:
            checked &= ~np.isin(self.rows, [proposal.row for proposal in self.proposals])
        return np.flatnonzero(checked)

    @property
    def tells_drafts(self) -> bool:
        """Whether the drafts that the worker writes are reported before the masks, which depend on them."""
        return bool(len(self.masked)) and bool(np.isin(self.masked, self.drafted).any())


@dataclass(slots=True)
class Masks:
    """Token masks of a plan's masked segments. Passed to the executor after the plan and before the next plan."""

    bits: Ints
    """[logits rows, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if token t may be chosen; tokens beyond the last
    word may not. One row for each token that a masked segment chooses, in the order of `StepPlan.masked`."""


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of N tokens of a step.

    Entry i is about the token AT position `positions[i]` of the row of segment `segments[i]`. ids, values and ranks are
    [N, 1 + k]: the token itself, then the k most likely ones; k is the largest number that any row asked for."""

    segments: Ints
    positions: Ints
    ids: Ints
    values: npt.NDArray[np.float32]
    ranks: Ints


@dataclass(slots=True)
class Hidden:
    """Hidden states after the last norm of the positions that the segments want, or sums of them. A segment's are in order."""

    segments: Ints
    """[N] the segment of each line."""
    values: npt.NDArray[np.float32]
    """[N, width]"""


@dataclass(slots=True)
class StepResult:
    """The result of a plan: the tokens that each segment adds to its row."""

    id: int
    tokens: Ints
    """Tokens of all segments, concatenated; NOT_FINITE where the logits are not finite."""
    kept: Ints
    """[segments] number of tokens of each segment: 0 without SAMPLE, 1, or up to 1 + drafts with verified drafts."""
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None
    hidden: Hidden | None = None
    labels: list[tuple[int, npt.NDArray[np.float32]]] = field(default_factory=list)
    """(segment, logits) of each segment with Want.LABELS: [labels], with Want.HIDDEN [count, labels]."""
    seconds: float = 0.0
    kernel_seconds: float = 0.0
    """The part of `seconds` in the model's forward pass."""
    draft_seconds: float = 0.0
    """The part of `seconds` before it, in which pages are moved and tokens drafted."""
    load_results: list[LoadResult] = field(default_factory=list)
    """Loads that have ended since the last result."""
    write_results: list[WriteResult] = field(default_factory=list)
    """Writes to stores that have ended or failed since the last result."""
    picks: npt.NDArray[np.int64] | None = None
    """[layers with experts, experts] how often each was picked since the start; now and then, of mixtures."""
    expert_hits: int = 0
    """With `picks`: how many of them were of experts on the device, if some are in host memory alone."""
    chances: npt.NDArray[np.float32] | None = None
    """[drafts of `StepPlan.drafted`] how likely each is kept if those before it are, as the drafter estimates it, if any."""
    ahead: tuple[int, int] = (0, 0)
    """Since the start: outcomes of verifications for which a drafter that drafts ahead had drafts, and all of them."""


MOST_DEPTH = 9
"""Maximum plans in flight. Two suffice to overlap planning with execution; each pipeline stage but the first adds one."""
NOT_FINITE = -2
"""Stands for a token if none can be chosen."""
