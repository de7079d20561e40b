"""The adapters that an engine serves, named by a digest of their contents; and the names by which users call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint import resolve_folder
from penstock.core.errors import ConfigError, ModelError, PenstockError, RequestError
from penstock.core.request import Adapter, Request
from penstock.engine.ranks import Rank, RankGroup
from penstock.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that answers a prompt, with vLLM's names. `lora_int_id` is accepted and not needed."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def located(name: str, folder: str) -> str:
    """The adapter's folder on this machine. RequestError if there is none."""
    if not name:
        raise RequestError("lora_name is empty", param="lora_name")
    try:
        return str(Path(resolve_folder(folder, None)).resolve())
    except PenstockError as error:
        raise RequestError(f"the adapter {name!r}: {error}", param="lora_path", code="invalid_adapter", status=404) from None


class Adapters:
    """The engine's own record. Used only from the engine's thread."""

    def __init__(self, rank: Rank, scheduler: Scheduler, enabled: bool, most: int, elsewhere: Callable[[], bool]) -> None:
        """most: the most adapters in host memory. `elsewhere`: whether requests have been taken in that the scheduler does not
        know now, because they wait for a grammar or for the next round of a beam search."""
        self._rank = rank
        self._scheduler = scheduler
        self._enabled = enabled
        self._most = most
        self._elsewhere = elsewhere
        self._names: dict[str, int] = {}
        """By digest: how often it was added and not yet removed."""
        self._pool = ThreadPoolExecutor(1, "penstock-adapters")
        self._loading: list[Future[str]] = []
        """Adapters that are being read, on another thread."""

    def close(self) -> None:
        """Reads no more."""
        self._pool.shutdown(cancel_futures=True)

    def add(self, folder: str) -> str:
        """Reads an adapter folder. Returns its digest. RequestError 400 if it cannot be used."""
        self._check_room()
        return self._note(self._read(folder))

    def load(self, folder: str) -> Future[str]:
        """Begins to read an adapter folder while steps run. `take` must be given the result."""
        self._check_room()
        if isinstance(self._rank, RankGroup):
            # Its ranks hear of it between two steps.
            found: Future[str] = Future()
            found.set_result(self._read(folder))
        else:
            found = self._pool.submit(self._read, folder)
        self._loading.append(found)
        return found

    def take(self, found: Future[str]) -> str:
        """The digest of an adapter that has been read. RequestError as in `add`."""
        self._loading.remove(found)
        return self._note(found.result())

    def _note(self, name: str) -> str:
        self._names[name] = self._names.get(name, 0) + 1
        return name

    def _check_room(self) -> None:
        if not self._enabled:
            raise RequestError("this server takes no adapters; start it with --enable-lora", param="lora_name",
                               code="lora_not_enabled")
        self._clear()
        if len(self._names) + len(self._loading) >= self._most:
            raise RequestError(f"{len(self._names)} adapters are loaded, and no more fit (--max-cpu-loras); unload one first",
                               param="lora_name", code="too_many_adapters")

    def _read(self, folder: str) -> str:
        try:
            return self._rank.add_adapter(folder)
        except ModelError as error:
            raise RequestError(str(error), param="lora_path", code="invalid_adapter") from None

    def start(self, modules: Sequence[str]) -> list[Adapter]:
        """Adds those that are served from the start, each as NAME=FOLDER. ConfigError for one that cannot be used."""
        found = []
        for text in modules:
            name, equals, folder = text.partition("=")
            if not (name and equals and folder):
                raise ConfigError(f"lora_modules has {text!r}; it must be NAME=FOLDER")
            try:
                place = located(name, folder)
                found.append(Adapter(name, place, self.add(place)))
            except RequestError as error:
                raise ConfigError(error.message) from None
        return found

    def remove(self, name: str) -> None:
        """Takes back one `add`. Requests that have been taken in finish."""
        if name in self._names:
            self._names[name] -= 1
        self._clear()

    def check(self, request: Request) -> None:
        """RequestError 404 if the request names an adapter that is not there."""
        if request.adapter and not self._names.get(request.adapter):
            raise RequestError("the adapter of this request has been unloaded", param="model", code="model_not_found",
                               status=404)

    def _clear(self) -> None:
        """Forgets removed adapters that no request uses any more. Not while one is read, which might be the same."""
        if self._loading or self._elsewhere():
            return
        used = {sequence.request.adapter for sequence in self._scheduler.live}
        for name in [name for name, count in self._names.items() if count <= 0 and name not in used]:
            del self._names[name]
            self._scheduler.queues.adapters.forget(name)
            self._rank.drop_adapter(name)
