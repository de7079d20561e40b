"""Picked experts that a GPU does not hold, computed on the CPU while the GPU fetches others.

In each layer of a short step a kernel divides them by `Costs` (`ops/experts_kernels.py::share`) and writes the tokens of the
CPU's experts to pinned memory. The CPU's kernel reads the matrices where they are; it is a host function on a stream of its
own, so that a CUDA graph can hold it. `join` adds its results in float32. Python decides nothing between two kernels."""

import ctypes
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penstock.ops import gpu, registry
from penstock.ops.cpu import STORED, CpuExperts
from penstock.platform.facts import detect

LOG = logging.getLogger("penstock")

TOKENS, PICKS = 64, 1024
"""The most of a step that the CPU helps with: in longer ones each expert has many tokens, the GPU's work. 0: of none."""
_TRIES = 8


class Costs(NamedTuple):
    """Microseconds, measured while the link and the CPU read host memory at once: of fetching an expert, of one with a first
    and each further token on the CPU, and between the GPU's choice and its use of the results if the CPU computes none."""

    link: float
    first: float
    more: float
    call: float


NEVER = Costs(0.0, 1.0, 0.0, 0.0)
"""The CPU computes nothing."""


@dataclass
class Absent:
    """The experts of a layer that are in host memory alone."""

    missing: torch.Tensor
    """Their numbers, int32 on the device."""
    matrices: tuple[Any, ...]
    """The arguments `up` to `inward` of `CpuExperts.told`: all experts of the layer, in host memory."""
    calls: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = field(default_factory=dict)
    """The arguments of the CPU's kernel by tokens and picks of each. CUDA graphs know where they are."""


class Helper:
    """The CPU's side of a model: memory that all layers share, as they take turns."""

    def __init__(self, ops: CpuExperts, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._ops = ops
        self.costs = NEVER
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

        def room(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
            where = "meta" if device.type == "meta" else "cpu"
            return torch.zeros(shape, dtype=kind, device=where, pin_memory=self._stream is not None)

        self._x, self._found = room((TOKENS, width), dtype), room((TOKENS, width), torch.float32)
        self._picks, self._weights = room((PICKS,), torch.int32), room((PICKS,), torch.float32)

    def serves(self, picks: torch.Tensor) -> bool:
        return len(picks) <= TOKENS and picks.numel() <= PICKS

    def share(self, layer: Absent, x: torch.Tensor, picks: torch.Tensor,
              weights: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], None]]:
        """Enqueues the CPU's part. Returns the picks that are left to the GPU, and what adds the results to the GPU's."""
        from penstock.ops import experts_kernels as kernels  # Triton: heavy, and not everywhere

        (tokens, count), width, total, lacking = picks.shape, x.shape[1], picks.numel(), len(layer.missing)
        kept = torch.empty_like(picks)
        some: dict[str, Any] = {"width": width, "count": count, "picked": gpu.covering(count), "block": 1024, "num_warps": 4}
        kernels.share[(tokens,)](
            picks, weights, x, layer.missing, kept, self._picks, self._weights, self._x, total, lacking, x.stride(0),
            *self.costs, most=gpu.covering(max(16, total)), gaps=gpu.covering(max(16, lacking)),
            slots=gpu.covering(max(16, len(layer.matrices[0]))), **some)
        if not x.is_meta:
            self._compute(layer, tokens, count)

        def join(out: torch.Tensor) -> None:
            if self._stream is not None:
                torch.cuda.current_stream(out.device).wait_stream(self._stream)
            kernels.join[(tokens, -(-width // 1024))](picks, kept, self._found, out, **some)

        return kept, join

    def _compute(self, layer: Absent, tokens: int, count: int) -> None:
        """Runs the CPU's kernel behind what the current stream has: at once where there are no streams."""
        if (tokens, count) not in layer.calls:
            picks = self._picks[:tokens * count].view(tokens, count)
            told = self._ops.told(self._x[:tokens], picks, self._weights, self._found, *layer.matrices, form=STORED)
            layer.calls[tokens, count] = ctypes.create_string_buffer(told, len(told))
        call = layer.calls[tokens, count]
        if self._stream is None:
            self._ops.run(call.raw)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        launch, stream = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc, ctypes.c_void_p(self._stream.cuda_stream)
        code = launch(stream, ctypes.cast(self._ops.run, ctypes.c_void_p), call)
        if code:
            raise RuntimeError(f"cuLaunchHostFunc failed with error {code} of the CUDA driver")

    def measure(self, layer: Absent, fetch: Callable[[torch.Tensor], None]) -> None:
        """Finds the costs by the experts of one layer. `fetch` enqueues the copies of picks [T, K]."""
        device, missing = layer.missing.device, layer.missing.tolist()
        groups = [missing[at:at + 4] for at in range(0, len(missing), 4)][:_TRIES]
        wanted = [torch.tensor([group], dtype=torch.int32, device=device) for group in groups]
        x = torch.randn(8, self._x.shape[1]).to(self._x.dtype)
        found, weights = torch.empty(x.shape), torch.ones(8)
        there, none, ones = x[:1].to(device), torch.full((1, 8), -1, dtype=torch.int32, device=device), weights[None].to(device)

        def computed(experts: list[list[int]]) -> float:
            picks = torch.tensor(experts, dtype=torch.int32)
            told = self._ops.told(x[:len(picks)], picks, weights, found, *layer.matrices, form=STORED)
            begin = time.perf_counter()
            self._ops.run(told)
            return (time.perf_counter() - begin) * 1e6

        def pass_on(times: int) -> None:
            for _ in range(times):
                self.share(layer, there, none, ones)[1](there)

        # The first calls compile and load kernels.
        fetch(wanted[0])
        pass_on(1)
        computed([missing[:1]])
        torch.cuda.synchronize(device)
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        moments[0].record()
        for one in wanted:
            fetch(one)
        moments[1].record()
        first = statistics.median(computed([group]) / len(group) for group in groups)
        eight = statistics.median(computed([group[:1]] * 8) for group in groups)
        # Steps are captured, too: a launch takes Python longer than the GPU.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            pass_on(_TRIES)
        graph.replay()
        moments[2].record()
        graph.replay()
        moments[3].record()
        torch.cuda.synchronize(device)
        link, call = (moments[at].elapsed_time(moments[at + 1]) * 1e3 for at in (0, 2))
        self.costs = Costs(link / sum(map(len, groups)), first, max(0.0, eight - first) / 7, call / _TRIES)
        LOG.info("experts in host memory, microseconds: %.0f to fetch one; on the CPU %.0f for one token, %.1f for each "
                 "further one, and %.0f for any", *self.costs)


def helper(width: int, dtype: torch.dtype, device: torch.device) -> Helper | None:
    """None where the CPU has no kernel for such experts, or is to help with no step."""
    if not min(TOKENS, PICKS):
        return None
    facts = detect("cpu")
    for one in reversed(registry.implementations("experts")):
        if isinstance(one.call, CpuExperts) and one.refusal(facts, dtype) is None:
            return Helper(one.call, width, dtype, device)
    return None
