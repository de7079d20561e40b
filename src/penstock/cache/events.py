"""KV events: page news as data in the shapes of vLLM's. Publishing them is in `engine/events.py`.

The index calls a `Sink`; `Journal` is the sink that keeps what it is told, as wire events, until a publisher takes it. Order
matters: a page is stored after its parent, and every tier is spoken of separately. The key of a page says all that its entry
in the cache depends on (`cache/keys.py`), so a router that holds a request's key knows where it is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.cache import media
from penstock.cache.keys import Key, number

SCHEMA_VERSION = 1
"""Grows when a field changes its meaning or disappears; new fields may come without. Every event carries it."""

MEDIUM = {"device": "GPU", "host": "CPU", "disk": "STORAGE", "remote": "STORAGE"}
"""vLLM's names for our tiers. The device is "GPU" to routers whatever it is: where pages must be to be computed with."""


class Sink(Protocol):
    """Told by the index, in the engine's thread, whenever pages begin or cease to be findable. Must be quick."""

    def stored(self, group: int, tier: str, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str,
               adapter: str) -> None:
        """Consecutive whole pages with these keys and, concatenated, these tokens can be found in `tier` (device, host, disk,
        remote). `parent` is the key of the page before the first, None at the start of a context. Tokens are as the index
        knows them: negative where a medium is (`cache/media.py`)."""
        ...

    def removed(self, group: int, tier: str, keys: Sequence[Key]) -> None:
        """These pages can no longer be found in `tier`."""
        ...

    def cleared(self) -> None:
        """Nothing can be found anywhere any more."""
        ...


Hash = bytes | int


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Fields and order as in vLLM. Those with a default are left out where they have it."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    """Of all listed pages, concatenated."""
    block_size: int
    lora_id: int | None
    """Deprecated by vLLM: always nil."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    """One entry a page: on the first page of a context the adapter and the salt, as far as there are any, and on each page the
    digests of the media in it, in hexadecimal."""
    group_idx: int | None = None
    """Which cache group, where a model has several: layers that keep different stretches of the context."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    """The tier behind the device, by our name."""
    schema: int = 0
    """Ours: `SCHEMA_VERSION`."""


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
    """full_attention | sliding_window, vLLM's words."""
    window: int | None = None


class Journal:
    """Keeps events in order until they are taken. Begins with AllBlocksCleared: whoever listens may have known an engine that
    was here before."""

    def __init__(self, page: int, groups: Sequence[Group] = (Group(),), numbers: bool = False) -> None:
        """`page` is the tokens of a page. `numbers` names pages by 64-bit integers instead of bytes."""
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
        """The events since the last call; they are the caller's."""
        events, self._events = self._events, []
        return events

    def _with_placeholders(self, tokens: Sequence[int], extra: list[list[Any]]) -> Sequence[int]:
        """Tokens as a client would name them; the media among them are added to the `extra` of each page."""
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
    """(locality, ownership) of a tier. Two of ours are one medium to vLLM; these tell them apart."""
    if tier == "device":
        return None, None
    return "REMOTE" if tier == "remote" else "LOCAL", tier
