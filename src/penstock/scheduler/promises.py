"""The policy of promises: earliest deadline first, within what each tenant, and each class of a tenant, is owed.

Every tenant has a counter of the service that it had (virtual token counter: prompt and output tokens by what they cost), and
each of its classes one by its weight. A tenant that had more than the least served, beyond a tolerance, comes after all others;
among the others the earliest deadline of a first token is first. A tenant that comes back starts where the least served one is:
nothing is saved up. Waiting sequences gain on the others, and every deadline comes, so nobody waits for ever.

`Forecast` says when a request would have its first token, and refuses those whose promise cannot be kept. Its rates are those
at which prompts were computed and admitted while somebody was left waiting; until then, those of the model of step time."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.errors import RequestError
from penstock.core.request import Sequence
from penstock.core.service import Service
from penstock.core.steptime import Lateness, Load, StepTime
from penstock.scheduler.pace import SOON
from penstock.scheduler.policy import POLICIES, Key, Order, Policy, Standing
from penstock.scheduler.step import InFlight

_LENIENT = 25.0
"""Tolerance between the classes of a tenant, in multiples of that between tenants: shares bind in the long run only."""
_ALONE = 4.0
"""A promise is no shorter than this many times what a prompt takes alone: no order could keep it."""
_PATIENCE = 600.0
"""Deadline, in seconds, of a class that promises nothing: the longest that others may go before it."""
_AGAIN = 3.0
"""A promise that was broken is renewed for this many times its length: those that can still be kept go first."""
_OUTPUT = 4.0
"""Cost of an output token in prompt tokens, until the model of step time knows."""
_FULL = 0.75
"""Part of a promise between tokens that a step without prompts may take: they need the rest."""
_SLOWER, _KEPT, _SPARE = 0.01, -0.00004, 0.15
"""Change of the part of a promise between tokens that is kept free, for each answer that was slower and not: it comes to rest
where one of 250 is. The most of it: where steps are too long for other reasons, shorter prompts in them would only cost."""
_URGENT = 5
"""Steps before a prompt must start at which others make room for it."""


@dataclass(slots=True)
class _Account:
    """The service that a tenant, or one of its classes, had: tokens by weight, and its sequences that have not ended."""

    had: float = 0.0
    live: int = 0


class Promises(Policy):
    """One tenant of a class is served in order of arrival, as by `FirstCome`, but for long prompts of other promises."""

    def __init__(self, classes: dict[str, Service], times: StepTime, tolerance: float) -> None:
        """`tolerance`: tokens by which one may be ahead of the least served without losing its turn."""
        self.classes = classes
        self._times = times
        self._tolerance, self._lenient = tolerance, _LENIENT * tolerance
        self._tenants: dict[str, _Account] = {}
        self._shares: dict[str, dict[str, _Account]] = {}
        """By tenant, then class."""
        self._floor = 0.0
        self._weights: list[float] = []
        """Of the model of step time, by which `_output_cost` was computed."""
        self._output_cost = _OUTPUT
        self._following: Counter[str] = Counter()
        """Prompts behind the first of each batch."""
        self._forecast = Forecast(classes, times)
        self._spare = dict.fromkeys(classes, 0.0)
        """Part of promises between tokens that steps leave free, by class, as answers have been found to keep them."""

    def service(self, sequence: Sequence) -> Service:
        return self.classes[sequence.request.tier]

    def arrive(self, sequence: Sequence) -> None:
        request, service = sequence.request, self.classes.get(sequence.request.tier)
        if service is None:
            raise RequestError(f"there is no class {request.tier!r}; possible: {', '.join(filter(None, self.classes))}",
                               param="service_tier")
        alone = self._times.prompt(sequence.prompt_len)
        promised = _PATIENCE  # of a class that promises nothing: the order of arrival
        if math.isfinite(service.ttft):
            promised = min(max(service.ttft, _ALONE * alone), _PATIENCE + alone)
        if request.follows:
            # The prompts of a batch are computed one after another, so that others come in between.
            self._following[request.follows] += 1
            promised += alone * self._following[request.follows]
        sequence.promise = request.arrival + promised - min(request.beside, promised / 2)
        sequence.stretched = _ALONE * alone > service.ttft
        if request.deadline:
            sequence.promise = min(sequence.promise, request.deadline)
        tenant = self._tenants.setdefault(request.tenant, _Account())
        share = self._shares.setdefault(request.tenant, {}).setdefault(request.tier, _Account())
        for account, others in ((tenant, self._tenants), (share, self._shares[request.tenant])):
            if not account.live:
                account.had = max(account.had, _least(others.values(), account.had))
            account.live += 1

    def admit(self, sequence: Sequence, now: float, running: Order, waiting: Order, taken: bool, free: bool) -> None:
        reading, due = 0, dict[str, tuple[int, int]]()
        if not free:
            for group in waiting.groups:
                if self.classes[group.partition("\n")[0]].ttft > self.service(sequence).ttft:
                    first = waiting.before(group, self.key(sequence))
                    found = [s.prompt_len for s in first if not (s.index or s.request.follows or s.stretched)]
                    due[group] = sum(found), len(found)
            before = [s for s in running if s.goal > s.planned + 1 and s.promise <= sequence.promise]
            reading, long = (sum(s.goal - s.planned for s in before if s.stretched == one) for one in (False, True))
            # Long prompts leave half of each step to one that is not.
            reading += long if sequence.stretched else min(long, sequence.prompt_len)
            taken = taken and not any(self.expendable(s, sequence) for s in running)
        self._forecast.check(sequence, self.group(sequence), now, reading, due, free, taken, self._credit(sequence))

    def waits(self, sequence: Sequence, change: int) -> None:
        self._forecast.waits(sequence, self.group(sequence), change)

    def planned(self, step: InFlight, now: float, entered: int, waiting: bool) -> None:
        self._forecast.planned(step, now, entered, waiting)

    def begun(self, sequence: Sequence, now: float) -> None:
        self._forecast.begun(sequence, now)

    def end(self, sequence: Sequence) -> None:
        tenant, tier = sequence.request.tenant, sequence.request.tier
        gaps, promised = sequence.known - sequence.prompt_len - 1, self.classes[tier].tpot
        if gaps > 0 and promised is not None:
            slower = sequence.timings.finished - sequence.timings.first_token > gaps * promised
            self._spare[tier] = min(_SPARE, max(0.0, self._spare[tier] + (_SLOWER if slower else _KEPT)))
        if sequence.request.follows:
            self._following -= Counter([sequence.request.follows])
        self._forecast.ended += sequence.row >= 0
        self._tenants[tenant].live -= 1
        self._shares[tenant][tier].live -= 1
        if not self._tenants[tenant].live and len(self._tenants) > 1 and self._tenants[tenant].had <= self._floor:
            # It would come back at the floor in any case.
            del self._tenants[tenant], self._shares[tenant]

    def begin(self) -> None:
        self._floor = _least(self._tenants.values(), self._floor)
        times, weights = self._times, self._times.weights
        if weights is not self._weights:
            self._weights, prompt = weights, times.slope(2048)
            # A row of decode beside others, of 1,000 tokens, in tokens of a prompt that fills a step.
            row = times.slope(64) + weights[2] + 1000 * weights[3]
            self._output_cost = min(16.0, max(1.0, row / prompt)) if prompt else _OUTPUT

    def group(self, sequence: Sequence) -> str:
        return f"{sequence.request.tier}\n{sequence.request.tenant}"

    def standing(self, group: str) -> Standing:
        tier, _, name = group.partition("\n")
        ahead, shares = self._tenants[name].had - self._floor, self._shares[name]
        owed = 0.0
        if len(shares) > 1:
            # In tokens of the class that had most. The owed class itself comes first: were the leader put last instead, a third
            # class with earlier deadlines would take what the leader leaves.
            most, weight = max((share.had, self.classes[other].weight) for other, share in shares.items() if share.live)
            owed = max(0.0, (most - shares[tier].had) * weight - self._lenient)
        return ahead if ahead > self._tolerance else 0.0, -owed

    def _credit(self, sequence: Sequence) -> float:
        """Tokens by which the class may still get ahead of the least served of its tenant."""
        tier, shares = sequence.request.tier, self._shares[sequence.request.tenant]
        lead = shares[tier].had - _least(shares.values(), shares[tier].had)
        return max(0.0, self._lenient - lead * self.classes[tier].weight)

    def key(self, sequence: Sequence) -> Key:
        return sequence.request.priority, sequence.promise, sequence.request.arrival, sequence.index

    def charge(self, sequence: Sequence, positions: int) -> None:
        cost = positions if sequence.planned < sequence.prompt_len else positions * self._output_cost
        self._charge(sequence.request.tenant, sequence.request.tier, cost)

    def charge_each(self, sequences: list[Sequence]) -> None:
        if len(self._tenants) == 1 and len(next(iter(self._shares.values()))) == 1:
            if sequences:
                request = sequences[0].request
                self._charge(request.tenant, request.tier, len(sequences) * self._output_cost)
            return
        counts = Counter((sequence.request.tenant, sequence.request.tier) for sequence in sequences)
        for (tenant, tier), count in counts.items():
            self._charge(tenant, tier, count * self._output_cost)

    def _charge(self, tenant: str, tier: str, cost: float) -> None:
        self._tenants[tenant].had += cost
        self._shares[tenant][tier].had += cost / self.classes[tier].weight

    def share(self, sequence: Sequence, budget: int, unread: int, head: Sequence | None) -> int:
        """A long prompt leaves half of the budget to others; any leaves all but a little if `head` is due earlier."""
        others = unread - (sequence.goal - sequence.planned)
        earlier = head is not None and head.promise < sequence.promise
        if others <= 0 or not (earlier or sequence.stretched):
            return budget
        return max(budget - others, budget // 8 if earlier else budget // 2)

    def late(self, sequence: Sequence, now: float) -> bool:
        ttft, own = self.service(sequence).ttft, self._own(sequence)
        if now + own <= sequence.promise or sequence.known > sequence.prompt_len or not math.isfinite(ttft):
            return False
        sequence.promise = now + _AGAIN * ttft
        self._forecast.begun(sequence, now + own)
        return True

    def urgent(self, sequence: Sequence, now: float, decode: Load) -> bool:
        service, least = self.service(sequence), self._own(sequence) + _URGENT * self._times.seconds(decode)
        return not service.preemptible and sequence.promise - now < max((1 - SOON) * service.ttft, least)

    def _own(self, sequence: Sequence) -> float:
        """Predicted seconds to compute what a sequence has left to read, with nothing beside it."""
        return self._times.prompt(sequence.goal - sequence.planned)

    def expendable(self, sequence: Sequence, head: Sequence | None = None) -> int:
        if sequence.known <= sequence.mark:
            return 0
        service = self.service(sequence)
        if head is not None and service.weight >= self.service(head).weight:
            return 0
        return 2 if service.preemptible else int(head is None)

    def rank(self, sequence: Sequence) -> float:
        return -self.service(sequence).weight

    def tightest(self, groups: Iterable[str]) -> float | None:
        tiers = [group.partition("\n")[0] for group in groups]
        found = [self.classes[tier].tpot for tier in tiers]
        promised = [(1 - self._spare[tier]) * tpot for tier, tpot in zip(tiers, found, strict=True)
                    if tpot is not None and tpot < math.inf]
        return min(promised) if promised else (math.inf if found and None not in found else None)

    def bearable(self, load: Load, tightest: float | None) -> bool:
        if tightest is None or not self._times.known or load.segments == 1:
            return True
        one = Load(1, 1, load.read / load.segments)
        return self._times.seconds(load) <= _FULL * tightest or self._times.seconds(one) > _FULL * tightest


def policy_of(name: str, classes: dict[str, Service], times: StepTime, tokens: int) -> Policy:
    """The policy that the option `scheduling_policy` names; `tokens` is the most of a step."""
    return Promises(classes, times, 2 * tokens) if name == "promises" else POLICIES[name]()


def _least(accounts: Iterable[_Account], default: float) -> float:
    return min((account.had for account in accounts if account.live), default=default)


_MARGIN, _MOST = 0.1, 0.5
"""Part of a promise that is kept free for errors of forecasts, at least and at most."""
_GAIN = 1 / 128
"""Weight of the newest error."""
_NARROWEST, _WIDEST = 3.0, 12.0
"""Mean deviations that are kept free above the mean error, at least and at most."""
_IF_BROKEN, _IF_KEPT = 0.5, -0.00125
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
            errors, wider = self._lateness(sequence), _IF_KEPT if now <= sequence.promise else _IF_BROKEN
            errors.took(max(0.0, now - sequence.forecast))
            errors.deviations = min(_WIDEST, max(_NARROWEST, errors.deviations + wider))
            sequence.forecast = 0.0

    def _lateness(self, sequence: Sequence) -> Lateness:
        return self._errors[sequence.request.tier, sequence.stretched]

    def planned(self, step: InFlight, now: float, entered: int, waiting: bool) -> None:
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
        """Predicted seconds to a new request's first token, waiting for long prompts if its own is one; `reading`: the running
        ones' prompt tokens left; `due`: prompt tokens and number of those due before it, by group of classes that promise
        later; `taken`: all rows are, and none is given up; `credit`: tokens of its class before others are owed any."""
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
        """The service that classes due earlier, which go on coming, leave to this one: at least its share by weight."""
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
                           f"{promised + beside:.2f} s, less {promised - usable:.2f} s for errors; try again later, or send "
                           "x-penstock-wait: true to wait", code="overloaded", status=429, retry=max(1.0, late - usable))


def _fair(ahead: Counter[str], mine: str) -> int:
    """The work ahead of a tenant. Tenants are served by turns: nobody waits for more of another's work than of its own."""
    return min(ahead.total(), ahead[mine] * len(ahead))
