"""Tenants of the cache, and the salts of their namespaces, derived from API keys.

The time to first token reveals whether a prompt was cached, so requests of different keys share no cached pages. The salt is a
keyed hash made here, no name of a client's: no client can choose another's namespace. A cache_salt divides it further."""

import contextlib
import os
import secrets
from hashlib import blake2b
from pathlib import Path

from penstock.config.schema import ServerOptions
from penstock.core.errors import ConfigError
from penstock.observe.log import LOG
from penstock.stores.folder import claim

SECRET_BYTES = 32

LONGEST_SALT = 64
"""Characters of a request's cache_salt from which on its hash stands for it."""


SECRET_NAME = "tenants.secret"
"""The file in the disk tier's own subfolder. Its readers can read the pages themselves."""


class Tenants:
    def __init__(self, options: ServerOptions, cache_disk: str | None = None, adopt: bool = False) -> None:
        """`cache_disk` is the disk tier's folder (`adopt`: also with other files): its pages need lasting salts."""
        keyed = bool(options.api_key or options.keys_file)
        self.isolated = options.cache_isolation == "key" or (options.cache_isolation == "auto" and keyed)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        if self.isolated and options.cache_secret_file:
            self._secret = read_secret(Path(options.cache_secret_file).expanduser())
        elif self.isolated and cache_disk:
            try:
                self._secret = read_secret(claim(cache_disk, adopt).path / SECRET_NAME)
            except OSError as error:
                LOG.warning("cache_disk %s cannot be used now (%s): tenants find nothing there that was kept before this start",
                            cache_disk, error.strerror)

    def of(self, key: bytes, cache_salt: str | None) -> tuple[str, str]:
        """(tenant, salt) of a request that came with `key` (empty if with none) and, perhaps, asks for a salt of its own."""
        if not self.isolated:
            salt = cache_salt or ""  # it is kept with every page: a long one as its hash
            return "", salt if len(salt) <= LONGEST_SALT else blake2b(
                salt.encode(), digest_size=16, person=b"long salt").hexdigest()
        return self._derive(b"tenant", key), self._derive(b"salt", key, (cache_salt or "").encode())

    def _derive(self, purpose: bytes, *parts: bytes) -> str:
        hashed = blake2b(key=self._secret, digest_size=16, person=purpose)
        for part in parts:
            hashed.update(len(part).to_bytes(8, "little") + part)
        return hashed.hexdigest()


def read_secret(path: Path) -> bytes:
    """Reads the secret from a file; creates it, readable by its owner only, if missing. ConfigError if it is unusable."""
    try:
        if not path.exists():
            _make(path)
        found = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot use the secret file {path}: {error.strerror}; choose another --cache-secret-file") from None
    if len(found) < SECRET_BYTES:
        raise ConfigError(f"the secret file {path} has {len(found)} characters; at least {SECRET_BYTES} are needed, from a "
                          "source of randomness. Remove the file to have a new one made")
    # However long it is: BLAKE2b takes keys of up to 64 bytes.
    return blake2b(found, digest_size=SECRET_BYTES).digest()


def _make(path: Path) -> None:
    """Creates a new secret atomically: if several servers start on the same folder, the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()
