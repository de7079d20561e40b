"""The disk: torn and foreign files are told from pages, killed writers leave nothing that is read, two engines agree."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core.plan import PageName
from penstock.stores import record
from penstock.stores.disk import DiskStore
from penstock.stores.folder import INCOMING, SUBFOLDER, claim, parse
from tests.unit.stores.pages import get, name, page, path_of, put, version


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(claim(str(tmp_path)), version())


@pytest.mark.parametrize("size", [1, 3000, 1 << 20])
def test_every_flipped_bit_and_every_cut_is_found(store: DiskStore, size: int) -> None:
    put(store, version(), 1, size)
    whole = bytearray(path_of(store, name(1)).read_bytes())
    assert len(whole) == record.HEADER_BYTES + size
    places = range(len(whole)) if size == 1 else [*range(76), 80, 81, len(whole) // 2, len(whole) - 1]
    for at in places:
        if 76 <= at < 80:
            continue  # filling
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        path_of(store, name(1)).write_bytes(broken)
        assert isinstance(get(store, version(), 1, size), str), at
    for length in (0, 1, 79, 80, len(whole) - 1):
        if length < len(whole):
            path_of(store, name(1)).write_bytes(whole[:length])
            assert get(store, version(), 1, size) == "short"
    path_of(store, name(1)).write_bytes(whole)
    assert get(store, version(), 1, size) == page(1, size)


def test_damage_that_sums_might_hide_is_found() -> None:
    """Lines and words swapped, lost or doubled, and bits flipped in the same place of several words."""
    rng = random.Random(8)
    whole, line = rng.randbytes(40 * 4096 + 72), 4096
    good = record.checksum(memoryview(whole))

    def found(broken: bytearray) -> bool:
        return broken == whole or record.checksum(memoryview(broken)) != good

    for _ in range(300):
        broken, (i, j) = bytearray(whole), rng.sample(range(40), 2)
        one, other = slice(i * line, (i + 1) * line), slice(j * line, (j + 1) * line)
        what = rng.randrange(5)
        if what == 0:
            broken[one], broken[other] = broken[other], broken[one]
        elif what == 1:
            broken[one] = broken[other]
        elif what == 2:
            broken[one] = bytes(line) if rng.random() < 0.5 else rng.randbytes(line)
        elif what == 3:
            at, to = (8 * rng.randrange(len(whole) // 8) for _ in range(2))
            broken[at:at + 8], broken[to:to + 8] = broken[to:to + 8], broken[at:at + 8]
        else:
            bit = rng.randrange(64)
            for _ in range(rng.randrange(1, 4)):
                broken[8 * rng.randrange(len(whole) // 8) + bit // 8] ^= 1 << bit % 8
        assert found(broken), what


def test_a_page_under_another_name_is_not_taken(store: DiskStore) -> None:
    put(store, version(), 1)
    put(store, version(), 2)
    os.replace(path_of(store, name(2)), path_of(store, name(1)))
    assert get(store, version(), 1) == "it is another page"


def test_use_is_seen_by_others(store: DiskStore) -> None:
    put(store, version(), 1)
    os.utime(path_of(store, name(1)), (1, 1))
    store.touch(name(1))
    store.touch(name(2))
    assert time.time() - path_of(store, name(1)).stat().st_mtime < 60


def test_two_engines_see_each_other(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(claim(str(tmp_path)), version())
    third = DiskStore(claim(str(tmp_path)), version(computation="other"))
    for i in range(30):
        put((store, other)[i % 2], version(), i)
    for one in (store, other):
        came, went = one.changes()
        assert {entry.name for entry in came} >= {name(i) for i in range(30)} and not went
    assert all(isinstance(entry.name, str) for entry in third.changes()[0]), "of its own version there is none"
    store.delete(name(7))
    put(store, version(), 31)
    time.sleep(0.01)
    assert other.changes()[1] == [name(7)]
    # Another version's files can be deleted by what they were listed as.
    foreign = DiskStore(claim(str(tmp_path)), version(computation="other")).changes()[0]
    assert len(foreign) == 30
    for entry in foreign:
        third.delete(entry.name)
    assert not [entry for entry in DiskStore(claim(str(tmp_path)), version()).changes()[0] if not isinstance(entry.name, str)]


def test_foreign_files_are_not_pages(store: DiskStore) -> None:
    put(store, version(), 1)
    (path_of(store, name(1)).parent / "README").write_text("hello")
    assert [entry.name for entry in store.changes()[0]] == [name(1)]
    assert [parse(text) for text in ("", "-0", "ab-0", "g" * 64 + "-0", "a" * 64 + "-x", "a" * 64 + "-0\n")] == [None] * 6
    assert parse("ab" * 32 + "-3") == PageName(3, b"\xab" * 32)


def test_a_full_disk_leaves_nothing(store: DiskStore, tmp_path: Path) -> None:
    """The system takes the first bytes of a file, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            put(store, version(), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path / SUBFOLDER / INCOMING)
    assert not path_of(store, name(1)).exists()


WRITER = """
import sys
from pathlib import Path
from penstock.stores.disk import DiskStore
from penstock.stores.folder import claim
from tests.unit.stores.pages import put, version
store = DiskStore(claim(sys.argv[1]), version())
print("up", flush=True)
number = int(sys.argv[2])
while True:
    put(store, version(), number, 200_000)
    number += 1
"""


def test_killed_writers_leave_whole_pages_only(tmp_path: Path) -> None:
    whole = 0
    for attempt in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(attempt * 100_000)], stdout=subprocess.PIPE,
                                  cwd=Path(__file__).parents[3])
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
        time.sleep(0.03 + 0.017 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    store = DiskStore(claim(str(tmp_path)), version())
    for entry in store.changes()[0]:
        assert not isinstance(entry.name, str)
        number = int.from_bytes(entry.name.key, "big")
        assert get(store, version(), number, 200_000) == page(number, 200_000)
        whole += 1
    assert whole > 6
    left = list((tmp_path / SUBFOLDER / INCOMING).iterdir())
    for path in left:
        os.utime(path, (1, 1))
    store.changes()
    assert not list((tmp_path / SUBFOLDER / INCOMING).iterdir()), "what they left is removed in time"
