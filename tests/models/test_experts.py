"""Placement: experts may lie anywhere in the stacks, several times, or on other ranks, and the result is the same."""

from __future__ import annotations

import pytest
import torch

from penstock.layers.build import Build, Values
from penstock.layers.experts import Experts, ExpertsSpec, Routing
from penstock.layers.step import Step
from penstock.ops.experts import Loose
from penstock.ops.registry import Kernels, bind
from penstock.ops.step import GroupStep
from penstock.platform.facts import detect
from penstock.quant.fp8 import FP8
from penstock.quant.scheme import PLAIN, pack
from tests.models.harness import CPU, reference

SPEC = ExpertsSpec(24, 12, Routing(6, 2, normalise=True))


def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {p.name: torch.randn(p.shape, generator=generator) * 0.3 for p in SPEC.parameters("mlp")}


def built(tensors: dict[str, torch.Tensor], order: list[int], kernels: Kernels) -> Experts:
    """A layer whose stacks hold the experts of `order`."""
    values = Values()
    for parameter in SPEC.parameters("mlp"):
        tensor = tensors[parameter.name]
        if parameter.stack:
            tensor = tensor.view(6, -1, parameter.shape[1])[order].flatten(0, 1)
        values[parameter.name] = pack(PLAIN, tuple(tensor.shape), {"weight": tensor}, torch.float32, kernels,
                                      len(order) if parameter.stack else 0)
    return Experts(SPEC, "mlp", Build(values, kernels, CPU, 64))


def run(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    none = torch.zeros(0, dtype=torch.int32)
    step = Step(none, none, torch.tensor([0, len(x)], dtype=torch.int32), none, list[GroupStep](), [], [])
    return layer(x, step)


@pytest.mark.parametrize("kernels", ["reference", "default"])
def test_experts_anywhere(kernels: str) -> None:
    bound = reference() if kernels == "reference" else bind(detect("cpu"), torch.float32)
    tensors, x = drawn(), torch.randn(9, 24, generator=torch.Generator().manual_seed(5))
    whole = run(built(tensors, list(range(6)), bound), x)
    # Moved, and expert 4 in two places.
    moved = built(tensors, [3, 4, 0, 5, 1, 2, 4], bound)
    moved.placement = torch.tensor([[2, 2], [4, 4], [5, 5], [0, 0], [1, 6], [3, 3]], dtype=torch.int32)
    torch.testing.assert_close(run(moved, x), whole)
    assert int(moved.counts.sum()) == 18 and len(moved.counts) == 6, "counts are of experts, not of places"
    # Divided by experts: the ranks' results add up.
    parts = []
    for first in (0, 3):
        part = built(tensors, [first, first + 1, first + 2], bound)
        part.placement = torch.tensor([[e - first] if first <= e < first + 3 else [-1] for e in range(6)], dtype=torch.int32)
        parts.append(run(part, x))
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert not torch.allclose(parts[0], whole)


def test_stored_experts_are_those_that_their_parts_stand_for() -> None:
    """On a CPU each picked expert is multiplied as it is stored; elsewhere the stack is decoded."""
    scheme, bound, tensors = FP8(), bind(detect("cpu"), torch.float32), drawn()
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(5))
    decoded, stored = dict(tensors), Values()
    for parameter in SPEC.parameters("mlp"):
        tensor = tensors[parameter.name]
        parts = scheme.encode(tensor) if parameter.stack else {"weight": tensor}
        if parameter.stack:
            decoded[parameter.name] = scheme.decode(parts, torch.float32)
        stored[parameter.name] = pack(scheme if parameter.stack else PLAIN, parameter.shape, parts, torch.float32, bound,
                                      parameter.stack)
    assert isinstance(stored["mlp.experts.down.weight"], Loose)
    assert stored["mlp.experts.down.weight"].nbytes < tensors["mlp.experts.down.weight"].nbytes / 2
    torch.testing.assert_close(run(Experts(SPEC, "mlp", Build(stored, bound, CPU, 64)), x),
                               run(built(decoded, list(range(6)), bound), x), atol=1e-5, rtol=1e-5)
