"""One continuation of a request and its progress. There are no phases: the positions left to plan are `goal - planned`."""

import numpy as np
import numpy.typing as npt

from penstock.core.request import PHASES, Request, Timings, TokenLogprobs

Floats = npt.NDArray[np.float32]


class Sequence:
    """Counts of positions: computed <= planned <= goal.

    `known` tokens are on the host (`tokens`); `planned` positions are in plans already made; `computed` positions are done.
    Owned by the scheduler; nothing else writes it."""

    __slots__ = ("acceptance", "cache_state", "cached", "cached_by_tier", "chances", "children", "computed", "constraint",
                 "done", "due", "epoch", "expected", "forecast", "goal", "index", "limit", "mark", "masked", "pages", "passed",
                 "phase", "planned", "pooled", "predicted", "promise", "promised", "prompt_len", "request", "room", "row",
                 "scores", "scoring", "seed", "since", "slack", "stops", "stretched", "timings", "tokens")

    def __init__(self, request: Request, index: int, seed: int, limit: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.limit = limit
        """Maximum tokens, prompt plus output."""
        self.tokens: list[int] = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.goal = self.prompt_len
        """Positions to compute so far: those of known tokens and of tokens that plans in flight will sample, except that of the
        last possible token, which is never fed back."""
        self.planned = 0
        """An upper bound while drafts are in flight: rejected drafts are subtracted when their result is applied."""
        self.slack = 0
        """Maximum amount by which `planned` may be too high."""
        self.promised = 0
        """Maximum tokens that plans in flight may add."""
        self.expected: tuple[int, list[int]] | None = None
        """(position, tokens) that the host expects from there on; verified like drafts."""
        self.predicted = 0
        """The place in `request.predicted`, in bytes, up to which the answer follows it. Written by the drafts alone."""
        self.acceptance: float | None = None
        """Estimated probability that a draft is kept if those before it are. Written by the draft policy alone."""
        self.chances: list[float] = []
        """The same for each of its newest drafts, as the drafter itself estimates it, if it does."""
        self.computed = 0
        self.epoch = 0
        """Number of preemptions."""
        self.row = -1
        self.done = False
        self.cached = 0
        """Prompt tokens that the cache had at first admission."""
        self.cached_by_tier: dict[str, int] = {}
        """`cached` by tier."""
        self.promise = request.arrival
        """When its first token is due, time.time() in seconds. Written by the policy alone."""
        self.forecast = 0.0
        """When it was expected at admission, if others waited; else 0. Written by the policy alone."""
        self.stretched = False
        """Whether the prompt is so long that more time was promised than its class has. Written by the policy alone."""
        self.mark = 0
        """Tokens that it had when it was last preempted: it is not again before it has more."""
        self.passed = 0
        """Number of later sequences admitted while this one waited for room."""
        self.children: list[Sequence] = []
        """The request's other sequences, until they are forked off at the end of the prompt."""
        ends = () if request.params.ignore_eos else request.eos_ids
        self.stops = frozenset((*(request.params.stop_token_ids or ()), *ends))
        self.scoring = index == 0 and request.params.prompt_logprobs is not None
        """Whether prompt log probabilities are still to be delivered."""
        self.scores: list[TokenLogprobs] = []
        self.pooled: list[Floats] = []
        """Collected so far for `request.pool`: [lines, width] of each segment."""
        self.masked = False
        """Whether its tokens are chosen under a mask."""
        self.constraint: object = None
        """The state of its grammar constraint. Written by the masker alone."""
        self.pages: list[PageRun] = []
        """The sequence's pages, a run for each cache group; empty before the first grow. Written by the cache alone."""
        self.room = 0
        """Positions below this can be written without asking the cache. Written by the cache alone."""
        self.due = 1 << 62
        """Value of `computed` at which the scheduler must call `Cache.commit` again. Written by the cache alone."""
        self.cache_state: object = None
        """The cache's own record of this sequence, beside its pages."""
        self.timings = Timings(arrival=request.arrival, phases=[0.0] * len(PHASES))
        self.phase = PHASES.index("queued")
        self.since = request.arrival
        """Where its time goes now, and since when."""

    def enter(self, phase: str, now: float) -> None:
        """Its time goes elsewhere from now on."""
        self.timings.phases[self.phase] += max(0.0, now - self.since)
        self.phase, self.since = PHASES.index(phase), max(now, self.since)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def computes_all(self) -> bool:
        """Whether every position must be computed, although the cache may have some."""
        return self.scoring or (self.request.pool is not None and not self.request.pool.from_end)

    def restart(self) -> None:
        """Resets the computed positions, as preemption does. Known tokens stay; plans in flight may still add some."""
        self.epoch += 1
        self.mark = self.known
        self.planned = self.computed = self.slack = 0
        self.row = -1
        self.pooled = []
        if self.scoring:
            self.scores.clear()


class PageRun:
    """The pages of one cache group that a sequence holds: `ids[i]` covers positions [i * page, (i + 1) * page).

    Entries below `first` were given back (behind a window); -1 where none is needed, inside a segment of an exact state."""

    __slots__ = ("first", "ids")

    def __init__(self, ids: list[int] | None = None, first: int = 0) -> None:
        self.ids = [] if ids is None else ids
        self.first = first
