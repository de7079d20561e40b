"""The engine: scheduler, cache and a worker behind an executor, and the one loop that keeps `depth` plans in flight.

Owned by one thread. It knows tokens, no text; `inputs` and `outputs` translate for those who do.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from penstock import models
from penstock.cache.manager import Cache
from penstock.checkpoint import dtype_of, read_config, resolve_folder
from penstock.config.resolve import EngineConfig, MemoryPlan, Occupancy, cache_room, plan_memory, resolve
from penstock.config.schema import EngineOptions
from penstock.core.errors import RequestError
from penstock.core.plan import StepPlan
from penstock.core.request import EngineInfo, EngineStats, Request, Update
from penstock.engine.beam import BeamSearches
from penstock.engine.events import open_events
from penstock.engine.executor import Direct, Executor, Pending, Threaded
from penstock.engine.tiers import Naming, set_up
from penstock.observe.log import LOG
from penstock.ops import compile as compiling
from penstock.ops import gpu, registry
from penstock.ops.compile import Compilation
from penstock.platform.facts import DeviceFacts, detect, device_name
from penstock.scheduler.admission import Limits
from penstock.scheduler.scheduler import Scheduler
from penstock.worker import memory
from penstock.worker.rehearsal import rehearse
from penstock.worker.worker import Worker

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights load."""


_FLUSH_SECONDS = 5.0
"""How long an engine that closes waits for pages that are being written to stores."""


class Engine:
    """Takes requests, gives updates. `turn` is the loop's body; call it while `busy`."""

    def __init__(self, options: EngineOptions, progress: Progress | None = None) -> None:
        """Loads the model and plans memory. Raises ConfigError or ModelError saying what to change."""
        self.options = options
        facts = detect(options.device)
        compiles = facts.kind == "cuda" and compiling.watch()
        self.folder = resolve_folder(options.model, options.revision)
        checkpoint = read_config(self.folder)
        spec = models.describe(checkpoint)
        self.config = resolve(options, spec.max_positions, dtype_of(self.folder, checkpoint), facts, spec.size)
        dtype = getattr(torch, self.config.dtype)
        device = torch.device(device_name(options.device, facts))
        self.kernels = registry.bind(facts, dtype, self.config.kernels, batch_invariant=self.config.batch_invariant)
        registry.set_threads(self.config.threads, self.kernels)
        if self.kernels.uncapturable():
            self.config = replace(self.config, graph_tokens=0)
        found = memory.occupancy(device)
        if found is not None:
            memory.settle_allocator()
        memory.check(options, self.config, spec, device, facts, found)
        compilation = _compile(self.config, spec, self.kernels, device) if compiles else None
        self._naming = Naming(options, self.folder)
        with memory.explained(device):
            model = models.load(self.folder, checkpoint, dtype=dtype, device=device, kernels=self.kernels,
                                load_format=options.load_format, max_model_len=self.config.max_model_len, seed=options.seed,
                                progress=progress)
        if compilation is not None:
            compilation.finish(self.kernels)
            with torch.cuda.device(device):
                compilation.load(self.kernels)
        with compiling.explained(facts.capability), memory.explained(device):
            self.memory, scratch = _plan_memory(options, self.config, model, device, facts, found)
            self.tiers = set_up(options, self.config, self.memory.layout, self.folder, model.computation)
            self.worker = Worker(model, self.memory.layout, self.config.max_num_seqs, self.memory.max_model_len, device,
                                 self.config.graph_tokens, self.tiers.behind)
            self.worker.settle(scratch, self.config.max_num_batched_tokens)
        self.events = open_events(options, self.memory.layout, self.tiers.hierarchy)
        cache = Cache(self.memory.layout, policy=options.cache_policy, sharing=options.enable_prefix_caching,
                      model=self._naming.start(model.computation), quota=options.cache_tenant_share, tiers=self.tiers.hierarchy,
                      sink=self.events.sink if self.events is not None else None)
        self.scheduler = Scheduler(cache, Limits(
            max_model_len=self.memory.max_model_len, max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens, max_queued=options.max_num_queued_reqs,
            vocab_size=spec.vocab_size, step_target=self.config.step_target))
        self.executor: Executor = Threaded(self.worker) if facts.kind == "cpu" else Direct(self.worker)
        self.beams = BeamSearches(self._add, self._abort)
        self._flying: deque[Pending] = deque()
        self.info = EngineInfo(
            model=options.model, architecture=spec.architecture, vocab_size=spec.vocab_size,
            max_model_len=self.scheduler.admission.longest, max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens, page_size=self.config.page,
            kv_tokens=self.memory.kv_tokens, pages_total=self.memory.layout.slabs, dtype=self.config.dtype, device=facts.name,
            weight_bytes=self.memory.weight_bytes, step_bytes=self.memory.step_bytes, kv_bytes=self.memory.layout.nbytes,
            graph_bytes=self.memory.graph_bytes, graphs=len(self.worker.graphs or ()),
            graph_seconds=0.0 if self.worker.graphs is None else self.worker.graphs.seconds,
            compiled=0 if compilation is None else compilation.compiled,
            compile_seconds=0.0 if compilation is None else compilation.seconds,
            prefix_caching=cache.sharing, cache_identity=cache.model or "",
            kv_events=self.events.describe() if self.events is not None else None,
            kernels=self.kernels.table(), notes=_notes(self.config, self.memory, self.kernels, facts))

    def submit(self, request: Request) -> None:
        """Takes a request in. Raises RequestError if its parameters mean nothing, if it can never run, or if too many wait."""
        request.params.check()
        request.params.check_vocabulary(self.info.vocab_size)
        if request.params.seed is None:
            raise RequestError("the engine needs a seed; the frontend draws one", param="seed")
        if request.params.beam_width:
            self.scheduler.limit_of(request)
            self.beams.start(request, self.info.vocab_size)
        else:
            self._add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests by "id", or single sequences by "id/index". Unknown ones are ignored."""
        ids = list(ids)
        self.beams.abort(ids)
        self._abort(ids)

    def _add(self, request: Request) -> None:
        self.scheduler.add(request, time.time())

    def _abort(self, ids: Iterable[str]) -> None:
        self.scheduler.abort(ids, time.time())

    def reset_prefix_cache(self) -> bool:
        """From now on no request finds what earlier ones computed. What runs is not disturbed. Always possible: True."""
        self.scheduler.cache.reset()
        if self.events is not None:
            self.events.flush()
        return True

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or self.beams.busy

    @property
    def writing(self) -> bool:
        """Whether cached pages are on their way to stores: a turn now and then, even with nothing to compute, moves them on."""
        return self._naming.pending or self.scheduler.cache.writing

    @property
    def _unwritten(self) -> bool:
        """Whether pages would be lost to stores if the engine ended now."""
        cache = self.scheduler.cache
        return cache.writing or (self._naming.pending and any(cache.pools.kept_pages))

    def turn(self) -> list[Update]:
        """One turn of the loop: plan a step and hand it out, then take in results until fewer than `depth` plans fly."""
        began = time.perf_counter()
        if self._naming.pending and (name := self._naming.poll()) is not None:
            self.scheduler.cache.name(name)
            self.info.cache_identity = name
        plan = self.scheduler.plan(time.time())
        self.scheduler.stats.plan_seconds += time.perf_counter() - began
        if plan is not None:
            self._flying.append(self.executor.submit(plan))
            if len(plan.masked):
                self._mask(plan)
        # Without a new plan there is nothing to overlap with; wait for what flies, one result at a time.
        room = self.config.depth - 1 if plan is not None else max(0, len(self._flying) - 1)
        self._take_results(room)
        if self.events is not None:
            self.events.flush()
        updates = self.beams.through(self.scheduler.take_updates())
        if sys.flags.dev_mode and not self.busy:
            # At rest there is time to see whether every page is accounted for (python -X dev).
            self.scheduler.check()
        return updates

    def _take_results(self, room: int) -> None:
        """Applies results, the oldest first, until no more than `room` plans fly."""
        while len(self._flying) > room:
            # Taken off only when it is there: whoever is interrupted while waiting finds it in its place.
            result = self._flying[0].result()
            self._flying.popleft()
            began = time.perf_counter()
            self.scheduler.apply(result, time.time())
            self.scheduler.stats.plan_seconds += time.perf_counter() - began

    def _mask(self, plan: StepPlan) -> None:
        """Gives the plan just submitted its masks. They depend on the tokens of all plans before it, so those are applied
        first, while the device computes this one's forward pass."""
        masker = self.scheduler.masker
        assert masker is not None
        self._take_results(1)
        self.executor.mask(plan.id, masker.masks(self.scheduler.masked(plan)))

    def stats(self) -> EngineStats:
        """Current figures."""
        stats = self.scheduler.snapshot(time.time())
        stats.cache_identity = self.info.cache_identity
        return stats

    def close(self) -> None:
        """Finishes the plans in flight, and for a moment what is being written to stores; then stops the worker. The engine
        cannot be used afterwards."""
        until = time.monotonic() + _FLUSH_SECONDS
        while self._unwritten and not self.scheduler.live and time.monotonic() < until:
            self.turn()
            time.sleep(0.001)
        self._naming.close()
        self.executor.close()
        self._flying.clear()
        self.worker.close()
        self.tiers.close()
        if self.events is not None:
            self.events.close()


def _compile(config: EngineConfig, spec: models.ModelSpec, kernels: registry.Kernels,
             device: torch.device) -> Compilation | None:
    """Starts compiling what steps will launch, in other processes, while weights load."""
    chip = gpu.chip(device)
    manifest = compiling.Manifest(spec, config, kernels.table(), chip)
    jobs = manifest.jobs()
    if jobs is None:
        try:
            jobs = rehearse(spec, kernels, dtype=getattr(torch, config.dtype), rows=config.max_num_seqs, page=config.page,
                            tokens=config.max_num_batched_tokens, max_model_len=config.max_model_len,
                            graph_tokens=config.graph_tokens, chip=chip)
        except Exception as error:  # noqa: BLE001 (it costs time at start, and must not cost the start)
            LOG.warning("kernels are compiled one by one as they are needed: %s: %s", type(error).__name__, error)
            return None
        manifest.keep(jobs)
    return Compilation(jobs, chip.capability)


def _notes(config: EngineConfig, plan: MemoryPlan, kernels: registry.Kernels, facts: DeviceFacts) -> list[str]:
    notes = []
    looking = kernels.uncapturable() if facts.kind != "cpu" else []
    if looking:
        why = dict.fromkeys(f"{name}: {reason}" for op in looking for name, reason in kernels.refused.get(op, []))
        notes.append(f"no CUDA graphs: plain PyTorch serves {', '.join(looking)} and waits for the device; decoding is slow"
                     + (f" ({'; '.join(why)})" if why else ""))
    if plan.max_model_len < config.max_model_len:
        notes.append(f"max_model_len is {plan.max_model_len} instead of the model's {config.max_model_len}: "
                     "the KV cache holds no more")
    return notes


def _plan_memory(options: EngineOptions, config: EngineConfig, model: models.Decoder, device: torch.device,
                 facts: DeviceFacts, found: Occupancy | None) -> tuple[MemoryPlan, int]:
    """What goes where, and how much of it steps take and give back."""
    working = memory.working_bytes(model, config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len,
                                   config.page, device, config.graph_tokens)
    room = cache_room(options, facts, memory.free_bytes(device, options.gpu_memory_utilization), working.step + working.graphs)
    plan = plan_memory(options, config, model.states, model.weight_bytes, working.step, room, working.graphs, found)
    return plan, working.scratch
