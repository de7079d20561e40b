"""Experts in host memory, plain or quantized: the result is that of all on the device, wherever each is or is computed, and
those picked often come to it."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penstock.core.errors import ConfigError, ModelError
from penstock.core.rank import DeviceFacts
from penstock.engine.engine import Engine
from penstock.models import describe
from penstock.ops import experts_coded, experts_helped, experts_hosted, registry
from penstock.ops.cpu import STORED, CpuExperts
from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.experts_helped import Costs, helper
from penstock.ops.experts_hosted import HostedStack, Residency, Stages
from penstock.ops.experts_triton import InvariantExperts, Plan, Tile, TritonExperts, choose_coded, launch
from penstock.ops.registry import bind, implementations
from penstock.ops.table import Implementation
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4, NVFP4
from penstock.quant.scheme import PLAIN
from penstock.worker import memory
from penstock.worker.memory import packed_bytes, resident
from tests.ops.interpreter import DEVICE
from tests.ops.kernels import DTYPES as EVERY_TYPE, close, usable
from tests.ops.test_experts import GLUS, Case, inputs, plain
from tests.ops.test_experts_coded import PLANS as CODED_PLANS
from tests.ops.test_experts_triton import PLANS

OPS = TritonExperts()
CASE = Case(7, 9, 3, 64, 48)


def hosted(held: dict[str, Any], slots: int, stages: Stages, ops: TritonExperts = OPS, glu: Glu = GLUS["swiglu"],
           inward: bool = False) -> tuple[Residency, HostedStack, HostedStack]:
    pinned = [held[name].pin_memory() if DEVICE.type == "cuda" else held[name].clone() for name in ("up", "down")]
    up, down = (ops.pack_stored(PLAIN, {"weight": one.flatten(0, 1)}, len(one), one.shape[1:], one.dtype, slots, DEVICE)
                for one in pinned)
    assert isinstance(up, HostedStack) and isinstance(down, HostedStack)
    biases = (None if bias is None else bias.to(DEVICE) for bias in (held["up_bias"], held["down_bias"]))
    return Residency(up, down, stages, glu, *biases, inward), up, down


def check(plan: Plan, held: dict[str, Any], layer: tuple[Residency, HostedStack, HostedStack]) -> None:
    residency, up, down = layer
    there = {name: held[name].to(DEVICE) for name in ("x", "picks", "weights")}
    residency.fetch(there["picks"])
    got = launch(plan, up=up, down=down, glu=Glu(), **there)
    close(got.cpu(), plain(**{name: held[name] for name in ("x", "picks", "weights", "up", "down")}), 1.0, factor=8)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_wherever_experts_are(plan: Plan) -> None:
    """Two layers share a stage; what one has fetched is overwritten for the other. Before and after promotions."""
    stages = Stages()
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


@pytest.mark.parametrize("scheme, plan", [
    (FP8("token"), "one token"), (FP8("token"), "one by one"), (FP8("group", (128, 128)), "sorted"), (FP8(), "unsorted"),
    (Int8("token"), "sorted"), (MXFP4(), "one by one"), (NVFP4(), "unsorted"), (Grouped(4, 128), "one by one"),
    (Grouped(4, 32, "uint8"), "sorted"), (GGUF("q8_0"), "sorted"), (GGUF("q4_1"), "unsorted")],
    ids=lambda value: getattr(value, "name", value))
def test_codes_wherever_experts_are(scheme: Any, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized experts give the bits of all on the device, packed at once or in pieces, before and after a promotion."""
    held = inputs(Case(1 if plan == "one token" else 2, 4, 2, 256, 128), torch.float16)
    there = {name: held[name].to(DEVICE) for name in ("x", "picks", "weights")}  # type: ignore[union-attr]
    parts = {name: scheme.encode(held[name].flatten(0, 1).float()) for name in ("up", "down")}  # type: ignore[union-attr]

    def packed(name: str, slots: int) -> Stack:
        own = {suffix: part.to(DEVICE) for suffix, part in parts[name].items()} if not slots else parts[name]
        count, n, k = held[name].shape  # type: ignore[union-attr]
        return OPS.pack_stored(scheme, own, count, (n, k), torch.float16, slots, DEVICE if slots else None)

    whole = [packed(name, 0) for name in ("up", "down")]
    monkeypatch.setattr("penstock.ops.experts_coded._AT_ONCE", 1)
    up, down = (packed(name, 1) for name in ("up", "down"))
    assert isinstance(up, HostedStack) and isinstance(down, HostedStack) and up.nbytes < whole[0].nbytes
    residency = Residency(up, down, Stages(), Glu(), None, None, False)
    assert residency.helper is None, "the CPU does not read these codes"
    tiles = CODED_PLANS.get(plan) or choose_coded(1, 2, whole[0], whole[1])
    assert tiles.down.ahead == (3 if plan == "one token" else 0)
    wanted = launch(tiles, up=whole[0], down=whole[1], glu=Glu(), **there)
    for popular in (3, 1):
        for stack in (up, down):
            stack.stage.view(torch.uint8).fill_(0x5a)
        assert residency.promote(np.eye(4, dtype=np.int64)[popular] * 9, 1) == 1 and residency.slot[popular] == 0
        left, join = residency.begin(there["x"], there["picks"], there["weights"], whole=False)
        assert left is there["picks"] and join is None
        assert torch.equal(launch(tiles, up=up, down=down, glu=Glu(), **there), wanted)


def test_codes_that_share_panels_are_refused() -> None:
    scheme = Grouped(4, 32)
    with pytest.raises(ModelError, match="experts of 48 rows of 4-bit codes cannot be in host memory"):
        OPS.pack_stored(scheme, scheme.encode(torch.randn(5 * 48, 64)), 5, (48, 64), torch.float16, 2, DEVICE)


def test_more_picks_than_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ops.experts_hosted._EVERY", 16)
    held = inputs(CASE, torch.float16)
    check(PLANS["sorted"], held, hosted(held, 2, Stages()))


def test_promotion() -> None:
    """Slots go to what is picked most, no more at a time than allowed, and not back and forth for small differences."""
    residency, up, _ = hosted(inputs(CASE, torch.float16), 3, Stages())
    assert residency.promote(np.array([100, 5, 60, 80, 6, 0, 0, 0, 0]), 9) == 1, "6 picks are not much more than 5"
    assert sorted(np.flatnonzero(residency.slot >= 0)) == [0, 2, 3] and residency.slot[3] == 1
    assert torch.equal(up.data[1].cpu(), up.host[3])
    assert residency.promote(np.array([0, 0, 0, 0, 0, 90, 91, 92, 93]), 2) == 2
    assert residency.promote(np.zeros(9, np.int64), 9) == 1, "what was asked for before is still in the scores"
    assert sorted(residency.slot[residency.slot >= 0]) == [0, 1, 2]
    assert residency.promote(np.zeros(9, np.int64), 0) == 0


COSTS = {"all": Costs(9.0, 1.0, 0.1, 0.0), "none": Costs(1.0, 2.0, 1.0, 99.0), "some": Costs(10.0, 8.0, 3.0, 4.0),
         "few tokens": Costs(10.0, 2.0, 12.0, 1.0)}


def divided(picks: torch.Tensor, slot: Any, costs: Costs) -> set[int]:
    """The CPU's experts, found by trying every number of them."""
    tokens = {expert: int((picks == expert).sum()) for expert in picks.unique().tolist() if expert >= 0 and slot[expert] < 0}
    order = sorted(tokens, key=lambda expert: (tokens[expert], expert))

    def end(count: int) -> float:
        cpu = costs.call + sum(costs.first + costs.more * (tokens[expert] - 1) for expert in order[:count]) if count else 0.0
        return max(cpu, (len(order) - count) * costs.link)

    return set(order[:min(range(len(order) + 1), key=end)])


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("inward", [False, True])
def test_some_are_computed_on_the_cpu(costs: Costs, inward: bool) -> None:
    """As the costs say, and the sum is that of all."""
    glu, plan = GLUS["clamped"], PLANS["unsorted"]
    for case, slots in ((Case(1, 9, 6, 48, 32), 3), (Case(7, 9, 3, 64, 48), 1), (Case(13, 33, 5, 48, 24), 11)):
        held: dict[str, Any] = inputs(case, torch.float32, biased=True)
        held["picks"][0, 0] = -1
        residency, up, down = hosted(held, slots, Stages(), OPS, glu, inward)
        assert residency.helper is not None
        residency.helper.costs = costs
        there = {name: None if held[name] is None else held[name].to(DEVICE)
                 for name in ("x", "picks", "weights", "up_bias", "down_bias")}
        picks, join = residency.begin(there["x"], there["picks"], there["weights"], whole=False)
        gone = set(held["picks"][picks.cpu() != held["picks"]].tolist())
        assert gone == divided(held["picks"], residency.slot, costs) and join is not None
        assert bool((picks.cpu()[picks.cpu() != held["picks"]] == -1).all())
        assert bool(gone) == (costs is not COSTS["none"])
        got = launch(plan, up=up, down=down, glu=glu, inward=inward, **{**there, "picks": picks})
        join(got)
        close(got.cpu(), plain(**held, glu=glu, inward=inward), 1.0, factor=8)
        again, absent = residency.begin(there["x"], there["picks"], there["weights"], whole=True)
        assert again is there["picks"] and absent is None


def test_whom_the_cpu_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps, and operations that promise a token's bits. Layers share the CPU's side."""
    stages = Stages()
    layers = [hosted(inputs(CASE, torch.float16), 3, stages)[0] for _ in range(2)]
    assert layers[0].helper is layers[1].helper is not None
    monkeypatch.setattr(experts_helped, "TOKENS", 6)
    assert not layers[0].helper.serves(torch.empty(7, 3)) and layers[0].helper.serves(torch.empty(6, 3))
    assert hosted(inputs(CASE, torch.float16), 3, Stages(), InvariantExperts())[0].helper is None
    for bound in ("TOKENS", "PICKS"):
        with monkeypatch.context() as patch:
            patch.setattr(experts_helped, bound, 0)
            assert helper(64, torch.float32, DEVICE) is None, "a bound of 0: the CPU helps with no step"
    monkeypatch.setattr(registry, "implementations", lambda _op: [])
    assert helper(64, torch.float32, DEVICE) is None


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
@pytest.mark.parametrize("implementation", [one for one in implementations("experts") if isinstance(one.call, CpuExperts)],
                         ids=lambda one: one.name)
def test_matrices_as_they_are_stored(implementation: Implementation, dtype: torch.dtype) -> None:
    """The CPU's kernel reads plain rows, and leaves float32."""
    ops = usable(implementation, dtype)
    for case in (Case(1, 7, 3, 64, 24), Case(9, 16, 2, 80, 96), Case(40, 6, 1, 48, 40), Case(530, 11, 4, 16, 8)):
        for inward in (False, True):
            held: dict[str, Any] = inputs(case, dtype, biased=True)
            held["picks"][::4, 0] = -1
            out = torch.full(held["x"].shape, float("nan"))
            ops.run(ops.told(held["x"], held["picks"], held["weights"], out, held["up"], held["down"], Glu(), held["up_bias"],
                             held["down_bias"], inward, form=STORED))
            close(out.to(dtype), plain(**held, inward=inward), 1.0, factor=6)


class Placed(ExpertsOps):
    """The reference, reading each matrix from the place that the table names."""

    def pack_stored(self, _scheme: Any, parts: Any, count: int, shape: tuple[int, int], _dtype: torch.dtype, slots: int = 0,
                    device: torch.device | None = None) -> Stack:
        return HostedStack(parts["weight"].view(count, *shape), slots, device or DEVICE, self)

    def product(self, x: torch.Tensor, stack: Stack, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(stack, HostedStack)
        return F.linear(x, self.place(stack, expert), bias)

    @staticmethod
    def place(stack: HostedStack, expert: int) -> torch.Tensor:
        """The matrix or the codes of an expert, [n, columns]."""
        at, memory = int(stack.where[expert]), stack.data
        if not 0 <= at < memory.numel():
            at, memory = at - (stack.stage.data_ptr() - memory.data_ptr()) // memory.element_size(), stack.stage
        return memory.view(-1)[at:at + stack.host[0].numel()].view(stack.n, -1)


class PlacedCodes(Placed):
    """The same of FP8 codes with scales of rows."""

    def pack_stored(self, scheme: Any, parts: Any, count: int, shape: tuple[int, int], dtype: torch.dtype, slots: int = 0,
                    device: torch.device | None = None) -> Stack:
        return experts_coded.pack(scheme, parts, count, shape, dtype, self, slots, device)

    def product(self, x: torch.Tensor, stack: Stack, expert: int, bias: torch.Tensor | None) -> torch.Tensor:
        hosted = isinstance(stack, HostedStack)
        codes = self.place(stack, expert) if hosted else stack.data.view(stack.count, stack.n, -1)[expert]
        assert stack.coded is not None and stack.coded.gains is not None
        matrix = codes[:, :stack.k].float() * stack.coded.gains.view(stack.count, stack.n, 1)[expert]
        return F.linear(x, matrix.to(x.dtype), bias)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is a GPU's here, whose own placement serves")
@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS["some"], COSTS["none"]], ids=["some", "none"])
def test_an_engine_divides_them(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of a mixture whose experts are on the device, fetched, and computed on the CPU."""
    from tests.system.test_layouts import ASSETS, greedy, options  # needs no interpreter, so it is not this module's need

    wanted = greedy(Engine(options(ASSETS / "canary-moe")), max_tokens=4)
    table = registry.TABLE["experts"]
    monkeypatch.setitem(table, "triton", replace(table["triton"], call=Placed(), supports=lambda _facts, _dtype: None, rank=99))
    monkeypatch.setattr(memory, "resident", lambda *_: 3)
    monkeypatch.setattr(experts_helped, "NEVER", costs)
    monkeypatch.setattr(experts_hosted, "_PROGRAMS", 1)
    computed, run = list[int](), CpuExperts.run.fget
    monkeypatch.setattr(CpuExperts, "run", property(lambda ops: lambda told: (
        computed.append(max(ctypes.cast(struct.unpack_from("q", told, 16)[0], ctypes.POINTER(ctypes.c_int32))[:2])),
        run(ops)(told))))  # type: ignore[misc]
    engine = Engine(options(ASSETS / "canary-moe", kernels={"experts": "triton"}))
    layers = engine.rank._model.experts  # type: ignore[attr-defined]
    assert all(sum(layer.residency.slot >= 0) == 3 for layer in layers)
    assert greedy(engine, max_tokens=4) == wanted
    assert computed and (max(computed) >= 0) == (costs is not COSTS["none"])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is a GPU's here, whose own placement serves")
@pytest.mark.slow
def test_an_engine_fetches_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of a mixture that is quantized at load, with all experts on the device and with three of each layer."""
    from tests.system.test_layouts import ASSETS, greedy, options

    table = registry.TABLE["experts.fp8"]
    found = replace(table["triton"], call=PlacedCodes(), supports=lambda _facts, _dtype: None, rank=99)
    monkeypatch.setitem(table, "triton", found)
    monkeypatch.setattr(experts_hosted, "_PROGRAMS", 1)
    wanted = greedy(Engine(options(ASSETS / "canary-moe", quantization="fp8_weights")), max_tokens=4)
    monkeypatch.setattr(memory, "resident", lambda *_: 3)
    engine = Engine(options(ASSETS / "canary-moe", quantization="fp8_weights"))
    layers = engine.rank._model.experts  # type: ignore[attr-defined]
    assert all(layer.up.coded is not None and sum(layer.residency.slot >= 0) == 3 for layer in layers)
    assert all(layer.residency.helper is None for layer in layers)
    assert greedy(engine, max_tokens=4) == wanted


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
    stored = describe(config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    codes = each // 2
    all_codes = packed_bytes(stored, dtype, bound)
    for held in (1, 5, 15):
        took = packed_bytes(replace(stored, resident=held), dtype, bound)
        assert took == all_codes - 4 * (16 - held) * codes + (16 - held) * codes
        assert resident("auto", stored, dtype, bound, facts, int(took / 0.8) + 8) == held
    del bound.able["experts.fp8_block"]
    for other, where, why in ((dense, facts, "has no experts"), (spec, cpu, "is for GPUs"),
                              (stored, facts, "stored as fp8_block, which are decoded"), (spec, facts, "with one expert")):
        with pytest.raises(ConfigError, match=why):
            resident("auto", other, dtype, bound, where, whole // 8)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_graph() -> None:
    """A captured graph reads the experts from where they have moved to, and the CPU computes its part within it."""
    held = inputs(Case(5, 32, 4, 512, 256), torch.bfloat16)
    residency, up, down = hosted(held, 8, Stages())
    there = {name: held[name].to(DEVICE) for name in ("x", "picks", "weights")}  # type: ignore[union-attr]
    plan = Plan(Tile(16, 64, 64, swap=True), Tile(16, 64, 64, swap=True), False)

    def run() -> torch.Tensor:
        picks, join = residency.begin(there["x"], there["picks"], there["weights"], whole=False)
        out = launch(plan, up=up, down=down, glu=Glu(), **{**there, "picks": picks})
        assert join is not None
        join(out)
        return out

    residency.helper.costs = COSTS["some"]  # type: ignore[union-attr]
    wanted, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(4):
        residency.promote(np.random.default_rng(0).integers(0, 1000, 32), 8)
        for stack in (up, down):
            stack.stage.fill_(float("nan"))
        graph.replay()
        close(out.cpu(), wanted.cpu().double(), 1.0, factor=8)
