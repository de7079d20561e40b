"""Publishes the KV cache events over ZMQ, as vLLM does, for routers. `cache/events.py` defines the events.

A batch is three frames: topic, sequence number (8 bytes, big-endian, from 0, +1 each), msgpack [time, events]. A replay socket
answers a sequence number with the buffered batches from that number on, then with number -1 and no payload."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from penstock.cache.events import SCHEMA_VERSION, Event, Group, Journal, Sink
from penstock.cache.tiers.hierarchy import Hierarchy
from penstock.cache.whereabouts import Whereabouts
from penstock.core.errors import ConfigError
from penstock.core.state import CacheLayout, Everything, Retention, Window

LOG = logging.getLogger("penstock")

ENDPOINT = "tcp://127.0.0.1:5557"
"""The default endpoint. It is local to this machine, because events reveal which prompts are cached."""

END = (-1).to_bytes(8, "big", signed=True)
"""Marks the end of a replay, in place of a sequence number."""


class EventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The option kv_events_config: vLLM's --kv-events-config, name by name."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """zmq, or null for none; by default zmq where events are enabled."""
    endpoint: str = ENDPOINT
    """Bound if it is the default, has a * or ::, or is ipc or inproc; else connected to. Port 0 takes a free one."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """The number of batches that can be replayed."""
    hwm: int = 100_000
    """The number of batches queued for a slow subscriber; further ones are dropped, which it sees by the sequence numbers."""
    max_queue_size: int = 100_000
    """The number of batches queued for sending; beyond it the engine blocks (backpressure)."""
    topic: str = ""
    use_int_block_hashes: bool = False
    """Name pages by 64-bit integers (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES) instead of 32 bytes."""

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


def read_config(given: Mapping[str, Any]) -> EventsConfig:
    """The config as typed values; strings such as "true" and "100" are converted. ConfigError names the invalid field."""
    try:
        config = msgspec.convert(dict(given), EventsConfig, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(EventsConfig))
        raise ConfigError(f"kv_events_config: {error}; possible fields are {known}") from None
    if config.publisher not in (None, "zmq", "null"):
        raise ConfigError(f"kv_events_config: publisher is {config.publisher!r}; possible are zmq and null")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"kv_events_config: {name} is {getattr(config, name)}; it must be at least 1")
    return config


class CacheEvents:
    """An engine's KV events and their publisher. Owned by the engine's thread."""

    def __init__(self, layout: CacheLayout, tiers: Hierarchy | None, config: EventsConfig) -> None:
        """Events of a cache with this layout and of its tiers. ConfigError if the sockets cannot be opened."""
        self._journal = Journal(layout.page, [_group(group.keep) for group in layout.groups], config.use_int_block_hashes)
        self._whereabouts = Whereabouts(self._journal, tiers) if tiers is not None else None
        self.publisher = Publisher(config)
        self.flush()

    @property
    def sink(self) -> Sink:
        return self._whereabouts or self._journal

    def flush(self) -> None:
        if self._whereabouts is not None:
            self._whereabouts.flush()
        events = self._journal.take()
        if events:
            self.publisher.publish(events)

    def close(self) -> None:
        self.flush()
        self.publisher.close()


def open_events(given: Mapping[str, Any], sharing: bool, layout: CacheLayout, tiers: Hierarchy | None) -> CacheEvents | None:
    """An engine's events, None if kv_events_config has none; `sharing`: prefixes are cached. ConfigError: bad settings."""
    config = read_config(given)
    if not config.enabled:
        return None
    if not sharing:
        raise ConfigError("kv_events_config is of no use with enable_prefix_caching off: nothing can be found; set one of them")
    return CacheEvents(layout, tiers, config)


def _group(keep: Retention) -> Group:
    """vLLM's description of a cache group."""
    if isinstance(keep, Window):
        return Group("sliding_window", keep.width)
    return Group("full_attention" if isinstance(keep, Everything) else type(keep).__name__.lower())


class Publisher:
    """Sends batches in a thread of its own; `publish` may be called from one thread at a time."""

    def __init__(self, config: EventsConfig) -> None:
        """Binds the sockets. ConfigError if that is not possible."""
        self.config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._batches: deque[tuple[float, Sequence[Event]]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        try:
            self._out = self._open(zmq.PUB, config.endpoint)
            self._replay = self._open(zmq.ROUTER, config.replay_endpoint) if config.replay_endpoint else None
        except zmq.ZMQError as error:
            self._context.destroy(0)
            places = " and ".join(filter(None, (config.endpoint, config.replay_endpoint)))
            raise ConfigError(f"kv_events_config: cannot listen on {places}: {error.strerror}") from None
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else None
        # This socket pair wakes the thread; its capacity bounds the queue.
        self._inbox, self._wake = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._inbox.set_hwm(1)
        self._wake.set_hwm(config.max_queue_size)
        self._inbox.bind("inproc://batches")
        self._wake.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="penstock-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # A replay is sent at once, and a ROUTER socket drops messages beyond its high-water mark.
        socket.set_hwm(max(self.config.hwm, self.config.buffer_steps + 1))
        socket.setsockopt(zmq.LINGER, 1000)
        if endpoint == ENDPOINT or any(part in endpoint for part in ("*", "::", "ipc://", "inproc://")):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        return socket

    def describe(self) -> dict[str, Any]:
        """The addresses and settings that a consumer needs to subscribe."""
        return {"publisher": "zmq", "endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint,
                "topic": self.config.topic, "buffer_steps": self.config.buffer_steps, "schema_version": SCHEMA_VERSION}

    def publish(self, events: Sequence[Event]) -> None:
        """Sends events as one batch. They must not be changed afterwards."""
        self._batches.append((time.time(), events))
        self._wake.send(b"")

    def close(self) -> None:
        """Sends the queued batches and closes the sockets."""
        self._wake.send(b"end")
        self._thread.join()
        self._context.destroy(1000)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            # Send everything published before a replay request first, so that the replay includes it.
            while self._inbox.poll(0):
                if self._inbox.recv():
                    return
                self._send(number)
                number += 1
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send(self, number: int) -> None:
        numbered = number.to_bytes(8, "big"), self._encode(self._batches.popleft())
        self._sent.append(numbered)
        self._out.send_multipart((self._topic, *numbered))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        asker, *frames = replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            LOG.warning("a question on the replay socket of KV events is not a sequence number of 8 bytes")
            return
        # Big-endian numbers of equal length compare like their bytes.
        for numbered in self._sent:
            if numbered[0] >= frames[1]:
                replay.send_multipart((asker, b"", self._topic, *numbered))
        replay.send_multipart((asker, b"", self._topic, END, b""))
