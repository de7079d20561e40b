"""The places of sequences: waiting in the policy's order, running in a row, or in a plan in flight. Rows that are taken and
left are collected here for the next plan. `admission.py` and `batch.py` decide who moves."""

from collections import Counter, deque

from penstock.cache.manager import Cache
from penstock.core.plan import Enter, StepPlan
from penstock.core.request import EngineStats, Sequence
from penstock.scheduler.policy import Order, Policy
from penstock.scheduler.step import InFlight


class Slots:
    """`count` slots, numbered from 1; 0 stands for no adapter."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._slot: dict[str, int] = {}
        """By adapter, least recently used first."""
        self._held: Counter[str] = Counter()

    def has_room(self, adapter: str) -> bool:
        """Whether `take` would find a slot."""
        return not adapter or adapter in self._slot or bool(self._free) or len(+self._held) < len(self._slot)

    def take(self, adapter: str) -> tuple[int, bool]:
        """The slot of an adapter for one more sequence, and whether it has to be filled first. There must be room."""
        if not adapter:
            return 0, False
        filled = adapter in self._slot
        if not filled and not self._free:
            self.forget(next(name for name in self._slot if not self._held[name]))
        self._slot[adapter] = slot = self._slot.pop(adapter, 0) or self._free.pop()
        self._held[adapter] += 1
        return slot, not filled

    def give(self, adapter: str) -> None:
        """One sequence less uses the adapter, which stays in its slot."""
        if adapter:
            self._held[adapter] -= 1

    def forget(self, adapter: str) -> None:
        """Frees the slot of an adapter that no sequence uses."""
        assert not self._held[adapter], adapter
        slot = self._slot.pop(adapter, 0)
        if slot:
            self._free.append(slot)


class Queues:
    """Moves sequences between waiting and running. Rows and pages of those that leave are free at once."""

    def __init__(self, cache: Cache, policy: Policy, rows: int, max_adapters: int, stats: EngineStats) -> None:
        self.cache = cache
        self.policy = policy
        self.waiting = Order(policy)
        self.running = Order(policy)
        self.in_flight: deque[InFlight] = deque()
        self.rows = list(range(rows - 1, -1, -1))
        """Free rows; the last is taken next."""
        self.adapters = Slots(max_adapters)
        self.held: Counter[str] = Counter()
        """Rows by the owner of the request (`Request.owner`)."""
        self.asking: Counter[str] = Counter()
        """Waiting sequences by the owner of the request."""
        self.ranks: dict[str, float] = {}
        """Of all owners of rows or waiting sequences, by the policy."""
        self.coming = 0
        """Requests of a batch that its caller still holds back, so that the first of them run already."""
        self.crowded = False
        """Whether a waiting sequence found no room in the last admission."""
        self.cornered: Sequence | None = None
        """A sequence without pages though it ran alone, as its shared ones take too many slabs: it runs first, and unshared."""
        self.entered: list[Enter] = []
        """For the next plan, as are the next two."""
        self._left: list[int] = []
        self._filled: list[tuple[int, str]] = []
        self._stats = stats

    def wait(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
        self.asking[sequence.request.owner] += 1
        self.ranks[sequence.request.owner] = self.policy.rank(sequence)
        self.policy.waits(sequence, 1)

    def enter(self, sequence: Sequence, now: float) -> None:
        """Gives a waiting sequence with pages the row that was reserved for it, `rows[-1]`."""
        self._stop_waiting(sequence)
        self.cornered = None
        self.rows.pop()
        self.cache.enter(sequence)
        self.running.add(sequence)
        request = sequence.request
        self.held[request.owner] += 1
        # For constrained sequences the mask enforces min_tokens, because it knows whether the answer can continue.
        banned = sorted(sequence.stops) if request.params.min_tokens and not sequence.masked else []
        labels = request.pool.labels if request.pool is not None else []
        slot, empty = self.adapters.take(request.adapter)
        if empty:
            self._filled.append((slot, request.adapter))
        self.entered.append(Enter(sequence.row, list(sequence.tokens), sequence.prompt_len, request.params, sequence.seed,
                                  banned, labels, slot, hash(request.salt), request.adapted_from))
        sequence.enter("decode" if sequence.timings.first_token else "prefill", now)
        if not sequence.timings.first_scheduled:
            sequence.timings.first_scheduled = now
            # Count a prompt once: the request's other sequences are forked from the first.
            if not request.part and not sequence.index:
                sequence.cached, sequence.cached_by_tier = sequence.planned, self.cache.count_hit(sequence)
                self._stats.prompt_tokens += sequence.prompt_len
                self._stats.cached_tokens += sequence.cached

    def preempt(self, loser: Sequence, now: float) -> None:
        """Takes a running sequence's row and pages; it waits again."""
        for step in self.in_flight:
            if loser in step.sequences:
                step.lost.add(loser)
        self.leave(loser)
        self.cache.release(loser)
        loser.restart()
        loser.timings.preemptions += 1
        loser.enter("preempted", now)
        self._stats.preemptions += 1
        self.wait(loser)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of its row, or out of those that wait; its pages stay its own."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self.rows.append(sequence.row)
            self._left.append(sequence.row)
            owner = sequence.request.owner
            self.held[owner] -= 1
            if not self.held[owner]:
                del self.held[owner]
            self.adapters.give(sequence.request.adapter)
            sequence.row = -1
        elif sequence in self.waiting:
            self._stop_waiting(sequence)
            if sequence is self.cornered:
                self.cornered = None
        if sequence.request.owner not in self.held and sequence.request.owner not in self.asking:
            self.ranks.pop(sequence.request.owner, None)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        owner = sequence.request.owner
        self.asking[owner] -= 1
        if not self.asking[owner]:
            del self.asking[owner]
        self.policy.waits(sequence, -1)

    def fork(self, parent: Sequence) -> None:
        """Forks a request's other sequences: they share the prompt's pages and recompute only its last position."""
        for child in parent.children:
            child.planned = child.computed = self.cache.fork(parent, child, parent.prompt_len - 1)
            self.wait(child)
        parent.children = []

    def shed(self) -> bool:
        """Takes the pages of the last forked sequence that waits; it will recompute its prompt. False if there is none."""
        for sequence in reversed(list(self.waiting)):
            if sequence.pages:
                self.cache.release(sequence)
                sequence.planned = sequence.computed = 0
                return True
        return False

    def drain(self, plan: StepPlan) -> None:
        """Moves what was collected into a plan."""
        plan.enter, plan.leave, plan.adapters = self.entered, self._left, self._filled
        self.entered, self._left, self._filled = [], [], []

    def check(self, live: list[Sequence], rows: int) -> None:
        """Asserts that each of the `live` sequences, and of so many rows, is where it belongs; for tests."""
        taken = [sequence.row for sequence in self.running]
        assert sorted(taken + self.rows) == list(range(rows)), "a row is lost or owned twice"
        assert len(self.running) + len(self.waiting) + sum(len(s.children) for s in live) == len(live), "a sequence is lost"
        assert self.held == Counter(sequence.request.owner for sequence in self.running)
        assert self.asking == Counter(sequence.request.owner for sequence in self.waiting)
        assert self.ranks.keys() == self.held.keys() | self.asking.keys()
        assert all((sequence.row >= 0) == (sequence in self.running) for sequence in live)
