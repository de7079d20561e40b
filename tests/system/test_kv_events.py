"""KV events: a consumer that knows the wire alone rebuilds the tree of a real engine, also after it has missed batches."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from penstock import LLM, SamplingParams
from penstock.cache import keys
from penstock.cache.events import Journal
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.request import Request
from penstock.engine.engine import Engine
from penstock.engine.events import END, EventsConfig, Publisher, read_config
from tests.data import MODELS, need
from tests.models.families import CASES, make
from tests.system.kv_consumer import Consumer
from tests.system.ranks import Threaded

ONE = SamplingParams(temperature=0, max_tokens=1)
PAGE = 4
SOCKETS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


@contextmanager
def published(**options: Any) -> Iterator[tuple[Publisher, Consumer]]:
    """A publisher, and a consumer that has subscribed before the first batch."""
    config = read_config({**SOCKETS, **options})
    publisher = Publisher(config)
    consumer = Consumer(publisher.endpoint, publisher.replay_endpoint, config.topic)
    try:
        # A subscription takes a moment; until it has arrived, batches are lost, which is what replay is for.
        yield publisher, consumer
    finally:
        consumer.close()
        publisher.close()


class Tree:
    """A cache's tree in small, that stores and removes at random and tells a journal."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.journal = Journal(PAGE)
        self.root = keys.root("model", "", "salt")
        self.blocks: dict[bytes, tuple[bytes | None, list[int]]] = {}

    def grow(self) -> None:
        parent = self.rng.choice([None, *self.blocks])
        tokens = [self.rng.randrange(50_000) for _ in range(PAGE * self.rng.randrange(1, 4))]
        chain = keys.chain(parent or self.root, tokens, PAGE)
        self.journal.stored(0, "device", parent, chain, tokens, "salt", "")
        for i, key in enumerate(chain):
            self.blocks[key] = (parent if i == 0 else chain[i - 1], tokens[i * PAGE:(i + 1) * PAGE])

    def prune(self) -> None:
        leaves = sorted(self.blocks.keys() - {parent for parent, _ in self.blocks.values()})
        if leaves:
            key = self.rng.choice(leaves)
            del self.blocks[key]
            self.journal.removed(0, "device", [key])

    def clear(self) -> None:
        self.blocks.clear()
        self.journal.cleared()

    def live(self, publisher: Publisher, steps: int) -> None:
        for _ in range(steps):
            self.rng.choices((self.grow, self.prune, self.clear), (10, 6, 0.2))[0]()
            if self.rng.random() < 0.5:
                publisher.publish(self.journal.take())
        publisher.publish(self.journal.take())


def mapped(consumer: Consumer) -> dict[Any, tuple[Any, list[int]]]:
    place = consumer.places.get((0, "GPU", None), {})
    return {name: (block["parent"], block["tokens"]) for name, block in place.items()}


def test_every_batch_in_order() -> None:
    tree = Tree(1)
    with published(topic="kv@pod@model") as (publisher, consumer):
        tree.live(publisher, 300)
        consumer.read()
        consumer.catch_up()
        assert mapped(consumer) == tree.blocks and tree.blocks


@pytest.mark.parametrize("seed", range(3))
def test_lost_batches_are_replayed(seed: int) -> None:
    tree, rng = Tree(seed), random.Random(seed)
    with published() as (publisher, consumer):
        for _ in range(4):
            tree.live(publisher, 60)
            consumer.read(drop=lambda sequence: rng.random() < 0.3)
        consumer.catch_up()
        assert mapped(consumer) == tree.blocks
        assert consumer.replayed > 10


def test_who_comes_late_gets_everything() -> None:
    tree = Tree(4)
    with published() as (publisher, _):
        tree.live(publisher, 100)
        late = Consumer(publisher.endpoint, publisher.replay_endpoint)
        late.catch_up()
        assert mapped(late) == tree.blocks
        late.close()


def test_frames_as_others_write_and_read_them() -> None:
    """Frame by frame what a consumer of vLLM's or SGLang's stream expects."""
    with (published(topic="kv@pod@model", buffer_steps=3) as (publisher, consumer),
          closing(consumer.context.socket(zmq.SUB)) as events, closing(consumer.context.socket(zmq.DEALER)) as asker):
        events.setsockopt(zmq.SUBSCRIBE, b"kv@")
        events.connect(publisher.endpoint)
        asker.connect(publisher.replay_endpoint or "")
        journal = Journal(PAGE)
        while not events.poll(20):
            publisher.publish(journal.take())
        topic, number, payload = events.recv_multipart()
        assert topic == b"kv@pod@model" and len(number) == 8 and int.from_bytes(number, "big") < 500
        decoded = msgspec.msgpack.decode(payload)
        assert type(decoded[0]) is float and type(decoded[1]) is list and len(decoded) == 2
        for _ in range(10):
            publisher.publish([])
        while events.poll(100):
            last = int.from_bytes(events.recv_multipart()[1], "big")
        asker.send_multipart((b"", (0).to_bytes(8, "big")))
        answers = []
        while not answers or answers[-1][2] != END:
            assert asker.poll(5000)
            answers.append(asker.recv_multipart())
        assert [frames[:2] for frames in answers] == [[b"", b"kv@pod@model"]] * 4
        numbers = [int.from_bytes(frames[2], "big", signed=True) for frames in answers]
        assert numbers == [last - 2, last - 1, last, -1], "the last three that were kept, and the end"
        assert answers[-1][3] == b""


def test_a_wrong_question_harms_nobody() -> None:
    with published() as (publisher, consumer):
        with closing(consumer.context.socket(zmq.DEALER)) as asker:
            asker.connect(publisher.replay_endpoint or "")
            asker.send_multipart((b"", b"nonsense, and too long"))
            asker.send_multipart((b"x",))
        publisher.publish(Journal(PAGE).take())
        consumer.catch_up()
        assert consumer.next == 1


def test_config() -> None:
    assert not EventsConfig().enabled and not read_config({}).enabled
    texts = read_config({"enable_kv_cache_events": "true", "buffer_steps": "12", "topic": "x"})
    assert texts.enabled and texts.buffer_steps == 12 and texts.topic == "x"
    assert not read_config({"enable_kv_cache_events": True, "publisher": "null"}).enabled
    for wrong in ({"endpont": "x"}, {"buffer_steps": "many"}, {"publisher": "kafka"}, {"hwm": 0}):
        with pytest.raises(ConfigError, match="kv_events_config"):
            read_config(wrong)
    with closing(socket.socket()) as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            Publisher(EventsConfig(endpoint=f"tcp://*:{taken.getsockname()[1]}"))


# -- a real engine


def blocks_of(llm: LLM) -> dict[int, dict[bytes, tuple[bytes | None, list[int]]]]:
    """The whole pages that an engine's index has on the device: by group, parent and tokens by key. Keys are computed here."""
    index = llm.engine.scheduler.cache.index
    width, found = index.width, {group: {} for group in range(index.groups)}  # type: dict[int, dict[bytes, Any]]

    def follow(node: Any, parent: bytes, start: bool) -> None:
        tokens = np.frombuffer(bytes(node.tokens[:len(node.tokens) // width * width]), np.int32).tolist()
        chain = keys.chain(parent, tokens, index.page)
        for slot, key in enumerate(chain):
            before = chain[slot - 1] if slot else None if start else parent
            for group in range(index.groups):
                if node.pages[group][slot] >= 0:
                    found[group][key] = (before, tokens[slot * index.page:(slot + 1) * index.page])
        for child in node.children.values():
            follow(child, chain[-1] if chain else parent, start and not chain)

    for (adapter, salt), root in index.roots.items():
        for child in root.children.values():
            follow(child, keys.root(llm.info.cache_identity, adapter, salt), True)
    return found


def test_tiers_behind_the_device(tmp_path: Path) -> None:
    """Pages in host memory and on disk are told as well, also when the device has evicted them."""
    for write in ("through", "evict"):
        rng = random.Random(8)
        with LLM(str(need(MODELS / "babyllama-tok105")), dtype="float32", threads=1, max_num_seqs=4, max_model_len=160,
                 block_size=8, kv_cache_memory_bytes=1 << 20, kv_events_config=SOCKETS, cache_host_bytes=2 << 20,
                 cache_disk=str(tmp_path / write), cache_write=write, cache_load="always") as llm:
            sources = llm.info.kv_events or {}
            consumer = Consumer(sources["endpoint"], sources["replay_endpoint"])
            history: list[int] = []
            for _ in range(60):
                output = llm.generate({"prompt_token_ids": conversation(rng, history)}, ONE, use_tqdm=False)[0]
                history = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                consumer.read(0.01)
            cache, events = llm.engine.scheduler.cache, llm.engine.events
            assert events is not None and cache.tiers is not None
            until = time.monotonic() + 10
            while cache.writing and time.monotonic() < until:
                llm.engine.turn()
            events.flush()
            consumer.catch_up()
            tiers: Any = cache.tiers
            there = {("CPU", "host"): {name.key for name in tiers.host.oldest()},
                     ("STORAGE", "disk"): {name.key for name in tiers.catalogs[0]._entries if not isinstance(name, str)}}
            for (medium, owner), expected in there.items():
                told = consumer.places.get((0, medium, owner), {})
                assert set(told) == expected and len(expected) > 20, (write, owner)
                for key, block in told.items():
                    parent = block["parent"] or keys.root(llm.info.cache_identity)
                    assert keys.chain(parent, block["tokens"], len(block["tokens"])) == [key]
            assert any(event["type"] == "BlockRemoved" and event.get("ownership") == "host" for event in consumer.seen)
            consumer.close()


def test_what_was_on_disk_before_is_told_once_it_is_known(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 160, "block_size": 8, "cache_load": "always",
                               "cache_host_bytes": 8 << 20, "cache_disk": str(tmp_path), "kv_events_config": SOCKETS}
    prompt = {"prompt_token_ids": [5 + i % 90 for i in range(81)]}
    with LLM(str(need(MODELS / "babyllama-tok105")), **options) as llm:
        llm.generate(prompt, ONE, use_tqdm=False)
    with LLM(str(need(MODELS / "babyllama-tok105")), **options) as llm:
        sources = llm.info.kv_events or {}
        consumer = Consumer(sources["endpoint"], sources["replay_endpoint"])
        consumer.catch_up()
        assert not consumer.places, "names alone say nothing"
        assert llm.generate(prompt, ONE, use_tqdm=False)[0].cached_by_tier == {"disk": 80}
        consumer.catch_up()
        assert len(consumer.places[0, "GPU", None]) == len(consumer.places[0, "STORAGE", "disk"]) == 10
        consumer.close()


def conversation(rng: random.Random, history: list[int]) -> list[int]:
    """A prompt that goes on from something said before, or begins anew."""
    keep = rng.randrange(len(history) + 1) if rng.random() < 0.7 else 0
    return [*history[:keep], *(rng.randrange(3, 105) for _ in range(rng.randrange(1, 60)))][-140:]


@pytest.mark.parametrize("model", [pytest.param("babyllama-tok105", marks=pytest.mark.exhaustive), "gemma3-grouped"])
def test_the_tree_of_an_engine(model: str, tmp_path: Path) -> None:
    """Full attention, and windows beside it; under eviction, in several namespaces, after a reset and after losses."""
    rng = random.Random(7)
    if model == "gemma3-grouped":
        make(next(case for case in CASES if case.name == model), tmp_path)
    folder = tmp_path if model == "gemma3-grouped" else need(MODELS / model)
    with LLM(str(folder), dtype="float32", threads=1, max_num_seqs=4, max_model_len=160, block_size=8,
             skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20, kv_events_config=SOCKETS) as llm:
        sources = llm.info.kv_events or {}
        consumer = Consumer(sources["endpoint"], sources["replay_endpoint"])
        history: list[int] = []
        for turn in range(40):
            prompts = [conversation(rng, history) for _ in range(rng.randrange(1, 4))]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(temperature=0, max_tokens=8),
                                   use_tqdm=False, cache_salt=rng.choice(("", "one", "two")))
            history = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
            if turn == 25:
                assert llm.reset_prefix_cache()
            consumer.read(0.02, drop=lambda sequence: rng.random() < 0.2)
        consumer.catch_up()
        expected = blocks_of(llm)
        assert sum(map(len, expected.values())) > 10
        for group, blocks in expected.items():
            place = consumer.places.get((group, "GPU", None), {})
            assert {name: (block["parent"], block["tokens"]) for name, block in place.items()} == blocks
            salts = {tuple(block["extra"] or ()) for block in place.values() if block["parent"] is None}
            assert salts <= {(), ("one",), ("two",)} and len(salts) > 1
        assert {event["type"] for event in consumer.seen} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        consumer.close()


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
                                    {"context_parallel_size": 2, "block_size": 4}], ids=str)
def test_ranks_tell_once_what_all_of_them_hold(layout: dict[str, Any]) -> None:
    """Pages on the devices and in host memory, each of which is in parts on all ranks, are those of one rank."""
    found = []
    for more in ({}, layout):
        options = EngineOptions(**{"model": str(need(MODELS / "babyllama-tok105")), "device": "cpu", "dtype": "float32",
                                   "threads": 1, "max_num_seqs": 4, "max_model_len": 160, "block_size": 8,
                                   "cache_host_bytes": 8 << 20, "kv_events_config": SOCKETS, **more})
        engine = Engine(options, rank=Threaded(options) if options.ranks > 1 else None)
        try:
            sources = engine.info.kv_events or {}
            with closing(Consumer(sources["endpoint"], sources["replay_endpoint"])) as consumer:
                for name, length in (("a", 81), ("b", 33), ("c", 9)):
                    engine.submit(Request(name, [5 + i % 90 for i in range(length)],
                                          SamplingParams(temperature=0, max_tokens=9, seed=0)))
                    while engine.busy or engine.writing:
                        engine.turn()
                assert engine.events is not None
                engine.events.flush()
                consumer.catch_up()
                told = sum(len(event["block_hashes"]) for event in consumer.seen if event["type"] == "BlockStored")
                found.append((told, {place: sorted(block["tokens"] for block in blocks.values())
                                     for place, blocks in consumer.places.items()}))
        finally:
            engine.close()
    (told, places), ranks = found
    assert ranks == (told, places) and {medium for _, medium, _ in places} == {"GPU", "CPU"}
    assert told == sum(map(len, places.values())) > 20
