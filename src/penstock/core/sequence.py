"""One continuation of one request and how far it has come. Phases are not stored: work left is `goal - planned`."""

from __future__ import annotations

from penstock.core.request import Request, Timings, TokenLogprobs


class Sequence:
    """Counts of positions: computed <= planned <= goal.

    `known` tokens are on the host (`tokens`); `planned` positions are in plans already made; `computed` positions are done.
    Owned by the scheduler; nobody else writes.
    """

    __slots__ = ("cache_state", "cached", "cached_by_tier", "children", "computed", "constraint", "done", "drafted", "due",
                 "epoch", "expected", "goal", "index", "limit", "masked", "pages", "passed", "planned", "promised",
                 "prompt_len", "request", "room", "row", "scores", "scoring", "seed", "slack", "stops", "timings", "tokens")

    def __init__(self, request: Request, index: int, seed: int, limit: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.limit = limit
        """Most tokens that may become known: prompt plus output."""
        self.tokens: list[int] = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.goal = self.prompt_len
        """Positions that should be computed so far: of known tokens and of those that plans in flight will sample, but never
        that of the last token of all, which is not fed back."""
        self.planned = 0
        """With drafts in flight an upper bound: those that are rejected are subtracted when their result is applied."""
        self.slack = 0
        """By how much `planned` may be too high."""
        self.promised = 0
        """The most tokens that plans in flight may add."""
        self.drafted = 0
        """How many tokens the worker's drafter has been told to write behind the row's known ones, for the next segment."""
        self.expected: tuple[int, list[int]] | None = None
        """A position and the tokens that somebody on the host expects from there on; drafts, too."""
        self.computed = 0
        self.epoch = 0
        """Grows on preemption."""
        self.row = -1
        self.done = False
        self.cached = 0
        """Prompt tokens that the cache had at first admission."""
        self.cached_by_tier: dict[str, int] = {}
        """The same by the tier that had them."""
        self.passed = 0
        """How many that came later were admitted while it waited for room."""
        self.children: list[Sequence] = []
        """The request's other sequences, until they are forked off at the end of the prompt."""
        ends = () if request.params.ignore_eos else request.eos_ids
        self.stops = frozenset((*(request.params.stop_token_ids or ()), *ends))
        self.scoring = index == 0 and request.params.prompt_logprobs is not None
        """Prompt log probabilities are still owed."""
        self.scores: list[TokenLogprobs] = []
        self.masked = False
        """Its tokens are chosen under a mask."""
        self.constraint: object = None
        """What constrains its tokens and how far that is. Written by the masker alone."""
        self.pages: list[PageRun] = []
        """The sequence's pages, a run for each cache group; empty before the first grow. Written by the cache alone."""
        self.room = 0
        """Positions below this can be written without asking the cache. Written by the cache alone."""
        self.due = 1 << 62
        """`computed` at which the cache wants to be told again (`commit`). Written by the cache alone."""
        self.cache_state: object = None
        """The cache's own record of this sequence, beside its pages."""
        self.timings = Timings(arrival=request.arrival)

    @property
    def known(self) -> int:
        return len(self.tokens)

    def restart(self) -> None:
        """Resets the computed positions, as preemption does. Known tokens stay; plans in flight may still add some."""
        self.epoch += 1
        self.planned = self.computed = self.slack = self.drafted = 0
        self.row = -1
        if self.scoring:
            self.scores.clear()


class PageRun:
    """The pages of one cache group that a sequence holds: `ids[i]` covers positions [i * page, (i + 1) * page).

    Entries below `first` were given back (behind a window) and are stale; -1 where no page is needed, inside a segment of an
    exact state.
    """

    __slots__ = ("first", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.first = 0
