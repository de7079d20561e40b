"""Beam search above the scheduler: a beam search request becomes rounds of one-token requests, one for each open beam.

Each one-token request matches its beam in the prefix cache, so it computes one position and shares all pages but the last. A
frontend sees one request whose answers arrive at the end, best first. The rules are those of Hugging Face's generate."""

import heapq
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.core.errors import RequestError
from penstock.core.request import Request, Timings, TokenLogprobs, Update
from penstock.core.sampling import SamplingParams

SEPARATOR = "#"
"""Separates the search's id and the beam's number in the ids of the one-token requests. Frontends' ids do not contain it."""


class Beginning(NamedTuple):
    """An open beam: tokens that may become an answer."""

    tokens: list[int]
    logprob: float
    """The sum over all tokens."""
    lines: list[TokenLogprobs]
    """For each token its log probabilities: the token itself, then the most likely ones."""


class FinishedBeam(NamedTuple):
    score: float
    beginning: Beginning
    stopped: bool
    """True if a stop token ended it, False if the length limit did."""


class BeamSearch:
    """The state of one search, a pure function of the log probabilities of its beams. Knows no engine."""

    def __init__(self, params: SamplingParams, stops: Iterable[int]) -> None:
        """`params` must have `max_tokens` set; `stops` are the tokens that end an answer."""
        self.params = params
        self.width = params.beam_width
        self.stops = frozenset(stops)
        self.open = [Beginning([], 0.0, [])]
        """Beams to continue, most probable first."""
        self.found: list[FinishedBeam] = []
        """The best `width` answers so far, best first."""
        self._length = params.max_tokens or 1

    @property
    def alternatives(self) -> int:
        """The number of most likely next tokens that `advance` needs for each beam; enough beside all stop tokens."""
        return self.width + len(self.stops)

    def advance(self, lines: list[TokenLogprobs]) -> None:
        """Extends every open beam by one token. `lines[i][1:]` are the most likely tokens after `open[i]`."""
        length = len(self.open[0].tokens) + 1
        blocked: frozenset[int] = self.stops if length <= self.params.min_tokens else frozenset()
        # Ties: the likelier beam first, then the lower token id.
        best = heapq.nsmallest(self.width + self.width * len(self.stops), (
            (-(beam.logprob + logprob), i, token, logprob, rank)
            for i, (beam, line) in enumerate(zip(self.open, lines, strict=True))
            for token, logprob, rank in zip(line.ids[1:], line.logprobs[1:], line.ranks[1:], strict=True)
            if token not in blocked))
        going: list[Beginning] = []
        for place, (negative, i, token, logprob, rank) in enumerate(best):
            stopped = token in self.stops
            full = length >= self._length
            if (stopped or full) and place >= self.width:
                # Beyond the best `width` candidates only unfinished beams count.
                continue
            parent = self.open[i]
            beam = Beginning([*parent.tokens, token], -negative, [*parent.lines, self._line(lines[i], token, logprob, rank)])
            if stopped or full:
                self.found.append(FinishedBeam(beam.logprob / length ** self.params.length_penalty, beam, stopped))
                self.found.sort(key=lambda found: -found.score)
                del self.found[self.width:]
            elif len(going) < self.width:
                going.append(beam)
        self.open = going
        if going and not self._worth_it(length):
            self.open = []

    def _line(self, line: TokenLogprobs, token: int, logprob: float, rank: int) -> TokenLogprobs:
        """The log probabilities reported for a chosen token."""
        last = 1 + (self.params.logprobs or 0)
        return TokenLogprobs([token, *line.ids[1:last]], [logprob, *line.logprobs[1:last]], [rank, *line.ranks[1:last]])

    def _worth_it(self, length: int) -> bool:
        """True if an open beam may still beat the worst of the `width` best answers (as `early_stopping` defines it)."""
        if len(self.found) < self.width:
            return True
        early, penalty = self.params.early_stopping, self.params.length_penalty
        if early is True:
            return False
        longest = self._length if early == "never" and penalty > 0 else length
        return bool(self.open[0].logprob / longest ** penalty > self.found[-1].score)


class _Running:
    """A running search: its request, and the beams whose next tokens have not arrived yet."""

    def __init__(self, request: Request, search: BeamSearch) -> None:
        self.request = request
        self.search = search
        self.round = 0
        self.lines: dict[str, TokenLogprobs] = {}
        self.asked: list[str] = []
        """The ids of this round's requests, in the order of `search.open`."""
        self.first: Update | None = None
        """The first update, with facts about the prompt: cached tokens and the start time."""
        self.preemptions = 0


class BeamSearches:
    """All beam searches of an engine, between the engine's callers and the scheduler."""

    def __init__(self, add: Callable[[Request], None], abort: Callable[[list[str]], None]) -> None:
        """`add` and `abort` pass requests and aborts on to the scheduler."""
        self._add = add
        self._abort = abort
        self._running: dict[str, _Running] = {}
        self._news: list[Update] = []

    def start(self, request: Request, vocab_size: int) -> None:
        """Starts a search. RequestError if the vocabulary is too small, or if the scheduler refuses the first request."""
        if request.id in self._running:
            raise RequestError(f"a request with id {request.id!r} is running already; ids must be unique", param="request_id",
                               code="duplicate_request_id")
        params = request.params
        stops = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_ids)]
        running = _Running(request, BeamSearch(params, stops))
        if running.search.alternatives > vocab_size:
            raise RequestError(f"beam_width is {params.beam_width} and {len(running.search.stops)} tokens end an answer, but "
                               f"the vocabulary has only {vocab_size}; lower beam_width", param="beam_width")
        self._ask(running)
        self._running[request.id] = running

    def abort(self, ids: Iterable[str]) -> None:
        """Aborts searches; other ids are ignored. Single answers cannot be aborted, because there are none before the end."""
        for name in ids:
            running = self._running.pop(name, None)
            if running is not None:
                self._abort([asked for asked in running.asked if asked not in running.lines])
                self._end(running, "abort")

    @property
    def requests(self) -> list[Request]:
        return [running.request for running in self._running.values()]

    @property
    def busy(self) -> bool:
        """True if there are running searches, or updates of ended ones."""
        return bool(self._running or self._news)

    def through(self, updates: list[Update]) -> list[Update]:
        """The updates for callers: updates of other requests unchanged, plus the answers of searches that have ended."""
        if not self.busy:
            return [update for update in updates if SEPARATOR not in update.request_id]
        passed, self._news = self._news, []
        for update in updates:
            name, separator, _ = update.request_id.rpartition(SEPARATOR)
            running = self._running.get(name) if separator else None
            if running is not None and update.request_id in running.asked:
                self._take(running, update)
            elif not separator:
                passed.append(update)
        passed += self._news
        self._news = []
        return passed

    def _ask(self, running: _Running) -> None:
        """Submits a one-token request for each open beam of a search."""
        request, search = running.request, running.search
        params = SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True, logprobs=search.alternatives)
        running.lines = {}
        running.asked = [f"{request.id}{SEPARATOR}{running.round}.{i}" for i in range(len(search.open))]
        running.round += 1
        for name, beam in zip(running.asked, search.open, strict=True):
            self._add(Request(name, [*request.prompt_ids, *beam.tokens], params, [], request.arrival, request.priority,
                              request.salt, request.tenant, request.retain, request.adapter, part=bool(beam.tokens),
                              media=request.media, follows=request.id if beam.tokens else "",
                              adapted_from=request.adapted_from))

    def _take(self, running: _Running, update: Update) -> None:
        if update.finish_reason in ("error", "abort"):
            del self._running[running.request.id]
            self._abort([name for name in running.asked if name not in running.lines and name != update.request_id])
            self._end(running, update.finish_reason, update.error)
            return
        assert update.logprobs is not None
        running.lines[update.request_id] = update.logprobs[0]
        running.first = running.first or update
        running.preemptions += update.timings.preemptions if update.timings is not None else 0
        if len(running.lines) < len(running.asked):
            return
        running.search.advance([running.lines[name] for name in running.asked])
        if running.search.open:
            self._go_on(running)
            return
        del self._running[running.request.id]
        self._end(running, None)

    def _go_on(self, running: _Running) -> None:
        try:
            self._ask(running)
        except RequestError as error:
            # A search that cannot continue must not end the others.
            del self._running[running.request.id]
            self._abort(running.asked)
            self._end(running, "error", error.message)

    def _end(self, running: _Running, reason: str | None, error: str | None = None) -> None:
        """Queues the last updates of a search: its answers, or the error."""
        request, first, now = running.request, running.first, time.time()
        timings = Timings(request.arrival, 0.0, 0.0, now, running.preemptions)
        if first is not None and first.timings is not None:
            timings.first_scheduled, timings.first_token = first.timings.first_scheduled, now
        for index in range(request.params.n):
            update = Update(request.id, index, [], reason, error=error, timings=timings)
            if reason is None:
                answer = running.search.found[index]
                last = answer.beginning.tokens[-1]
                update.token_ids = answer.beginning.tokens
                update.finish_reason = "stop" if answer.stopped else "length"
                update.stop_reason = last if answer.stopped and last in (request.params.stop_token_ids or ()) else None
                update.logprobs = None if request.params.logprobs is None else answer.beginning.lines
                if index == 0 and first is not None:
                    update.cached_tokens, update.cached_by_tier = first.cached_tokens, first.cached_by_tier
            self._news.append(update)
