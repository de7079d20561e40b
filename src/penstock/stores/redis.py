"""Pages as values of a Redis or Valkey server: redis://[user:password@]host[:port][/database].

Implements the five commands that it needs itself (protocol: redis.io/docs/latest/develop/reference/protocol-spec, RESP2). Pages
are then read straight into pinned memory, which client libraries do not support, and it is less code than an adapter. The
server bounds its own size (maxmemory with an LRU policy); only damaged pages are deleted here."""

import io
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from penstock.core.errors import ConfigError
from penstock.core.plan import PageName
from penstock.stores import Entry, Listing, Store
from penstock.stores.version import Version

_CONNECT_SECONDS, _ANSWER_SECONDS, _LIST_SECONDS = 2.0, 5.0, 30.0
"""Timeouts of connecting, one command, and a whole listing. They are deadlines, so trickling bytes do not extend them."""
_LINE_BYTES, _WORD_BYTES, _WORDS, _DEPTH = 4096, 1 << 16, 100_000, 4
"""Limits of a reply: bytes of a line, bytes of a bulk string, elements of an array, and depth. Beyond is broken or hostile."""
_MOST_KEYS = 50_000_000
_REFUSED = re.compile("NOAUTH|WRONGPASS|AUTH|invalid password")
_SCAN_COUNT, _KEY_BYTES = 1000, 32

Reply = bytes | int | list["Reply"] | None
Result = TypeVar("Result")


class RedisStore(Store):
    """The pages of one version on a server, under penstock:VERSION:GROUP:KEY. Each calling thread uses its own connection.

    Reading a value updates its last use on the server."""

    tier = "remote"

    def __init__(self, url: str, version: Version) -> None:
        """ConfigError for an invalid URL, OSError if the server cannot be reached now."""
        self._url = urlsplit(url)
        self._prefix = b"penstock:" + version.id + b":"
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._listing = Listing()
        try:
            _ = self._url.port
        except ValueError as error:
            raise ConfigError(f"cache_remote is {self._url.scheme}://{self._url.hostname}, which is not a Redis URL: "
                              f"{error}") from None
        try:
            self._call(lambda connection: connection.ask(b"PING"))
        except OSError as error:
            if _REFUSED.search(str(error)):
                raise ConfigError(f"cache_remote is {self._url.scheme}://{self._url.hostname}, which refuses the user or "
                                  f"password of the URL: {error}") from None
            raise

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        self._call(lambda connection: connection.ask(b"SET", self._key(name), parts))

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        done = self._call(lambda connection: connection.fetch(self._key(name), parts))
        if done is None:
            raise FileNotFoundError(name)
        return done

    def delete(self, name: PageName | str) -> None:
        key = name.encode("latin-1") if isinstance(name, str) else self._key(name)
        self._call(lambda connection: connection.ask(b"DEL", key))

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        now = time.time()
        return self._listing.compare(Entry(self._parse(key), 0, now) for key in self._call(self._keys))

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _keys(self, connection: "_Connection") -> list[bytes]:
        pattern = b"".join(b"\\" + bytes([byte]) for byte in self._prefix) + b"*"
        cursor, found, until = b"0", list[bytes](), time.monotonic() + _LIST_SECONDS
        while time.monotonic() < until and len(found) < _MOST_KEYS:
            reply = connection.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", str(_SCAN_COUNT).encode())
            match reply:
                case [bytes(cursor), list(keys)]:
                    found += [key for key in keys if isinstance(key, bytes)]
                case _:
                    raise OSError(f"the server answered {reply!r:.100} to SCAN")
            if cursor == b"0":
                return found
        raise TimeoutError(f"a listing takes longer than {_LIST_SECONDS:.0f} s")

    def _key(self, name: PageName) -> bytes:
        return self._prefix + name[0].to_bytes(1, "little") + name[1]

    def _parse(self, key: bytes) -> PageName | str:
        rest = key[len(self._prefix):]
        return PageName(rest[0], rest[1:]) if len(rest) == 1 + _KEY_BYTES else key.decode("latin-1")

    def _call(self, operation: "Callable[[_Connection], Result]") -> Result:
        """Runs an idempotent operation on a connection reserved for it, again on a new one if the server has closed that."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            with suppress(ConnectionError):
                return self._on(connection, operation)
        return self._on(_Connection(self._url), operation)

    def _on(self, connection: "_Connection", operation: "Callable[[_Connection], Result]") -> Result:
        """Runs an operation on a connection, and closes the connection after an error, because its state is unknown."""
        try:
            result = operation(connection)
        except ValueError as error:
            connection.close()
            raise OSError(f"the server's answer is not of the Redis protocol: {error}") from None
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return result


class _Connection:
    """A connection to the server; one command at a time."""

    def __init__(self, url: SplitResult) -> None:
        self._socket = socket.create_connection((url.hostname or "127.0.0.1", url.port or 6379), _CONNECT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming = _Incoming(self._socket)
        self._file = io.BufferedReader(self._incoming, 1 << 16)
        try:
            if url.password:
                self.ask(b"AUTH", *[unquote(part).encode() for part in (url.username, url.password) if part])
            if url.path.strip("/"):
                self.ask(b"SELECT", url.path.strip("/").encode())
        except BaseException:
            self.close()
            raise

    def ask(self, *words: bytes | Sequence[memoryview]) -> Reply:
        """Sends a command and reads its reply. A word may be given in parts. OSError for an error reply."""
        self._send(words)
        return self._reply()

    def fetch(self, key: bytes, parts: Sequence[memoryview]) -> int | None:
        """GET into `parts`. Returns the number of bytes read, at most their size; None if there is no such key."""
        self._send((b"GET", key))
        kind, rest = self._line()
        if kind != b"$":
            raise OSError(f"the server answered {(kind + rest)[:100]!r} to GET")
        nbytes, most = int(rest), sum(part.nbytes for part in parts)
        if nbytes < 0:
            return None
        if nbytes > most + _WORD_BYTES:
            raise ValueError(f"a value of {nbytes} bytes where a page has {most}")
        done = 0
        for part in parts:
            done += self._file.readinto(part[:nbytes - done])
        self._exactly(nbytes - done + 2)
        return done

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _send(self, words: Sequence[bytes | Sequence[memoryview]]) -> None:
        self._incoming.until = time.monotonic() + _ANSWER_SECONDS
        self._socket.settimeout(_ANSWER_SECONDS)
        small = b"*%d\r\n" % len(words)
        for word in words:
            if isinstance(word, bytes):
                small += b"$%d\r\n%b\r\n" % (len(word), word)
                continue
            self._socket.sendall(small + b"$%d\r\n" % sum(part.nbytes for part in word))
            for part in word:
                self._socket.sendall(part)
            small = b"\r\n"
        self._socket.sendall(small)

    def _reply(self, depth: int = 0) -> Reply:
        kind, rest = self._line()
        if kind == b"-":
            raise OSError(rest.decode(errors="replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return self._exactly(self._size(rest, _WORD_BYTES) + 2)[:-2] if int(rest) >= 0 else None
        if kind == b"*":
            if depth == _DEPTH:
                raise ValueError(f"arrays in more than {_DEPTH} arrays")
            return [self._reply(depth + 1) for _ in range(self._size(rest, _WORDS))]
        if kind != b"+":
            raise OSError(f"the server answered {(kind + rest)[:100]!r}, which is not the Redis protocol")
        return rest

    def _size(self, text: bytes, most: int) -> int:
        """A size in a reply. ValueError if it exceeds `most`."""
        if int(text) > most:
            raise ValueError(f"{text[:40].decode()} elements or bytes, where at most {most} can be meant")
        return int(text)

    def _line(self) -> tuple[bytes, bytes]:
        line = self._file.readline(_LINE_BYTES)
        if len(line) == _LINE_BYTES:
            raise ValueError(f"a line of more than {_LINE_BYTES} bytes")
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server has closed the connection")
        return line[:1], line[1:-2]

    def _exactly(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise ConnectionError("the server has closed the connection")
        return data


class _Incoming(io.RawIOBase):
    """Reads from a server with one deadline, `until`, for a whole reply; trickling bytes do not extend it."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self.until = time.monotonic() + _CONNECT_SECONDS
        self._socket = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server does not answer in time")
        self._socket.settimeout(left)
        return self._socket.recv_into(buffer)
