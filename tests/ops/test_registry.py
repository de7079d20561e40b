"""The kernel table: what is bound follows from what implementations say they can do, never from their names."""

from __future__ import annotations

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.ops import gpu, registry
from penstock.ops.registry import bind, implementations
from penstock.ops.table import Implementation
from penstock.platform.facts import DeviceFacts

CPU = DeviceFacts("cpu", "", 0, 1)
GPU = DeviceFacts("cuda", "a GPU", 1 << 30, 1, capability=(9, 0))


def enter(monkeypatch: pytest.MonkeyPatch, op: str, name: str, **fields: object) -> Implementation:
    registry.load()
    made = Implementation(name, object(), lambda facts, dtype: None, 99, **fields)  # type: ignore[arg-type]
    monkeypatch.setitem(registry.TABLE[op], name, made)
    return made


def test_batch_invariance_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: object())
    assert bind(GPU, torch.bfloat16).chosen["linear"].name == "triton"
    bound = bind(GPU, torch.bfloat16, batch_invariant=True)
    assert {op: bound.chosen[op].name for op in ("linear", "attention")} == dict.fromkeys(("linear", "attention"),
                                                                                          "triton-invariant")
    assert all(chosen.batch_invariant for chosen in bound.chosen.values())
    best = enter(monkeypatch, "linear", "best", batch_invariant=True)
    assert bind(GPU, torch.bfloat16, batch_invariant=True).chosen["linear"] is best
    enter(monkeypatch, "linear", "best", batch_invariant=False)
    assert bind(GPU, torch.bfloat16, batch_invariant=True).chosen["linear"].name == "triton-invariant"
    assert bind(GPU, torch.bfloat16).chosen["linear"].name == "best"
    # The user's own choice goes first.
    assert bind(GPU, torch.bfloat16, {"linear": "triton"}, batch_invariant=True).chosen["linear"].name == "triton"


def test_no_invariant_kernel_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"batch_invariant: no kernel for linear .*reference: its results depend"):
        bind(GPU, torch.bfloat16, batch_invariant=True)


def test_a_type_that_is_not_served_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, "rms_norm", "narrow", dtypes=(torch.bfloat16,))
    assert bind(CPU, torch.bfloat16).chosen["rms_norm"].name == "narrow"
    bound = bind(CPU, torch.float32)
    assert bound.chosen["rms_norm"].name != "narrow"
    assert ("narrow", "it has no torch.float32") in bound.refused["rms_norm"]


def test_what_no_graph_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ["attention", "build_step", "cache_write", "delta_rule", "experts", "latent_write", "lora", "rope_write"]
    assert bind(CPU, torch.float32, {"*": "reference"}).uncapturable() == plain
    enter(monkeypatch, "layer_norm", "host", capturable=False)
    enter(monkeypatch, "sample", "host", capturable=False)  # is never captured
    assert "layer_norm" in bind(CPU, torch.float32).uncapturable()
    assert "sample" not in bind(CPU, torch.float32).uncapturable()


def test_every_reference_serves_anything() -> None:
    registry.load()
    for op in registry.TABLE:
        if op.startswith(("linear.", "experts.")):  # the reference of a stored scheme is its own `decode`
            continue
        reference = implementations(op)[0]
        assert reference.name == "reference" and reference.refusal(CPU, torch.float64) is None
