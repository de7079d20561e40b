"""Several engine processes as one (data parallelism): the frontend's handle, and who gets which request.

Every replica holds the whole model and its own cache. A request goes where least is left to compute, which counts what a
replica may have cached of its prompt. A replica that dies takes only its own requests with it."""

import asyncio
import dataclasses
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.core.child import Refused, own_folder
from penstock.core.errors import EngineDeadError, PenstockError, RequestError
from penstock.core.request import EngineInfo, EngineStats, Request, TierStats
from penstock.engine.loading import ModelFiles
from penstock.engine.outputs import Delta
from penstock.engine.process import ENGINE, EngineOutputs, EngineProcess
from penstock.observe.log import LOG

Counts = TypeVar("Counts", EngineStats, TierStats)

_BLOCK = 64
"""Tokens of a prompt's beginning that are remembered as one."""
_BLOCKS = 256
"""The most blocks of a prompt that are looked at."""
_REMEMBERED = 1 << 16
"""Blocks remembered of each replica, the most recently sent ones."""
_RESTARTS, _RESTART_SECONDS = 3, 600.0
"""The most restarts within so many seconds: an engine that is lost again and again does not come back."""
_DECODING = 64
"""Tokens of work that a request stands for besides its prompt."""


@dataclasses.dataclass
class _Open:
    replica: int
    work: int
    """Tokens that it is counted with."""
    left: int
    """Sequences that have not ended."""


class Balancer:
    """Chooses a replica for each request by the work that is open there and the prompts that were sent there before."""

    def __init__(self, count: int) -> None:
        self.work = [0] * count
        self.open: dict[str, _Open] = {}
        self._sent = [OrderedDict[int, None]() for _ in range(count)]
        self._turn = 0

    def choose(self, request: Request, live: Sequence[int]) -> int:
        """One of the `live` replicas, which is counted to have the request from now on."""
        blocks = _blocks(request)
        known = {replica: _BLOCK * next((i for i, block in enumerate(blocks) if block not in self._sent[replica]), len(blocks))
                 for replica in live}
        self._turn += 1
        # Equal ones take turns.
        best = min(live, key=lambda replica: (self.work[replica] - known[replica], (replica - self._turn) % len(self.work)))
        work = max(0, len(request.prompt_ids) - known[best]) + _DECODING * request.params.n
        self.work[best] += work
        self.open[request.id] = _Open(best, work, request.params.n)
        sent = self._sent[best]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > _REMEMBERED:
            sent.popitem(last=False)
        return best

    def computed(self, name: str) -> None:
        """The prompt of a request has been computed."""
        found = self.open.get(name)
        if found is not None and found.work > _DECODING * found.left:
            self._count(found, _DECODING * found.left)

    def ended(self, name: str, sequences: int = 1) -> None:
        """So many sequences of a request have ended."""
        found = self.open.get(name)
        if found is None:
            return
        found.left -= sequences
        if found.left <= 0:
            self._count(found, 0)
            del self.open[name]

    def forget(self, name: str) -> None:
        """A request has ended, with all its sequences."""
        if name in self.open:
            self.ended(name, self.open[name].left)

    def reset(self) -> None:
        """Nothing is cached any more."""
        for sent in self._sent:
            sent.clear()

    def _count(self, found: _Open, work: int) -> None:
        self.work[found.replica] += work - found.work
        found.work = work


def _blocks(request: Request) -> list[int]:
    """A name for each whole block of the prompt and all before it, within the request's cache namespace."""
    found, name, ids = list[int](), hash((request.adapter, request.salt, request.tenant)), request.prompt_ids
    for at in range(0, min(len(ids), _BLOCK * _BLOCKS) - _BLOCK + 1, _BLOCK):
        name = hash((name, *ids[at:at + _BLOCK]))
        found.append(name)
    return found


class Replicas:
    """The interface of `EngineProcess`, for several of them."""

    def __init__(self, options: Sequence[Any], *, on_outputs: Callable[[EngineOutputs[Delta]], None],
                 on_refused: Callable[[Refused], None], on_death: Callable[[str], None],
                 on_loading: Callable[[int, int], None] | None = None, engine: str = ENGINE) -> None:
        """`options`: those of each replica (`config/resolve.py::replicas`)."""
        self._on_outputs = on_outputs
        self._on_refused = on_refused
        self._on_death = on_death
        self._ready = False
        self._folder = own_folder()
        self._together = options[0].enable_expert_parallel
        """Whether they step together, so that none can go on without the others."""
        self._options = list(options)
        self._engine = engine
        self._restart = options[0].restart == "ranks"
        self._restarts: deque[float] = deque(maxlen=_RESTARTS)
        """Times of the last restarts."""
        self._again: dict[int, asyncio.Task[None]] = {}
        """Replicas that are being started again."""
        self.balancer = Balancer(len(options))
        self._stats = [EngineStats() for _ in options]
        self._processes = [self._made(i, on_loading if i == 0 else None) for i in range(len(options))]

    def _made(self, replica: int, on_loading: Callable[[int, int], None] | None = None) -> EngineProcess:
        # Replicas that do not step together must not meet: the ranks of each then choose a folder of their own.
        options = dataclasses.replace(self._options[replica], data_parallel_rendezvous=self._folder if self._together else "")
        return EngineProcess(options, on_outputs=partial(self._take, replica), on_refused=self._refuse,
                             on_death=partial(self._die, replica), on_loading=on_loading, engine=self._engine)

    @property
    def pid(self) -> int | None:
        """The first replica's."""
        return self._processes[0].pid

    @property
    def dead(self) -> str | None:
        """The reason why no replica is left; before all are ready, why one is gone."""
        reasons = [process.dead for process in self._processes]
        if self._ready and (self._again or (None in reasons and not self._together)):
            return None
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def _live(self) -> list[int]:
        return [i for i, process in enumerate(self._processes) if process.dead is None and i not in self._again]

    @property
    def starting(self) -> bool:
        """Whether requests cannot be taken until a lost engine has started again."""
        return bool(self._again) and not self._live

    @property
    def last_message(self) -> float:
        """Of the replica that has been silent for longest."""
        return min((self._processes[i].last_message for i in self._live), default=0.0)

    @last_message.setter
    def last_message(self, now: float) -> None:
        for process in self._processes:
            process.last_message = now

    async def start(self) -> ModelFiles:
        """As `EngineProcess.start`, of all at once."""
        found: list[ModelFiles] = await self._all([process.start() for process in self._processes])
        return found[0]

    async def ready(self) -> EngineInfo:
        """The first replica's facts, with the room of all together."""
        infos: list[EngineInfo] = await self._all([process.ready() for process in self._processes])
        self._ready = True
        return msgspec.structs.replace(
            infos[0], max_num_seqs=sum(info.max_num_seqs for info in infos), kv_tokens=sum(info.kv_tokens for info in infos),
            pages_total=sum(info.pages_total for info in infos), notes=[*infos[0].notes, f"{len(infos)} replicas serve"])

    async def _all(self, calls: Iterable[Any]) -> list[Any]:
        try:
            return await asyncio.gather(*calls)
        except BaseException:
            await self.stop(0.0)
            raise

    def tell(self, name: str, argument: Any = None, key: str = "") -> None:
        """As `EngineProcess.tell`; a request goes to one replica, anything else to all."""
        live = self._live
        if not live:
            if self._again:
                raise RequestError("the engine was lost and starts again; try again in a while", status=503,
                                   code="engine_restarting")
            raise EngineDeadError(self.dead or "no replica is left")
        if name != "submit":
            for i in live:
                self._processes[i].tell(name, argument, key)
            return
        chosen = self.balancer.choose(argument, live)
        try:
            self._processes[chosen].tell(name, argument, key)
        except BaseException:
            self.balancer.forget(argument.id)
            raise

    async def ask(self, name: str, argument: Any = None) -> Any:
        """The answer of all replicas, or False if they do not agree; a `look` is at the first one, traces are of all."""
        if name == "look":
            return await self._processes[self._live[0]].ask(name, argument)
        if name == "reset_prefix_cache":
            self.balancer.reset()
        found = await asyncio.gather(*(self._processes[i].ask(name, argument) for i in self._live))
        if name == "stop_profile":
            return [path for paths in found for path in paths]
        return found[0] if all(one == found[0] for one in found) else False

    def abort(self, ids: list[str]) -> None:
        by_replica: dict[int, list[str]] = {}
        for one in ids:
            found = self.balancer.open.get(one.partition("/")[0])
            if found is not None:
                by_replica.setdefault(found.replica, []).append(one)
                if "/" not in one:
                    self.balancer.forget(one)
        for replica, names in by_replica.items():
            self._processes[replica].abort(names)

    async def stop(self, timeout: float = 10.0) -> None:
        for task in self._again.values():
            task.cancel()
        await asyncio.gather(*(process.stop(timeout) for process in self._processes))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, replica: int, outputs: EngineOutputs[Delta]) -> None:
        for update in outputs.updates:
            if update.token_ids:
                self.balancer.computed(update.request_id)
            if update.finish_reason == "error":
                self.balancer.forget(update.request_id)
            elif update.finish_reason is not None:
                self.balancer.ended(update.request_id)
        if outputs.stats is not None:
            self._stats[replica] = outputs.stats
        self._on_outputs(EngineOutputs(outputs.updates, None if outputs.stats is None else together(self._stats),
                                       outputs.admitted))

    def _refuse(self, refused: Refused) -> None:
        self.balancer.forget(refused.key)
        self._on_refused(refused)

    def _die(self, replica: int, reason: str) -> None:
        if replica in self._again:
            # Told by who waits for its start; or one of engines that step together, which all end.
            return
        again = self._ready and self._restart and self._may_restart()
        if not again:
            # Its process may live, as those of ranks that were not lost.
            self._processes[replica].dead = reason
        if not again and (not self._live or not self._ready or self._together):
            self._on_death(reason)
            return
        gone = list(range(len(self._processes))) if self._together else [replica]
        lost = [name for name, found in self.balancer.open.items() if found.replica in gone]
        LOG.error("replica %d of %d is gone%s; %d requests fail: %s", replica, len(self._processes),
                  " and starts again" if again else ", the others go on", len(lost), reason)
        for one in gone:
            self._stats[one] = EngineStats()
        if again:
            self._again.update(dict.fromkeys(gone, asyncio.get_running_loop().create_task(self._start_again(gone))))
        for name in lost:
            self.balancer.forget(name)
        self._on_outputs(EngineOutputs([Delta(name, 0, [], "error", error=f"its replica is gone: {reason}", status=503)
                                        for name in lost], together(self._stats)))

    def _may_restart(self) -> bool:
        """Whether an engine may be started again: not if the last restarts were too many in too short a time."""
        now = time.monotonic()
        if len(self._restarts) == _RESTARTS and now - self._restarts[0] < _RESTART_SECONDS:
            return False
        self._restarts.append(now)
        return True

    async def _start_again(self, gone: Sequence[int]) -> None:
        """Starts lost engines again, once more if they are lost at it; then the others go on, or the server ends."""
        while True:
            kept = all(self._processes[i].dead is None for i in gone)
            try:
                await self._started(gone)
                break
            except PenstockError as error:
                # A model or an option that is refused now will be refused again. That ranks could not be kept is no loss more.
                if isinstance(error, EngineDeadError) and (kept or self._may_restart()):
                    LOG.error("an engine was lost while it started, and starts again: %s", error)
                    continue
                for i in gone:
                    del self._again[i]
                LOG.error("an engine that was lost could not be started again: %s", error)
                if not self._live:
                    self._on_death(f"an engine that was lost could not be started again: {error}")
                return
        for i in gone:
            del self._again[i]
        self.balancer.reset()
        LOG.info("%d of %d replicas have started again", len(gone), len(self._processes))

    async def _started(self, gone: Sequence[int]) -> None:
        """Waits for an engine that goes on with ranks that live; else ends these and starts others in their place."""
        if any(self._processes[i].dead is not None for i in gone):
            await asyncio.gather(*(self._processes[i].stop(0.0) for i in gone))
            if self._together:
                # Ranks of the last start left their names in the folder.
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = own_folder()
            for i in gone:
                self._processes[i] = self._made(i)
            await asyncio.gather(*(self._processes[i].start() for i in gone))
        await asyncio.gather(*(self._processes[i].ready() for i in gone))


def _summed(given: Sequence[Counts], **others: Any) -> Counts:
    """Statistics whose counts are the sums of the given ones', but for the fields of `others`."""
    names = [name for name in given[0].__struct_fields__ if name not in others]
    return type(given[0])(**others, **{name: _added([getattr(one, name) for one in given]) for name in names})


def _added(values: list[Any]) -> Any:
    """Their sum; that of lists element by element, where shorter ones end in zeros, and of dicts key by key."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for one in values for key in one)
        return {key: _added([one[key] for one in values if key in one]) for key in keys}
    if not isinstance(values[0], list):
        return sum(values)
    return [_added([value[i] for value in values if i < len(value)]) for i in range(max(map(len, values)))]


def together(stats: Sequence[EngineStats]) -> EngineStats:
    """The statistics of all replicas: counts and seconds are added, `kv_usage` is that of all memory."""
    tiers: dict[str, list[TierStats]] = {}
    for tier in (tier for one in stats for tier in one.tiers):
        tiers.setdefault(tier.name, []).append(tier)
    return _summed(
        stats, time=max(one.time for one in stats), step_time=stats[0].step_time,
        step_time_error=max(one.step_time_error for one in stats),
        kv_usage=sum(one.kv_usage * one.pages_total for one in stats) / max(1, sum(one.pages_total for one in stats)),
        cache_identity=next((one.cache_identity for one in stats if one.cache_identity), ""),
        tiers=[_summed(same, name=name, available=min(one.available for one in same)) for name, same in tiers.items()])
