"""Drafts from the model's own guesses (lookahead decoding, Fu et al. 2024): no second model, no text that repeats.

Verification chooses a token behind every draft, the wrong ones too. Tokens behind the first wrong draft are guesses of the
text to come, made from a nearly right context: the next iteration of Jacobi's method takes them as drafts, as they lie in the
row already. Each step's guesses also enter a pool of the row, where later steps find n-grams that begin with the row's last
token. The original computes guesses in positions of their own as well; here the positions of drafts are the only ones."""

import numpy as np
import torch

from penstock.worker.drafters.ngram import NGram
from penstock.worker.drafting import Drafting, Host
from penstock.worker.rows import upload

_STEPS = 64
"""Steps whose guesses a row's pool has."""


class Lookahead(NGram):
    stays = True

    def __init__(self, shortest: int, longest: int, most: int, host: Host) -> None:
        """`most`: the most tokens drafted at once."""
        super().__init__(shortest, longest)
        rows = host.rows
        self._width = most + 2
        # A token that is none parts the guesses of two steps.
        self._pool = torch.full((len(rows.tokens), _STEPS * (most + 3)), -1, dtype=torch.int32, device=rows.device)
        """[row, place]"""
        self._turn = np.zeros(len(rows.tokens), np.int32)
        """[row] steps whose guesses were put into its pool."""

    def propose(self, drafting: Drafting) -> None:
        entered = [enter.row for enter in drafting.plan.enter]
        if entered:
            self._pool[entered], self._turn[entered] = -1, 0
        rows = drafting.plan.rows[drafting.segments]
        if len(rows):
            # The tokens behind the last known ones go into the pools, together with these.
            place = self._turn[rows] % _STEPS * (self._width + 1)
            self._turn[rows] += 1
            tokens, row = drafting.rows.tokens, drafting.row.long()[:, None]
            step = torch.arange(self._width, device=tokens.device)
            at = (drafting.length.long()[:, None] - 1 + step).clamp(max=tokens.shape[1] - 1)
            self._pool[row, upload(place, tokens.device).long()[:, None] + step] = tokens[row, at]
        super().propose(drafting)

    def beside(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._pool[row.long()]
        return pool, pool >= 0
