"""The forecast: when a request would have its first token, and the refusal of those whose promise cannot be kept.

The rates are those at which prompts were computed and admitted while somebody was left waiting; until then, those of the model
of step time."""

import math
from collections import Counter

from penstock.core.errors import RequestError
from penstock.core.lateness import Lateness
from penstock.core.sequence import Sequence
from penstock.core.service import Service
from penstock.core.steptime import StepTime
from penstock.scheduler.step import InFlight

_MARGIN, _MOST = 0.1, 0.5
"""Part of a promise that is kept free for errors of forecasts, at least and at most."""
_GAIN = 1 / 128
"""Weight of the newest error."""
_NARROWEST, _WIDEST = 3.0, 12.0
"""Mean deviations that are kept free above the mean error, at least and at most."""
_BROKEN, _KEPT = 0.5, -0.00125
"""Change of their number for each promise that was broken and kept: it comes to rest where one of 400 is broken."""
_LEAST = 0.5
"""Seconds of waiting after which the rate of prompts counts."""
_TURNOVER = 30.0
"""Seconds over which the rate is averaged at which rows become free."""
_MEMORY = 3.0
"""Seconds of waiting over which the rates are averaged."""


class Forecast:
    """Counts those who wait, and learns rates from plans; asked once for each request."""

    def __init__(self, classes: dict[str, Service], times: StepTime) -> None:
        self._classes = classes
        self._times = times
        self.waiting: Counter[str] = Counter()
        """Requests that wait, by group: class, line feed, tenant."""
        self.unread: Counter[str] = Counter()
        """Their prompt tokens."""
        self._first: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        """The same without long prompts, which let others go first."""
        self._seconds = self._entered = 0.0
        self._tokens = dict.fromkeys(classes, 0.0)
        """Prompt tokens by class."""
        self._last = 0.0
        self.ended = self._span = self._at = 0.0
        """Sequences that have left rows, in so many seconds, and the time of the latest plan."""
        self._errors = {(name, long): Lateness(_GAIN, _MARGIN / 4 * min(service.ttft, 30.0))
                        for name, service in classes.items() for long in (False, True)}
        """By how much first tokens came later than forecast, by class, of long prompts apart."""

    def waits(self, sequence: Sequence, group: str, change: int) -> None:
        """As `Policy.waits`. Further choices and prompts of a request do not count: they let others go first."""
        if sequence.index or sequence.request.follows:
            return
        self.waiting[group] += change
        self.unread[group] += change * sequence.prompt_len
        if not sequence.stretched:
            self._first[group] += change
            self._unread[group] += change * sequence.prompt_len
        if not self.waiting[group]:
            del self.waiting[group], self.unread[group], self._first[group], self._unread[group]

    def begun(self, sequence: Sequence, now: float) -> None:
        """Learns from the forecast of a sequence that has its first token now, or will have it then."""
        if sequence.forecast:
            errors, wider = self._lateness(sequence), _KEPT if now <= sequence.promise else _BROKEN
            errors.took(max(0.0, now - sequence.forecast))
            errors.deviations = min(_WIDEST, max(_NARROWEST, errors.deviations + wider))
            sequence.forecast = 0.0

    def _lateness(self, sequence: Sequence) -> Lateness:
        return self._errors[sequence.request.tier, sequence.stretched]

    def planned(self, step: InFlight, now: float, entered: int, waiting: bool) -> None:
        """As `Policy.planned`."""
        self._span += min(1.0, now - self._at)
        self._at = now
        if self._span > 2 * _TURNOVER:
            self._span, self.ended = self._span / 2, self.ended / 2
        waiting = waiting and self._first.total() > 0  # long prompts wait for their part of steps, not for others
        if not (waiting or self._last):
            return
        seconds = now - self._last if self._last else 0.0
        self._last = now if waiting else 0.0
        if seconds > 0:
            keep = math.exp(-seconds / _MEMORY)
            self._seconds = keep * self._seconds + seconds
            for tier in self._tokens:
                self._tokens[tier] *= keep
            for sequence, count in zip(step.sequences, step.counts, strict=True):
                if sequence.planned < sequence.prompt_len:
                    self._tokens[sequence.request.tier] += count
            self._entered = keep * self._entered + entered

    def seconds(self, sequence: Sequence, reading: int, due: dict[str, tuple[int, int]], taken: bool, credit: float) -> float:
        """Predicted seconds to the first token of a new request, which waits for long prompts if its own is one; `reading`:
        prompt tokens left of the running sequences; `due`: prompt tokens and number of those who wait and are due before it, by
        group of classes that promise later; `taken`: all rows are, and none would be given up; `credit`: tokens that its class
        may have before others are owed any."""
        request = sequence.request
        own, service = len(request.prompt_ids), self._classes[request.tier]
        waiting, unread = (self.waiting, self.unread) if sequence.stretched else (self._first, self._unread)
        tokens, entries, later = Counter[str](), Counter[str](), list[tuple[float, str, int, int]]()
        for group, count in waiting.items():
            tier, _, tenant = group.partition("\n")
            other = self._classes[tier]
            if other.ttft > service.ttft:
                first, many = due.get(group, (0, 0))
                later.append((other.weight / service.weight, tenant, unread[group] - first, count - many))
            else:
                first, many = unread[group], count
            tokens[tenant] += first
            entries[tenant] += many
        # Classes that are due later get their share once this one has used its credit.
        beyond = max(0.0, 1 - credit / max(1, own + tokens.total()))
        for ratio, tenant, left, count in later:
            tokens[tenant] += int(min(left, beyond * ratio * tokens[tenant]))
            entries[tenant] += int(min(count, beyond * ratio * entries[tenant]))
        alone = self._times.prompt(own) + taken * self._span / max(1.0, self.ended)
        if not entries:
            return alone + self._times.prompt(reading)
        ahead = _fair(tokens, request.tenant)
        part, done = self._part(service), sum(self._tokens.values())
        # Where none has entered for so long, another will not for as long again.
        rows = _fair(entries, request.tenant) * self._seconds / max(1.0, part * self._entered)
        if self._seconds < _LEAST or not done:
            return alone + max(rows, self._times.prompt(ahead + reading))
        return alone + max((ahead + reading) * self._seconds / (part * done), rows)

    def _part(self, service: Service) -> float:
        """The part of the service that classes which are due earlier leave to this one: they go on coming while it waits. At
        least its share by weight."""
        later = sum(done for tier, done in self._tokens.items() if self._classes[tier].ttft >= service.ttft)
        weights = sum(self._classes[tier].weight for tier, done in self._tokens.items() if done)
        return max(later / max(1.0, sum(self._tokens.values())), service.weight / max(service.weight, weights))

    def check(self, sequence: Sequence, group: str, now: float, reading: int, due: dict[str, tuple[int, int]], free: bool,
              taken: bool, credit: float) -> None:
        """RequestError 429 if the queue of the request's class or tenant is full, or if its promise cannot be kept; with the
        seconds after which it probably could. `free`: nobody waits and there are rows; the others: as for `seconds`."""
        request, service = sequence.request, self._classes[sequence.request.tier]
        late = 0.0 if free else now + self.seconds(sequence, reading, due, taken, credit) - request.arrival
        mine = self.waiting[group]
        many = sum(count for other, count in self.waiting.items() if other.startswith(f"{request.tier}\n"))
        most = service.queue if not request.tenant else service.tenant_queue or max(1, service.queue // 2)
        for count, limit, whose in ((many, service.queue, "all"), (mine, most, "your key's")):
            if count >= limit:
                raise RequestError(f"{count} of {whose} requests of the class {request.tier!r} are waiting, which is the most; "
                                   "try again later, or use another class", code="queue_full", status=429,
                                   retry=max(1.0, late / 2))
        promised = sequence.promise - request.arrival
        usable = promised - min(_MOST * promised, max(_MARGIN * promised, self._lateness(sequence).late))
        if not (free or request.waits):
            sequence.forecast = request.arrival + late
        if free or request.waits or not (request.deadline or math.isfinite(service.ttft)) or late <= usable:
            return
        # Neither has what the frontend takes, which a client knows nothing of.
        beside = min(request.beside, promised)
        raise RequestError(f"the first token would come after about {late + beside:.2f} s; the class {request.tier!r} promises "
                           f"{promised + beside:.2f} s, less {promised - usable:.2f} s for errors; try "
                           "again later, or send x-penstock-wait: true to wait",
                           code="overloaded", status=429, retry=max(1.0, late - usable))


def _fair(ahead: Counter[str], mine: str) -> int:
    """The work ahead of a tenant. Tenants are served by turns: nobody waits for more of another's work than of its own."""
    return min(ahead.total(), ahead[mine] * len(ahead))
