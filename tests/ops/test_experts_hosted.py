"""Experts in host memory: the result is that of all on the device, wherever each is, and those picked often come to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.device import DeviceFacts
from penstock.core.errors import ConfigError
from penstock.models import describe
from penstock.ops.experts import Glu
from penstock.ops.experts_hosted import HostedStack, Residency
from penstock.ops.experts_triton import Plan, Tile, TritonExperts, launch
from penstock.ops.registry import bind
from penstock.worker.memory import packed_bytes, resident
from tests.ops.interpreter import DEVICE
from tests.ops.kernels import close
from tests.ops.test_experts import Case, inputs, plain
from tests.ops.test_experts_triton import PLANS

OPS = TritonExperts()
CASE = Case(7, 9, 3, 64, 48)


def hosted(held: dict[str, Any], slots: int, stages: dict[Any, torch.Tensor]) -> tuple[Residency, HostedStack, HostedStack]:
    pinned = [held[name].pin_memory() if DEVICE.type == "cuda" else held[name].clone() for name in ("up", "down")]
    up, down = (OPS.host(one, slots, DEVICE) for one in pinned)
    assert isinstance(up, HostedStack) and isinstance(down, HostedStack)
    return Residency(up, down, stages), up, down


def check(plan: Plan, held: dict[str, Any], layer: tuple[Residency, HostedStack, HostedStack]) -> None:
    residency, up, down = layer
    there = {name: held[name].to(DEVICE) for name in ("x", "picks", "weights")}
    residency.fetch(there["picks"])
    got = launch(plan, up=up, down=down, glu=Glu(), **there)
    close(got.cpu(), plain(**{name: held[name] for name in ("x", "picks", "weights", "up", "down")}), 1.0, factor=8)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_wherever_experts_are(plan: Plan) -> None:
    """Two layers share a stage; what one has fetched is overwritten for the other. Before and after promotions."""
    stages: dict[Any, torch.Tensor] = {}
    held = [inputs(CASE, torch.float16) for _ in range(2)]
    held[1]["up"] = held[1]["up"].flip(0)  # type: ignore[union-attr]
    held[0]["picks"][2] = -1  # type: ignore[index]
    layers = [hosted(one, slots, stages) for one, slots in zip(held, (1, 5), strict=True)]
    assert len(stages) == 2
    for stage in stages.values():
        stage.fill_(float("nan"))
    for _ in range(2):
        for one, layer in zip(held, layers, strict=True):
            check(plan, one, layer)
        assert layers[1][0].promote(np.arange(9) * 10, 3) > 0


def test_more_picks_than_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ops.experts_hosted._EVERY", 16)
    held = inputs(CASE, torch.float16)
    check(PLANS["sorted"], held, hosted(held, 2, {}))


def test_promotion() -> None:
    """Slots go to what is picked most, no more at a time than allowed, and not back and forth for small differences."""
    residency, up, _ = hosted(inputs(CASE, torch.float16), 3, {})
    assert residency.promote(np.array([100, 5, 60, 80, 6, 0, 0, 0, 0]), 9) == 1, "6 picks are not much more than 5"
    assert sorted(np.flatnonzero(residency.slot >= 0)) == [0, 2, 3] and residency.slot[3] == 1
    assert torch.equal(up.data[1].cpu(), up.host[3])
    assert residency.promote(np.array([0, 0, 0, 0, 0, 90, 91, 92, 93]), 2) == 2
    assert residency.promote(np.zeros(9, np.int64), 9) == 1, "what was asked for before is still in the scores"
    assert sorted(residency.slot[residency.slot >= 0]) == [0, 1, 2]
    assert residency.promote(np.zeros(9, np.int64), 0) == 0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the facts of a GPU are made up")
def test_as_many_as_fit() -> None:
    """`auto` takes the most experts whose bytes, with the stage's, leave room for a cache; a model is refused that has none."""
    facts, dtype = DeviceFacts("cuda", "a GPU", 1 << 37, 16, frozenset(), (9, 0)), torch.bfloat16
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512,
              "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
              "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "max_position_embeddings": 1024}
    spec, bound = describe(config), bind(facts, dtype)
    each = 3 * 256 * 128 * 2
    whole = packed_bytes(spec, dtype, bound)
    assert whole == spec.nbytes("bfloat16")
    for held in (1, 5, 15):
        took = packed_bytes(replace(spec, resident=held), dtype, bound)
        assert took == whole - 4 * (16 - held) * each + (16 - held) * each
        assert resident("auto", spec, dtype, bound, facts, int(took / 0.8) + 8) == held
        assert resident(str(held), spec, dtype, bound, facts, 0) == held
    assert resident("auto", spec, dtype, bound, facts, 2 * whole) == resident("16", spec, dtype, bound, facts, 0) == 0
    dense = describe(config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    cpu = DeviceFacts("cpu", "a CPU", 1 << 37, 16, frozenset(), (0, 0))
    stored = describe(config | {"quantization_config": {"quant_method": "fp8"}})
    for other, where, why in ((dense, facts, "has no experts"), (spec, cpu, "is for GPUs"), (stored, facts, "stored as fp8"),
                              (spec, facts, "not even|with one expert")):
        with pytest.raises(ConfigError, match=why):
            resident("auto", other, dtype, bound, where, whole // 8)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_graph() -> None:
    """A captured graph reads the experts from where they have moved to."""
    held = inputs(Case(5, 32, 4, 512, 256), torch.bfloat16)
    residency, up, down = hosted(held, 8, {})
    there = {name: held[name].to(DEVICE) for name in ("x", "picks", "weights")}  # type: ignore[union-attr]
    plan = Plan(Tile(16, 64, 64, swap=True), Tile(16, 64, 64, swap=True), False)

    def run() -> torch.Tensor:
        residency.fetch(there["picks"])
        return launch(plan, up=up, down=down, glu=Glu(), **there)

    wanted, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(4):
        residency.promote(np.random.default_rng(0).integers(0, 1000, 32), 8)
        for stack in (up, down):
            stack.stage.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted)
