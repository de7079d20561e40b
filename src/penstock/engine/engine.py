"""The engine: scheduler, cache and a worker behind an executor, and the loop that keeps `depth` plans in flight.

Owned by one thread. It handles tokens only; `inputs` and `outputs` translate from and to text."""

import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from penstock.cache.manager import Cache
from penstock.config.resolve import LORA_RANK, memory_limits, plan_memory, resolve
from penstock.config.schema import EngineOptions, place
from penstock.config.tiers import plan_tiers
from penstock.core import service
from penstock.core.errors import ConfigError, EngineDeadError, PenstockError, RequestError
from penstock.core.plan import Masks, StepPlan
from penstock.core.request import EngineInfo, EngineStats, Request, Update
from penstock.core.steptime import StepTime
from penstock.engine.adapters import Adapters, largest_rank
from penstock.engine.beam import BeamSearches
from penstock.engine.constraints import Constraints
from penstock.engine.events import CacheEvents, open_events
from penstock.engine.executor import Direct, Pending, Threaded
from penstock.engine.loading import tokenizer_folder
from penstock.engine.ranks import Progress, Rank, RankGroup
from penstock.engine.raycluster import RayCluster
from penstock.engine.remote import RemoteGroup
from penstock.engine.tiers import Naming, Weights, set_up
from penstock.engine.view import View
from penstock.parallel.axis import places
from penstock.scheduler.admission import Limits
from penstock.scheduler.drafting import draft_policy
from penstock.scheduler.promises import policy_of
from penstock.scheduler.scheduler import Scheduler

_FLUSH_SECONDS = 5.0
"""The longest that `close` waits for pages being written to stores."""


_RANK = "penstock.worker.rank:Rank"
"""The class that makes a rank from options; named, because the engine's half must not import torch."""


def make_rank(options: EngineOptions) -> Rank:
    """The ranks that the options ask for: one in this process, or several in their own. ConfigError for an unusable device."""
    first = place(options)
    if not first.alone:
        if options.node_rank:
            raise ConfigError(f"node_rank is {options.node_rank}, but only machine 0 has the engine; start the others by "
                              "penstock serve")
        here, cluster = options.local_ranks, None
        if options.distributed_executor_backend == "ray" and options.nnodes > 1:
            cluster = RayCluster()
            if options.master_addr == EngineOptions.master_addr:
                options = replace(options, master_addr=cluster.address)
        encoded, every = msgspec.json.encode(options), list(places(first))
        # Experts that have moved are not where a new rank would look for them.
        renews = options.restart == "ranks" and options.nnodes == 1 and not first.datas > 1 and not options.enable_eplb
        if cluster is not None:
            cluster.start(encoded, [every[at:at + here] for at in range(here, len(every), here)], options.device != "cpu")
        return RemoteGroup(encoded, every, here, None if cluster is None else cluster.end, renews)
    module, _, attribute = _RANK.partition(":")
    return cast(Rank, getattr(importlib.import_module(module), attribute)(options))


class Engine:
    """Accepts requests and returns updates. `turn` is one iteration of the loop; call it while `busy`."""

    def __init__(self, options: EngineOptions, progress: Progress | None = None, rank: Rank | None = None) -> None:
        """Loads the model and plans memory, on a `rank` of this process unless one is given. Raises ConfigError or ModelError
        saying what to change; then nothing is left of what had been started."""
        self.options = options
        self.beams = BeamSearches(self._add, self._abort)
        self._in_flight: deque[Pending] = deque()
        self.events: CacheEvents | None = None
        self._ended = self._profiled = False
        with ExitStack() as undo:
            self.rank = make_rank(options) if rank is None else rank
            undo.callback(self.rank.close)
            self._start(progress, undo)
            self._closing = undo.pop_all()

    def _start(self, progress: Progress | None, undo: ExitStack) -> None:
        """Starts everything but the rank itself. `undo` collects the clean-up of all that was started."""
        options, survey = self.options, self.rank.survey()
        if options.max_lora_rank is None:
            options = replace(options, max_lora_rank=max(LORA_RANK, largest_rank(options.lora_modules)))
        self.config = config = resolve(options, survey.max_positions, survey.dtype, survey.device, survey.parameters,
                                        survey.whole)
        self.rank.check(config)
        weights = Weights(options.model, survey.folder, options.load_format, options.seed)
        # By a store that outlives the process, or by subscribers to its events.
        seen = options.cache_disk is not None or options.cache_remote is not None or bool(options.kv_events_config)
        self._naming = Naming(weights, leave=seen)
        undo.callback(self._naming.close)
        loaded = self.rank.load(progress)
        self.memory = plan = plan_memory(memory_limits(options), config, loaded.states, loaded.weight_bytes, loaded.step_bytes,
                                         loaded.room, loaded.graph_bytes, loaded.occupancy)
        # Callbacks run in reverse order: first the loop, then the rank, whose movers still write, then the tiers' bookkeeping.
        undo.callback(lambda: self.events.close() if self.events is not None else None)
        times = StepTime(chunk=config.max_num_batched_tokens)
        self.tiers = set_up(plan_tiers(options, plan.behind), weights, config.dtype, plan.behind, loaded.computation, times)
        undo.callback(self.tiers.close)
        undo.callback(self.rank.close)
        prepared = self.rank.prepare(plan.layout, plan.max_model_len, self.tiers.behind)
        self.events = open_events(options.kv_events_config, options.enable_prefix_caching, plan.layout, self.tiers.hierarchy)
        # Where tokens see those behind them, a beginning is not the same in another prompt.
        cache = Cache(plan.layout, policy=options.cache_policy, sharing=options.enable_prefix_caching and not survey.whole,
                      model=self._naming.start(loaded.computation), quota=options.cache_tenant_share,
                      tiers=self.tiers.hierarchy, sink=self.events.sink if self.events is not None else None)
        longest = min(plan.max_model_len, config.max_num_batched_tokens + 1) if survey.whole else plan.max_model_len
        classes = service.read(options.classes)
        times.buckets = list(prepared.buckets)
        self.scheduler = Scheduler(cache, Limits(
            max_model_len=longest, whole=survey.whole, max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, max_queued=options.max_num_queued_reqs,
            vocab_size=survey.vocab_size + survey.second, step_target=config.step_target,
            max_adapters=options.max_loras if options.enable_lora else 0, stages=config.stages, exact=config.exact),
            policy_of(options.scheduling_policy, classes, times, config.max_num_batched_tokens),
            drafting=draft_policy(config.speculation, times) if config.speculation is not None else None, times=times)
        self.view = View(self.scheduler)
        self.executor: Direct | Threaded = Direct(self.rank) if self.rank.overlaps else Threaded(self.rank)
        undo.callback(self._end)
        self.adapters = Adapters(self.rank, self.scheduler, options.enable_lora, options.max_cpu_loras,
                                 lambda: [*self.beams.requests, *self.constraints.requests.values()], self._take_in)
        undo.callback(self.adapters.close)
        folder = None if options.skip_tokenizer_init else tokenizer_folder(options, survey.folder)
        self.constraints = Constraints(self.scheduler, survey.vocab_size, folder, self.rank.mask_room)
        undo.callback(self.constraints.close)
        notes = loaded.notes
        if plan.max_model_len < config.max_model_len:
            notes = [*notes, f"max_model_len is {plan.max_model_len} instead of the model's {config.max_model_len}: "
                             "the KV cache holds no more"]
        self.info = EngineInfo(
            model=options.model, architecture=survey.architecture, vocab_size=survey.vocab_size,
            max_model_len=self.scheduler.admission.longest - survey.whole, max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, page_size=config.page, kv_tokens=plan.kv_tokens,
            pages_total=plan.layout.slabs, dtype=config.dtype, device=survey.device.name, weight_bytes=plan.weight_bytes,
            step_bytes=plan.step_bytes, kv_bytes=plan.layout.nbytes, graph_bytes=plan.graph_bytes, graphs=prepared.graphs,
            graph_seconds=prepared.graph_seconds, compiled=loaded.compiled, compile_seconds=loaded.compile_seconds,
            prefix_caching=cache.sharing, cache_identity=cache.index.model or "", tenant_share=options.cache_tenant_share,
            kv_events=self.events.publisher.describe() if self.events is not None else None, kernels=loaded.kernels,
            task=survey.task, labels=list(survey.labels), encoder=survey.whole, pairs=survey.pairs, second=survey.second,
            adapters=self.adapters.start(options.lora_modules), max_loras=options.max_loras if options.enable_lora else 0,
            buckets=list(prepared.buckets), classes=list(classes), step_target=config.step_target, notes=notes)

    def submit(self, request: Request) -> None:
        """Queues a request. RequestError if its parameters are invalid, if it can never run, or if the queue is full."""
        request.params.check()
        request.params.check_vocabulary(self.info.vocab_size)
        if request.params.seed is None:
            raise RequestError("the engine needs a seed; the frontend draws one", param="seed")
        if not self.adapters.hold(request):
            self._take_in(request)

    def _take_in(self, request: Request) -> None:
        """Goes on with a request whose adapter is there."""
        if request.params.beam_width:
            self.scheduler.admission.check(request)
            self.beams.start(request, self.info.vocab_size)
        elif not self.constraints.hold(request):
            self._add(request)

    def undecided(self, request_id: str) -> bool:
        """Whether a request that was submitted may still be refused, because its grammar is being compiled."""
        return request_id in self.constraints.requests

    def expect(self, requests: int) -> None:
        """Says how many requests of a batch its caller still holds back: drafts are chosen for the load that they will make."""
        self.scheduler.queues.coming = requests

    def abort(self, ids: Iterable[str]) -> None:
        """Aborts requests by "id", or single sequences by "id/index". Unknown ids are ignored."""
        ids = list(ids)
        self.beams.abort(ids)
        self.constraints.abort(ids)
        self.adapters.abort(ids)
        self._abort(ids)

    def _add(self, request: Request) -> None:
        self.scheduler.add(request, time.time())

    def _abort(self, ids: Iterable[str]) -> None:
        self.scheduler.abort(ids, time.time())

    def add_adapter(self, folder: str) -> str:
        """Reads an adapter folder. Returns the name by which requests call it. RequestError if it cannot be used."""
        return self.adapters.add(folder)

    def load_adapter(self, folder: str) -> Future[str]:
        """Begins to read an adapter folder while steps run; once it is done, `Adapters.take` must be given the future."""
        return self.adapters.load(folder)

    def remove_adapter(self, name: str) -> bool:
        """Forgets an adapter once its requests have ended. Always possible: True."""
        self.adapters.remove(name)
        return True

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Running requests are not disturbed. Always possible: True."""
        self.scheduler.cache.reset()
        if self.events is not None:
            self.events.flush()
        return True

    def start_profile(self) -> bool:
        """Begins to record the ranks' steps. Always possible: True."""
        self._take_results(0)
        self.rank.start_profile()
        self._profiled = True
        return True

    def stop_profile(self, folder: str) -> list[str]:
        """Ends that. Returns the traces in `folder`: one, unless ranks are on several machines. RequestError if none runs."""
        if not self._profiled:
            raise RequestError("nothing is recorded; /start_profile begins", code="not_profiling")
        self._take_results(0)
        self._profiled = False
        return self.rank.stop_profile(folder)

    def look(self) -> dict[str, Any]:
        """The work at this moment, for people who watch."""
        return self.view.look()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or self.beams.busy or self.constraints.busy or self.adapters.busy

    @property
    def writing(self) -> bool:
        """True while cached pages are being written to stores. An occasional turn is then needed even without requests."""
        return self._naming.pending or self.scheduler.cache.writing

    def turn(self, meanwhile: Callable[[Pending], None] | None = None) -> list[Update]:
        """One iteration of the loop: plans and submits a step, then applies results until fewer than `depth` plans are in
        flight. `meanwhile` is called with the first plan whose result is waited for; requests may come and go in it."""
        began = time.perf_counter()
        if self._naming.pending and (name := self._naming.poll()) is not None:
            self.scheduler.cache.name(name)
            self.info.cache_identity = name
        self.adapters.admit()
        self.constraints.admit()
        plan = self.scheduler.plan(time.time())
        self.scheduler.stats.plan_seconds += time.perf_counter() - began
        if plan is not None:
            self._in_flight.append(self.executor.submit(plan))
            self.view.planned(plan)
            if len(plan.masked):
                self._mask(plan)
        # Without a new plan there is nothing to overlap with: wait for the in-flight plans, one result at a time.
        room = self.config.depth - 1 if plan is not None else max(0, len(self._in_flight) - 1)
        if meanwhile is not None and len(self._in_flight) > room:
            meanwhile(self._in_flight[0])
        self._take_results(room)
        if self.events is not None:
            self.events.flush()
        updates = self.beams.through(self.scheduler.take_updates())
        if sys.flags.dev_mode and not self.busy:
            # While idle, check that every page is accounted for (python -X dev).
            self.scheduler.check()
        return updates

    def _take_results(self, room: int) -> None:
        """Applies results, oldest first, until at most `room` plans are in flight."""
        while len(self._in_flight) > room:
            # Remove the plan only after its result has arrived, so that an interrupt while waiting does not lose it.
            result = self._in_flight[0].result()
            self._in_flight.popleft()
            began = time.perf_counter()
            self.scheduler.apply(result, time.time())
            self.view.done(result)
            self.scheduler.stats.plan_seconds += time.perf_counter() - began

    def _mask(self, plan: StepPlan) -> None:
        """Sends the masks of the plan just submitted. They depend on the tokens of all earlier plans, whose results are applied
        first, while the device computes this plan's forward pass."""
        masker = self.scheduler.masker
        assert masker is not None
        drafts = self.executor.drafts() if plan.tells_drafts else None
        self._take_results(1)
        segments = self.scheduler.masked(plan, drafts)
        try:
            masks = masker.masks(segments)
        except BaseException:
            # The worker waits for masks: send some even after an error, or closing the engine would deadlock.
            lines = sum(1 + len(segment.drafts) for segment in segments)
            self.executor.mask(plan.id, Masks(np.full((lines, -(-self.info.vocab_size // 32)), -1, np.int32)))
            raise
        self.executor.mask(plan.id, masks)

    def stats(self) -> EngineStats:
        """The current statistics. EngineDeadError if a rank is lost: an idle engine notices it here."""
        self.rank.look()
        stats = self.scheduler.snapshot(time.time())
        stats.cache_identity = self.info.cache_identity
        if isinstance(self.rank, RankGroup):
            stats.rank_seconds = self.rank.seconds.tolist()
        self.constraints.count(stats)
        self.adapters.count(stats)
        return stats

    def again(self) -> "Engine":
        """The engine anew after a RankLostError: without requests, with an empty cache, and ranks that keep their weights.
        EngineDeadError if that fails; then nothing is left."""
        assert isinstance(self.rank, RemoteGroup)
        try:
            rank = self.rank.renewed()
            self._closing.close()
            return Engine(self.options, rank=rank)
        except PenstockError as error:
            raise EngineDeadError(f"ranks could not go on without those that were lost: {error}") from error

    def close(self) -> None:
        """Finishes the in-flight plans, waits briefly for writes to stores, then stops everything that was started, even if
        some of it fails. The engine cannot be used afterwards; closing again does nothing."""
        with self._closing:
            cache, until = self.scheduler.cache, time.monotonic() + _FLUSH_SECONDS
            while not (self._ended or self.scheduler.live) and time.monotonic() < until and (
                    cache.writing or (self._naming.pending and any(cache.pools.kept_pages))):
                self.turn()
                time.sleep(0.001)

    def _end(self) -> None:
        self._ended = True
        self._in_flight.clear()
        self.executor.close()
