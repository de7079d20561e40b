"""Output processing: turns engine updates into text and vLLM's output objects (detokenization, stop strings).

Runs in the frontend; knows neither asyncio nor HTTP. An update costs time in proportion to its new tokens."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from penstock.core.request import Request, Timings, TokenLogprobs, Update
from penstock.dialects.message import Message
from penstock.text import Detokenizer, StopStrings, Tokenizer


class Delta(Update, gc=False):
    """An update and its text. The finish_reason may also come from a stop string, which is then the stop_reason."""

    text: str = ""
    """New text that no stop string will take back. May be empty although there are tokens."""
    ledger: dict[str, float] | None = None
    """Where the sequence's time went (`engine/ledger.py`); on its last delta."""


@dataclass(slots=True)
class _Open:
    """One sequence whose end has not been seen."""

    detokenizer: Detokenizer | None
    stops: StopStrings | None
    count: int = 0
    first_token: float = 0.0


@dataclass(slots=True)
class _Live:
    """One request with sequences that have not ended."""

    request: Request
    sequences: dict[int, _Open | None]
    """By index; None until the first token, because a request may have many."""


class Outputs:
    """The requests in progress and the state of their text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer there is no text, and no stop string is found (Inputs refuses such requests)."""
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}
        self._aborts: list[str] = []

    def register(self, request: Request) -> None:
        """Expects updates of `request`. Its id must not be in use."""
        assert request.id not in self._live, f"request id {request.id!r} is in use"
        self._live[request.id] = _Live(request, dict.fromkeys(range(request.params.n)))

    def _open(self, request: Request) -> _Open:
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return _Open(None, None)
        # The output continues the prompt's text.
        detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens, request.prompt_ids, request.shown)
        return _Open(detokenizer, StopStrings(params.stops, params.include_stop_str_in_output) if params.stop else None)

    def forget(self, request_id: str) -> None:
        """Ignores further updates of this request. Unknown ids are ignored."""
        self._live.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._live)

    def push(self, updates: Iterable[Update]) -> list[Delta]:
        """One delta for each update of a sequence that has not ended, in order. Updates of others are ignored."""
        return [delta for update in updates if self.complete(delta := Delta(*msgspec.structs.astuple(update)))]

    def complete(self, delta: Delta) -> bool:
        """Adds the text, and the end where a stop string is complete. False if the sequence has ended or is unknown."""
        live = self._live.get(delta.request_id)
        if live is None or delta.index not in live.sequences:
            return False
        sequence = live.sequences[delta.index]
        if sequence is None:
            sequence = live.sequences[delta.index] = self._open(live.request)
        ended = delta.finish_reason is not None
        self._add_text(live, sequence, delta)
        if delta.finish_reason is not None:
            del live.sequences[delta.index]
            if not live.sequences:
                del self._live[delta.request_id]
            if not ended:
                # Stop strings are found here; the engine does not know them.
                whole = live.request.params.n == 1 or not live.sequences
                self._aborts.append(delta.request_id if whole else f"{delta.request_id}/{delta.index}")
        return True

    def take_aborts(self) -> list[str]:
        """Sequences ("id" or "id/index") that stop strings ended since the last call; the engine should abort them."""
        aborts, self._aborts = self._aborts, []
        return aborts

    @staticmethod
    def _add_text(live: _Live, sequence: _Open, delta: Delta) -> None:
        ids = delta.token_ids
        if ids and not sequence.count:
            sequence.first_token = time.time()
        if sequence.detokenizer is None:
            sequence.count += len(ids)
            return
        # The token that ended the output is not part of its text, unless stops are wanted there.
        shown = ids[:-1] if delta.finish_reason == "stop" and not live.request.params.include_stop_str_in_output else ids
        if sequence.stops is not None:
            _until_stop(live, sequence, shown, delta)
        else:
            sequence.count += len(ids)
            delta.text = sequence.detokenizer.push(shown)
            if delta.finish_reason is not None:
                delta.text += sequence.detokenizer.flush()


def _until_stop(live: _Live, sequence: _Open, shown: list[int], delta: Delta) -> None:
    """Adds the text of `shown` to `delta`, token by token; ends it at a stop string, with the tokens up to that one."""
    assert sequence.detokenizer is not None and sequence.stops is not None
    text, least = "", live.request.params.min_tokens
    for place, token in enumerate(shown, 1):
        # As in vLLM, a stop string that is complete before min_tokens does not count.
        safe, stop = sequence.stops.push(sequence.detokenizer.push((token,)), sequence.count + place > least)
        text += safe
        if stop is not None:
            _stop(live, sequence, delta, text, stop, place)
            return
    if delta.finish_reason is not None:
        safe, stop = sequence.stops.push(sequence.detokenizer.flush(), True)
        text += safe
        if stop is not None:
            _stop(live, sequence, delta, text, stop, len(delta.token_ids))
            return
        text += sequence.stops.flush()
    delta.text = text
    sequence.count += len(delta.token_ids)


def _stop(live: _Live, sequence: _Open, delta: Delta, text: str, stop: str, tokens: int) -> None:
    """Ends a sequence at a stop string that its `tokens`-th new token has completed."""
    delta.text = text
    delta.token_ids = delta.token_ids[:tokens]
    if delta.logprobs is not None:
        delta.logprobs = delta.logprobs[:tokens]
    delta.finish_reason, delta.stop_reason = "stop", stop
    if delta.timings is None:
        delta.timings = Timings(arrival=live.request.arrival, first_token=sequence.first_token, finished=time.time())
        first = sequence.first_token or delta.timings.finished
        # As seen from here: it ended by a stop string, and the engine's own timings come too late.
        delta.timings.phases = [0.0, 0.0, first - live.request.arrival, delta.timings.finished - first]


# -- vLLM's shapes


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    """1 is the most likely."""
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps of a request's events, time.time() in seconds; 0.0 where unknown."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float:
        return max(0.0, self.first_scheduled_time - self.arrival_time) if self.first_scheduled_time else 0.0


class CompletionOutput:
    """One continuation, as far as it has come."""

    __slots__ = ("_parts", "cumulative_logprob", "error", "finish_reason", "index", "logprobs", "message",
                 "stop_reason", "token_ids")

    def __init__(self, index: int, logprobs: bool = False) -> None:
        self.index = index
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.cumulative_logprob: float | None = 0.0 if logprobs else None
        self.logprobs: list[dict[int, Logprob]] | None = [] if logprobs else None
        """For each token: the chosen one first, then the most likely ones."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        """The error message, with finish_reason "error"."""
        self.message: Message | None = None
        """Of a chat: the text read by the model's dialect as content, reasoning and tool calls."""

    @property
    def text(self) -> str:
        # Joined on access, so that a long output is not copied for each of its tokens.
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: Delta, tokenizer: Tokenizer | None) -> None:
        if delta.text:
            self._parts.append(delta.text)
        self.token_ids += delta.token_ids
        if self.logprobs is not None and delta.logprobs:
            self.logprobs += [_entry(line, tokenizer) for line in delta.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(line.logprobs[0] for line in delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error

    def __repr__(self) -> str:
        return (f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
                f"cumulative_logprob={self.cumulative_logprob}, logprobs={self.logprobs}, "
                f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})")


@dataclass(slots=True)
class RequestOutput:
    """A request and its continuations, as far as they have come."""

    request_id: str
    prompt: str | None
    """The prompt's text, if it was given as text."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each prompt token, None for the first; None if not asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    """Prompt tokens that were not computed because the cache had them."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """`num_cached_tokens` by tier: device, host, disk, remote."""
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @classmethod
    def empty(cls, request: Request, prompt: str | None = None, tokenizer: Tokenizer | None = None) -> "RequestOutput":
        """Nothing generated yet. `tokenizer` gives the decoded_token of log probabilities."""
        logprobs = request.params.logprobs is not None
        outputs = [CompletionOutput(index, logprobs) for index in range(request.params.n)]
        metrics = RequestMetrics(arrival_time=request.arrival)
        return cls(request.id, prompt, request.prompt_ids, None, outputs, False, metrics, 0, tokenizer=tokenizer)

    def add(self, delta: Delta) -> None:
        self.outputs[delta.index].add(delta, self.tokenizer)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(_entry(line, self.tokenizer) for line in delta.prompt_logprobs)]
        if delta.index == 0 and delta.cached_tokens:
            self.num_cached_tokens, self.cached_by_tier = delta.cached_tokens, delta.cached_by_tier or {}
        if delta.timings is not None:
            self._time(delta.timings)
        if delta.finish_reason is not None:
            self.finished = all(output.finish_reason is not None for output in self.outputs)

    def _time(self, timings: Timings) -> None:
        """The request begins with the first of its sequences and ends with the last."""
        metrics = self.metrics
        for name, value in (("first_scheduled_time", timings.first_scheduled), ("first_token_time", timings.first_token)):
            known: float = getattr(metrics, name)
            if value and (not known or value < known):
                setattr(metrics, name, value)
        metrics.finished_time = max(metrics.finished_time, timings.finished)
        metrics.num_preemptions += timings.preemptions


@dataclass(slots=True)
class BeamSearchSequence:
    tokens: list[int]
    """The prompt's and the answer's; a token that ended it is left out unless `include_stop_str_in_output`."""
    logprobs: list[dict[int, Logprob]]
    """For each token of the answer, the one that ended it included."""
    cum_logprob: float
    text: str | None
    """Of `tokens`; None without a tokenizer."""
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]


def _entry(line: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    for token, logprob, rank in zip(line.ids, line.logprobs, line.ranks, strict=True):
        if token not in found:
            found[token] = Logprob(logprob, rank, tokenizer.token_text(token) if tokenizer is not None else None)
    return found
