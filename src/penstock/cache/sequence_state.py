"""The cache's per-sequence state: its node in the prefix index, its content keys, and the load or leader it waits for."""

from penstock.cache import keys, media
from penstock.cache.prefix import TOKEN, Node
from penstock.core.request import Sequence


class SequenceState:
    """Stored in `Sequence.cache_state` from the first cache lookup to the end of the sequence."""

    __slots__ = ("asked", "deepest", "forked", "generation", "indexed", "keys", "leader", "loaded", "node", "origin", "packed",
                 "ticket", "until", "upto")

    def __init__(self) -> None:
        self.packed = bytearray()
        """Its known tokens in the index's format (`words`), as far as they were needed so far."""
        self.keys: list[keys.Key] = []
        """Content keys of its whole pages; computed when tiers are first searched for them."""
        self.node: Node | None = None
        """The tree node that contains position `indexed` or ends there; None while the tree has nothing of the sequence."""
        self.indexed = 0
        """The number of positions in the tree, a multiple of the page size."""
        self.deepest: Node | None = None
        """All pages that the sequence holds and the tree keeps are in this node or its ancestors."""
        self.origin: Node | None = None
        """The node where its match ended. A draft head's page may be there even if the sequence continued on another branch."""
        self.forked = False
        """It has shared pages with a fork, so the tree may keep pages of it that the fork added."""
        self.generation = 0
        """The cache's generation when it got its pages. Pages of an older generation never enter the index."""
        self.leader: Sequence | None = None
        """The sequence that is prefilling the shared prefix; this one waits until the leader has computed position `upto`."""
        self.upto = 0
        self.ticket: int | None = None
        """The ticket of the load that it waits for."""
        self.until = 0.0
        """The deadline for waiting for loads, in seconds of `time.monotonic()`; 0 if it has not started to wait."""
        self.asked = -1
        """The sequence epoch in which it requests no more loads: what is not on the device is computed."""
        self.loaded: dict[str, int] = {}
        """The number of positions that were loaded for it, by source tier."""


def state_of(sequence: Sequence) -> SequenceState:
    """The sequence's cache state; created at the first call."""
    if sequence.cache_state is None:
        sequence.cache_state = SequenceState()
    assert isinstance(sequence.cache_state, SequenceState)
    return sequence.cache_state


def packed(sequence: Sequence, upto: int) -> bytearray:
    """At least the first `upto` tokens of a sequence in the index's format (`words`). The caller must not change them."""
    state = state_of(sequence)
    have = len(state.packed) // TOKEN
    if have < upto:
        state.packed += words(sequence, have, upto)
    return state.packed


def words(sequence: Sequence, start: int, end: int) -> bytes | bytearray:
    """The known tokens at [start, end) as int32, with media placeholders replaced by the media's words (`cache/media.py`)."""
    data: bytes | bytearray = keys.packed(sequence.tokens[start:end])
    if sequence.request.media:
        data = bytearray(data)
        media.put(data, start, sequence.request.media, sequence.tokens)
    return data
