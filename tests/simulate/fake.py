"""A worker without a model: its "layers" remember tokens in pages, and the next token is a hash of what they can read.

Any page that is lost, shared wrongly, written too early or read too late changes a hash and so the output. An exact state is a
digest of all tokens so far, read where a segment starts and written where it ends; an entry of a draft head knows the next
token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.cache.keys import Key
from penstock.cache.tiers import Content
from penstock.core.plan import LoadResult, Logprobs, StepPlan, StepResult, Want, WriteResult
from penstock.core.request import TierStats
from penstock.core.state import CacheLayout, Retention

VOCABULARY = 31
_PRIME = (1 << 61) - 1


def digest(seen: Sequence[int], group: int, value: int | None = None) -> int:
    value = group + 1 if value is None else value
    for token in seen:
        value = (value * 1_000_003 + token + 7) % _PRIME
    return value


def pair(tokens: Sequence[int], position: int) -> int:
    """A draft head's entry."""
    return int(tokens[position]) * 97 + int(tokens[position + 1])


def expected(prompt: list[int], keeps: list[Retention], seed: int, count: int) -> list[int]:
    """The tokens that a sequence must generate, computed from its tokens alone."""
    tokens = list(prompt)
    for _ in range(count):
        last = len(tokens) - 1
        parts = []
        for group, keep in enumerate(keeps):
            if keep.exact:
                parts.append(digest(tokens, group))
            elif keep.ahead:
                parts.append(digest([pair(tokens, p) for p in range(last)], group))
            else:
                parts.append(digest(tokens[keep.needed(last)[0]:], group))
        tokens.append((sum(parts) + seed) % VOCABULARY)
    return tokens[len(prompt):]


Pages = npt.NDArray[np.int64]
"""Of one group: what each page says of each of its positions."""


class Behind(Protocol):
    """The worker's half of what is behind the device."""

    def save(self, plan: StepPlan, pages: list[Pages]) -> None:
        """Before anything of a plan changes a page."""
        ...

    def fetch(self, plan: StepPlan) -> None:
        """After the plan's copies."""
        ...

    def arrived(self, pages: list[Pages], wait: bool) -> tuple[list[LoadResult], list[WriteResult]]:
        """The sequences that ended with the step."""
        ...


class FakeWorker:
    """Runs plans on pages of plain numbers."""

    def __init__(self, layout: CacheLayout, rows: int, length: int, behind: Behind | None = None) -> None:
        self.layout = layout
        self.behind = behind
        self.tokens = np.zeros((rows, length + 1), np.int64)
        self.seed = np.zeros(rows, np.int64)
        self.length = np.zeros(rows, np.int64)
        self.rng = random.Random(rows)
        self.tables = [np.full((rows, -(-length // layout.page) + 1), -1, np.int64) for _ in layout.groups]
        self.pages: list[Pages] = [np.full((layout.slabs * g.per_slab, layout.page), -99, np.int64) for g in layout.groups]

    def run(self, plan: StepPlan) -> StepResult:
        for enter in plan.enter:
            self.tokens[enter.row, :len(enter.tokens)] = enter.tokens
            self.seed[enter.row] = enter.seed
        for table, edits in zip(self.tables, plan.edits, strict=True):
            for row, index, page_id in edits.tolist():
                table[row, index] = page_id
        if self.behind is not None:
            self.behind.save(plan, self.pages)
        for move in plan.moves:
            self.pages[move.group][move.target] = self.pages[move.group][move.source]
        if self.behind is not None:
            self.behind.fetch(plan)
        for proposal in plan.proposals:
            self.tokens[proposal.row, proposal.position:proposal.position + len(proposal.tokens)] = proposal.tokens
        segments = list(zip(plan.rows.tolist(), self._starts(plan), plan.counts.tolist(), plan.wants.tolist(), strict=True))
        told = {proposal.row for proposal in plan.proposals}
        for row, start, count, want in segments:
            if want & Want.EACH and row not in told:
                self._draft(row, start + 1, count - 1)
        self._write(segments)
        out: list[int] = []
        kept = np.zeros(len(segments), np.int32)
        scores: list[tuple[int, int]] = []
        for i, (row, start, count, want) in enumerate(segments):
            end = start + count
            if want & Want.SAMPLE:
                first = start + 1 if want & Want.EACH else end
                picks = [self._pick(row, last) for last in range(first, end + 1)]
                agree = [pick == int(self.tokens[row, place]) for place, pick in enumerate(picks[:-1], first)]
                kept[i] = n = 1 + (agree.index(False) if False in agree else len(agree))
                out += picks[:n]
                self.tokens[row, first:first + n] = picks[:n]
                end = first + n - 1
                self.length[row] = end + 1
            for g, group in enumerate(self.layout.groups):
                if group.keep.ahead:
                    self._put(g, row, end - 1, pair(self.tokens[row], end - 1))
            if want & Want.SCORE:
                scores += [(i, p) for p in range(start + 1, end + 1)]
        result = StepResult(plan.id, np.array(out, np.int32), kept)
        if scores:
            at = np.array(scores, np.int32)
            # The engine drops nothing: what is beyond the prompt is the real worker's business, so leave it out here too.
            result.scores = Logprobs(at[:, 0], at[:, 1], at[:, 1:2], at[:, 1:2].astype(np.float32), at[:, 1:2])
        if self.behind is not None:
            result.load_results, result.write_results = self.behind.arrived(self.pages, wait=plan.idle)
        return result

    def _starts(self, plan: StepPlan) -> list[int]:
        """Where the segments begin in truth."""
        if plan.slack is None:
            return [int(start) for start in plan.starts]
        starts = np.where(plan.slack > 0, self.length[plan.rows] - 1, plan.starts)
        assert ((starts <= plan.starts) & (starts >= plan.starts - plan.slack)).all(), "the plan's bounds are wrong"
        return [int(start) for start in starts]

    def _pick(self, row: int, end: int) -> int:
        return (sum(self._read(g, row, end) for g in range(len(self.tables))) + int(self.seed[row])) % VOCABULARY

    def _draft(self, row: int, length: int, count: int) -> None:
        """Drafts that are right up to some token."""
        keeps, right = [group.keep for group in self.layout.groups], self.rng.randint(0, count)
        drafts = expected(self.tokens[row, :length].tolist(), keeps, int(self.seed[row]), right)
        drafts += [self.rng.randrange(VOCABULARY) for _ in range(count - right)]
        self.tokens[row, length:length + count] = drafts

    def _at(self, g: int, row: int, position: int) -> int:
        page = int(self.tables[g][row, position // self.layout.page])
        assert page >= 0, "a page is missing"
        return page

    def _put(self, g: int, row: int, position: int, value: int) -> None:
        self.pages[g][self._at(g, row, position), position % self.layout.page] = value

    def _write(self, segments: list[tuple[int, int, int, int]]) -> None:
        written = set()
        for row, start, count, _ in segments:
            end = start + count
            for g, group in enumerate(self.layout.groups):
                if group.keep.exact:
                    before = int(self.pages[g][self._at(g, row, start - 1), 0]) if start else None
                    target = self._at(g, row, end - 1)
                    assert (g, target) not in written, "two rows of a step write the same state"
                    written.add((g, target))
                    self.pages[g][target, 0] = digest(self.tokens[row, start:end].tolist(), g, before)
                    continue
                for position in range(start, end):
                    slot = (g, self._at(g, row, position), position % self.layout.page)
                    assert slot not in written, "two tokens of a step write the same slot"
                    written.add(slot)
                    if not group.keep.ahead:
                        self._put(g, row, position, int(self.tokens[row, position]))
                    elif position < end - 1:
                        self._put(g, row, position, pair(self.tokens[row], position))

    def _read(self, g: int, row: int, end: int) -> int:
        keep, page = self.layout.groups[g].keep, self.layout.page
        if keep.exact:
            return int(self.pages[g][self._at(g, row, end - 1), 0])
        first, last = keep.needed(end - 1)[0], end - 1 if keep.ahead else end
        return digest([int(self.pages[g][self._at(g, row, p), p % page]) for p in range(first, last)], g)


class FakeTiers:
    """Both halves of the tiers behind the device: a dictionary of pages, from which loads come late, fail or are refused."""

    def __init__(self, rng: random.Random, through: bool) -> None:
        self.rng = rng
        self.through = through
        self.known: set[tuple[int, Key]] = set()
        self.bytes: dict[tuple[int, Key], npt.NDArray[np.int64]] = {}
        self.loads: dict[int, list[Content]] = {}
        self.started: list[int] = []
        self.tickets = 0
        self.landed = 0
        self.failed = 0
        self._transfers: list[Any] = []

    def offer(self, pages: Sequence[Content], leaving: bool) -> None:
        if leaving or self.through:
            for page in pages:
                if self.rng.random() < 0.9:
                    self.known.add((page.group, page.key))
                    self._transfers.append(page)

    def find(self, group: int, keys: Sequence[Key]) -> list[bool]:
        return [(group, key) in self.known for key in keys]

    def load(self, pages: Sequence[Content], positions: int) -> int | None:
        assert positions > 0 and len({(page.group, page.page) for page in pages}) == len(pages)
        if self.rng.random() < 0.1:
            return None
        self.tickets += 1
        self.loads[self.tickets] = list(pages)
        self._transfers.append(self.tickets)
        return self.tickets

    def patience(self, positions: int) -> float:
        return 60.0

    def source(self, ticket: int) -> dict[str, int]:
        return {"host": len(self.loads[ticket])}

    @property
    def pending(self) -> bool:
        return bool(self._transfers)

    @property
    def writing(self) -> bool:
        return False

    def drain(self) -> list[Any]:
        transfers, self._transfers = self._transfers, []
        return transfers

    def report(self, load_results: Iterable[LoadResult], write_results: Iterable[WriteResult]) -> None:
        for result in load_results:
            pages = self.loads.pop(result.ticket)
            if not result.ok:
                self.known -= {(page.group, page.key) for page in pages}

    def stats(self) -> list[TierStats]:
        return [TierStats("host")]

    def clear(self) -> None:
        self.known.clear()

    # -- the worker's half

    def save(self, plan: StepPlan, pages: list[Pages]) -> None:
        for transfer in plan.transfers:
            if isinstance(transfer, Content):
                self.bytes[transfer.group, transfer.key] = pages[transfer.group][transfer.page].copy()

    def fetch(self, plan: StepPlan) -> None:
        self.started += [transfer for transfer in plan.transfers if isinstance(transfer, int)]

    def arrived(self, pages: list[Pages], wait: bool) -> tuple[list[LoadResult], list[WriteResult]]:
        done = [ticket for ticket in self.started if self.rng.random() < 0.3]
        if wait and self.started and not done:
            done = self.started[:1]
        self.started = [ticket for ticket in self.started if ticket not in done]
        return [self._land(ticket, pages) for ticket in done], []

    def _land(self, ticket: int, pages: list[Pages]) -> LoadResult:
        ok = self.rng.random() < 0.85
        for content in self.loads[ticket]:
            # A load that fails has filled some of its pages with anything.
            pages[content.group][content.page] = self.bytes[content.group, content.key] if ok else -7
        self.landed += ok
        self.failed += not ok
        return LoadResult(ticket, ok)
