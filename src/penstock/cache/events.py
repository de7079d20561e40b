"""KV cache events in vLLM's format: pages stored in or removed from each tier. `engine/events.py` publishes them.

The prefix index calls a `Sink`; `Journal` is the sink that collects wire events until the publisher takes them. Order matters:
a page is reported after its parent, and each tier is reported separately. The key of a page covers everything that its contents
depend on (`cache/keys.py`), so a router that computes a request's keys knows where it is cached."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.cache import media
from penstock.cache.keys import Key, number

SCHEMA_VERSION = 1
"""Incremented when a field changes its meaning or is removed; added fields do not change it. Every event carries it."""

MEDIUM = {"device": "GPU", "host": "CPU", "disk": "STORAGE", "remote": "STORAGE"}
"""vLLM's names for our tiers. Routers see the compute device as "GPU", whatever its kind."""


class Sink(Protocol):
    """Callbacks for pages that become or stop being findable. Called by the index in the engine's thread; must be fast."""

    def stored(self, group: int, tier: str, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str,
               adapter: str) -> None:
        """Consecutive whole pages with these keys and tokens, concatenated, can be found in `tier` (device, host, disk,
        remote). `parent`: the key before the first, None at a context's start. Media are negative tokens (`cache/media.py`)."""

    def removed(self, group: int, tier: str, keys: Sequence[Key]) -> None:
        """These pages can no longer be found in `tier`."""

    def cleared(self) -> None:
        """The whole cache was cleared, in every tier."""


Hash = bytes | int


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Fields and their order are vLLM's. Fields that have their default value are omitted."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    """The tokens of all listed pages, concatenated."""
    block_size: int
    lora_id: int | None
    """Deprecated by vLLM: always nil."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    """Of each page: adapter and salt, if any, on a context's first, and the hexadecimal digests of its media."""
    group_idx: int | None = None
    """The index of the cache group, for models with several groups (layers that retain different parts of the context)."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    """Our name of the tier; None for the device."""
    schema: int = 0
    """Penstock's addition: `SCHEMA_VERSION`."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    schema: int = 0


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    schema: int = 0


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Group(msgspec.Struct):
    """The part of an event that describes a cache group."""

    kind: str = "full_attention"
    """full_attention | sliding_window, as vLLM names them."""
    window: int | None = None


class Journal:
    """Queues events in order until taken. The first is AllBlocksCleared, as a subscriber may know an earlier engine's pages."""

    def __init__(self, page: int, groups: Sequence[Group] = (Group(),), numbers: bool = False) -> None:
        """`page` is the page size in tokens. With `numbers`, block hashes are 64-bit integers instead of bytes."""
        self.page = page
        self.groups = list(groups)
        self._numbers = numbers
        self._events: list[Event] = []
        self.cleared()

    def stored(self, group: int, tier: str, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str,
               adapter: str) -> None:
        assert len(tokens) == len(keys) * self.page, (len(tokens), len(keys), self.page)
        extra: list[list[Any]] = [[] for _ in keys]
        if parent is None:
            extra[0] += [part for part in (adapter, salt) if part]
        tokens = self._with_placeholders(tokens, extra)
        before = None if parent is None else self._hashes([parent])[0]
        facts, hybrid = self.groups[group], len(self.groups) > 1
        self._events.append(BlockStored(
            self._hashes(keys), before, list(tokens), self.page, None, MEDIUM[tier], adapter or None,
            [one or None for one in extra] if any(extra) else None, group if hybrid else None,
            facts.kind if hybrid else None, facts.window, *_place(tier), SCHEMA_VERSION))

    def removed(self, group: int, tier: str, keys: Sequence[Key]) -> None:
        event = BlockRemoved(self._hashes(keys), MEDIUM[tier], group if len(self.groups) > 1 else None, *_place(tier),
                             SCHEMA_VERSION)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.group_idx, last.ownership) == (event.group_idx, event.ownership):
            last.block_hashes += event.block_hashes
        else:
            self._events.append(event)

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared(SCHEMA_VERSION))

    def take(self) -> list[Event]:
        """Returns the events since the last call and forgets them."""
        events, self._events = self._events, []
        return events

    def _with_placeholders(self, tokens: Sequence[int], extra: list[list[Any]]) -> Sequence[int]:
        """Token ids as clients send them: placeholders for media words, whose digests are appended to their page's `extra`."""
        if not any(token < 0 for token in tokens):
            return tokens
        plain = list(tokens)
        for i, mine in enumerate(extra):
            for run in media.runs(np.array(plain[i * self.page:(i + 1) * self.page], np.int32)):
                first = i * self.page + run.at
                plain[first:first + run.length] = [run.token] * run.length
                mine.append(run.digest.hex())
        return plain

    def _hashes(self, keys: Sequence[Key]) -> list[Hash]:
        return [number(key) for key in keys] if self._numbers else list(keys)


def _place(tier: str) -> tuple[str | None, str | None]:
    """(locality, ownership) of a tier. Disk and remote are both STORAGE to vLLM; these two fields distinguish them."""
    if tier == "device":
        return None, None
    return "REMOTE" if tier == "remote" else "LOCAL", tier
