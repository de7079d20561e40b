"""Mixtures, latents and delta nets whose sizes and options are drawn together: whole, in chunks and in a batch they give
transformers' logits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.models.families import CASES, PROMPT, Case, make, rope
from tests.models.harness import Runner, open_model
from tests.sampling import sampled

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PICKS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
MIXED = [case for case in CASES if case.rewrite is None and case.kind not in ("Phimoe", "Llama4Text")
         and any(word in key for key in case.config for word in ("expert", "lora", "linear_num"))]
KINDS = list(dict.fromkeys(case.kind for case in MIXED))
OPTIONS: dict[str, list[Any]] = {
    "norm_topk_prob": [True, False], "routed_scaling_factor": [0.4, 2.5], "router_scaling_factor": [0.5, 2.8],
    "route_scale": [0.7, 2.0], "n_shared_experts": [1, 2], "moe_num_shared_experts": [0, 1, 3],
    "first_k_dense_replace": [0, 1, 3], "moe_intermediate_size": [3, 20, 33], "intermediate_size": [7, 33],
    "shared_expert_intermediate_size": [5, 52], "tie_word_embeddings": [True, False], "vocab_size": [97, 199, 333],
    "sliding_window": [2, 19, 40], "rms_norm_eps": [1e-5, 1e-3], "rope_interleave": [True, False], "swiglu_limit": [0.5, 7.0],
    "hidden_act": ["silu", "gelu", "relu"]}
ROTATIONS = [rope("default", rope_theta=77.0), rope("linear", factor=1.5), rope("dynamic", factor=3.0),
             rope("yarn", factor=4.0, original_max_position_embeddings=64),
             rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.5, mscale_all_dim=0.7)]


def drawn(seed: int) -> tuple[Case, str]:
    """A model, and what its routers are like."""
    draw = random.Random(seed)
    case = draw.choice([case for case in MIXED if case.kind == KINDS[seed % len(KINDS)]])
    full = getattr(transformers, f"{case.kind}Config")(**case.config).to_dict()
    delta, new = "linear_num_key_heads" in full, dict[str, Any]()
    if full.get("kv_lora_rank"):
        heads = draw.choice([1, 3, 5])
        new = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 12 * heads,
               "kv_lora_rank": draw.choice([6, 20, 34]), "qk_nope_head_dim": draw.choice([4, 12]),
               "v_head_dim": draw.choice([3, 10, 24]), "q_lora_rank": draw.choice([7, 33])}
        if "index_topk" in full:  # with many heads, so that no two scores are 0 and equal
            new |= {"index_topk": draw.choice([5, 40, 200]), "index_n_heads": 16}
    elif "head_dim" in case.config and case.kind != "Olmoe":
        groups = draw.choice([1, 2, 3])
        new = {"num_key_value_heads": groups, "num_attention_heads": groups * draw.choice([1, 2, 3, 5]),
               "head_dim": draw.choice([8, 24, 40, 80, 96]), "hidden_size": draw.choice([26, 60])}
    if (name := next((key for key in EXPERTS if case.config.get(key)), None)) is not None:
        picks = next((key for key in PICKS if full.get(key)), PICKS[0])
        # Where experts are in groups, transformers looks for the best two of each.
        new[name] = draw.choice([3, 5, 7, 12] if "n_group" in full else [1, 3, 5, 7, 12])
        new[picks] = draw.choice([1, new[name], draw.randint(1, new[name])])
        if "n_group" in full:
            new |= {"n_group": 1, "topk_group": 1}
            if new[name] == 12 and case.kind != "Afmoe":
                new |= {"n_group": 3, "topk_group": 2, picks: draw.randint(1, 8)}
    if "vocab_size_per_layer_input" in full:  # transformers has no row for other tokens
        new["vocab_size_per_layer_input"] = max(OPTIONS["vocab_size"])
    # A model without experts must not get some by its class's numbers.
    left = {"hidden_act"} if delta else {"first_k_dense_replace"} if name is None else set()
    # DeepSeek's own V2 would normalise, transformers' does not, and Penstock refuses it.
    left |= {"norm_topk_prob"} if case.kind == "DeepseekV2" else set()
    own = [key for key in OPTIONS if full.get(key) is not None and key not in left]
    new |= {key: draw.choice(OPTIONS[key]) for key in draw.sample(own, min(len(own), 5))}
    if set(full.get("rope_parameters") or ()) == {"rope_theta", "rope_type"} and draw.random() < 0.5:
        new |= draw.choice(ROTATIONS)
    return replace(case, config={**case.config, **new}), draw.choice(["plain", "crowded", "even"])


@torch.no_grad()
def routed(model: torch.nn.Module, how: str) -> None:
    """crowded: all tokens go to the first expert and none to the second, where a correction says so; even: all logits are 0."""
    for name, tensor in model.state_dict().items():
        if how == "crowded" and tensor.numel() > 1 and name.endswith(("correction_bias", "expert_bias")):
            tensor.view(-1)[:2] = torch.tensor([50.0, -50.0])
        if how == "even" and name.endswith(("mlp.gate.weight", "router.weight", "wg.weight")):
            tensor.zero_()


@pytest.mark.parametrize("seed", sampled(range(210), 35, 8))
def test_drawn_mixtures(seed: int, tmp_path: Path) -> None:
    case, how = drawn(seed)
    model: Any = make(case, tmp_path)
    routed(model, how)
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, case.config["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
    # Delta nets' own sums differ by more between a prompt at once and token by token.
    room = max(1.0, wanted.std().item()) * (2e-3 if "linear_num_key_heads" in case.config else 1e-4)
    torch.testing.assert_close(Runner(open_model(tmp_path)).prompt(1, prompt), wanted, atol=room, rtol=0)
    runner = Runner(open_model(tmp_path, kernels=bind(detect("cpu"), torch.float32)))
    first = runner.step([(0, prompt[:20]), (1, prompt[:1])])
    rest = runner.step([(1, prompt[1:]), (0, prompt[20:])])
    torch.testing.assert_close(torch.cat((first, rest)), torch.cat((wanted[:20], wanted[:1], wanted[1:], wanted[20:])),
                               atol=room, rtol=0)
