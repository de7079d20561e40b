"""The interface between the engine's loop and the source of token constraints: a grammar, a schema, a list of choices."""

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from penstock.core.plan import Masks
from penstock.core.request import Request, Sequence


class MaskedSegment(NamedTuple):
    """A segment whose tokens are chosen under a mask. All plans before its own have been applied, so `sequence.tokens` has
    every token but those that this segment checks and chooses."""

    sequence: Sequence
    """May be done by now; then its lines may say anything."""
    drafts: list[int]
    """Tokens that the segment checks: line j of its 1 + len(drafts) lines is for the token behind drafts[:j]."""


class Masker(Protocol):
    """Decides which tokens may follow."""

    def wants(self, request: Request) -> bool:
        """Whether the tokens of this request are chosen under a mask. Asked once, when the request is taken in."""

    def masks(self, segments: List[MaskedSegment]) -> Masks:
        """The lines of all these segments, in their order."""
