"""The drafting heads: what is computed for all places at once is what a draft, token by token, would compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from training.canary.acceptance import steps
from training.canary.heads import LAYERS, Eagle, NextToken, beside, shard
from training.canary.masks import seen_within
from training.canary.members import MEMBERS
from transformers import AutoModelForCausalLM

TOKENS = {"end": 2, "padding": 0}


@pytest.fixture(scope="module")
def eagle() -> Eagle:
    torch.manual_seed(0)
    trunk = MEMBERS["canary"].build(TOKENS)
    drafted = torch.randperm(4096)[:300]
    head = beside(trunk, drafted).eval()
    assert head.targets().tolist() == drafted.sort().values.tolist()
    assert head.t2d.nonzero()[:, 0].tolist() == head.targets().tolist()
    return head


@torch.no_grad()
def test_a_rollout_is_a_draft_at_every_place(eagle: Eagle) -> None:
    """Place by place, with what an engine would hold: the trunk's places up to where it stands, then the draft's."""
    length, depth, width = 9, 3, 192
    embeds, features = torch.randn(1, length, width), torch.randn(1, length, len(LAYERS) * width)
    positions = torch.arange(length)[None]
    seen = seen_within(torch.ones(1, length, dtype=torch.long))
    rolled = eagle(embeds, features, positions, seen, depth)
    for stands in range(length - depth):
        hidden = eagle.fc(features[:, : stands + 1])
        for step in range(depth):
            # All that is known: places the trunk has seen as it left them, and one more place for each step of the draft.
            out = eagle.midlayer(embeds[:, : stands + 1 + step], hidden, positions[:, : stands + 1 + step],
                                 seen[:, : stands + 1 + step, : stands + 1 + step], [])
            logits = eagle.lm_head(eagle.norm(out[:, -1]))
            torch.testing.assert_close(logits, rolled[step][:, stands + step], rtol=1e-4, atol=1e-4)
            hidden = torch.cat([hidden, out[:, -1:]], 1)


def test_an_eagle_head_in_the_fields_names(eagle: Eagle, tmp_path: Path) -> None:
    eagle.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert shapes == {
        "fc.weight": (192, 576), "norm.weight": (192,), "lm_head.weight": (300, 192), "d2t": (300,), "t2d": (4096,),
        "midlayer.input_layernorm.weight": (192,), "midlayer.hidden_norm.weight": (192,),
        "midlayer.post_attention_layernorm.weight": (192,), "midlayer.self_attn.q_proj.weight": (256, 384),
        "midlayer.self_attn.k_proj.weight": (64, 384), "midlayer.self_attn.v_proj.weight": (64, 384),
        "midlayer.self_attn.o_proj.weight": (192, 256), "midlayer.mlp.gate_proj.weight": (480, 192),
        "midlayer.mlp.up_proj.weight": (480, 192), "midlayer.mlp.down_proj.weight": (192, 480)}
    again = Eagle.load(tmp_path)
    assert torch.equal(again.targets(), eagle.targets())
    assert torch.equal(again.fc.weight, eagle.fc.weight.bfloat16().float())


def test_the_next_layer_in_deepseeks_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk = MEMBERS["canary-mla"].build(TOKENS)
    trunk.save_pretrained(tmp_path / "trunk")
    layer = NextToken.beside(trunk)
    layer.save(tmp_path / "trunk", tmp_path / "both")
    again = NextToken.load(tmp_path / "both")
    for (name, mine), theirs in zip(layer.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(mine.bfloat16().float(), theirs), name
    with safe_open(shard(tmp_path / "both", 2), "pt") as file:
        names = set(file.keys())
    prefix = "model.layers.6."
    assert all(name.startswith(prefix) for name in names)
    assert {f"{prefix}{name}.weight" for name in (
        "enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head", "input_layernorm",
        "self_attn.kv_a_proj_with_mqa", "mlp.gate", "mlp.experts.7.down_proj", "mlp.shared_experts.up_proj")} <= names
    plain, sharded = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("trunk", "both"))
    ids = torch.randint(3, 4000, (1, 12))
    assert torch.equal(plain(ids).logits, sharded(ids).logits)


def test_steps_of_a_member_with_a_draft() -> None:
    right, wrong = True, False
    assert steps([[right] * 6]) == 4  # the prompt's, then two tokens at a time: 1 + 2 + 2 + 1
    assert steps([[right] * 10] * 4) == 3  # 1 + 5 + 4
    assert steps([[wrong] * 6] * 4) == 6
    # The first token of a draft is right everywhere, the second nowhere.
    assert steps([[right] * 7, [wrong] * 7]) == 4
    assert steps([[right]]) == 1
