"""The cache's own state of a sequence: its place in the index, its keys, and the load or leader that it waits for."""

from __future__ import annotations

from penstock.cache import keys, media
from penstock.cache.keys import Key
from penstock.cache.prefix import TOKEN, Node
from penstock.core.sequence import Sequence


class SequenceState:
    """Kept on the sequence (`Sequence.state`), from its first look into the cache to its end."""

    __slots__ = ("asked", "deepest", "forked", "generation", "indexed", "keys", "leader", "loaded", "node", "origin", "packed",
                 "ticket", "until", "upto")

    def __init__(self) -> None:
        self.packed = bytearray()
        """Its known tokens as the index knows them, as far as they were needed."""
        self.keys: list[Key] = []
        """Content keys of its whole pages, if tiers were asked for them."""
        self.node: Node | None = None
        """Where in the tree position `indexed` lies or ends; None as long as nothing of it is there."""
        self.indexed = 0
        """Positions that the tree has, a multiple of the page."""
        self.deepest: Node | None = None
        """A node in which or above which all pages lie that it holds and the tree keeps."""
        self.origin: Node | None = None
        """Where its match ended. A draft head's page may lie there although the sequence has gone another way."""
        self.forked = False
        """It has shared its pages with a fork: the tree may keep some of them that it did not add itself."""
        self.generation = 0
        """The cache's, when its pages began. Those of another generation are not kept."""
        self.leader: Sequence | None = None
        """The sequence that is computing what this one needs, and waits for until position `upto` is computed."""
        self.upto = 0
        self.ticket: int | None = None
        """The load that it waits for."""
        self.until = 0.0
        """When it stops waiting for loads, in seconds of `time.monotonic()`; 0 if it has not begun."""
        self.asked = -1
        """The sequence's epoch in which its turn to have pages loaded is over: what is not on the device is computed."""
        self.loaded: dict[str, int] = {}
        """Positions that were loaded for it, by the tier that had them."""


def state_of(sequence: Sequence) -> SequenceState:
    """The sequence's state, made at the first call."""
    if sequence.cache_state is None:
        sequence.cache_state = SequenceState()
    assert isinstance(sequence.cache_state, SequenceState)
    return sequence.cache_state


def packed(sequence: Sequence, upto: int) -> bytearray:
    """At least the first `upto` tokens of a sequence as the index knows them (`words`); to be read only."""
    state = state_of(sequence)
    have = len(state.packed) // TOKEN
    if have < upto:
        state.packed += words(sequence, have, upto)
    return state.packed


def words(sequence: Sequence, start: int, end: int) -> bytes | bytearray:
    """The known tokens at [start, end) as int32, and in the place of media's placeholders the words of the media."""
    data = keys.packed(sequence.tokens[start:end])
    if not sequence.request.media:
        return data
    mutable = bytearray(data)
    media.put(mutable, start, sequence.request.media, sequence.tokens)
    return mutable
