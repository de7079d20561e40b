"""Properties of every store: pages come back as they were, all or nothing, and listings tell what came and went."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.stores import Store
from penstock.stores.disk import DiskStore
from penstock.stores.objects import ObjectStore
from penstock.stores.opening import open_stores
from penstock.stores.redis import RedisStore
from penstock.stores.version import Version
from tests.unit.stores.pages import get, layout, name, page, put, version


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server, of its own."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--requirepass", "p w"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"redis://:p%20w@127.0.0.1:{port}/3"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=["disk", "objects", "memory objects", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("redis"))
    if request.param == "memory objects":
        return f"memory://{tmp_path.name}"
    return f"file://{tmp_path}/objects" if request.param == "objects" else str(tmp_path / "disk")


def open_store(place: str, found: Version) -> Store:
    return open_stores(None if "://" in place else place, place if "://" in place else None, found)[0]


def test_pages_come_back(place: str) -> None:
    found = version(weights=place)
    store = open_store(place, found)
    assert store.changes() == ([], [])
    for i in range(20):
        put(store, found, i)
    assert all(get(store, found, i) == page(i) for i in range(20))
    came, went = store.changes()
    assert {entry.name for entry in came} == {name(i) for i in range(20)} and not went
    put(store, found, 3)
    store.delete(name(4))
    store.delete(name(4))
    with pytest.raises(FileNotFoundError):
        get(store, found, 4)
    came, went = store.changes()
    assert (came, went) == ([], [name(4)])
    store.close()
    again = open_store(place, found)
    assert get(again, found, 5) == page(5)
    assert len(again.changes()[0]) == 19
    again.close()


def test_other_versions_are_not_seen(place: str) -> None:
    one, other = version(weights=place + "1"), version(weights=place + "2")
    stores = open_store(place, one), open_store(place, other)
    put(stores[0], one, 1)
    with pytest.raises(FileNotFoundError):
        get(stores[1], other, 1)
    assert not [entry for entry in stores[1].changes()[0] if not isinstance(entry.name, str)]
    assert get(stores[0], other, 1) == "it is of another version", "the page itself says so, too"


def test_many_threads(place: str) -> None:
    found = version(weights=place + "threads")
    store = open_store(place, found)
    wrong: list[int] = []

    def work(first: int) -> None:
        for i in range(first, first + 15):
            put(store, found, i % 40, 60_000)
            if get(store, found, i % 40, 60_000) != page(i % 40, 60_000):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(7 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    store.close()


def test_buffers_that_do_not_fit(place: str) -> None:
    found = version(weights=place + "sizes")
    store = open_store(place, found)
    store.write(name(1), [memoryview(b"abc"), memoryview(b"defgh")])
    long = [memoryview(bytearray(2)), memoryview(bytearray(20))]
    assert store.read(name(1), long) == 8
    assert bytes(long[0]) + bytes(long[1][:6]) == b"abcdefgh"
    short = [memoryview(bytearray(2)), memoryview(bytearray(3))]
    assert store.read(name(1), short) == 5
    assert bytes(short[0]) + bytes(short[1]) == b"abcde"
    put(store, found, 2)
    assert get(store, found, 2) == page(2), "the connection is in order afterwards"
    store.close()


def test_versions_differ_by_what_counts() -> None:
    same = version(model="another name"), version(dtype="another word"), version(layout=layout(slabs=3))
    assert {found.id for found in same} == {version().id}
    others = [version(weights="x"), version(computation="x"), version(rank=1, ranks=2), version(ranks=2), version(rank=1),
              version(layout=layout(page=32))]
    assert len({version().id, *(found.id for found in others)}) == 7


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for words in ((str(file), None), (None, "just-a-host"), (None, "redis://127.0.0.1:port"), (None, "nosuch://x/y")):
        with pytest.raises(ConfigError):
            open_stores(*words, version())
    with pytest.raises(OSError, match="refused"):
        RedisStore("redis://user:wrong@127.0.0.1:1/0", version())


def test_kinds() -> None:
    assert (DiskStore.tier, ObjectStore.tier, RedisStore.tier) == ("disk", "remote", "remote")


def test_refused_passwords_are_told(redis: str) -> None:
    with pytest.raises(ConfigError, match=r"NOAUTH|WRONGPASS|Authentication"):
        RedisStore(redis.replace("p%20w", "guess"), version())


def test_connections_that_were_closed_while_idle_are_no_error(redis: str) -> None:
    """As a server's option `timeout` does, and its restart."""
    store = RedisStore(redis, version())
    put(store, version(), 1)
    for connection in store._idle:
        connection._socket.shutdown(socket.SHUT_RDWR)
    assert get(store, version(), 1) == page(1)
    for connection in store._idle:
        connection._socket.shutdown(socket.SHUT_RDWR)
    put(store, version(), 2)
    assert get(store, version(), 2) == page(2) and len(store._idle) == 1
    store.close()


@pytest.mark.parametrize("answer", [b"", b"+PONG\r\n", b"$many\r\n", b"$100\r\nshort", b"*1\r\n:5\r\n", b"-LOADING\r\n",
                                    b"?\r\n"])
def test_a_server_that_answers_nonsense_is_an_oserror(answer: bytes) -> None:
    """It answers one PING as it should, and everything else with `answer`, and then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def serve() -> None:
            replies = [b"+PONG\r\n", answer]
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, connection.makefile("rb") as commands:
                        for reply in replies:
                            for _ in range(int(commands.readline()[1:])):
                                commands.read(int(commands.readline()[1:]) + 2)
                            connection.sendall(reply)
                    replies = [answer]

        threading.Thread(target=serve, daemon=True).start()
        store = RedisStore(f"redis://127.0.0.1:{listening.getsockname()[1]}", version())
        for operation in (lambda: get(store, version(), 1), store.changes):
            with pytest.raises(OSError):
                operation()
        store.close()
