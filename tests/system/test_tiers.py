"""Greedy output is the same whatever tier a page comes from, whatever becomes of it there, and after a restart.

Trained models talk: several conversations that share a system prompt, turn by turn, and branches off them. The device has room
for little more than one of them, so that pages leave it and come back all the time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock import canary
from penstock.cache.keys import chain
from penstock.checkpoint import Fingerprint, sample
from penstock.cli.main import main
from penstock.config.schema import EngineOptions
from penstock.core.plan import PageName
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.state import lay_out
from penstock.engine import tiers
from penstock.engine.engine import Engine
from penstock.stores import Store
from penstock.stores.opening import open_stores
from penstock.worker.movers import PageReader
from tests.data import MODELS, need

FAULTY = int(os.environ.get("PENSTOCK_TEST_FAULTY_REQUESTS", "300"))
"""Requests of the tests with faults in `make test-all`, twice those of `make test`; the full measure is 10,000."""
SOME_FAULTY = [FAULTY // 2, pytest.param(FAULTY, marks=pytest.mark.exhaustive)]

LENGTH = 320
OUTPUT = 10
CHUNK = 64


def folder(model: str) -> str:
    return canary.NAME if model == canary.NAME else str(need(MODELS / model))


@cache
def slab_bytes(model: str) -> tuple[int, int]:
    """Bytes of a slab, and of a device cache that holds the longest sequence and a little more."""
    from penstock import models
    from penstock.checkpoint import dtype_of, read_config, resolve_folder

    path = resolve_folder(folder(model), None)
    checkpoint = read_config(path)
    layout = lay_out(models.describe(checkpoint).states(dtype_of(path, checkpoint)), 16, 0)
    return layout.slab_bytes, layout.slab_bytes * (layout.slabs_for(LENGTH, CHUNK) + 4)


def start(model: str, **options: Any) -> Engine:
    slab, device = slab_bytes(model)
    host = options.pop("host_slabs", None)
    if host is not None:
        options["cache_host_bytes"] = host * slab
    given = {"model": folder(model), "device": "cpu", "block_size": 16, "max_model_len": LENGTH, "max_num_seqs": 8,
             "max_num_batched_tokens": CHUNK, "kv_cache_memory_bytes": device, **options}
    return Engine(EngineOptions(**given))


def run(engine: Engine, prompts: Sequence[list[int]], check: bool = True) -> list[list[int]]:
    """The continuations of prompts that are asked at once."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=0)
        engine.submit(Request(str(i), prompt, params))
    out: dict[str, list[int]] = {}
    while engine.busy:
        for update in engine.turn():
            assert update.finish_reason in (None, "length"), update
            out.setdefault(update.request_id, []).extend(update.token_ids)
        if check:
            engine.scheduler.check()
    return [out[str(i)] for i in range(len(prompts))]


def talk(engine: Engine) -> list[list[int]]:
    """Everything that is said: four conversations of four turns that share a system prompt, and two branches off each."""
    rng = random.Random(11)
    vocabulary = engine.info.vocab_size

    def words(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    system, said = words(75), list[list[int]]()
    contexts = [system + words(10 * i) for i in range(4)]
    for _ in range(4):
        prompts = [context + words(14) for context in contexts]
        answers = run(engine, prompts)
        contexts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        said += answers
    for _ in range(2):
        said += run(engine, [context[:-7] + words(9) for context in contexts])
    return said


@cache
def reference(model: str) -> list[list[int]]:
    """Answers where nothing is ever reused."""
    engine = start(model, enable_prefix_caching=False, kv_cache_memory_bytes=64 * slab_bytes(model)[1])
    said = talk(engine)
    engine.close()
    assert len({tuple(answer) for answer in said}) > 12, "the model says the same to everything: it would hide mistakes"
    return said


def figures(engine: Engine) -> dict[str, Any]:
    return {tier.name: tier for tier in engine.stats().tiers}


@pytest.mark.parametrize("model", ["stories260k", canary.NAME])
@pytest.mark.parametrize("write", ["through", "evict"])
def test_host(model: str, write: str) -> None:
    engine = start(model, host_slabs=200, cache_write=write, cache_load="always")
    assert talk(engine) == reference(model)
    host = figures(engine)["host"]
    assert host.hit_tokens > 300 and host.bytes_in > 0 and host.bytes_out > 0 and host.failures == 0
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("write", ["through", "evict"])
def test_disk_and_restart(tmp_path: Path, write: str, depth: int) -> None:
    """A host so small that the disk is needed; then an engine that finds all of it there; then one whose pages are broken."""
    options = {"host_slabs": 12, "cache_disk": str(tmp_path), "cache_write": write, "cache_load": "always", "depth": depth}
    engine = start("stories260k", **options)
    assert talk(engine) == reference("stories260k")
    disk = figures(engine)["disk"]
    assert disk.stored_pages > 20 and disk.used_bytes > 0
    flush(engine)
    tiers = figures(engine).values()
    assert sum(tier.bytes_in for tier in tiers) == sum(tier.bytes_out for tier in tiers) > 0, "what goes in came out elsewhere"
    page = engine.memory.layout.groups[0].page_bytes
    assert figures(engine)["device"].bytes_in % page == 0 < figures(engine)["device"].bytes_in
    engine.close()

    again = start("stories260k", **options)
    assert talk(again) == reference("stories260k")
    disk = figures(again)["disk"]
    assert disk.hit_tokens > 150 and disk.failures == 0
    again.close()
    assert main(["cache", "verify", str(tmp_path)]) == 0

    rng, broken = random.Random(4), 0
    for path in sorted(tmp_path.rglob("*-0")):
        if rng.random() < 0.5:
            data = bytearray(path.read_bytes())
            data[rng.randrange(80, len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data[:rng.choice([len(data), 300])])
            broken += 1
    assert broken > 10
    last = start("stories260k", **options)
    assert talk(last) == reference("stories260k")
    assert figures(last)["disk"].failures > 3, "nobody met a broken page"
    last.close()


@pytest.mark.serial
def test_predicted_costs_decide() -> None:
    """Without being told to, an engine loads where that pays."""
    engine = start("stories260k", host_slabs=200)
    assert talk(engine) == reference("stories260k")
    assert figures(engine)["host"].hit_tokens > 100
    engine.close()


def found_on_disk(root: Path, **options: Any) -> int:
    """Positions of a fixed prompt that a new engine finds on disk; it leaves what it computes there."""
    engine = start(options.pop("model", "stories260k"), cache_disk=str(root), host_slabs=40, cache_load="always", **options)
    run(engine, [list(range(3, 99))])
    found: int = figures(engine)["disk"].hit_tokens
    engine.close()
    return found


def test_other_options_find_other_pages(tmp_path: Path) -> None:
    """Each option that may change an entry; and those that change none find what is there."""
    assert found_on_disk(tmp_path) == 0
    assert found_on_disk(tmp_path) == 80
    for changed in ({"dtype": "bfloat16"}, {"block_size": 8}, {"load_format": "dummy"}, {"load_format": "dummy", "seed": 1},
                    {"kernels": {"*": "reference"}}, {"kernels": {"rms_norm": "reference"}}):
        assert found_on_disk(tmp_path, **changed) == 0, changed
    for same in ({"max_model_len": LENGTH - 16}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 32}, {"cache_policy": "lru"},
                 {"threads": 1}, {"seed": 5}, {"depth": 1}, {"cache_write": "evict"}):
        assert found_on_disk(tmp_path, **same) == 80, same
    assert len(list((tmp_path / "penstock-cache" / "pages").iterdir())) >= 4


def test_any_byte_of_the_weights_is_another_model(tmp_path: Path) -> None:
    """A fine-tune that differs in one value of one row shares nothing: the samples of both are equal, their keys are not."""
    rng, model = random.Random(2), tmp_path / "model"
    shutil.copytree(folder("stories260k"), model)
    path = model / "model.safetensors"
    whole = path.read_bytes()
    data_starts = 8 + int.from_bytes(whole[:8], "little")
    samples = {sample(model, "auto", 0)}
    assert found_on_disk(tmp_path / "pages", model=str(model)) == 0
    assert found_on_disk(tmp_path / "pages", model=str(model)) == 80
    for _ in range(3):
        changed = bytearray(whole)
        changed[rng.randrange(data_starts, len(whole))] ^= 1
        path.write_bytes(changed)
        samples.add(sample(model, "auto", 0))
        assert found_on_disk(tmp_path / "pages", model=str(model)) == 0
    assert len(samples) == 1, "the case that a sample misses"
    path.write_bytes(whole)
    assert found_on_disk(tmp_path / "pages", model=str(model)) == 80


@pytest.mark.parametrize("scaling", [
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 200, "short_factor": [1.0] * 4,
     "long_factor": [1.5] * 4}], ids=["dynamic", "longrope"])
def test_the_same_model_at_another_length(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """Where `max_model_len` decides how positions are rotated, engines of another length find nothing, and say the same as
    without a disk."""
    model = tmp_path / "model"
    shutil.copytree(folder("stories260k"), model)
    config = json.loads((model / "config.json").read_text())
    config |= {"rope_scaling": scaling} | ({"max_position_embeddings": 128} if scaling["rope_type"] == "dynamic" else {})
    (model / "config.json").write_text(json.dumps(config))
    said = []
    for disk in (None, str(tmp_path / "pages")):
        for length in (160, LENGTH):
            engine = start(str(model), max_model_len=length, cache_load="always",
                           **({"cache_disk": disk, "host_slabs": 40} if disk else {}))
            said.append(run(engine, [list(range(3, 99))]))
            if disk:
                assert figures(engine)["disk"].hit_tokens == 0
            engine.close()
    assert said[:2] == said[2:]
    assert found_on_disk(tmp_path / "pages", model=str(model)) == 80


def test_a_start_does_not_wait_for_the_hash_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is there nothing is stored; then what was computed meanwhile is, and a later engine finds it."""
    known = threading.Event()
    hash_file = Fingerprint._hash

    def late(self: Fingerprint, path: Path) -> str:
        known.wait()
        return hash_file(self, path)

    monkeypatch.setattr(Fingerprint, "_hash", late)
    monkeypatch.setattr(tiers, "_SMALL_SECONDS", 0.0)
    engine = start("stories260k", cache_disk=str(tmp_path), host_slabs=40, cache_load="always")
    prompt = list(range(3, 99))
    said = run(engine, [prompt])
    assert figures(engine)["host"].bytes_in == 0 and engine.writing and not engine.info.cache_identity
    known.set()
    until = time.monotonic() + 10
    while not engine.info.cache_identity and time.monotonic() < until:
        engine.turn()
    flush(engine)
    assert figures(engine)["disk"].stored_pages == 6 and engine.stats().cache_identity
    engine.close()
    monkeypatch.undo()
    engine = start("stories260k", cache_disk=str(tmp_path), host_slabs=40, cache_load="always")
    assert run(engine, [prompt]) == said and figures(engine)["disk"].hit_tokens == 80
    engine.close()


def test_two_engines_share_a_disk(tmp_path: Path) -> None:
    engines = [start("stories260k", host_slabs=12, cache_disk=str(tmp_path), cache_load="always") for _ in range(2)]
    said: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        said[i] = talk(engines[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == said[1] == reference("stories260k")
    # Each finds the pages that the other has written, once it has looked for them; another prompt each time, because the
    # second engine computes those that it does not find.
    before = figures(engines[1])["disk"].hit_tokens
    for attempt in range(8):
        prompt = list(range(100 + attempt, 250))
        run(engines[0], [prompt])
        flush(engines[0])
        time.sleep(1.5 * (attempt + 1))
        run(engines[1], [prompt])
        if figures(engines[1])["disk"].hit_tokens > before:
            break
    assert figures(engines[1])["disk"].hit_tokens > before
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_precedes_a_damaged_page_is_used(tmp_path: Path, depth: int) -> None:
    """Of the six pages of a prompt on disk one is damaged or has gone: those before it are loaded, the rest is computed."""
    prompt = list(range(3, 106))
    engine = start("stories260k", cache_disk=str(tmp_path), host_slabs=40, cache_load="always", depth=depth)
    said = run(engine, [prompt])
    flush(engine)
    index = engine.scheduler.cache.index
    keys = chain(index.root_key(index.root("", "", "")), prompt, 16)
    engine.close()
    for i, key in enumerate(keys):
        (path,) = tmp_path.rglob(f"{key.hex()}-0")
        whole = path.read_bytes()
        if i % 2:
            path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        else:
            path.unlink()
        engine = start("stories260k", cache_disk=str(tmp_path), host_slabs=40, cache_load="always", depth=depth)
        assert run(engine, [prompt]) == said
        found = figures(engine)["disk"]
        # Pages that went before the start are not asked for; damaged pages count as lost.
        assert (found.hit_tokens, found.failures) == (16 * i, i % 2), i
        engine.close()
        path.write_bytes(whole)


def test_the_disk_stays_within_its_bound(tmp_path: Path) -> None:
    slab, _ = slab_bytes("stories260k")
    bound = 30 * slab
    engine = start("stories260k", host_slabs=12, cache_disk=str(tmp_path), cache_disk_bytes=bound, cache_load="always")
    assert talk(engine) == reference("stories260k")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*-0")) <= bound
    assert figures(engine)["disk"].evicted_pages > 0
    engine.close()


def flush(engine: Engine) -> None:
    """Until nothing is on its way to a store."""
    until = time.monotonic() + 10
    while engine.writing and time.monotonic() < until:
        engine.turn()


def test_preempted_requests_come_back_from_the_host() -> None:
    """More is running than the device holds: what a preempted request loses there it loads again instead of computing it."""
    rng = random.Random(3)
    asked = [[rng.randrange(3, 500) for _ in range(190)] for _ in range(5)]

    def generate(**options: Any) -> tuple[list[list[int]], Any, Any]:
        engine = start("stories260k", cache_load="always", **options)
        for i, prompt in enumerate(asked):
            engine.submit(Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True, seed=0)))
        out: dict[str, list[int]] = {}
        while engine.busy:
            for update in engine.turn():
                out.setdefault(update.request_id, []).extend(update.token_ids)
            engine.scheduler.check()
        found = [out[str(i)] for i in range(len(asked))], engine.stats(), figures(engine)
        engine.close()
        return found

    want, stats, _ = generate(kv_cache_memory_bytes=64 * slab_bytes("stories260k")[1])
    assert stats.preemptions == 0
    found, stats, tiers = generate(kv_cache_memory_bytes=2 * slab_bytes("stories260k")[1], host_slabs=200)
    assert found == want
    assert stats.preemptions > 0 and tiers["host"].hit_tokens > 0


class Slow:
    """A store that takes half a second to read a page."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        time.sleep(0.5)
        return self._store.read(name, parts)


def test_who_waits_for_pages_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = list(range(100, 250))
    options = {"host_slabs": 12, "cache_disk": str(tmp_path), "cache_load": "always"}
    engine = start("stories260k", **options)
    want = run(engine, [prefix])
    engine.close()
    monkeypatch.setattr("penstock.stores.opening.open_stores",
                        lambda *arguments, **named: [Slow(store) for store in open_stores(*arguments, **named)])
    engine = start("stories260k", **options)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=0)
    engine.submit(Request("waits", prefix, params))
    engine.turn()
    ends: dict[str, float] = {}
    began = time.monotonic()
    engine.submit(Request("passes", list(range(3, 90)), params))
    out: list[int] = []
    while engine.busy:
        for update in engine.turn():
            if update.request_id == "waits":
                out += update.token_ids
            if update.finish_reason:
                ends[update.request_id] = time.monotonic() - began
    assert ends["passes"] < 0.4 < ends["waits"] and out == want[0]
    assert figures(engine)["disk"].hit_tokens > 100
    engine.close()


class Faulty:
    """A store in which things go wrong, at random, as they do with disks."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self._store, self._rng = store, rng
        self.tier = store.tier
        self.counts = dict.fromkeys(("short", "flipped", "gone", "unreadable", "slow", "full", "torn"), 0)

    def _happens(self, what: str, chance: float) -> bool:
        if self._rng.random() >= chance:
            return False
        self.counts[what] += 1
        return True

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        if self._happens("slow", 0.02):
            time.sleep(0.03)
        if self._happens("gone", 0.03):
            self._store.delete(name)
        if self._happens("unreadable", 0.02):
            raise OSError(5, "Input/output error")
        done = self._store.read(name, parts)
        if self._happens("flipped", 0.05):
            part = parts[self._rng.randrange(len(parts))]
            part[self._rng.randrange(len(part))] ^= 1 << self._rng.randrange(8)
        if self._happens("short", 0.05):
            cut = self._rng.randrange(len(parts[1]))
            parts[1][cut:] = bytes(len(parts[1]) - cut)
            return len(parts[0]) + cut
        return done

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        if self._happens("full", 0.01):
            raise OSError(28, "No space left on device")
        if self._happens("torn", 0.05):
            # As after a power failure: the name is there, its bytes are not.
            whole = b"".join(parts)
            parts = [memoryview(whole[:self._rng.randrange(len(whole))])]
        self._store.write(name, parts)

    def touch(self, name: PageName) -> None:
        self._store.touch(name)

    def delete(self, name: PageName | str) -> None:
        self._store.delete(name)

    def changes(self) -> Any:
        return self._store.changes()

    def close(self) -> None:
        self._store.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Faulty]]:
    """Every store that an engine opens is faulty; those opened so far."""
    opened: list[Faulty] = []

    def open_faulty(*arguments: Any, **named: Any) -> list[Store]:
        stores = [Faulty(store, random.Random(len(opened))) for store in open_stores(*arguments, **named)]
        opened.extend(stores)
        return list(stores)

    monkeypatch.setattr(tiers, "open_stores", open_faulty)
    monkeypatch.setattr("penstock.stores.opening.open_stores", open_faulty)
    monkeypatch.setattr("penstock.cache.tiers.catalog._PAUSE_SECONDS", 0.05)
    yield opened


def prompts(vocabulary: int, count: int) -> list[list[int]]:
    """Requests that share beginnings of many lengths, as a tree of conversations does; many come again."""
    rng = random.Random(99)
    contexts: list[list[int]] = [[]]
    found = []
    for _ in range(count):
        context = rng.choice(contexts[-40:] if rng.random() < 0.7 else contexts)
        prompt = context + [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 60))]
        if len(prompt) > LENGTH - OUTPUT - 60:
            prompt = prompt[:rng.randrange(1, 100)]
        contexts.append(prompt)
        found.append(prompt)
    return found


def ask_at_random(root: Path, count: int) -> tuple[int, int, int]:
    """Random requests over a small device, a small host and a disk, with restarts, against an engine without cache: wrong
    answers, tokens from disk, pages that were no good."""
    asked = prompts(512, count)
    plain = start("stories260k", enable_prefix_caching=False, kv_cache_memory_bytes=64 * slab_bytes("stories260k")[1])
    wrong, hits, failures, batch = 0, 0, 0, 12
    engine = None
    for at in range(0, len(asked), batch):
        if engine is None:
            engine = start("stories260k", host_slabs=10, cache_disk=str(root), cache_load="always",
                           cache_disk_bytes=slab_bytes("stories260k")[0] * 400,
                           cache_write="through" if (at // batch) % 3 else "evict")
        mine, theirs = (run(one, asked[at:at + batch], check=False) for one in (engine, plain))
        wrong += sum(a != b for a, b in zip(mine, theirs, strict=True))
        engine.scheduler.check()
        if (at // batch) % 10 == 9:
            hits, failures = hits + figures(engine)["disk"].hit_tokens, failures + figures(engine)["disk"].failures
            engine.close()
            engine = None
    if engine is not None:
        hits, failures = hits + figures(engine)["disk"].hit_tokens, failures + figures(engine)["disk"].failures
        engine.close()
    plain.close()
    return wrong, hits, failures


@pytest.mark.parametrize("asked", SOME_FAULTY)
def test_no_fault_makes_a_wrong_token(tmp_path: Path, faults: list[Faulty], asked: int) -> None:
    wrong, hits, failures = ask_at_random(tmp_path, asked)
    counts = {what: sum(fault.counts[what] for fault in faults) for what in faults[0].counts}
    print(f"{asked} requests, {wrong} wrong; {hits} tokens from disk, {failures} pages dropped; faults: {counts}")
    assert wrong == 0
    assert hits > asked and failures > asked // 50
    assert all(counts.values()), counts


@pytest.mark.parametrize("asked", SOME_FAULTY)
def test_no_damaged_file_makes_a_wrong_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    """The same with files that are damaged just before they are read, several at a time, as an undisturbed disk's are."""
    rng, read = random.Random(5), PageReader.read
    counts = dict.fromkeys(("flipped", "short", "empty", "gone", "another", "folder"), 0)

    def damaging(reader: PageReader, names: Sequence[PageName], *rest: Any) -> Any:
        assert reader.at_once
        assert reader._files is not None
        (path,) = map(Path, reader._files.files([rng.choice(names)]) or [])
        if rng.random() < 0.2 and path.is_file():
            damage(path, what := rng.choice(list(counts)), rng)
            counts[what] += 1
        return read(reader, names, *rest)

    monkeypatch.setattr(PageReader, "read", damaging)
    wrong, hits, failures = ask_at_random(tmp_path, asked)
    print(f"{asked} requests, {wrong} wrong; {hits} tokens from disk, {failures} pages dropped; files: {counts}")
    assert wrong == 0
    assert hits > asked and failures > asked // 50
    assert all(counts.values()), counts


def damage(path: Path, what: str, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if what == "flipped":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == "short":
        del data[rng.randrange(len(data)):]
    elif what == "empty":
        data.clear()
    path.unlink()
    if what == "another":
        others = [other for other in path.parent.parent.rglob("*-0") if other.is_file()]
        data[:] = rng.choice(others).read_bytes() if others else b"none"
    if what == "folder":
        path.mkdir()
    elif what != "gone":
        path.write_bytes(data)


TALKER = """
import sys
from pathlib import Path
from tests.system.test_tiers import start, talk
engine = start("stories260k", host_slabs=40, cache_disk=sys.argv[1], cache_load="always")
print("up", flush=True)
while True:
    talk(engine)
    engine.scheduler.cache.index.clear()
"""


def test_killed_engines_leave_nothing_wrong(tmp_path: Path) -> None:
    need(MODELS / "stories260k")
    for seconds in (0.05, 0.4):
        process = subprocess.Popen([sys.executable, "-c", TALKER, str(tmp_path)], stdout=subprocess.PIPE,
                                   cwd=Path(__file__).parents[2])
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert main(["cache", "verify", str(tmp_path)]) == 0
    engine = start("stories260k", host_slabs=40, cache_disk=str(tmp_path), cache_load="always")
    assert talk(engine) == reference("stories260k")
    assert figures(engine)["disk"].hit_tokens > 0
    engine.close()
