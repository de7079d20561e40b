"""The adapters that an engine serves, named by a digest of their contents; and the names by which users call them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.cache import keys
from penstock.cache.prefix import TOKEN
from penstock.checkpoint import resolve_folder
from penstock.checkpoint.adapter import read_adapter
from penstock.core.errors import ConfigError, ModelError, PenstockError, RequestError
from penstock.core.request import Adapter, EngineStats, Medium, Request
from penstock.engine.ranks import Rank, RankGroup
from penstock.scheduler.scheduler import Scheduler

_READERS = 2
"""The most folders that are read at once: one reads its file while the other's matrices are converted."""
_WAIT_SECONDS = 0.005
"""The longest that an otherwise idle turn waits for an adapter."""


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


def largest_rank(modules: Sequence[str]) -> int:
    """The largest rank that adapters, each as NAME=FOLDER, may have; 0 of those that cannot be read, which `start` refuses."""
    found = [0]
    for text in modules:
        with suppress(PenstockError):
            config = read_adapter(Path(located(text, text.partition("=")[2])))
            found += [config.rank, *map(int, config.rank_pattern.values())]
    return max(found)


def _activate(request: Request, invocation: tuple[int, ...]) -> None:
    """Has the adapter compute from these tokens' last occurrence on, as PEFT does; a prompt without them is the bare model's.
    Cached pages are the bare model's up to there, where the adapter's digest takes a medium's place in their keys."""
    data, found = keys.packed(request.prompt_ids), keys.packed(invocation)
    at = data.rfind(found)
    while at > 0 and at % TOKEN:
        at = data.rfind(found, 0, at + len(found) - 1)
    if at < 0:
        request.adapter = ""
    elif at:
        request.adapted_from = at // TOKEN
        medium = Medium(request.adapted_from, 1, b"adapter " + request.adapter.encode())
        request.media = sorted([*request.media, medium], key=lambda one: one.start)


class Adapters:
    """The engine's own record, of all adapters that are served and of those in host memory. Of these the least recently used
    leave when others come, and are read again for the next request; `lora_modules` stay. Used only from the engine's thread."""

    def __init__(self, rank: Rank, scheduler: Scheduler, enabled: bool, most: int, elsewhere: Callable[[], list[Request]],
                 go_on: Callable[[Request], None]) -> None:
        """`most`: in host memory. `elsewhere`: requests that were taken in and that the scheduler may not know now, as they
        wait for a grammar or for the next round of a beam search. `go_on`: takes in a request whose adapter has come."""
        self._rank, self._scheduler, self._elsewhere, self._go_on = rank, scheduler, elsewhere, go_on
        self._enabled, self._most = enabled, most
        self._names: dict[str, int] = {}
        """By digest: how often it was added and not yet removed."""
        self._folders: dict[str, str] = {}
        """Where each is read again."""
        self._invocations: dict[str, tuple[int, ...]] = {}
        """`AdapterConfig.invocation` of those that have one."""
        self._resident: dict[str, None] = {}
        """Adapters in host memory, least recently used first."""
        self._pinned: set[str] = set()
        self._pool = ThreadPoolExecutor(_READERS, "penstock-adapters")
        self._loading: dict[Future[str], str] = {}
        """Folders that are being read, on another thread, and not yet served."""
        self._waiting: dict[str, list[Request]] = {}
        """Requests by the adapter that they wait for."""
        self._coming: dict[str, Future[str]] = {}
        """The adapters among these that are being read."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, folder: str) -> str:
        """Reads an adapter folder. Returns its digest. RequestError 400 if it cannot be used."""
        self._check()
        return self._note(self._read(folder), folder)

    def load(self, folder: str) -> Future[str]:
        """Begins to read an adapter folder while steps run. `take` must be given the result."""
        self._check()
        found = self._begin(folder)
        self._loading[found] = folder
        return found

    def take(self, found: Future[str]) -> str:
        """The digest of an adapter that has been read. RequestError as in `add`."""
        folder = self._loading.pop(found)
        return self._note(found.result(), folder)

    def _begin(self, folder: str) -> Future[str]:
        if not isinstance(self._rank, RankGroup):
            return self._pool.submit(self._read, folder)
        # Its ranks hear of it between two steps.
        found: Future[str] = Future()
        try:
            found.set_result(self._read(folder))
        except RequestError as error:
            found.set_exception(error)
        return found

    def _note(self, name: str, folder: str) -> str:
        self._names[name] = self._names.get(name, 0) + 1
        self._folders[name] = folder
        self._resident[name] = None
        self._clear()
        return name

    def _check(self) -> None:
        if not self._enabled:
            raise RequestError("this server takes no adapters; start it with --enable-lora", param="lora_name",
                               code="lora_not_enabled")

    def _read(self, folder: str) -> str:
        try:
            name = self._rank.add_adapter(folder)
            if found := read_adapter(Path(folder)).invocation:
                self._invocations[name] = found
            return name
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
            self._pinned.add(found[-1].digest)
        if len(self._pinned) > self._most:
            raise ConfigError(f"lora_modules has {len(self._pinned)} adapters, which stay in host memory, and max_cpu_loras is "
                              f"{self._most}; raise it, or serve some by lora_dir")
        return found

    def remove(self, name: str) -> None:
        """Takes back one `add`. Requests that have been taken in finish."""
        if name in self._names:
            self._names[name] -= 1
        self._clear()

    def hold(self, request: Request) -> bool:
        """Takes a request whose adapter must be read first, and returns True; `admit` passes it on. False if it need not wait.
        RequestError 404 if the request names an adapter that is not there."""
        name = request.adapter
        if name and not self._names.get(name):
            raise RequestError("the adapter of this request has been unloaded", param="model", code="model_not_found",
                               status=404)
        if not name or name in self._resident:
            if name:
                self._use(request)
            return False
        self._scheduler.admission.check_held(request, sum(map(len, self._waiting.values())), "adapters")
        self._waiting.setdefault(name, []).append(request)
        return True

    def _use(self, request: Request) -> None:
        name = request.adapter
        self._resident[name] = self._resident.pop(name)
        if name in self._invocations:
            _activate(request, self._invocations[name])

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests that wait here; others are ignored."""
        gone = set(ids)
        for name, requests in list(self._waiting.items()):
            for request in [request for request in requests if request.id in gone]:
                requests.remove(request)
                self._scheduler.end(request, "abort")
            if not requests:
                del self._waiting[name]

    def admit(self) -> None:
        """Passes on requests whose adapter is read, and begins to read the next. Waits briefly if nothing else is to do."""
        if not self._coming and not self._waiting:
            return
        if self._coming and not self._scheduler.busy:
            wait(self._coming.values(), _WAIT_SECONDS, FIRST_COMPLETED)
        for name in [name for name, found in self._coming.items() if found.done()]:
            self._arrived(name, self._coming.pop(name))
        for name in [name for name in self._waiting if name not in self._coming][:_READERS - len(self._coming)]:
            if not self._clear(1 + len(self._coming)):
                break
            self._coming[name] = self._begin(self._folders[name])

    def _arrived(self, name: str, found: Future[str]) -> None:
        error, digest = None, name
        try:
            digest = found.result()
            self._resident[digest] = None
            # Another version may have taken its place: requests that have not begun get that one.
            self._names.setdefault(digest, 0)
            self._folders.setdefault(digest, self._folders[name])
        except RequestError as refused:
            error = refused
        for request in self._waiting.pop(name, []):
            try:
                if error is not None:
                    raise error
                request.adapter = digest
                self._use(request)
                self._go_on(request)
            except RequestError as refused:
                self._scheduler.end(request, "error", refused)

    def count(self, stats: EngineStats) -> None:
        """Fills in how many sequences of each adapter run and wait."""
        found: dict[str, list[int]] = {}
        for sequence in self._scheduler.live if self._enabled else ():
            if sequence.request.adapter:
                found.setdefault(sequence.request.adapter, [0, 0])[sequence.row < 0] += 1
        for name, requests in self._waiting.items():
            found.setdefault(name, [0, 0])[1] += sum(request.params.n for request in requests)
        stats.adapters = found

    def _clear(self, more: int = 0) -> bool:
        """Forgets removed adapters, and takes the least recently used out of host memory until `more` fit beside the others,
        as far as no request uses them. Returns whether they fit. Not while one is read, which might be the same."""
        over = len(self._resident) + more - self._most
        if self._loading:
            return over <= 0
        used = {request.adapter for request in (*self._elsewhere(), *(one.request for one in self._scheduler.live))}
        for name in [*self._resident, *(name for name in self._names if name not in self._resident)]:
            removed = self._names[name] <= 0 and name not in self._waiting
            if name in used or not (removed or (over > 0 and name in self._resident and name not in self._pinned)):
                continue
            if removed:
                del self._names[name], self._folders[name]
                self._invocations.pop(name, None)
                self._pinned.discard(name)
            if name in self._resident:
                del self._resident[name]
                over -= 1
                self._scheduler.queues.adapters.forget(name)
                self._rank.drop_adapter(name)
        return over <= 0 or (more == 1 and self._pinned.issuperset(self._resident))
