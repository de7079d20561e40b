"""Reading pages by files, several at a time, finds the same as reading them one by one."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.core.plan import PageName
from penstock.stores import record
from penstock.stores.disk import DiskStore
from penstock.stores.folder import claim
from penstock.worker import movers
from penstock.worker.movers import PageReader
from tests.unit.stores.pages import name, page, path_of, version

SIZES = (1, 72, 3000, 4096, 10 * 4096 + 8, 64 * 4096, 64 * 4096 + 1, 150 * 4096 + 4000)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(claim(str(tmp_path)), version())


def fill(store: DiskStore, number: int, size: int) -> Path:
    data = memoryview(page(number, size))
    store.write(name(number), [memoryview(record.header(version().id, name(number), data)), data])
    return path_of(store, name(number))


def both(store: DiskStore, names: list[PageName], sizes: list[int]) -> tuple[dict[PageName, str], torch.Tensor]:
    """The faults of pages and their bytes, by one reader; the other must find the same."""
    files, single = PageReader(store, version().id), PageReader(store, version().id)
    assert files.at_once, "the function could not be built"
    single._function = None
    memory = [torch.zeros(sum(sizes) + 9, dtype=torch.uint8) for _ in range(2)]
    found = [reader.read(names, sizes, into) for reader, into in zip((files, single), memory, strict=True)]
    assert {of: why.partition(": '")[0] for of, why in found[0].items()} == {of: why.partition(": '")[0]
                                                                             for of, why in found[1].items()}
    assert all((into[-9:] == 0).all() for into in memory)
    return found[0], memory[0]


def test_pages_of_all_sizes(store: DiskStore) -> None:
    for i, size in enumerate(SIZES):
        fill(store, i, size)
    found, memory = both(store, [name(i) for i in range(len(SIZES))], list(SIZES))
    assert not found
    assert bytes(memory[:sum(SIZES)].numpy()) == b"".join(page(i, size) for i, size in enumerate(SIZES))
    assert both(store, [], [])[0] == {}


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_good_is_told(store: DiskStore, size: int) -> None:
    rng = random.Random(size)
    for number in range(12):
        path = fill(store, number, size)
        whole = path.read_bytes()
        if number == 1:
            path.unlink()
        elif number == 2:
            path.unlink()
            path.mkdir()
        elif 3 <= number <= 6:
            path.write_bytes(whole[:rng.choice([0, 79, 80, 80 + rng.randrange(size)])])
        elif number == 7:
            path.write_bytes(whole + b"more")
        elif number >= 8:
            at = rng.randrange(80, len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1:])
    os.replace(path_of(store, name(11)), path_of(store, name(8)))
    found, memory = both(store, [name(i) for i in range(12)], [size] * 12)
    assert set(found) == {name(i) for i in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11)}
    assert all("No such file" in found[name(i)] for i in (1, 11)) and "Is a directory" in found[name(2)]
    assert all(found[name(i)].startswith("it ends after") for i in range(3, 7)) and found[name(8)] == "it is another page"
    for good in (0, 7):
        assert bytes(memory[good * size:(good + 1) * size].numpy()) == page(good, size)
    assert both(store, [name(0)], [size + 1])[0][name(0)].startswith("it ends after"), "of a page that is larger"


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    movers._function.cache_clear()
    yield
    movers._function.cache_clear()


def test_without_a_compiler_pages_are_read_one_by_one(store: DiskStore, without_compiler: None,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    fill(store, 0, 3000)
    with caplog.at_level(logging.WARNING):
        readers = [PageReader(store, version().id) for _ in range(3)]
    assert not any(reader.at_once for reader in readers)
    assert len(caplog.records) == 1 and "/nowhere/g++" in caplog.text
    memory = torch.zeros(3000, dtype=torch.uint8)
    assert readers[0].read([name(0)], [3000], memory) == {} and bytes(memory.numpy()) == page(0)
