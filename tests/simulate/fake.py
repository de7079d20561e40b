"""A worker without a model: its "layers" remember tokens in pages, and the next token is a hash of what they can read.

Any page that is lost, shared wrongly, written too early or read too late changes a hash and so the output.
"""

from __future__ import annotations

import numpy as np

from penstock.core.layout import CacheLayout
from penstock.core.plan import NOT_SAMPLED, Logprobs, StepPlan, StepResult, Want
from penstock.core.state import Window

VOCABULARY = 31
_PRIME = (1 << 61) - 1


def digest(seen: list[int], group: int) -> int:
    value = group + 1
    for token in seen:
        value = (value * 1_000_003 + token + 7) % _PRIME
    return value


def expected(prompt: list[int], keeps: list[object], seed: int, count: int) -> list[int]:
    """What a sequence must generate, computed from its tokens alone."""
    tokens = list(prompt)
    for _ in range(count):
        last = len(tokens) - 1
        parts = []
        for group, keep in enumerate(keeps):
            first = max(0, last - keep.width + 1) if isinstance(keep, Window) else 0
            parts.append(digest(tokens[first:last + 1], group))
        tokens.append((sum(parts) + seed) % VOCABULARY)
    return tokens[len(prompt):]


class FakeWorker:
    """Runs plans on pages of plain lists."""

    def __init__(self, layout: CacheLayout, rows: int, length: int) -> None:
        self.layout = layout
        self.tokens = np.zeros((rows, length + 1), np.int64)
        self.seed = np.zeros(rows, np.int64)
        self.tables = [np.full((rows, -(-length // layout.page) + 1), -1, np.int64) for _ in layout.groups]
        self.pages = [np.full((layout.slabs * g.per_slab, layout.page), -99, np.int64) for g in layout.groups]

    def run(self, plan: StepPlan) -> StepResult:
        page = self.layout.page
        for enter in plan.enter:
            self.tokens[enter.row, :len(enter.tokens)] = enter.tokens
            self.seed[enter.row] = enter.seed
        for table, edits in zip(self.tables, plan.edits, strict=True):
            for row, index, page_id in edits.tolist():
                table[row, index] = page_id
        for move in plan.moves:
            self.pages[move.group][move.target] = self.pages[move.group][move.source]
        segments = list(zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.wants.tolist(), strict=True))
        written = set()
        for row, start, count, _ in segments:
            for position in range(start, start + count):
                for g, table in enumerate(self.tables):
                    slot = (g, int(table[row, position // page]), position % page)
                    assert slot not in written, "two tokens of a step write the same slot"
                    written.add(slot)
                    self.pages[g][slot[1], slot[2]] = self.tokens[row, position]
        out = np.full(len(segments), NOT_SAMPLED, np.int32)
        scores: list[tuple[int, int]] = []
        for i, (row, start, count, want) in enumerate(segments):
            end = start + count
            if want & Want.SAMPLE:
                total = 0
                for g, group in enumerate(self.layout.groups):
                    first = max(0, end - group.keep.width) if isinstance(group.keep, Window) else 0
                    seen = [int(self.pages[g][self.tables[g][row, p // page], p % page]) for p in range(first, end)]
                    total += digest(seen, g)
                out[i] = (total + int(self.seed[row])) % VOCABULARY
                self.tokens[row, end] = out[i]
            if want & Want.SCORE:
                scores += [(i, p) for p in range(start + 1, end + 1)]
        result = StepResult(plan.id, out)
        if scores:
            at = np.array(scores, np.int32)
            # The engine drops nothing: what is beyond the prompt is the real worker's business, so leave it out here too.
            result.scores = Logprobs(at[:, 0], at[:, 1], at[:, 1:2], at[:, 1:2].astype(np.float32), at[:, 1:2])
        return result
