"""The policy of promises: earliest deadline first, within what each tenant, and each class of a tenant, is owed.

Every tenant has a counter of the service that it had (virtual token counter: prompt and output tokens by what they cost), and
each of its classes one by its weight. A tenant that had more than the least served, beyond a tolerance, comes after all others;
among the others the earliest deadline of a first token is first. A tenant that comes back starts where the least served one is:
nothing is saved up. Waiting sequences gain on the others, and every deadline comes, so nobody waits for ever."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.errors import RequestError
from penstock.core.sequence import Sequence
from penstock.core.service import Service
from penstock.core.steptime import Load, StepTime
from penstock.scheduler.forecast import Forecast
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
    """One tenant of one class is served in the order of arrival, as by `FirstCome`, unless a prompt is so long that its promise
    is another."""

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
        """The class of a sequence."""
        return self.classes[sequence.request.tier]

    def arrive(self, sequence: Sequence) -> None:
        request, service = sequence.request, self.classes.get(sequence.request.tier)
        if service is None:
            raise RequestError(f"there is no class {request.tier!r}; possible: {', '.join(filter(None, self.classes))}",
                               param="service_tier", code="invalid_value")
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
