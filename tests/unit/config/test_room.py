"""Too little memory, on a GPU that others use or on a CPU: refused before anything is loaded, with what would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.resolve import check_host, check_room
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.rank import Occupancy
from penstock.engine.engine import Engine
from penstock.platform import facts
from penstock.worker import memory

GIB = 1 << 30


def found(free: float, total: float = 80) -> Occupancy:
    return Occupancy(int(free * GIB), int(total * GIB))


@pytest.mark.parametrize(("utilization", "weights", "free"), [(0.9, 16, 79.5), (0.9, 16, 26), (1.0, 60, 62), (0.3, 16, 79)])
def test_enough(utilization: float, weights: float, free: float) -> None:
    check_room(utilization, int(weights * GIB), found(free))


def test_the_fraction_that_would_fit() -> None:
    """50 of 80 GiB are taken: 0.7 leaves 6, weights of 16 need (50 + 16 + 1) / 80."""
    with pytest.raises(ConfigError) as raised:
        check_room(0.7, 16 * GIB, found(30))
    message = str(raised.value)
    for part in ("weights take 16.0 GiB", "50.0 GiB of the GPU's 80.0 are in use", "gpu_memory_utilization 0.7 leaves 6.0 GiB",
                 "--gpu-memory-utilization 0.84 would fit"):
        assert part in message, message
    check_room(0.84, 16 * GIB, found(30))


@pytest.mark.parametrize(("weights", "free", "said"), [(16, 10, "Stop what uses the GPU"), (90, 79, "needs a larger GPU")])
def test_nothing_would_fit(weights: int, free: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        check_room(0.9, weights * GIB, found(free))
    assert "would fit" not in str(raised.value)


def test_weights_beyond_a_computer_s_memory() -> None:
    """130 GiB on a machine of 24, of which 20 are available: said before loading, with what would fit."""
    with pytest.raises(ConfigError) as raised:
        check_host(130 * GIB, GIB, 20 * GIB, 24 * GIB)
    for part in ("weights take 130.0 GiB and a step 1.0", "24.0 GiB only 20.0 are available", "Weights of up to 19.0 GiB fit",
                 "10.2 billion parameters in bfloat16"):
        assert part in str(raised.value)
    check_host(19 * GIB, GIB, 20 * GIB, 24 * GIB)


BIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
       "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
       "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("free", "flags", "said"), [
    (12, {}, "its weights take 15.0 GiB"),
    (24, {"kv_cache_memory_bytes": 100 << 30}, "kv_cache_memory_bytes is 107,374,182,400, but only"),
    (24, {"kv_cache_memory_bytes": 1000}, "raise it to 2,097,152 or more"),
    (24, {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}, "or lower max_model_len to 513"),
    (24, {"max_model_len": 131072}, "the longest that fits is"),
    (24, {"kernels": {"foo": "bar"}}, "'foo', which is no operation; possible are activation"),
    (24, {"kernels": {"*": "bar"}}, "'bar' everywhere, which no operation has"),
])
def test_memory_is_checked_before_weights_are_read(free: int, flags: dict[str, Any], said: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has no weights at all: whoever looked for them would say so."""
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    monkeypatch.setattr(memory, "available_memory", lambda: free * GIB)
    with pytest.raises(ConfigError) as raised:
        Engine(EngineOptions(model=str(tmp_path), device="cpu", max_num_seqs=2, max_num_batched_tokens=16, **flags))
    assert said in str(raised.value)


def test_cached_files_count_as_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's memory.current includes files that were read, which the kernel gives back."""
    monkeypatch.setattr(facts, "_CGROUP", tmp_path)
    before = facts.available_memory()
    for name, text in (("memory.max", f"{1 << 20}\n"), ("memory.current", f"{900 << 10}\n"),
                       ("memory.stat", f"anon {100 << 10}\ninactive_file {600 << 10}\n")):
        (tmp_path / name).write_text(text)
    assert facts.available_memory() == min(before, (1 << 20) - (300 << 10))
    (tmp_path / "memory.max").write_text("max\n")
    assert facts.available_memory() > 1 << 20
