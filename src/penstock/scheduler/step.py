"""A plan as the scheduler remembers it until its result is applied."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.plan import Want
from penstock.core.request import Sequence
from penstock.core.steptime import Load


@dataclass(slots=True)
class InFlight:
    """An in-flight plan, or the one being made: its segments' sequences, lengths, wants and starts."""

    id: int
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    wants: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    drafts: dict[int, int] = field(default_factory=dict)
    """Number of drafted tokens at the end of each segment that has any, by segment index."""
    proposed: set[int] = field(default_factory=set)
    """The segments of `drafts` whose tokens the host expects."""
    lost: set[Sequence] = field(default_factory=set)
    """Sequences preempted since the plan was made: their computed positions are void, their sampled tokens still count."""
    decode: Load = Load(0, 0)
    """The part of the step that decodes."""
    tightest: float | None = None
    """The tightest promise between tokens of those who ran before it; as `Policy.tightest`."""
    unread: int = 0
    """Prompt tokens of those who read or could start to."""
    later: Callable[[Sequence], bool] = lambda _: False
    """Whether a prompt is read in `part` alone: tokens beside the budget that no segment has yet."""
    part: int = 0
    brief: int = 0
    """Prompt tokens of short prompts that no segment has yet."""
    scored: int = 0
    """Positions with `Want.SCORE`."""
    cut: list[int] = field(default_factory=list)
    """Indices of the segments that were cut for others."""
    load: Load = Load(0, 0)
    held: bool = False
    """Whether the next step is planned when this one has ended, so that short prompts that come meanwhile are in it."""
    drafting: int = 0
    """The drafts of a sequence on average, as the draft policy has it; 0: the drafter rests."""
    rests: bool = False
    """As `StepPlan.rests`."""
    limit: str = ""
    """Of LIMITS: what binds it beside the device."""

    def add(self, sequence: Sequence, count: int) -> None:
        self.sequences.append(sequence)
        self.counts.append(count)

    def sampling(self) -> list[Sequence]:
        """The sequences for which it chooses tokens."""
        return [sequence for sequence, want in zip(self.sequences, self.wants, strict=True) if want & Want.SAMPLE]


LIMITS = ("compute", "memory", "kv_space", "rows", "queue", "client")
"""The limits that can bind: the device's arithmetic, reading its memory, pages, rows, bounds of queues, idle clients."""


def binding(*, waiting: bool, rows: bool, room: bool, refused: bool) -> str:
    """The limit that binds beside the device: `waiting` others, free `rows`, `room` for them, and requests `refused` since the
    last step; empty if only the device does."""
    if waiting and not rows:
        return "rows"
    if waiting and not room:
        return "kv_space"
    return "queue" if refused and not waiting else ""


def load_of(starts: list[int], counts: list[int], scored: int = 0) -> Load:
    """The size of a step with these segments, of which so many positions are scored."""
    if max(counts, default=1) == 1:
        return Load(len(counts), len(counts), float(sum(starts) + len(starts)), scored=scored)
    segments = list(zip(starts, counts, strict=True))
    read = sum(start + 1 for start, count in segments if count == 1)
    work = sum(count * (start + count / 2) for start, count in segments if count > 1)
    return Load(len(counts), sum(counts), float(read), work, scored)
