"""Routing against transformers' own routers: scores before and after the choice, groups, corrections, ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.ops.registry import implementations
from penstock.ops.routing import Routing
from tests.ops.kernels import random

EXPERTS = 24
KINDS = {
    "softmax": Routing(EXPERTS, 3),
    "normalised": Routing(EXPERTS, 3, normalise=True, scale=2.5),
    "one": Routing(EXPERTS, 1, normalise=True),
    "all": Routing(5, 5),
    "softmax_after": Routing(EXPERTS, 4, "softmax_after"),
    "sigmoid_after": Routing(EXPERTS, 1, "sigmoid_after"),
    "sigmoid": Routing(EXPERTS, 4, "sigmoid", normalise=True),
    "corrected": Routing(EXPERTS, 4, "sigmoid", True, 2.5, corrected=True),
    "corrected softmax": Routing(EXPERTS, 4, "softmax", True, corrected=True, least=1e-12),
    "groups": Routing(EXPERTS, 4, "sigmoid", True, 2.5, True, 4, 2),
    "groups by their best": Routing(EXPERTS, 4, "softmax", scale=16.0, groups=8, picked_groups=3, group_score="max"),
    "groups of one": Routing(6, 2, "sigmoid", True, 1.0, True, 6, 3),
    "sparsemixer": Routing(EXPERTS, 2, "sparsemixer", jitter=0.01),
}


def reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = implementations("route")[0].call(*args)
    return found


def router(kind: str, **config: Any) -> torch.nn.Module:
    """A router of transformers whose logits are its input."""
    import importlib

    module, name, options = {
        "qwen": ("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig"),
        "granite": ("granitemoe", "GraniteMoeTopKRouter", "GraniteMoeConfig"),
        "deepseek": ("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config"),
        "deepseek2": ("deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config"),
        "phi": ("phimoe", "PhimoeTopKRouter", "PhimoeConfig"),
        "ernie": ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig"),
    }[kind]
    made = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    settings = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    config = {"hidden_size": EXPERTS, "num_attention_heads": 2, "num_key_value_heads": 2, **config}
    found = getattr(made, name)(getattr(settings, options)(**config)).eval()
    found.weight.data.copy_(torch.eye(EXPERTS))
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_against_transformers(tied: bool) -> None:
    logits = random(40, EXPERTS, seed=1) * 2
    if tied:
        logits = logits.round()
    count: dict[str, Any] = {"num_local_experts": EXPERTS}
    bias = random(EXPERTS, seed=2) * 0.2
    cases: list[tuple[torch.nn.Module, Routing, torch.Tensor | None]] = [
        (router("qwen", num_experts_per_tok=3, norm_topk_prob=True, **count), Routing(EXPERTS, 3, normalise=True), None),
        (router("granite", num_experts_per_tok=4, **count), KINDS["softmax_after"], None),
        (router("deepseek", num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                n_routed_experts=EXPERTS), KINDS["groups"], bias),
        (router("deepseek2", num_experts_per_tok=4, n_group=8, topk_group=3, routed_scaling_factor=16.0,
                topk_method="group_limited_greedy", n_routed_experts=EXPERTS), KINDS["groups by their best"], None),
        (router("phi", num_experts_per_tok=2, router_jitter_noise=0.01, **count), KINDS["sparsemixer"], None),
        (router("ernie", num_experts_per_tok=4, num_experts=EXPERTS), KINDS["corrected softmax"], bias),
    ]
    for module, routing, correction in cases:
        for name, held in (*module.named_buffers(), *module.named_parameters()):
            if "correction" in name and correction is not None:
                held.data.copy_(correction)
        with torch.inference_mode():
            found = module(logits)
        weights, picks = found[-2:]
        mine, scaled = reference(logits, correction, routing)
        if type(module).__name__.startswith("Deepseek"):  # they ask topk for no order
            order, mine_order = picks.argsort(-1), mine.long().argsort(-1)
            picks, weights = picks.gather(1, order), weights.gather(1, order)
            mine, scaled = mine.gather(1, mine_order), scaled.gather(1, mine_order)
        assert torch.equal(mine.long(), picks), type(module).__name__
        torch.testing.assert_close(scaled, weights, atol=1e-6, rtol=1e-5)


def test_live_picks_are_counted() -> None:
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    logits = random(6, EXPERTS, seed=3)
    for live, size in ((torch.tensor([4], dtype=torch.int32), 4), (None, 6)):
        before = counts.clone()
        picks, _ = reference(logits, None, Routing(EXPERTS, 3), counts, live)
        assert torch.equal(counts - before, torch.bincount(picks[:size].flatten().long(), minlength=EXPERTS))
