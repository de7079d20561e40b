"""A consumer of KV events, as a router has one: it subscribes, notices what it missed, asks for it, and maps the cache.

It knows the wire format alone: msgpack maps by their keys, none of this project's types.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8


class Consumer:
    """The contents of each tier, as the events tell them."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.events.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self.replay = self.context.socket(zmq.REQ) if replay else None
        self.replay_endpoint = replay.replace("0.0.0.0", "127.0.0.1") if replay else ""
        self.next = 0
        """The number of the batch that should come next."""
        self.places: dict[tuple[int, str, str | None], dict[bytes | int, dict[str, Any]]] = {}
        """By group, medium and owner: what is known of each block, by its hash."""
        self.replayed = 0
        self.seen: list[dict[str, Any]] = []
        """Every event in order."""

    def read(self, seconds: float = 0.3, drop: Any = None) -> int:
        """Takes in batches until none has come for `seconds`; those whose number `drop` is true of are lost on the way."""
        taken = 0
        while self.events.poll(seconds * 1000):
            _topic, number, payload = self.events.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if drop is not None and drop(sequence):
                continue
            if sequence > self.next:
                self.catch_up(sequence)
            if sequence >= self.next:
                self.apply(sequence, payload)
            taken += 1
        return taken

    def catch_up(self, until: int | None = None) -> None:
        """Asks for every batch from `next` on, and takes those before `until`."""
        assert self.replay_endpoint, f"batches {self.next} to {until} are lost"
        asker = self.context.socket(zmq.DEALER)
        asker.connect(self.replay_endpoint)
        asker.send_multipart((b"", self.next.to_bytes(8, "big")))
        while asker.poll(5000):
            empty, _topic, number, payload = asker.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                break
            sequence = int.from_bytes(number, "big")
            if until is None or sequence < until:
                self.replayed += 1
                self.apply(sequence, payload)
        asker.close(0)

    def apply(self, sequence: int, payload: bytes) -> None:
        assert sequence == self.next, f"expected batch {self.next}, got {sequence}"
        self.next += 1
        stamp, events, *rank = msgspec.msgpack.decode(payload)
        assert abs(time.time() - stamp) < 600 and not rank
        for event in events:
            self.seen.append(event)
            getattr(self, "on_" + event["type"])(event)

    def on_BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802
        assert event.keys() >= {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                                "lora_name"}
        place, parent, size = self._place(event), event["parent_block_hash"], event["block_size"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        extra = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for i, name in enumerate(event["block_hashes"]):
            assert name not in place, "a block is stored twice"
            place[name] = {"parent": parent, "tokens": event["token_ids"][i * size:(i + 1) * size], "extra": extra[i]}
            parent = name

    def on_BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        place = self._place(event)
        for name in event["block_hashes"]:
            del place[name]

    def on_AllBlocksCleared(self, event: dict[str, Any]) -> None:  # noqa: N802
        self.places.clear()

    def _place(self, event: dict[str, Any]) -> dict[bytes | int, dict[str, Any]]:
        return self.places.setdefault((event.get("group_idx") or 0, event["medium"], event.get("ownership")), {})

    def contexts(self, group: int = 0, medium: str = "GPU", owner: str | None = None) -> dict[bytes | int, list[int]]:
        """The whole context of every block, as far back as it is known: tokens by hash."""
        place = self.places.get((group, medium, owner), {})
        found = {}
        for name in place:
            tokens: list[int] = []
            at: Any = name
            while at in place:
                tokens = place[at]["tokens"] + tokens
                at = place[at]["parent"]
            found[name] = tokens
        return found

    def close(self) -> None:
        self.context.destroy(0)
