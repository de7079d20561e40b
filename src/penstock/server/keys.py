"""API keys from a file: hashed, each with a tenant, a class, limits and an expiry. The file is read again when it changes.

The format is one JSON object a line; `penstock keys` writes it. A key itself is nowhere but with its holder: keys are 256
random bits, so a plain hash of one tells nothing about it."""

import math
import os
import secrets
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.core.errors import ConfigError, RequestError
from penstock.observe.log import LOG

LOOK_SECONDS = 1.0
"""The most time for which a changed file may go unnoticed."""

Class = Literal["user", "admin", "background"]
"""admin: also what concerns all tenants, and priorities below 0. background: served after all others."""


class Key(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A line of the file: everything that is known of a key."""

    id: str
    hash: str
    """SHA-256 of the key, hexadecimal."""
    tenant: str
    """Keys of one tenant share their cache and their stored objects."""
    kind: Class = "user"
    created: str = ""
    expires: str | None = None
    """ISO 8601, UTC."""
    max_tokens: int | None = None
    """The most prompt tokens of the tenant's requests in flight; by default --max-tenant-tokens."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers."""
    tier: str | None = None
    """The class of service of requests that name none; by default standard."""
    revoked: bool = False
    note: str = ""

    def expired(self, now: float) -> bool:
        return self.expires is not None and datetime.fromisoformat(self.expires).timestamp() <= now


def hashed(key: bytes) -> str:
    """Returns a key's form in the file."""
    return sha256(key).hexdigest()


def make(tenant: str, kind: Class = "user", seconds: float | None = None, **more: Any) -> tuple[str, Key]:
    """(a new key, what the file says of it); `more` are other fields of `Key`."""
    secret, now = f"pk-{secrets.token_urlsafe(32)}", datetime.now(UTC)
    expires = None if seconds is None else datetime.fromtimestamp(now.timestamp() + seconds, UTC).isoformat(timespec="seconds")
    return secret, Key(id=f"key_{secrets.token_hex(6)}", hash=hashed(secret.encode()), tenant=tenant, kind=kind,
                       created=now.isoformat(timespec="seconds"), expires=expires, **more)


def read(path: Path) -> list[Key]:
    """The keys of a file. ConfigError for one that cannot be used, naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}; penstock keys add {path} makes such a "
                          f"file") from None
    found: list[Key] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = msgspec.json.decode(line, type=Key)
            key.expired(0.0)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"line {number} of {path} is no key: {error}") from None
        found.append(key)
    if len({key.id for key in found}) < len(found):
        raise ConfigError(f"two keys in {path} have the same id")
    return found


def write(path: Path, keys: Iterable[Key]) -> None:
    """Replaces the file, readable by its owner only; a server sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"".join(msgspec.json.encode(key) + b"\n" for key in keys))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _limits(key: Key) -> list[tuple[str, int]]:
    given = (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute))
    return [(unit, most) for unit, most in given if most is not None]


class KeyFile:
    """The keys of one file, as it is now."""

    def __init__(self, path: str) -> None:
        """ConfigError if the file cannot be used."""
        self.path = Path(path).expanduser()
        self._keys = {key.hash: key for key in read(self.path)}
        self._stamp = self._now()
        self._looked = time.monotonic()
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        """Requests or tokens that a key may send now, and when that was true."""

    def find(self, secret: bytes) -> Key | None:
        """The entry of a key. RequestError if it was revoked or has expired."""
        self._look()
        key = self._keys.get(hashed(secret))
        if key is not None and (key.revoked or key.expired(time.time())):
            why = "was revoked" if key.revoked else f"has expired ({key.expires})"
            raise RequestError(f"the key {key.id} {why}; ask for another", code="invalid_api_key", status=401)
        return key

    def count(self, key: Key) -> None:
        """Counts a request of a key. RequestError 429 beyond its requests_per_minute, or if its tokens are used up."""
        for unit, most in _limits(key):
            left, need = self._left(key, unit, most), 1.0 if unit == "requests" else min(1.0, most)
            if left < need:
                seconds = (need - left) * 60 / most
                raise RequestError(f"the key {key.id} may send {most:,} {unit} a minute; try again in {math.ceil(seconds)} s",
                                   code="rate_limit_exceeded", status=429, retry=seconds)
        self.spend(key, "requests", 1)

    def spend(self, key: Key, unit: str, amount: int) -> None:
        """Takes from what a key may send. Tokens are known late: below zero, the key's next requests wait."""
        for name, most in _limits(key):
            if name == unit:
                self._buckets[key.id, unit] = self._left(key, unit, most) - amount, time.monotonic()

    def headers(self, key: Key) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit headers, of the limits that the key has."""
        found = []
        for unit, most in _limits(key):
            left = self._left(key, unit, most)
            for name, value in (("limit", str(most)), ("remaining", str(max(0, int(left)))),
                                ("reset", f"{max(0.0, (most - left) * 60 / most):.3f}s")):
                found.append((f"x-ratelimit-{name}-{unit}".encode(), value.encode()))
        return found

    def _left(self, key: Key, unit: str, most: int) -> float:
        now = time.monotonic()
        left, at = self._buckets.get((key.id, unit), (float(most), now))
        return min(float(most), left + (now - at) * most / 60)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked, stamp = now, self._now()
        if stamp == self._stamp:
            return
        try:
            self._keys = {key.hash: key for key in read(self.path)}
            LOG.info("%s has changed: %d keys", self.path, len(self._keys))
        except ConfigError as error:
            # An invalid file changes nothing: the keys read before stay valid.
            LOG.error("%s; the keys read before stay in force", error)
        self._stamp = stamp

    def _now(self) -> tuple[int, int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0, 0)
        return found.st_mtime_ns, found.st_size, found.st_ino
