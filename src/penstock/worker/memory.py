"""Memory of the worker besides weights and cache, and free device memory: estimated on a CPU, measured on a GPU."""

import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from penstock.config.resolve import EngineConfig, MemoryLimits, MemoryPlan, cache_room, check_host, check_room, plan_memory
from penstock.core.errors import ConfigError, first_line
from penstock.core.rank import DeviceFacts, Occupancy
from penstock.core.sampling import MAX_OPEN_LIST_WORDS
from penstock.core.state import StateSpec, lay_out
from penstock.layers.decoder import Decoder
from penstock.layers.spec import ModelSpec
from penstock.models.away import PLACES
from penstock.ops.experts_hosted import HostedStack
from penstock.ops.registry import Kernels
from penstock.platform.facts import available_memory
from penstock.quant.scheme import empty
from penstock.worker.dummy import dummy_plan
from penstock.worker.graphs import Graphs
from penstock.worker.sampler import MAX_LOGITS_ROWS
from penstock.worker.worker import Worker

_GIB = 1 << 30
_BESIDE_CACHE = 0.8
"""The share of a GPU's memory that weights may take where experts are to be divided between it and the host."""


LIST_BYTES = 5 * 4 * MAX_OPEN_LIST_WORDS
"""Maximum device memory of the sampling parameters' lists: up to twice the content, doubled while moving, plus the upload."""


class Working(NamedTuple):
    """Memory of a worker besides weights and cache, in bytes."""

    step: int
    """The rows' tables and the activations of the largest step."""
    graphs: int
    scratch: int
    """Scratch memory: the part of `step` that is allocated and freed within a step."""


class StepShape(NamedTuple):
    """So many segments of `count` tokens, each after `before` positions."""

    segments: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    before: int


def working_bytes(model: Decoder, tokens: int, rows: int, max_model_len: int, page: int, device: torch.device,
                  graph_tokens: int = 0) -> Working:
    """Peak memory of steps of up to `tokens` tokens and `rows` sampled rows, with graphs up to `graph_tokens`: on a CPU by
    count, on a GPU by the driver's free memory. There it runs the largest steps on a small cache, then captures every graph."""
    if device.type != "cuda":
        return Working(counted(model.spec, model.dtype, tokens, rows), 0, 0)
    shapes = largest_steps(tokens, rows, max_model_len, model.kernels.attention.contexts(max_model_len - 1 - tokens),
                           model.context is not None)
    small = lay_out(model.states, page, 0)
    slabs = max(small.slabs_for(count, count) * segments for segments, count, _ in shapes)
    layout = lay_out(model.states, page, small.slab_bytes * slabs)
    free = _free(device)
    worker = Worker(model, layout, rows, max_model_len, device)
    held = torch.cuda.memory_reserved(device)
    for segments, count, before in shapes:
        worker.run(dummy_plan(np.full(segments, count, np.int32), before, layout))
    left, scratch = _free(device), torch.cuda.memory_reserved(device) - held
    step, graphs = max(0, free - left - layout.nbytes) + LIST_BYTES, 0
    if graph_tokens and worker.stream is not None:
        captured = Graphs(worker.model, worker.rows, page, rows, graph_tokens, worker.stream, worker.sampler)
        captured.capture()
        graphs = max(0, left - _free(device))
        del captured
    # The model's views would keep the small cache alive.
    model.detach()
    del worker
    gc.collect()
    torch.cuda.empty_cache()
    return Working(step, graphs, scratch)


def counted(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Returns an upper bound of a step's memory in bytes: the largest live set of a layer (residual, normed input, merged
    projections, their result) and the sampler's float32 copies of the logits."""
    joined = replace(spec, schemes=()).parameters()
    widest = max(parameter.live or parameter.shape[0] for parameter in joined if parameter.name.startswith("blocks."))
    streams = 1 if spec.streams is None else spec.streams.count
    layer = tokens * (4 * streams * spec.width + 2 * widest + 3 * spec.inputs) * dtype.itemsize
    return layer + min(rows, MAX_LOGITS_ROWS) * spec.vocab_size * 4 * 6 + LIST_BYTES


def predicted(limits: MemoryLimits, config: EngineConfig, specs: Sequence[ModelSpec], device: torch.device,
              facts: DeviceFacts) -> MemoryPlan:
    """The memory plan of models that share steps, before anything is loaded; exact on a CPU. ConfigError if it does not fit."""
    weights = sum(on_host(spec, config.dtype) for spec in specs)
    dtype = getattr(torch, config.dtype)
    step = max(counted(spec, dtype, config.max_num_batched_tokens, config.max_num_seqs) for spec in specs)
    free = free_bytes(device, limits.utilization)
    if device.type == "cpu":
        check_host(weights, step, free, facts.memory)
    room = cache_room(limits, facts, free - weights, step)
    return plan_memory(limits, config, _states(specs, config), weights, step, room)


def _states(specs: Sequence[ModelSpec], config: EngineConfig) -> list[StateSpec]:
    return [state for spec in specs for state in spec.states(config.dtype)]


def packed_bytes(spec: ModelSpec, dtype: torch.dtype, kernels: Kernels) -> int:
    """Bytes of the parameters as a GPU's kernels hold them: packed, or decoded where none reads the stored form."""
    sizes: dict[tuple[object, ...], int] = {}
    stages: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    visiting: Counter[str] = Counter()
    total = 0
    for parameter in spec.parameters():
        scheme = parameter.scheme
        key = scheme, parameter.shape, parameter.stack, parameter.decoded, parameter.resident
        if scheme is None:
            total += parameter.nbytes(str(dtype).removeprefix("torch."))
            continue
        before = total
        if key not in sizes:
            stays = not parameter.decoded and (not parameter.stack or kernels.experts_for(scheme.name) is not None)
            sizes[key] = parameter.size * dtype.itemsize
            if stays or parameter.resident:
                held = empty(scheme, parameter.shape, dtype, torch.device("meta"), kernels, parameter.stack, parameter.resident)
                sizes[key] = held.nbytes
                if isinstance(held, HostedStack):
                    stages[parameter.shape, held.host.dtype] = held.host[len(held.data):].nbytes
        total += sizes[key]
        if parameter.away:
            visiting[parameter.name.split(".")[1]] += total - before
            total = before
    return total + sum(stages.values()) + PLACES * max(visiting.values(), default=0)


def away(asked: str | None, spec: ModelSpec, dtype: torch.dtype, kernels: Kernels, facts: DeviceFacts, free: int) -> int:
    """The number of blocks whose matrices are to be away, as `offload_weights` asks. `free`: bytes that the engine may fill.
    ConfigError if even with all of them away the rest does not fit."""
    if asked is None:
        return 0
    count, room = len(spec.blocks), int(free * _BESIDE_CACHE)
    gpu = facts.kind != "cpu"
    # On a GPU fewer would save nothing, as they have places there.
    least = min(count, PLACES + 1 if gpu else 1)
    if asked != "auto":
        return max(least, math.ceil(float(asked) * count))

    def taken(blocks: int) -> int:
        less = replace(spec, away=blocks)
        return packed_bytes(less, dtype, kernels) if gpu else on_host(less, str(dtype).removeprefix("torch."))

    found: int | None = next((blocks for blocks in (0, *range(least, count + 1)) if taken(blocks) <= room), None)
    if found is None:
        raise ConfigError(f"offload_weights auto: with the matrices of all {count} layers away, the rest takes "
                          f"{taken(count) / _GIB:.1f} GiB, and there is room for {room / _GIB:.1f} beside a KV cache; use a "
                          "smaller model, or several devices")
    return found


def on_host(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the parameters in the memory of a computer whose CPU is the device."""
    return sum(parameter.nbytes(dtype) for parameter in spec.parameters() if not parameter.away)


def resident(asked: str | None, spec: ModelSpec, dtype: torch.dtype, kernels: Kernels, facts: DeviceFacts, free: int) -> int:
    """The number of experts of each layer that the GPU is to hold, as `experts_on_device` asks; 0: all. `free`: bytes that the
    engine may fill. ConfigError if this model's experts cannot be divided so."""
    if asked is None:
        return 0
    stacks = [parameter for parameter in spec.parameters() if parameter.stack]
    if facts.kind != "cuda":
        raise ConfigError("experts_on_device is for GPUs; on a CPU leave it out: offload_weights maps experts from a file")
    if not stacks:
        raise ConfigError(f"experts_on_device is set, but {spec.architecture} has no experts. Leave it out")
    names = {parameter.scheme.name for parameter in stacks if parameter.scheme is not None}
    decoded = sorted(name for name in names if kernels.experts_for(name) is None)
    if decoded or kernels.chosen["experts"].name == "reference":
        what = f"experts stored as {', '.join(decoded)}, which are decoded" if decoded else "the reference kernel of experts"
        raise ConfigError(f"experts_on_device cannot serve {what}, only those that Triton kernels read. Leave it out")
    most = min(parameter.stack for parameter in stacks)
    if asked != "auto":
        return int(asked) if int(asked) < most else 0
    room = int(free * _BESIDE_CACHE)
    whole, one, two = (packed_bytes(replace(spec, resident=held), dtype, kernels) for held in (0, 1, 2))
    if whole <= room or most < 3:
        return 0
    if one > room:
        raise ConfigError(f"experts_on_device auto: with one expert of each layer on the device the weights take "
                          f"{one / _GIB:.1f} GiB, and there is room for {room / _GIB:.1f} beside a KV cache")
    return min(most - 1, 1 + (room - one) // (two - one))


def check(limits: MemoryLimits, config: EngineConfig, specs: Sequence[ModelSpec], device: torch.device, facts: DeviceFacts,
          found: Occupancy | None, kernels: Kernels) -> None:
    """Raises ConfigError before anything is loaded if it cannot fit. `found` is the GPU's `occupancy`."""
    if found is None:
        predicted(limits, config, specs, device, facts)
        return
    weights = sum(packed_bytes(spec, getattr(torch, config.dtype), kernels) for spec in specs)
    check_room(limits.utilization, weights, found)
    if limits.cache_bytes is not None:
        # The memory of a step is measured later; the cache must fit even without it.
        room = free_bytes(device, limits.utilization) - weights
        plan_memory(limits, config, _states(specs, config), weights, 0, room, occupancy=found)


def largest_steps(tokens: int, rows: int, max_model_len: int, contexts: Sequence[int], striped: bool) -> list[StepShape]:
    """The steps of up to `tokens` tokens and `rows` segments that take the most memory. `contexts`: lengths of context on which
    attention depends. `striped`: ranks divide contexts."""
    # Few long segments and many short ones: attention and the sampler have their memory peaks at opposite ends.
    shapes = [StepShape(segments, min(tokens // segments, max_model_len - 1), 0)
              for segments in {min(rows, -(-tokens // (max_model_len - 1))), min(rows, tokens)}]
    # A prefill chunk after a long context may take more memory than the first chunk.
    shapes += [StepShape(1, tokens, before) for before in contexts]
    if striped:
        # Keys of a whole context come to each rank; a few dozen queries have kernels of their own.
        one = min(tokens, max_model_len - 1)
        shapes += [StepShape(1, one, max_model_len - 1 - one), StepShape(1, min(64, one), 0)]
    return shapes


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def occupancy(device: torch.device) -> Occupancy | None:
    """Returns the free and total memory of a GPU; None for a CPU. ConfigError if it is full, in exclusive mode or broken."""
    if device.type != "cuda":
        return None
    try:
        return Occupancy(*torch.cuda.mem_get_info(device))
    except RuntimeError as error:
        raise ConfigError(
            f"{device} cannot be used now: {first_line(error)}. nvidia-smi shows who uses it, and whether it is in exclusive "
            "mode or broken; stop that, choose another (--device cuda:N), or use --device cpu") from error


@contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Turns GPU errors into ConfigError. Out of memory: who holds the memory and what to change. Others: how to debug."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        raise ConfigError(
            f"the GPU's memory ran out at start: of {total / _GIB:.1f} GiB this process has {own / _GIB:.1f}, others "
            f"{(total - free - own) / _GIB:.1f}, and {free / _GIB:.1f} are free. Stop what else uses the GPU, or lower "
            "--max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization") from error
    except torch.AcceleratorError as error:
        raise ConfigError(
            f"the GPU failed at start: {first_line(error)}. If it does with --enforce-eager and --kernels '*=reference', too, "
            "the driver or the GPU is at fault (dmesg, nvidia-smi -q); else a kernel is, and CUDA_LAUNCH_BLOCKING=1 shows which"
        ) from error


def free_bytes(device: torch.device, utilization: float) -> int:
    """Returns the bytes that may still be allocated on `device`; on a GPU, all its users may take `utilization` of it."""
    if device.type == "cpu":
        return available_memory()
    torch.cuda.empty_cache()
    found = occupancy(device)
    assert found is not None
    return max(0, found.free - int(found.total * (1 - utilization)))
