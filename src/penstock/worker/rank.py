"""A rank: one device's part of the engine from options to the last step. Its callers need not import torch.

Call `survey`, `check`, `load`, `prepare`, then `launch` for each plan. `close` may be called at any time."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock import models
from penstock.checkpoint import dtype_of, resolve_folder, sample
from penstock.config.resolve import EngineConfig, cache_asked, cache_room, memory_limits
from penstock.config.schema import METHODS, EngineOptions, balancing
from penstock.config.speculation import speculation
from penstock.core.errors import ConfigError
from penstock.core.plan import Ints, StepPlan
from penstock.core.rank import DeviceFacts, Loaded, Prepared, Survey
from penstock.core.state import CacheLayout
from penstock.models import adapters
from penstock.models.weights import Progress
from penstock.observe.log import LOG
from penstock.ops import compile as compiling, gpu, registry
from penstock.ops.lora import Slabs
from penstock.parallel.axis import ALONE, Place
from penstock.parallel.mesh import Mesh, join
from penstock.platform.allocator import keep_freed_memory
from penstock.platform.facts import detect, device_name
from penstock.platform.kept import Kept, sources
from penstock.platform.profile import Profile
from penstock.stores.opening import Opening
from penstock.worker import memory
from penstock.worker.balancing import Balancing
from penstock.worker.drafters import loading as drafters
from penstock.worker.drafters.ngram import SCRATCH
from penstock.worker.drafting import LoadedDrafter
from penstock.worker.rehearsal import rehearse
from penstock.worker.rejection import scratch
from penstock.worker.step import fitted
from penstock.worker.worker import Launched, Worker, compute_stream

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that configure torch's allocator."""

_ALIKE = ("dtype", "quantization", "quantization_rules", "kv_cache_dtype", "kv_cache_plain_layers", "kv_cache_scales",
          "tensor_parallel_size", "pipeline_parallel_size", "pipeline_layers", "context_parallel_size",
          "enable_expert_parallel", "expert_placement_strategy", "enable_eplb", "eplb_config", "offload_weights",
          "experts_on_device")
"""Options that each machine reads for itself."""


class Start(msgspec.Struct, array_like=True):
    """The making of a rank in a process of its own: the first line on its standard input."""

    address: str
    """Of its sockets."""
    options: EngineOptions
    place: Place


class Rank:
    """One device's part of an engine. Not thread-safe."""

    def __init__(self, options: EngineOptions, place: Place = ALONE) -> None:
        self._options = options
        self._limits = memory_limits(options)
        self._place = place
        self._mesh = Mesh()
        self._facts = detect(options.device)
        name = device_name(options.device, self._facts)
        number = options.data_parallel_rank * place.ranks + place.rank % options.local_ranks
        if self._facts.kind == "cuda" and (number or not place.alone):
            # Each rank of each replica has a GPU of its own, from the one on that was asked for.
            name = f"cuda:{int(name.partition(':')[2] or 0) + number}"
            self._facts = detect(name)
            torch.cuda.set_device(name)
        self._device = torch.device(name)
        self._compiles = self._facts.kind == "cuda" and compiling.watch()
        self._compilations: list[compiling.Compilation] = []
        self._drafter: LoadedDrafter | None = None
        self._model: models.Decoder | None = None
        self._adapters: adapters.AdapterReader | None = None
        self._surveyed: Survey | None = None
        self._loaded: Loaded | None = None
        """The findings of `survey` and `load`. Once loaded, nothing is read again."""
        self._worker: Worker | None = None
        self._profile = Profile()

    @property
    def overlaps(self) -> bool:
        return self._facts.kind != "cpu"

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def survey(self) -> Survey:
        """Inspects the device and the model's small files. ConfigError or ModelError if one of them cannot be used."""
        if self._surveyed is not None:
            return self._surveyed
        self._folder = resolve_folder(self._options.model, self._options.revision)
        options = self._options
        self._checkpoint = models.configured(self._folder, options.quantization, options.quantization_rules,
                                             cache_asked(options))
        self._whole = whole = models.describe(self._checkpoint)
        self._spec, spec = whole.at(self._place), whole.dealt(self._place).share(self._place.tensors)
        self._surveyed = found = Survey(self._facts, self._folder, spec.architecture, spec.vocab_size, spec.max_positions,
                                        spec.used, dtype_of(self._folder, self._checkpoint), spec.task, spec.labels,
                                        spec.whole, spec.pairs, spec.second, self._alike() if options.nnodes > 1 else [])
        return found

    def _alike(self) -> list[str]:
        options = self._options
        asked = speculation(options)
        # Of a user's own drafter only its author knows what its model is.
        drafts = asked is not None and asked.model is not None and asked.method in METHODS and asked.model
        weights, draft = (sample(folder, options.load_format, options.seed)[:16] if folder else "none" for folder in (
            self._folder, resolve_folder(drafts, None) if drafts else None))
        return [f"sources {sources().hex()[:16]}", f"PyTorch {torch.__version__}", f"weights {weights}",
                f"draft weights {draft}", *(f"{name} {getattr(options, name)}" for name in _ALIKE)]

    def check(self, config: EngineConfig) -> None:
        """Binds kernels and checks memory before anything is loaded. ConfigError if it does not suffice."""
        if self._loaded is not None:
            return
        if config.batch_invariant and self._spec.streams is not None:
            raise ConfigError("batch_invariant is not possible with a model of several streams, as the order of PyTorch's sums "
                              "in these depends on a step's tokens; leave it out")
        self._kernels = kernels = registry.bind(self._facts, getattr(torch, config.dtype), config.kernels,
                                                batch_invariant=config.batch_invariant)
        registry.set_threads(config.threads, kernels)
        # Blocks that come from a disk are waited for on the host.
        eager = kernels.uncapturable() or self._spec.eager or self._options.offload_folder is not None
        self._config = replace(config, graph_tokens=0) if eager else config
        self._occupancy = memory.occupancy(self._device)
        if self._occupancy is not None and not set(_ALLOCATOR) & os.environ.keys():
            # Against fragmentation, before the first GPU allocation.
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # noqa: SLF001 (no public way)
        free = memory.free_bytes(self._device, self._limits.utilization)
        how = self._spec, getattr(torch, config.dtype), kernels, self._facts, free
        self._spec = replace(self._spec, resident=memory.resident(self._options.experts_on_device, *how),
                             away=memory.away(self._options.offload_weights, *how))
        # Where this machine has the draft model.
        own, asked = speculation(self._options), config.speculation
        self._draft = None if asked is None else drafters.survey(
            replace(asked, model=None if own is None else own.model), self._folder, self._checkpoint, self._whole,
            config.max_model_len, self._options.load_format == "dummy")
        head = None if self._draft is None else self._draft.head
        self._spec = replace(self._spec, lends=head is not None and head.borrows and self._spec.ends and self._place.stages > 1)
        skips = self._draft is not None and self._draft.asked.method == "layer_skip"
        if skips and self._place.stages > 1:
            raise ConfigError("speculate layer_skip is not possible with pipeline_parallel_size: its first layers and its head "
                              "are on different stages; use another drafter, or tensor_parallel_size")
        if self._place.datas > 1 and self._draft is not None and (head is not None or skips):
            raise ConfigError(f"speculate {self._draft.asked.method} is not possible where replicas share experts "
                              "(enable_expert_parallel with data_parallel_size); use ngram or a draft model, or leave one out")
        memory.check(self._limits, self._config, self._specs, self._device, self._facts, self._occupancy, self._kernels)

    @property
    def _specs(self) -> list[models.ModelSpec]:
        """The model, and the draft model if there is one on this stage."""
        if self._draft is None or self._place.stage != (self._place.stages - 1) * self._draft.late:
            return [self._spec]
        draft = self._draft.part(self._place)
        return [self._spec] if draft is None else [self._spec, draft]

    def load(self, progress: Progress | None = None) -> Loaded:
        """Loads weights while kernels compile, and measures steps' memory. ConfigError or ModelError: what to change."""
        options, device, config, kernels = self._options, self._device, self._config, self._kernels
        self._mesh.take(self._join())
        if self._loaded is not None:
            return self._loaded
        compiled = [compilation(config if spec is self._spec else replace(config, adapters=None), spec, kernels, device)
                    for spec in self._specs] if self._compiles else []
        self._compilations = found = [one for one in compiled if one is not None]
        # Libraries with a slow first use load in parallel.
        with memory.explained(device), ThreadPoolExecutor(1, "penstock-warm-up") as pool:
            warming = pool.submit(kernels.attention.warm_up, device)
            how: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "device": device, "kernels": kernels,
                                   "load_format": options.load_format, "max_model_len": config.max_model_len,
                                   "seed": options.seed}
            self._model = model = models.load(self._folder, self._checkpoint, **how, progress=progress, place=self._place,
                                              group=self._mesh.tensor, data=self._mesh.data, context=self._mesh.context,
                                              resident=self._spec.resident, away=self._spec.away,
                                              folder_away=options.offload_folder, lends=self._spec.lends)
            if self._draft is not None:
                room = max(fitted(config.max_num_batched_tokens), self._config.graph_tokens, config.max_num_seqs)
                self._drafter = drafters.load(self._draft, model, room, **how, place=self._place, group=self._mesh.tensor)
            warming.result()
        for one in found:
            one.finish(kernels)
            with torch.cuda.device(device):
                one.load(kernels)
        with compiling.explained(self._facts.capability), memory.explained(device):
            working = self._working(model)
            self._scratch = working.scratch
            if config.adapters is not None:
                slots = Slabs.nbytes(adapters.layout(self._spec), *config.adapters, model.dtype)
                # Each graph is captured twice.
                working = working._replace(step=working.step + slots, graphs=2 * working.graphs)
            room = cache_room(self._limits, self._facts, memory.free_bytes(device, self._limits.utilization),
                              working.step + working.graphs)
        states, computed = [*model.states], model.computation
        if self._drafter is not None and self._drafter.states:
            states, computed = states + self._drafter.states, f"{computed}+{self._drafter.computation}"
        self._loaded = loaded = Loaded(
            states, sum(one.weight_bytes for one in self._held(model)), working.step,
            working.graphs, room, self._occupancy, computed, kernels.table(),
            notes(kernels, self._facts), sum(one.compiled for one in found), max((one.seconds for one in found), default=0.0))
        return loaded

    def _held(self, model: models.Decoder) -> list[models.Decoder]:
        """The models that this rank has loaded, in the order of their states."""
        draft = self._drafter.model if self._drafter is not None else None
        return [model] if draft is None else [model, draft]

    def _join(self) -> Mesh:
        return join(self._place, self._device, not self._options.disable_custom_all_reduce and self._options.nnodes == 1)

    def _working(self, model: models.Decoder) -> memory.Working:
        """Returns the working memory of steps. Measuring takes 2 s on a GPU, so later starts find it on disk."""
        config, device = self._config, self._device
        kept = Kept(compiling.kept_folder() / "measured", self._facts, gpu.chip(device), self._specs, config,
                    self._kernels.table(), torch.version.cuda, *map(os.environ.get, _ALLOCATOR)) if self._compiles else None
        found = kept.read() if kept is not None else None
        if found is not None:
            return memory.Working(*found)
        each = [memory.working_bytes(one, config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, config.page,
                                     device, config.graph_tokens) for one in self._held(model)]
        # The models run one after another, so that they can share all memory except their graphs.
        drafting, asked = 0, config.speculation
        if asked is not None:
            drafting = SCRATCH + scratch(asked.rejection, config.max_num_seqs, asked.tokens, model.spec.vocab_size)
        working = memory.Working(max(one.step for one in each) + drafting, sum(one.graphs for one in each),
                                 max(one.scratch for one in each))
        if kept is not None:
            kept.write(list(working))
        return working

    def prepare(self, layout: CacheLayout, max_model_len: int, opening: Opening | None) -> Prepared:
        """Allocates the cache and the rows, captures CUDA graphs and warms up. `opening`: the tiers behind the device."""
        assert self._model is not None
        config = self._config
        if self._device.type == "cpu":
            # Not before loading, whose buffers must not stay.
            keep_freed_memory()
        behind = None if opening is None else opening.open(self._place.rank, self._place.ranks)
        with compiling.explained(self._facts.capability), memory.explained(self._device):
            slabs = None
            if config.adapters is not None:
                slabs = Slabs(adapters.layout(self._spec), *config.adapters, self._model.dtype, self._device)
                rules = models.family_of(self._checkpoint)[1].RULES
                self._adapters = adapters.AdapterReader(self._whole, self._place, rules, self._model.dtype, config.adapters[1],
                                                        self._model.rows, self._mesh.tensor)
            try:
                self._worker = worker = Worker(self._model, layout, config.max_num_seqs, max_model_len, self._device,
                                               config.graph_tokens, behind, self._drafter, config.max_num_batched_tokens,
                                               self._mesh.pipe, slabs)
            except BaseException:
                for store in behind.stores if behind is not None else ():
                    store.close()
                raise
            worker.warm_up(self._scratch, config.max_num_batched_tokens)
            if self._place.experts:
                self._balance(worker)
            worker.model.forget_picks()
        if worker.graphs is None:
            return Prepared()
        sizes = worker.graphs.buckets
        return Prepared(len(worker.graphs), worker.graphs.seconds, tuple(sorted({*sizes.decode, *sizes.mixed})))

    def _balance(self, worker: Worker) -> None:
        options, data = self._options, self._mesh.data
        group = self._mesh.tensor if data is None else data.group
        assert group is not None
        with torch.inference_mode():
            found = Balancing(worker.model, group, interval=balancing(options)[1],
                              spread=options.expert_placement_strategy == "round_robin")
        if data is None:
            worker.balancing = found
        else:
            data.each = found.step

    @property
    def called(self) -> bool:
        """Whether engines that step together with this one have steps to compute."""
        # While it starts, it steps with them by itself, to measure.
        return self._worker is not None and self._mesh.data is not None and self._mesh.data.active

    @property
    def together(self) -> bool:
        """Whether other engines wait for this one at every step."""
        return self._mesh.data is not None

    def look(self) -> None:
        """A rank of the engine's own process is never lost."""

    def add_adapter(self, folder: str) -> str:
        """Reads an adapter into host memory. Returns its digest. ModelError if it does not fit the model."""
        assert self._adapters is not None
        if self._mesh.data is not None and self._place.tensors > 1:
            self.worker.follow(meets=True)
        name, found = self._adapters.read(Path(folder))
        self.worker.adapters.host[name] = found
        if self.worker.graphs is not None and found.ends & {adapters.APART, adapters.EMBEDDING}:
            LOG.warning("the adapter %s changes the embedding, experts, or keys and values of MLA: steps with its "
                        "requests run outside of CUDA graphs, and take longer", folder)
        return name

    def drop_adapter(self, name: str) -> None:
        """Forgets an adapter that no further plan names."""
        self.worker.adapters.host.pop(name, None)

    def start_profile(self) -> None:
        """Records what this process and its GPU do from here on."""
        self._profile.start()

    def stop_profile(self, folder: str) -> list[str]:
        """Ends that. Returns the trace's name in `folder`, which is made."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        place = self._options.data_parallel_rank * self._place.ranks + self._place.rank
        path = Path(folder) / f"rank{place}-{time.time_ns()}.json"
        self._profile.stop(path)
        return [str(path)]

    @property
    def renews(self) -> bool:
        """Whether this rank may outlive others: the engine decides whether it is told to `leave` or to end."""
        return self._options.restart == "ranks" and self._worker is not None

    def leave(self, rendezvous: str) -> str:
        """Keeps its weights and nothing else. At `load` it meets the others at the rendezvous, which is returned."""
        if self._device.type == "cuda":
            self._mesh.leave(compute_stream(self._device), self.worker.close)
        self._mesh.close()
        self.worker.close()
        self._worker = None
        self._place = replace(self._place, rendezvous=rendezvous)
        return rendezvous

    def launch(self, plan: StepPlan) -> Launched:
        return self.worker.launch(plan)

    def mask_room(self, lines: int, words: int) -> Ints:
        return self.worker.sampler.mask_room(lines, words)

    def close(self) -> None:
        """Frees all resources. May be called at any time and more than once."""
        for compiled in self._compilations:
            compiled.close()
        # Drop the weights first, so that the worker can return their memory to the driver.
        self._model = self._adapters = self._drafter = None
        if self._worker is not None:
            self._worker.close()
        self._mesh.close()


def compilation(config: EngineConfig, spec: models.ModelSpec, kernels: registry.Kernels,
                device: torch.device) -> compiling.Compilation | None:
    """Starts compiling the kernels that steps launch, in other processes, while weights load. A rehearsal finds them, and they
    are kept on disk, so that the next start of the same need not rehearse."""
    chip = gpu.chip(device)
    kept = Kept(compiling.kept_folder() / "manifests", spec, config, kernels.table(), chip)
    known = kept.read()
    found = compiling.Compilation([compiling.Job(**job) for job in known or ()], chip.capability)
    if known is None:
        try:
            kept.write([asdict(job) for job in rehearse(
                spec, kernels, dtype=getattr(torch, config.dtype), rows=config.max_num_seqs, page=config.page,
                tokens=config.max_num_batched_tokens, max_model_len=config.max_model_len, graph_tokens=config.graph_tokens,
                chip=chip, adapters=config.adapters, found=found.add)])
        except Exception as error:  # noqa: BLE001 (slower start, but never a failed one)
            LOG.warning("kernels are compiled one by one as they are needed: %s: %s", type(error).__name__, error)
            found.close()
            return None
    return found


def notes(kernels: registry.Kernels, facts: DeviceFacts) -> list[str]:
    looking = kernels.uncapturable() if facts.kind != "cpu" else []
    if not looking:
        return []
    why = dict.fromkeys(f"{name}: {reason}" for op in looking for name, reason in kernels.refused.get(op, []))
    return [f"no CUDA graphs: plain PyTorch serves {', '.join(looking)} and waits for the device; decoding is slow"
            + (f" ({'; '.join(why)})" if why else "")]
