"""GPUs that cannot serve, each by a false torch: one message with what was found and what to do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.cli.serve import memory_plan
from penstock.config.resolve import EngineConfig, memory_limits, plan_memory, resolve
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.rank import DeviceFacts, Occupancy
from penstock.core.request import EngineInfo
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.ops import compile, gpu, registry
from penstock.platform import kept
from penstock.worker import memory, rank

GIB = 1 << 30
CUDA = torch.device("cuda")


def gpu_facts(capability: tuple[int, int]) -> DeviceFacts:
    return DeviceFacts("cuda", "a GPU", 80 * GIB, 8, frozenset(), capability)


def config(**options: Any) -> EngineConfig:
    return resolve(EngineOptions(**options), 1 << 20, "bfloat16", gpu_facts((9, 0)))


def failing(error: Exception) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("said", ["CUDA error: CUDA-capable device(s) is/are busy or unavailable", "CUDA error: out of memory"])
def test_nobody_is_let_in(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exclusive mode, or so full that not even a context fits."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", failing(torch.AcceleratorError(f"{said}\nSearch for it in the manual.\n")))
    for ask in (lambda: memory.occupancy(CUDA), lambda: memory.free_bytes(CUDA, 0.9)):
        with pytest.raises(ConfigError) as raised:
            ask()
        message = str(raised.value)
        assert message.startswith(f"cuda cannot be used now: {said}. nvidia-smi shows who") and "\n" not in message
        assert "--device cuda:N" in message and "--device cpu" in message


def test_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    assert memory.occupancy(CUDA) == Occupancy(30 * GIB, 80 * GIB) and memory.occupancy(torch.device("cpu")) is None
    assert memory.free_bytes(CUDA, 0.75) == 10 * GIB and memory.free_bytes(CUDA, 0.5) == 0


def test_memory_runs_out_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 18 * GIB)
    with pytest.raises(ConfigError) as raised, memory.explained(CUDA):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    message = str(raised.value)
    assert "of 80.0 GiB this process has 18.0, others 60.0, and 2.0 are free" in message
    assert "--max-num-batched-tokens" in message and "--gpu-memory-utilization" in message


def test_the_gpu_fails_at_start() -> None:
    with pytest.raises(ConfigError) as raised, memory.explained(CUDA):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
    message = str(raised.value)
    assert "the GPU failed at start: CUDA error: an illegal memory access was encountered. If" in message
    assert "--enforce-eager" in message and "\n" not in message
    with pytest.raises(ValueError, match="another"), memory.explained(CUDA):
        raise ValueError("another")


def test_a_context_that_does_not_fit_beside_others() -> None:
    """The message names who has the memory and the longest context that fits."""
    states = [StateSpec((Field("k", (8, 128), "bfloat16"), Field("v", (8, 128), "bfloat16")), Everything())]
    options = EngineOptions(max_model_len=1 << 20, gpu_memory_utilization=0.5)
    wanted = config(max_model_len=1 << 20)
    room = 100 * lay_out(states, wanted.page, 0).slab_bytes
    with pytest.raises(ConfigError) as raised:
        plan_memory(memory_limits(options), wanted, states, GIB, GIB, room, occupancy=Occupancy(45 * GIB, 80 * GIB))
    message = str(raised.value)
    assert "at gpu_memory_utilization 0.5 (35.0 GiB of the GPU's 80.0 are in use already)" in message
    assert "the longest that fits is" in message and "--max-model-len" in message


# -- kernels that cannot serve


@pytest.mark.parametrize(("capability", "triton", "reason"), [
    ((7, 5), True, "needs compute capability 8.0, a GPU has 7.5"), ((9, 0), False, "Triton is not installed")])
def test_plain_pytorch_serves_and_says_why(capability: tuple[int, int], triton: bool, reason: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine falls back; whoever asks why it is slow is told."""
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: object() if triton else None)
    facts = gpu_facts(capability)
    kernels = registry.bind(facts, torch.bfloat16)
    assert {name for _, name in kernels.table()} == {"reference"}
    [note] = rank.notes(kernels, facts)
    assert note.startswith("no CUDA graphs: plain PyTorch serves attention, build_step, cache_write, delta_rule, "
                           "experts, latent_write, lora, rope_write")
    assert reason in note
    assert rank.notes(kernels, DeviceFacts("cpu", "", 0, 1)) == []
    with pytest.raises(ConfigError, match=f"kernel 'triton' cannot serve attention: {reason}"):
        registry.bind(facts, torch.bfloat16, {"attention": "triton"})


def test_a_rehearsal_that_fails_costs_time_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rank.gpu, "chip", lambda device: gpu.Chip((9, 0), 132))
    monkeypatch.setattr(rank, "rehearse", failing(RuntimeError("a launch looked into a tensor")))
    monkeypatch.setattr(kept, "version", lambda name: "1.0")
    kernels = registry.bind(gpu_facts((9, 0)), torch.bfloat16, {"*": "reference"})
    spec: Any = SimpleNamespace()
    with caplog.at_level(logging.WARNING, "penstock"):
        assert rank.compilation(config(), spec, kernels, CUDA) is None
    assert "compiled one by one as they are needed: RuntimeError: a launch looked into a tensor" in caplog.text
    assert not list(tmp_path.rglob("*.json")), "what was not rehearsed to the end is not kept"


def test_a_start_says_what_it_made() -> None:
    """Graphs and kernels, with what they took, where there are any."""
    info = EngineInfo(model="m", architecture="A", vocab_size=9, max_model_len=100, max_num_seqs=2, max_num_batched_tokens=50,
                      page_size=16, kv_tokens=100, pages_total=7, dtype="bfloat16", device="a GPU", weight_bytes=GIB,
                      step_bytes=GIB, kv_bytes=GIB, graph_bytes=GIB // 2, graphs=31, graph_seconds=0.72, compiled=45,
                      compile_seconds=4.71)
    said = memory_plan(info)
    assert "512.0 MiB   31 captured in 0.7 s" in said and "45   compiled in 4.7 s" in said
    for name in ("graphs", "compiled"):
        setattr(info, name, 0)
    assert "graphs" not in memory_plan(info) and "kernels" not in memory_plan(info)


def test_a_compiler_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process answers nothing; the start stops with a message instead of waiting."""
    worker = tmp_path / "compiler"
    worker.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    worker.chmod(0o755)
    monkeypatch.setattr(compile, "_PATIENCE", 0.3)
    monkeypatch.setattr(compile.sys, "executable", str(worker))
    job = compile.Job("penstock.ops.rows_kernels", "normalise", "{}", tmp_path / "nowhere", "penstock.ops.rows_triton")
    kernels = registry.bind(gpu_facts((7, 0)), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"does not work on compute capability 9\.0: the compiler's process ended"):
        compile.Compilation([job], (9, 0)).finish(kernels)
