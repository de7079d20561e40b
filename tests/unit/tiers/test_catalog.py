"""Catalogs: what a store holds as memory knows it, bounds, failing stores, and two engines within one bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.cache.tiers.catalog import Catalog, Keeper
from penstock.stores.disk import DiskStore
from penstock.stores.folder import claim
from penstock.stores.record import HEADER_BYTES
from tests.unit.stores.pages import name, path_of, put, version

SIZE = 3000


def catalog(root: Path, bound: int | None = None) -> Catalog:
    return Catalog(DiskStore(claim(str(root)), version()), [SIZE, 1000], bound)


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*-0"))


def test_what_was_kept_is_known_again(tmp_path: Path) -> None:
    one = catalog(tmp_path)
    for i in range(5):
        put(one.store, version(), i)  # type: ignore[arg-type]
    other = catalog(tmp_path)
    Keeper(other, 60).close()
    assert all(name(i) in other for i in range(5)) and other.pages == 5
    assert other.used_bytes >= 5 * (SIZE + HEADER_BYTES)
    other.doom([name(2)])
    assert name(2) not in other and other.pages == 4


def test_reserved_pages_are_written_once(tmp_path: Path) -> None:
    one = catalog(tmp_path)
    assert one.reserve(name(1), 0.0) and not one.reserve(name(1), 0.0) and name(1) not in one
    assert one.finish_write(name(1), True, 0.0) and name(1) in one and not one.reserve(name(1), 0.0)
    assert one.reserve(name(2), 0.0) and one.finish_write(name(2), False, 10.0)
    assert not one.reserve(name(2), 11.0), "a store that failed is left alone for a while"
    assert one.reserve(name(2), 20.0)
    assert one.used_bytes == SIZE + HEADER_BYTES


def test_what_is_doomed_is_not_found_again(tmp_path: Path) -> None:
    """Nor when a look at the store sees it before it is deleted, or when it was being written all the while."""
    one, other = catalog(tmp_path), catalog(tmp_path)
    for i in range(2):
        assert one.reserve(name(i), 0.0)
    put(one.store, version(), 0)  # type: ignore[arg-type]
    assert one.finish_write(name(0), True, 0.0)
    one.doom_all()
    put(one.store, version(), 1)  # type: ignore[arg-type]
    one.refresh()
    assert name(0) not in one and name(1) not in one and not one.reserve(name(0), 0.0)
    one.bury()
    other.refresh()
    assert name(0) not in other and name(1) in other, "what is being written is not deleted before it has been"
    assert not one.finish_write(name(1), True, 0.0) and name(1) not in one
    one.bury()
    other.refresh()
    assert not other.pages and one.used_bytes == other.used_bytes == 0
    assert one.reserve(name(0), 0.0) and one.reserve(name(1), 0.0), "they may come anew"


def test_what_cannot_be_deleted_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = catalog(tmp_path)
    put(one.store, version(), 1)  # type: ignore[arg-type]
    one.refresh()
    one.doom([name(1)])

    def refuse(found: object) -> None:
        raise OSError("read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(one.store, "delete", refuse)
        one.bury()
    one.refresh()
    assert name(1) not in one and size_of(tmp_path)
    one.bury()
    assert not size_of(tmp_path)


def test_what_was_being_written_when_all_ended_is_deleted(tmp_path: Path) -> None:
    one = catalog(tmp_path)
    keeper = Keeper(one, 60)
    assert one.reserve(name(1), 0.0)
    one.doom_all()
    put(one.store, version(), 1)  # type: ignore[arg-type]
    keeper.close()
    assert not size_of(tmp_path)


def test_bounds_hold_and_the_least_used_goes(tmp_path: Path) -> None:
    bound = 10 * (SIZE + HEADER_BYTES) + 2000
    one = catalog(tmp_path, bound)
    one.refresh()
    written = []
    for i in range(40):
        if one.reserve(name(i), 0.0):
            put(one.store, version(), i)  # type: ignore[arg-type]
            one.finish_write(name(i), True, 0.0)
            written.append(i)
            one.touch([name(0)])
        one.shrink()
        assert size_of(tmp_path) <= bound
    assert len(written) > 25, "writers find room"
    assert name(0) in one and name(written[-1]) in one and name(written[1]) not in one
    assert one.evicted == len(written) - one.pages


def test_pages_of_other_versions_make_room(tmp_path: Path) -> None:
    old = DiskStore(claim(str(tmp_path)), version(computation="other"))
    for i in range(8):
        put(old, version(computation="other"), i)
    for path in tmp_path.rglob("*-0"):
        os.utime(path, (1, 1))
    one = catalog(tmp_path, 8 * (SIZE + HEADER_BYTES) + 2000)
    keeper = Keeper(one, 60)
    assert one.reserve(name(1), 0.0)
    keeper.close()


def test_two_engines_keep_one_bound(tmp_path: Path) -> None:
    bound = 20 * (SIZE + HEADER_BYTES)
    engines = [catalog(tmp_path, bound) for _ in range(2)]
    for i in range(100):
        one = engines[i % 2]
        if one.reserve(name(i), 0.0):
            put(one.store, version(), i)  # type: ignore[arg-type]
            one.finish_write(name(i), True, 0.0)
        if i % 3 == 0:
            for other in engines:
                other.refresh()
                other.shrink()
            assert size_of(tmp_path) <= bound
    time.sleep(0.2)
    for one in engines:
        one.refresh()
    assert engines[0].pages == engines[1].pages > 10


def test_a_store_that_cannot_be_listed_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    one = catalog(tmp_path)

    def gone() -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(one.store, "changes", gone)
    for _ in range(3):
        one.refresh()
    assert caplog.text.count("no route to host") == 1


def test_a_keeper_deletes_in_the_background(tmp_path: Path) -> None:
    one = catalog(tmp_path)
    put(one.store, version(), 1)  # type: ignore[arg-type]
    keeper = Keeper(one, 0.01)
    one.doom_all()
    one.doom([name(1)])
    keeper.wake()
    put(one.store, version(), 2)  # type: ignore[arg-type]
    until = time.monotonic() + 5
    while (size_of(tmp_path) > SIZE + HEADER_BYTES or name(2) not in one) and time.monotonic() < until:
        time.sleep(0.01)
    keeper.close()
    assert size_of(tmp_path) == SIZE + HEADER_BYTES and name(2) in one and name(1) not in one


def test_what_is_used_is_told_to_the_store(tmp_path: Path) -> None:
    one = catalog(tmp_path)
    put(one.store, version(), 1)  # type: ignore[arg-type]
    path = path_of(one.store, name(1))  # type: ignore[arg-type]
    os.utime(path, (1, 1))
    keeper = Keeper(one, 60)
    one.touch([name(1), name(2)])
    keeper.close()
    assert time.time() - path.stat().st_mtime < 60


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    """A new engine gives up what was used longest ago by the files' times, in whatever order it finds the files."""
    old = DiskStore(claim(str(tmp_path)), version())
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    for i in range(8):
        put(old, version(), i)
    for age, i in enumerate(order):
        os.utime(path_of(old, name(i)), (1000 + age, 1000 + age))
    one = catalog(tmp_path, 8 * (SIZE + HEADER_BYTES) + 2000)
    one.refresh()
    assert list(one._entries) == [name(i) for i in order]
    one.shrink()
    gone = [i for i in range(8) if not path_of(old, name(i)).exists()]
    assert gone and set(gone) == set(order[:len(gone)]), "the least recently used have made room"
    old.touch(name(order[len(gone)]))
    again = catalog(tmp_path)
    again.refresh()
    assert list(again._entries)[-1] == name(order[len(gone)]), "what was used since is the youngest"
