"""The worker's tables of running sequences: their tokens, block tables and sampling parameters.

A row is an index into every table here. Tokens live on the device, so that a step can be planned before the tokens of the
previous step are known. The host decides pages and parameters, keeps them in host arrays, and copies changes to the device."""

from collections.abc import Callable

import numpy as np
import torch

from penstock.core.plan import Enter, Ints, StepPlan
from penstock.ops.step import bring
from penstock.worker.parameters import Parameters
from penstock.worker.sharing import Sharing
from penstock.worker.staging import Staging


class Rows:
    """Tables for `max_num_seqs` rows of up to `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int, page: int, groups: int, device: torch.device,
                 watched: int | None = None, bring: Callable[..., None] = bring) -> None:
        """`watched`: the cache group whose block table is searched for shared prefixes. `bring`: as in ops/step.py."""
        self.device, self.bring = device, bring
        self.tokens = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int32, device=device)
        """[row, position]; positions at and beyond the row's length hold drafts, or anything."""
        self.length = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        """[row] number of known tokens. Maintained only for rows with drafts, whose length the host learns with the result. For
        other rows, plans give exact segment starts."""
        self.before = torch.zeros_like(self.length)
        """[row] `length` at the beginning of the step, for a draft head that follows it."""
        self.tables = [np.zeros((max_num_seqs, -(-max_model_len // page)), np.int32) for _ in range(groups)]
        """Host block tables, one per cache group: [row, page index] -> page id. Entries behind a sliding window are stale."""
        self.device_tables = [torch.from_numpy(table).to(device) for table in self.tables]
        """Device block tables; on a CPU they share memory with `tables`."""
        self.sharing = Sharing(self.tables[watched], page) if watched is not None else None
        self._watched = watched
        self._known = Staging(device, bring)
        self._edits = Staging(device, bring)
        self.parameters = Parameters(max_num_seqs, device, bring)
        self.labels: dict[int, list[int]] = {}
        """The logits that pooled rows report, as `Enter.labels`."""

    def apply(self, plan: StepPlan) -> None:
        """Applies the row part of a plan: rows leave and enter, drafts are written, block tables are edited."""
        self.parameters.leave(plan.leave)
        self.parameters.enter(plan.enter)
        self.labels.update((enter.row, enter.labels) for enter in plan.enter)
        self._take_tokens(plan.enter)
        for row, position, tokens in plan.proposals:
            self.tokens[row, position:position + len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        self._take_edits(plan.edits)
        if self.sharing is not None and self._watched is not None:
            self.sharing.forget([*plan.leave, *(enter.row for enter in plan.enter)])
            self.sharing.edited(plan.edits[self._watched])

    def _take_tokens(self, enters: list[Enter]) -> None:
        """Uploads the known tokens of all entering rows in one copy."""
        if not enters:
            return
        size = sum(len(enter.tokens) for enter in enters)
        host, at = self._known.host(size), 0
        for enter in enters:
            host[at:at + len(enter.tokens)] = enter.tokens
            at += len(enter.tokens)
        self._known.send(size)
        for enter, known in zip(enters, self._known.device(size).split([len(e.tokens) for e in enters]), strict=True):
            self.tokens[enter.row, :len(known)] = known

    def _take_edits(self, edits: list[Ints]) -> None:
        size = sum(map(len, edits))
        if not size:
            return
        for table, lines in zip(self.tables, edits, strict=True):
            table[lines[:, 0], lines[:, 1]] = lines[:, 2]
        if self.device.type == "cpu":
            return
        # Upload the host table's current value instead of the edit's, so that the last of two edits of one entry wins.
        host, at = self._edits.host(2 * size), 0
        for table, lines in zip(self.tables, edits, strict=True):
            host[at:at + len(lines)] = lines[:, 0] * table.shape[1] + lines[:, 1]
            host[size + at:size + at + len(lines)] = table[lines[:, 0], lines[:, 1]]
            at += len(lines)
        self._edits.send(2 * size)
        places, pages = self._edits.device(2 * size).view(2, size)
        sizes = [len(lines) for lines in edits]
        for there, place, page in zip(self.device_tables, places.long().split(sizes), pages.split(sizes), strict=True):
            there.view(-1).scatter_(0, place, page)
