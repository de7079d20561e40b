"""Admission: refuses requests that can never run or that find the queue full, and lets waiting sequences overtake others.

A refusal says what would be accepted. Waiting sequences enter in the policy's order. Later sequences that fit may overtake one
without room for its known context, but only `PASSES` times, so that no sequence starves. A sequence that waits for another's
prefill (`cache/joining.py`) or for pages being loaded does not block others."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.cache.manager import Reuse
from penstock.core.errors import RequestError
from penstock.core.request import PHASES, Request, Sequence
from penstock.core.steptime import Load
from penstock.scheduler.policy import victim
from penstock.scheduler.queues import Queues
from penstock.scheduler.shares import Shares
from penstock.scheduler.step import InFlight

PASSES = 32
"""Maximum number of later sequences that may overtake a sequence without room."""

TRIES = 8
"""Maximum number of sequences without room tried per step, because each try costs a cache lookup."""

_CACHE = PHASES.index("cache")

CHOICES = 16
"""Sequences that may wait, for each request that may: some hundred bytes each."""


@dataclass(frozen=True)
class Limits:
    """Limits of the scheduler. A chunk is never longer than `max_num_batched_tokens`."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued: int
    vocab_size: int
    max_adapters: int = 0
    """Adapters that the device holds at once."""
    step_target: float | None = None
    """Target step time in seconds while sequences decode; None: prompts are not cut into chunks for it."""
    whole: bool = False
    """A prompt enters a step as a whole."""
    stages: int = 1
    """Pipeline stages, each of which computes another step."""
    exact: bool = False
    """Whether plans say exactly where segments start: a sequence waits for the result of the drafts that are verified."""


class Admission:
    """Checks a request against the limits and the arena, and gives rows to those that wait."""

    def __init__(self, limits: Limits, queues: Queues) -> None:
        self.limits = limits
        self._queues = queues
        self.longest = min(limits.max_model_len, queues.cache.layout.longest(limits.max_num_batched_tokens) + 1)
        """Prompt plus output that one request can have; the last token of all needs no cache entry."""

    def check(self, request: Request) -> int:
        """Returns the maximum tokens, prompt included, of each of the request's sequences. RequestError if the request can
        never run, or if `max_queued` requests wait beside those for whom there are rows, or CHOICES times as many sequences.

        A request counts once, however many choices and prompts it has: a few with 128 choices must not keep all others out."""
        prompt = len(request.prompt_ids)
        if prompt == 0:
            raise RequestError("the prompt has no tokens", param="prompt")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.limits.vocab_size:
            raise RequestError(f"the prompt names a token outside the vocabulary (0 to {self.limits.vocab_size - 1})",
                               param="prompt")
        if prompt >= self.longest:
            raise RequestError(f"the prompt has {prompt} tokens; with one token of output the most is {self.longest - 1}",
                               param="prompt", code="context_length_exceeded")
        limit = prompt + (1 if request.pool is not None else request.params.max_tokens or self.longest - prompt)
        if limit > self.longest:
            raise RequestError(f"the prompt has {prompt} tokens and max_tokens is {request.params.max_tokens}; at most "
                               f"{self.longest} fit together, so max_tokens can be {self.longest - prompt}",
                               param="max_tokens", code="context_length_exceeded")
        # Free rows do not help sequences that wait for pages.
        waiting, sequences = len(self._queues.asking), len(self._queues.waiting)
        free_rows, most = 0 if self._queues.crowded else len(self._queues.rows), self.limits.max_queued
        if (waiting >= most + free_rows or sequences >= CHOICES * most + free_rows) and not (request.part or request.follows):
            raise RequestError(f"{waiting} requests with {sequences} answers are waiting and at most {most} may, with "
                               f"{CHOICES * most} (--max-num-queued-reqs); try again later", code="queue_full", status=503)
        return limit

    def check_held(self, request: Request, waiting: int, what: str) -> None:
        """As `check`, of a request that first waits elsewhere for `what`, behind so many `waiting` ones."""
        self.check(request)
        if waiting >= self.limits.max_queued:
            raise RequestError(f"{waiting} requests are waiting for their {what} and at most {self.limits.max_queued} may "
                               "(--max-num-queued-reqs); try again later", code="queue_full", status=503)

    def make_way(self, now: float, decode: Load) -> None:
        """Renews broken promises of waiting ones, and preempts where there is no room: a lower class's sequence for one that
        must start now, and those of requests with more than their share of the rows. `decode`: of the latest step."""
        queues, policy = self._queues, self._queues.policy
        if not queues.waiting:
            return
        for first in queues.waiting.heads():
            if policy.late(first, now):
                queues.waiting.changed(first)
        head = next(iter(queues.waiting))
        if queues.rows and not queues.crowded:
            return
        if policy.urgent(head, now, decode):
            lower = victim(policy, list(queues.running), head)
            if lower is not None:
                queues.preempt(lower, now)
        shares = Shares(queues)
        # Thousands may wait: they are looked through only where somebody has too many rows.
        if not (shares.above() and (below := shares.below())):
            return
        needy = [s for s in queues.waiting if s.request.owner in below and s.phase != _CACHE]
        for head in needy[:max(len(needy) - len(queues.rows), int(queues.crowded))]:
            for loser in shares.above():
                if loser.known > loser.mark and policy.rank(head) <= policy.rank(loser):
                    queues.preempt(loser, now)
                    break

    def taken(self) -> bool:
        """Whether no row is free, and no request would give one to another that came now."""
        return not self._queues.rows and not Shares(self._queues, 1).above()

    def _in_turn(self, blocked: list[Sequence], held: set[str]) -> Iterator[Sequence]:
        """Waiting sequences in order, but those whose request has its share of the rows after others that are as important, and
        not if one of these was `blocked`, or `held` until a step has room for it. No further ones of a request that is held."""
        rank, shares, later = self._queues.policy.rank, Shares(self._queues), list[Sequence]()
        all_in_order = not (below := shares.below())
        for sequence in self._queues.waiting:
            owner = sequence.request.owner
            if owner in held:
                continue
            if owner in below and shares.left(owner) <= 0:
                below.remove(owner)
            if not (all_in_order or owner in below):
                later.append(sequence)
                continue
            while later and rank(later[0]) < rank(sequence):
                yield later.pop(0)
            yield sequence
        yield from later if not (blocked or held) else ()

    def admit(self, step: InFlight, budget: int, now: float) -> int:
        """Admits waiting sequences to rows and to the step. Returns what is left of the budget."""
        queues, policy = self._queues, self._queues.policy
        blocked, held, tries, load, full, closed = list[Sequence](), set[str](), 0, step.decode, False, False
        for sequence in self._in_turn(blocked, held) if queues.rows and queues.waiting else ():
            later = step.later(sequence)
            most = step.part if later else budget
            if later and not most:
                held.add(sequence.request.owner)
                continue
            if not queues.rows or most <= 0:
                break
            # Preempted with a token still in flight: it re-enters only when all of its tokens are known.
            if any(sequence in flying.lost for flying in queues.in_flight) or queues.cornered not in (None, sequence):
                continue
            waits = queues.cache.must_wait(sequence)
            if waits != (sequence.phase == _CACHE) and not sequence.timings.preemptions:
                sequence.enter("cache" if waits else "queued", now)
            if waits:
                continue
            adapter = sequence.request.adapter
            if adapter and (closed or not queues.adapters.has_room(adapter)):
                # It holds up no others, until it was passed so often that those with adapters must leave it a slot.
                blocked.append(sequence)
                closed = closed or sequence.passed >= PASSES
                continue
            load = Load(load.segments + 1, load.tokens + 1, load.read + sequence.prompt_len)
            full = not policy.bearable(load, step.tightest)
            if full:
                break
            count = self._find_room(sequence, most)
            if not count:
                blocked.append(sequence)
                tries += 1
                if tries >= TRIES or sequence.passed >= PASSES:
                    break
                continue
            for passed in blocked:
                passed.passed += 1
            queues.enter(sequence, now)
            step.add(sequence, count)
            policy.charge(sequence, count)
            step.part -= count * later
            budget -= count * (not later)
        queues.crowded = bool(blocked) or full
        return budget

    def _find_room(self, sequence: Sequence, budget: int) -> int:
        """Allocates pages for the first segment of a waiting sequence beyond its prefix hit, and returns its length; 0 if its
        whole known context does not fit now. A sequence that is alone always fits: everything unused is evicted for it."""
        queues, forked = self._queues, bool(sequence.pages)
        if queues.running:
            count = self._reserve(sequence, budget, Reuse.TOKENS)
            if count or forked:
                return count
        else:
            for reuse in (Reuse.NOTHING,) if sequence is queues.cornered else Reuse:
                count = self._reserve(sequence, budget, reuse)
                if count:
                    return count
                while queues.shed():
                    pass
                queues.cache.release(sequence)
        queues.cache.release(sequence)
        sequence.planned = sequence.computed = 0
        return 0

    def _reserve(self, sequence: Sequence, budget: int, reuse: Reuse) -> int:
        """Reserves a row and the pages of the first segment. Returns the segment's length, 0 if there is no room."""
        queues, cache = self._queues, self._queues.cache
        sequence.planned = sequence.computed = cache.match(sequence, reuse)
        sequence.row = queues.rows[-1]
        left = sequence.goal - sequence.planned
        count = cache.chunk(sequence, min(left, budget))
        room = (count == left or not self.limits.whole) and (not queues.running or cache.has_room(sequence, sequence.goal))
        if room and cache.grow(sequence, sequence.planned + count):
            return count
        sequence.row = -1
        return 0
