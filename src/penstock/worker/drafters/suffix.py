"""Drafts from the row's own tokens and from earlier outputs of the same owner (suffix decoding, Oliaro et al. 2024).

Earlier outputs lie in a ring of fixed size on the device. The places whose last tokens agree longest with the row's choose its
continuation by vote, token by token, as the most frequent path below a node of a suffix tree would be. There is no tree:
searching the ring is a few passes over it, which need no token on the host, so that steps can be planned ahead."""

import numpy as np
import torch

from penstock.worker.drafters.ngram import NGram
from penstock.worker.drafting import Drafting, Host

_STORED = 1 << 15
"""Tokens of earlier outputs."""


class Suffix(NGram):
    voters = 16

    def __init__(self, shortest: int, longest: int, host: Host) -> None:
        super().__init__(shortest, longest)
        rows = host.rows
        self._tokens = rows.tokens
        self._prompt, self._known = (np.zeros(len(rows.tokens), np.int64) for _ in range(2))
        """[row] number of tokens of its prompt, and of known ones, a few steps ago."""
        self._owner = torch.zeros(len(rows.tokens), dtype=torch.int64, device=rows.device)
        """[row]"""
        # A token that is none parts outputs from each other, and from the row that is searched before them.
        self._ring = torch.full((_STORED,), -1, dtype=torch.int32, device=rows.device)
        self._owners = torch.zeros(_STORED, dtype=torch.int64, device=rows.device)
        self._at = 0

    def propose(self, drafting: Drafting) -> None:
        plan = drafting.plan
        for enter in plan.enter:
            self._prompt[enter.row] = self._known[enter.row] = enter.prompt_len
            self._owner[enter.row] = enter.owner
        self._known[plan.rows] = np.maximum(self._known[plan.rows], plan.starts + 1)
        super().propose(drafting)

    def leave(self, rows: list[int]) -> None:
        for row in rows:
            # The prompt's last tokens are the context of the first that was said.
            first = max(0, int(self._prompt[row]) - self._longest)
            known = int(self._known[row])
            said = self._tokens[row, max(first, known - _STORED // 8):known]
            if self._at + len(said) + 2 > _STORED:
                self._at = 0
            place = slice(self._at + 1, self._at + 1 + len(said))
            self._ring[place], self._owners[place] = said, self._owner[row]
            self._at = place.stop
            self._ring[self._at] = -1

    def _chosen(self, found: torch.Tensor, agreed: torch.Tensor) -> torch.Tensor:
        # One place outvotes a few that agree in one token less, and many outvote it.
        weight, drafts = torch.where(agreed >= 0, 4.0 ** (agreed - agreed[:, :1]), 0.0), []
        for token in found.unbind(2):
            votes = ((token[:, :, None] == token[:, None, :]) * weight[:, None, :]).sum(2)
            drafts.append(token.gather(1, votes.argmax(1, keepdim=True)))
            weight = weight * (token == drafts[-1])
        # Behind an output's end there is no token.
        return torch.cat(drafts, 1).clamp(min=0)

    def beside(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._ring.expand(len(row), -1), self._owners[None] == self._owner[row.long()][:, None]
