"""A wrapper that shields the tiers from a disk, bucket or server that is full, unreachable, slow or misbehaving.

The store is opened on first use and again after a failure, so an engine starts without it. All it raises becomes OSError."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.errors import ConfigError
from penstock.core.plan import PageName
from penstock.stores import Entry, Store
from penstock.stores.disk import DiskStore

LOG = logging.getLogger("penstock")

_RETRY_SECONDS = 5.0
"""The shortest time between two attempts to open a store."""

_OPENING_SECONDS = 1.0
"""The longest that a thread waits for another thread that is opening the store."""

Result = TypeVar("Result")


class GuardedStore:
    """A store that is opened lazily and reopened after failures. The engine's and the worker's half each have their own."""

    def __init__(self, tier: str, name: str, connect: Callable[[], Store]) -> None:
        """`name` is the user's name of the store; `connect` opens it: OSError if unavailable now, ConfigError if for good."""
        self.tier = tier
        self._name = name
        self._connect = connect
        self._store: Store | None = None
        self._opening = threading.Lock()
        self._retry_at = 0.0
        self._why = "it is being opened"
        self._told = False

    def open(self, seconds: float) -> None:
        """Tries to open the store within `seconds`; otherwise it is opened later. ConfigError if it can never be opened."""
        failed: list[ConfigError] = []

        def attempt() -> None:
            try:
                self._opened()
            except ConfigError as error:
                failed.append(error)
            except OSError:
                return

        thread = threading.Thread(target=attempt, name=f"penstock-open-{self.tier}", daemon=True)
        thread.start()
        thread.join(seconds)
        if failed:
            raise failed[0]
        if self._store is None and not self._told:
            self._tell(f"it does not answer within {seconds:.0f} s")

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        try:
            self._call(lambda store: store.write(name, parts))
        except FileNotFoundError:
            # The folder itself is gone or was replaced: the store must be opened again.
            self._store = None
            raise

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        return self._call(lambda store: store.read(name, parts))

    def files(self, names: Sequence[PageName]) -> list[str] | None:
        """The paths of these pages if they are local files, else None."""
        return self._call(lambda store: store.files(names) if isinstance(store, DiskStore) else None)

    def touch(self, name: PageName) -> None:
        self._call(lambda store: store.touch(name))

    def delete(self, name: PageName | str) -> None:
        self._call(lambda store: store.delete(name))

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        return self._call(lambda store: store.changes())

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _call(self, operation: Callable[[Store], Result]) -> Result:
        try:
            return operation(self._opened())
        except OSError:
            raise
        except Exception as error:
            # No exception of a store may end our threads: parsers overflow, client libraries raise their own errors.
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _opened(self) -> Store:
        """The opened store. ConnectionError while it is unavailable."""
        if self._store is not None:
            return self._store
        if not self._opening.acquire(timeout=_OPENING_SECONDS):
            raise ConnectionError(self._why)
        try:
            # Another thread may have opened it meanwhile, or failed to.
            if self._store is None and time.monotonic() < self._retry_at:
                raise ConnectionError(self._why)
            return self._store or self._attempt()
        finally:
            self._opening.release()

    def _attempt(self) -> Store:
        try:
            self._store = self._connect()
        except Exception as error:
            self._why = f"it cannot be opened: {getattr(error, 'strerror', None) or error}"
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            if isinstance(error, ConfigError) and not self._told:
                raise
            self._tell(self._why)
            raise ConnectionError(self._why) from None
        if self._told:
            LOG.warning("the %s tier of the cache (%s) is back", self.tier, self._name)
            self._told = False
        return self._store

    def _tell(self, why: str) -> None:
        """Logs the failure, once for each time that the store becomes unavailable."""
        if not self._told:
            LOG.warning("the %s tier of the cache is off: %s cannot be used now, because %s. It is tried again every %.0f s; "
                        "requests are served without it", self.tier, self._name, why, _RETRY_SECONDS)
        self._told = True
