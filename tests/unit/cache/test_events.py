"""Events: vLLM's keys on the wire, and nothing said that is not so."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.cache import keys
from penstock.cache.events import SCHEMA_VERSION, Group, Journal


def wire(journal: Journal) -> list[dict[str, Any]]:
    """The events as a consumer decodes them."""
    found: list[dict[str, Any]] = msgspec.msgpack.decode(msgspec.msgpack.encode(journal.take()))
    return found


def test_the_beginning_is_empty() -> None:
    journal = Journal(4)
    assert wire(journal) == [{"type": "AllBlocksCleared", "schema": SCHEMA_VERSION}]
    assert wire(journal) == []


def test_stored_and_removed() -> None:
    journal = Journal(4)
    journal.take()
    root = keys.root("model", "", "salt")
    chain = keys.chain(root, range(8), 4)
    journal.stored(0, "device", None, chain, list(range(8)), "salt", "")
    journal.stored(0, "host", chain[0], chain[1:], [4, 5, 6, 7], "salt", "")
    journal.removed(0, "device", chain[1:])
    journal.cleared()
    assert wire(journal) == [
        {"type": "BlockStored", "block_hashes": chain, "parent_block_hash": None, "token_ids": list(range(8)), "block_size": 4,
         "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["salt"], None], "schema": SCHEMA_VERSION},
        {"type": "BlockStored", "block_hashes": chain[1:], "parent_block_hash": chain[0], "token_ids": [4, 5, 6, 7],
         "block_size": 4, "lora_id": None, "medium": "CPU", "lora_name": None, "locality": "LOCAL", "ownership": "host",
         "schema": SCHEMA_VERSION},
        {"type": "BlockRemoved", "block_hashes": chain[1:], "medium": "GPU", "schema": SCHEMA_VERSION},
        {"type": "AllBlocksCleared", "schema": SCHEMA_VERSION}]


def test_removals_are_told_together() -> None:
    journal = Journal(2)
    journal.take()
    chain = keys.chain(keys.root("model"), range(8), 2)
    for key in reversed(chain):
        journal.removed(0, "device", [key])
    journal.removed(0, "disk", chain[:1])
    first, second = wire(journal)
    assert first["block_hashes"] == chain[::-1] and second["ownership"] == "disk"


def test_numbers_groups_and_adapters() -> None:
    journal = Journal(2, (Group(), Group("sliding_window", 64)), numbers=True)
    journal.take()
    [key] = keys.chain(keys.root("model", "poems"), [1, 2], 2)
    journal.stored(1, "remote", None, [key], [1, 2], "", "poems")
    journal.removed(1, "disk", [key])
    stored, removed = wire(journal)
    assert stored["block_hashes"] == [keys.number(key)] == removed["block_hashes"]
    assert stored["group_idx"] == removed["group_idx"] == 1
    assert (stored["kv_cache_spec_kind"], stored["kv_cache_spec_sliding_window"]) == ("sliding_window", 64)
    assert (stored["lora_name"], stored["extra_keys"]) == ("poems", [["poems"]])
    assert (stored["medium"], stored["locality"], stored["ownership"]) == ("STORAGE", "REMOTE", "remote")
    assert (removed["medium"], removed["locality"], removed["ownership"]) == ("STORAGE", "LOCAL", "disk")
