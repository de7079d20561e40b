"""The open requests of a frontend: whose they are, how far they have come, and the statistics that this gives."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import RequestError
from penstock.core.request import Request, Timings, Update
from penstock.core.sampling import MAX_OPEN_LIST_WORDS
from penstock.core.steptime import Lateness
from penstock.engine.ledger import ledger
from penstock.engine.outputs import Delta
from penstock.engine.stream import Stream
from penstock.observe.figures import Figures
from penstock.scheduler.admission import CHOICES

_ENDED = 200
"""Sequences that `Traffic.ended` remembers."""


class Progress:
    """Of one sequence: when its first and last tokens came, in time.monotonic(), and how many."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self, now: float) -> None:
        self.first = self.last = now
        self.tokens = 0


class Track:
    """Progress of one open request, for its stream and the statistics. Times are time.monotonic()."""

    __slots__ = ("arrived", "cached", "open", "queued", "request", "sequences", "stream")

    def __init__(self, request: Request, stream: Stream, now: float) -> None:
        self.request = request
        self.stream = stream
        self.arrived = now
        self.open = request.params.n
        """Sequences that have not ended."""
        self.sequences: dict[int, Progress] = {}
        """By index, from the first token on."""
        self.queued = self.cached = 0.0  # seconds in the queue, prompt tokens that the cache had


class Traffic:
    """The open requests by their ids. Used from one event loop."""

    def __init__(self) -> None:
        self.figures = Figures(1)
        self.ended: deque[dict[str, Any]] = deque(maxlen=_ENDED)
        """The sequences that ended last, for people who watch."""
        self._tracks: dict[str, Track] = {}
        self.tenant_tokens: Counter[str] = Counter()
        """Prompt tokens of each tenant's open requests."""
        self._gaps: Counter[tuple[float, int]] = Counter()
        """Tokens by when the one before came, and how many came at once."""
        self._step_tokens = 0
        self.delivery = Lateness()
        """Seconds of first tokens from the engine to their stream."""
        self._prompts = Counter[Stream]()
        """Open requests by the stream of their answers: the prompts of a client's request share one."""
        self._list_words = 0
        """The device memory used by the open requests' sampling parameters, in 4-byte words."""

    def __len__(self) -> int:
        return len(self._tracks)

    def get(self, name: str) -> Track | None:
        return self._tracks.get(name)

    @property
    def streams(self) -> set[Stream]:
        return set(self._prompts)

    def check_room(self, requests: Sequence[Request], most: int) -> None:
        """RequestError 503 if `most` requests are open, as the engine runs and queues, or CHOICES times as many prompts: one
        request must not keep others out. A busy engine refuses them itself; this bounds what one that hangs is sent."""
        words = sum(request.list_words for request in requests)
        if words > MAX_OPEN_LIST_WORDS:
            raise RequestError(f"bad_words, logit_bias and allowed_token_ids of all n sequences take {4 * words:,} bytes of "
                               f"device memory; at most {4 * MAX_OPEN_LIST_WORDS:,} are possible; send fewer, or a lower n",
                               param="n")
        if self._list_words + words > MAX_OPEN_LIST_WORDS:
            self.figures.refused += 1
            raise RequestError("the lists of other requests (bad_words, logit_bias, allowed_token_ids) take "
                               "all the device memory there is for them; try again in a moment", code="overloaded", status=503)
        if len(self._prompts) >= most or len(self) >= CHOICES * most:
            self.figures.refused += 1
            raise RequestError(f"{len(self._prompts)} requests with {len(self)} prompts are open; at most {most} with "
                               f"{CHOICES * most} run and wait (--max-num-queued-reqs); try again in a moment",
                               code="queue_full", status=503)

    def open(self, request: Request, stream: Stream, now: float) -> None:
        self._tracks[request.id] = Track(request, stream, now)
        self._prompts[stream] += 1
        self.tenant_tokens[request.tenant] += len(request.prompt_ids)
        self._list_words += request.list_words
        stream.open.add(request.id)
        stream.unconfirmed.add(request.id)
        stream.prompt_tokens += len(request.prompt_ids)

    def forget(self, name: str) -> Track:
        track = self._tracks.pop(name)
        self._prompts[track.stream] -= 1
        if not self._prompts[track.stream]:
            del self._prompts[track.stream]
        tenant = track.request.tenant
        self.tenant_tokens[tenant] -= len(track.request.prompt_ids)
        self._list_words -= track.request.list_words
        if not self.tenant_tokens[tenant]:
            del self.tenant_tokens[tenant]
        return track

    def count_update(self, update: Update, track: Track) -> None:
        """Counts what the engine says of a sequence beside its tokens."""
        if update.finish_reason == "error":
            self.figures.finished["error"] += 1
        self._step_tokens += len(update.token_ids)
        if update.token_ids and not update.index and not track.sequences:
            computed = len(track.request.prompt_ids) - update.cached_tokens
            self.figures.computed_prompts.observe(computed)
            self._step_tokens += computed
        track.cached = update.cached_tokens or track.cached
        timings = update.timings
        if timings is not None and timings.first_scheduled:
            track.queued = timings.first_scheduled - timings.arrival
            self.figures.ended(timings)

    def count_tokens(self, track: Track, delta: Delta, now: float) -> None:
        count = len(delta.token_ids)
        track.stream.output_tokens += count
        self.figures.generation_tokens += count
        sequence = track.sequences.get(delta.index)
        if sequence is None:
            if not track.sequences:
                track.stream.cached_tokens += delta.cached_tokens
            sequence = track.sequences[delta.index] = Progress(now)
            self.figures.first_token.observe(now - track.arrived)
        else:
            # Tokens of the same two steps have the same time between them.
            self._gaps[sequence.last, count] += count
            sequence.last = now
        sequence.tokens += count

    def count_step(self, now: float) -> None:
        """Counts the tokens of a step, and the times between them and those of earlier ones."""
        if self._step_tokens:
            self.figures.step_tokens.observe(self._step_tokens)
            self._step_tokens = 0
        for (last, count), tokens in self._gaps.items():
            self.figures.between_tokens.observe((now - last) / count, tokens)
        self._gaps.clear()

    def count_end(self, track: Track, delta: Delta, now: float) -> None:
        """Counts a sequence that has ended, and gives its last delta the ledger of its time."""
        figures, stream = self.figures, track.stream
        sequence = track.sequences.get(delta.index) or Progress(now)
        tokens = sequence.tokens
        reason = delta.finish_reason or "stop"
        track.open -= 1
        stream.ends[reason] = None
        delta.ledger = stream.ledger = ledger(delta.timings or Timings(track.request.arrival))
        stream.ledger_at = time.time()
        figures.finished[reason] += 1
        figures.end_to_end.observe(now - track.arrived)
        figures.output_lengths.observe(tokens)
        past = stream.ledger_at - now
        if delta.timings is not None and delta.timings.first_token and tokens:
            self.delivery.took(max(0.0, past + sequence.first - delta.timings.first_token))
        self.ended.append({"id": delta.request_id, "arrival": past + track.arrived, "queued": track.queued,
                           "first": past + sequence.first, "finished": past + now, "output": tokens,
                           "prompt": len(track.request.prompt_ids), "cached": int(track.cached),
                           "priority": track.request.priority, "reason": reason})
        if tokens > 1:
            figures.per_token.observe((now - sequence.first) / (tokens - 1))
