"""Resolves options against the model and the device: every default and every conflict between options. Pure."""

import math
from dataclasses import dataclass, replace

from penstock.config.schema import EngineOptions, checked
from penstock.config.speculation import Speculation, speculation
from penstock.core.errors import ConfigError
from penstock.core.plan import MOST_DEPTH
from penstock.core.rank import DeviceFacts, Occupancy
from penstock.core.state import MODEL_DTYPES, CacheLayout, StateSpec, lay_out, layout_behind

_GIB = 1 << 30
_GRAPH_FLOPS = 1e13
"""14 ms of a fast GPU, which is what a host takes to enqueue the operations of a deep model's step."""
_CPU_KV_SHARE = 0.5
"""Default share of a computer's free memory for the KV cache; it becomes resident only as it is used."""


@dataclass(frozen=True)
class EngineConfig:
    """Resolved options: no Nones left."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page: int
    depth: int
    threads: int
    kernels: dict[str, str]
    """Implementations that must be used, by operation."""
    batch_invariant: bool
    """Of the others, only those whose results do not depend on the batch. On a CPU all faster ones are."""
    step_target: float | None
    """Seconds."""
    graph_tokens: int
    """Steps of up to so many tokens are captured as CUDA graphs; 0 captures none."""
    speculation: Speculation | None = None
    """The drafter and its parameters; None: no speculation."""
    stages: int = 1
    exact: bool = False
    """As `scheduler/admission.py::Limits.exact`."""
    adapters: tuple[int, int] | None = None
    """The most adapters on the device, and their largest rank; None: none are served."""


def resolve(options: EngineOptions, max_positions: int, checkpoint_dtype: str, facts: DeviceFacts,
            parameters: int = 0, whole: bool = False) -> EngineConfig:
    """Resolves what does not depend on the memory left beside the weights. `parameters`: a token is multiplied by so many.
    `whole`: an encoder, whose prompts may be as long as max_model_len, as no token of output follows."""
    options = checked(options)
    gpu = facts.kind != "cpu"
    dtype = checkpoint_dtype if options.dtype == "auto" else options.dtype
    if dtype not in MODEL_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; possible are {', '.join(MODEL_DTYPES)}")
    length = max_positions if options.max_model_len is None else options.max_model_len
    if not 2 <= length <= max_positions:
        raise ConfigError(f"max_model_len is {length}, but this model handles 2 to {max_positions} tokens")
    rows = options.max_num_seqs or (1024 if gpu else 128)
    budget = options.max_num_batched_tokens or max(rows, 8192 if gpu else 512)
    if budget < rows:
        raise ConfigError(f"max_num_batched_tokens is {budget}, but each of max_num_seqs = {rows} sequences needs one token "
                          f"a step; raise it to {rows} or lower max_num_seqs to {budget}")
    stages = options.pipeline_parallel_size
    useful = max(4, stages + 1)
    if stages >= MOST_DEPTH:
        raise ConfigError(f"pipeline_parallel_size is {stages}; it may be 1 to {MOST_DEPTH - 1}")
    depth = options.depth or stages + 1
    if depth > useful:
        raise ConfigError(f"depth is {depth}; it may be 1 to {useful}, and more than {stages + 1} gains nothing")
    drafting = speculation(options)
    contexts = options.context_parallel_size
    if contexts > 1 and gpu and drafting is not None:
        raise ConfigError("speculative decoding is not possible with context_parallel_size on GPUs, whose hosts count the keys "
                          "that each query sees; leave out speculate, or use tensor_parallel_size")
    if drafting is not None and drafting.relaxed and options.tensor_parallel_size > 1:
        raise ConfigError("use_relaxed_acceptance_for_thinking compares all logits of a token, which ranks divide; use "
                          "tensor_parallel_size 1, or leave it out")
    return EngineConfig(
        dtype=dtype, max_model_len=length + whole, max_num_seqs=rows, max_num_batched_tokens=budget,
        page=(options.block_size or 16) * contexts, depth=depth,
        threads=options.threads or max(1, facts.cores // processes(options)),
        step_target=None if options.step_target_ms is None else options.step_target_ms / 1e3,
        kernels=options.kernels, batch_invariant=gpu and options.batch_invariant,
        graph_tokens=min(budget, graph_tokens(parameters)) if gpu and not options.enforce_eager else 0,
        speculation=drafting, stages=stages, exact=max(stages, contexts) > 1 or (gpu and options.batch_invariant),
        adapters=(options.max_loras, options.max_lora_rank or LORA_RANK) if options.enable_lora else None)


LORA_RANK = 16
"""Of adapters, unless larger ones are served from the start."""


def graph_tokens(parameters: int) -> int:
    """Tokens from which on a step keeps the GPU busy for longer than a host needs to enqueue it operation by operation."""
    return max(256, min(8192, 1 << (int(_GRAPH_FLOPS / (2 * max(1, parameters))) - 1).bit_length()))


@dataclass(frozen=True)
class MemoryPlan:
    """The division of memory, in bytes, and the length of context that fits."""

    weight_bytes: int
    step_bytes: int
    layout: CacheLayout
    behind: CacheLayout
    """The layout of the tiers behind the device (`core/state.py::layout_behind`)."""
    kv_tokens: int
    """Tokens of context that fit when sequences are as long as the model allows."""
    max_model_len: int
    graph_bytes: int = 0


@dataclass(frozen=True)
class MemoryLimits:
    """The options that bound memory, all that a rank's memory plan needs of them."""

    utilization: float
    """Fraction of a GPU's memory that the engine may fill."""
    cache_bytes: int | None
    """The KV cache's size, if the user gives it."""
    exact_length: bool
    """Whether the user gives max_model_len, which is then not lowered to fit."""
    ranks: int = 1
    """Number of ranks that share a computer's memory."""


@dataclass(frozen=True)
class CacheAsked:
    """The options that say how keys and values are stored."""

    codec: str = "auto"
    plain_layers: tuple[str, ...] = ()
    scales: tuple[tuple[str, str], ...] = ()
    dtype: str = "auto"
    """The model's."""
    dummy: bool = False
    """Weights are random, so that no file has scales."""
    back: int = 0
    """Positions that recurrent states can go back by: the most drafts of a step."""


def cache_asked(options: EngineOptions) -> CacheAsked:
    """The ones among an engine's options. Behind fewer drafts than a page has positions, a segment has two pages at most."""
    return CacheAsked(options.kv_cache_dtype, tuple(options.kv_cache_plain_layers), tuple(options.kv_cache_scales.items()),
                      options.dtype, options.load_format == "dummy",
                      0 if (drafting := speculation(options)) is None else min(drafting.most, (options.block_size or 16) - 1))


def processes(options: EngineOptions) -> int:
    """Ranks of all engines that share a computer."""
    return options.local_ranks * options.data_parallel_size


def replicas(options: EngineOptions) -> list[EngineOptions]:
    """The options of each engine of a server. Each publishes cache events as vLLM's do: the next port, or a numbered name."""
    found = []
    for rank in range(options.data_parallel_size):
        events = dict(options.kv_events_config)
        for name in ("endpoint", "replay_endpoint") if rank else ():
            if isinstance(events.get(name), str):
                head, colon, port = events[name].rpartition(":")
                events[name] = f"{head}:{int(port) + rank}" if colon and port.isdigit() else f"{events[name]}-{rank}"
        found.append(replace(options, data_parallel_rank=rank, kv_events_config=events))
    return found


def memory_limits(options: EngineOptions) -> MemoryLimits:
    return MemoryLimits(options.gpu_memory_utilization, options.kv_cache_memory_bytes, options.max_model_len is not None,
                        processes(options))


def plan_memory(limits: MemoryLimits, config: EngineConfig, states: list[StateSpec], weight_bytes: int, step_bytes: int,
                free_bytes: int, graph_bytes: int = 0, occupancy: Occupancy | None = None) -> MemoryPlan:
    """Divides what is left after weights and the worst-case step. `free_bytes` is what the cache may take at most;
    `occupancy`, what a GPU's memory was like at first, is for the message.

    Raises ConfigError naming the longest context that fits, if the one that was asked for does not."""
    whole = lay_out(states, config.page, 0)
    one = whole.slabs_for(config.max_model_len, config.max_num_batched_tokens) * whole.slab_bytes
    asked = limits.cache_bytes
    if asked is not None and asked > free_bytes:
        raise ConfigError(f"kv_cache_memory_bytes is {asked:,}, but only {free_bytes:,} bytes are free beside the weights "
                          f"({weight_bytes:,}) and the worst-case step ({step_bytes:,})")
    # One slab more for each group and sequence: partly used slabs are not shared between groups.
    useful = (one + whole.slab_bytes * len(whole.groups)) * config.max_num_seqs
    layout = lay_out(states, config.page, asked if asked is not None else max(0, min(useful, free_bytes)))
    longest = layout.longest(config.max_num_batched_tokens) + 1 if layout.slabs else 0
    if longest < config.max_model_len and (limits.exact_length or longest < 2):
        if asked is not None:
            least = one if limits.exact_length else whole.slabs_for(2, 2) * whole.slab_bytes
            shorter = f", or lower max_model_len to {longest}" if longest >= 2 else ""
            raise ConfigError(f"kv_cache_memory_bytes is {asked:,}, which holds {max(0, longest)} tokens of this model; "
                              f"raise it to {least:,} or more{shorter}")
        busy = "" if occupancy is None else f" at gpu_memory_utilization {limits.utilization} ({occupancy})"
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, which needs {one / _GIB:.3f} GiB of KV cache, but "
            f"{layout.nbytes / _GIB:.3f} GiB are available{busy}; the longest that fits is {longest} tokens"
            + (f" (--max-model-len {longest})" if longest >= 2 else ": use a smaller model or dtype, or free memory"))
    length = min(config.max_model_len, longest)
    tokens = layout.slabs * length // max(1, layout.slabs_for(length, config.max_num_batched_tokens))
    return MemoryPlan(weight_bytes, step_bytes, layout, layout_behind(layout, states), tokens, length, graph_bytes)


_LEAST = 1 << 30
"""Bytes beside the weights below which no engine starts: a step, a few pages, libraries."""


def check_room(utilization: float, weight_bytes: int, found: Occupancy) -> None:
    """Raises ConfigError before anything is loaded, if the weights cannot fit: what takes the memory, and what would fit."""
    needed = weight_bytes + _LEAST
    if needed <= int(found.total * utilization) - found.used:
        return
    what = (f"the weights take {weight_bytes / _GIB:.1f} GiB and a step about {_LEAST / _GIB:.0f}; {found}, and "
            f"gpu_memory_utilization {utilization} leaves {max(0.0, utilization * found.total - found.used) / _GIB:.1f} GiB")
    if needed <= found.free * _MOST:
        fitting = math.ceil(100 * (found.used + needed) / found.total) / 100
        raise ConfigError(f"{what}. --gpu-memory-utilization {fitting:.2f} would fit; with more of it there is more KV cache")
    if needed <= found.total * _MOST:
        raise ConfigError(f"{what}. Stop what uses the GPU (nvidia-smi lists it), or choose another (--device cuda:N)")
    raise ConfigError(f"{what}. This model needs a larger GPU: use a smaller model or dtype, several GPUs, or host memory "
                      "(--offload-weights auto)")


def check_host(weight_bytes: int, step_bytes: int, available: int, total: int) -> None:
    """Raises ConfigError before anything is loaded on a CPU, if weights and steps cannot fit; it says what would."""
    if weight_bytes + step_bytes <= available:
        return
    fitting = max(0, available - step_bytes)
    raise ConfigError(f"this model does not fit into memory: its weights take {weight_bytes / _GIB:.1f} GiB and a step "
                      f"{step_bytes / _GIB:.1f}, but of this computer's {total / _GIB:.1f} GiB only {available / _GIB:.1f} are "
                      f"available. Weights of up to {fitting / _GIB:.1f} GiB fit, which is about {fitting / 2e9:.1f} billion "
                      "parameters in bfloat16: use a smaller model or dtype, stop other programs, or read some from disk "
                      "(--offload-weights auto)")


_MOST = 0.98
"""The usable share of a GPU's memory."""


def cache_room(limits: MemoryLimits, facts: DeviceFacts, free_bytes: int, step_bytes: int) -> int:
    """The most bytes that the cache may take of what is free beside the weights; less than all where the user does not say."""
    left = max(0, free_bytes - step_bytes)
    if facts.kind == "cpu":
        # Ranks share the computer's memory.
        left //= limits.ranks
    return int(left * _CPU_KV_SHARE) if limits.cache_bytes is None and facts.kind == "cpu" else left
