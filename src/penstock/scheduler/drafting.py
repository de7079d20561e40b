"""The interface that decides how many tokens are drafted per sequence. `worker/drafting.py` is the drafters' interface."""

from __future__ import annotations

from typing import Protocol

from penstock.core.sequence import Sequence


class DraftPolicy(Protocol):
    """Decides at each step how many tokens are drafted after a sequence's next token, and learns the acceptance."""

    def count(self, sequence: Sequence) -> int:
        """Returns the maximum number of tokens to draft, possibly 0. The scheduler may ask the drafter for fewer."""
        ...

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Reports that `drafted` tokens were verified and `accepted` of them kept."""
        ...
