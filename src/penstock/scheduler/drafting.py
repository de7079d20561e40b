"""How many tokens to draft for whom. Who drafts them, and how, is the worker's business (`worker/drafting.py`)."""

from __future__ import annotations

from typing import Protocol

from penstock.core.sequence import Sequence


class DraftPolicy(Protocol):
    """Decides at each step how many tokens are drafted behind a sequence's next token, and learns what came of it."""

    def count(self, sequence: Sequence) -> int:
        """The most tokens to draft; 0 for none. The scheduler may ask the drafter for fewer."""
        ...

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """So many drafted tokens were checked, and so many of them kept."""
        ...
