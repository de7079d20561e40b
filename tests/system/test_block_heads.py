"""Block diffusion heads (DFlash, DSpark) of random weights: what they draft, and that they change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from penstock import SamplingParams, canary, models
from penstock.checkpoint import read_config
from penstock.core.errors import ModelError
from penstock.scheduler.drafting import Drafts
from tests.system.test_speculation import FIXED, answers, opened

CANARY = canary.model_folder()
HEADS, KV, SIZE, INNER, LAYERS, MASK, RANK = 6, 3, 16, 48, 2, 7, 5


def saved(out: Path, dspark: bool) -> Path:
    """A folder with a random head for canary, in the layout of z-lab's or DeepSpec's."""
    target = models.describe(read_config(CANARY))
    width, draw, taps = target.width, torch.Generator().manual_seed(3), [0, 3, len(target.blocks) - 1]
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, len(taps) * width), "hidden_norm": (width,), "norm": (width,)}
    for layer in (f"layers.{i}" for i in range(LAYERS)):
        shapes |= {f"{layer}.self_attn.q_proj": (HEADS * SIZE, width), f"{layer}.self_attn.k_proj": (KV * SIZE, width),
                   f"{layer}.self_attn.v_proj": (KV * SIZE, width), f"{layer}.self_attn.o_proj": (width, HEADS * SIZE),
                   f"{layer}.self_attn.q_norm": (SIZE,), f"{layer}.self_attn.k_norm": (SIZE,),
                   f"{layer}.mlp.gate_proj": (INNER, width), f"{layer}.mlp.up_proj": (INNER, width),
                   f"{layer}.mlp.down_proj": (width, INNER), f"{layer}.input_layernorm": (width,),
                   f"{layer}.post_attention_layernorm": (width,)}
    if dspark:
        shapes |= {"markov_head.markov_w1": (target.vocab_size, RANK), "markov_head.markov_w2": (target.vocab_size, RANK),
                   "confidence_head.proj": (1, width + RANK)}
    out.mkdir()
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * (0.3 if "markov" not in name else 3.0)
               for name, shape in shapes.items()}
    if dspark:
        tensors["confidence_head.proj.bias"] = torch.tensor([0.5])
    save_file(tensors, out / "model.safetensors")
    named = {"mask_token_id": MASK, "target_layer_ids": taps}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": width, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": SIZE,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": target.vocab_size, "max_position_embeddings": 4096,
        "hidden_act": "silu", "torch_dtype": "float32"}
    config |= {**named, "markov_rank": RANK, "architectures": ["DSparkDraftModel"]} if dspark else {"dflash_config": named}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("dspark", [pytest.param(False, marks=pytest.mark.exhaustive), True],
                         ids=["dflash", "dspark"])
def test_a_random_head_changes_nothing(dspark: bool, tmp_path: Path) -> None:
    head = str(saved(tmp_path / "head", dspark))
    with opened() as plain, opened(speculative_model=head, **FIXED) as drafting:
        for asked in ({}, {"temperature": 0.9, "n": 2}, {"repetition_penalty": 1.3}):
            expected, (found, stats) = answers(plain, **asked)[0], answers(drafting, **asked)
            assert found == expected, asked
    assert stats.drafts > 100


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _turned(x: torch.Tensor, first: int) -> torch.Tensor:
    """x [T, heads, SIZE], rotated for positions from `first` on."""
    angle = torch.arange(first, first + len(x))[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (torch.cat((one, one), -1)[:, None] for one in (angle.cos(), angle.sin()))
    return x * cos + torch.cat((-x[..., SIZE // 2:], x[..., :SIZE // 2]), -1) * sin


def _drafts(tensors: dict[str, torch.Tensor], taps: torch.Tensor, embedding: torch.Tensor, head: torch.Tensor, token: int,
            count: int, dspark: bool) -> tuple[list[int], list[float]]:
    """The drafts behind `token` and how likely the head says that they are kept, by the papers' description, from the target's
    hidden states [T, taps x width] before it."""
    weight = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    context, length = _rms(taps @ weight["fc"].T, weight["hidden_norm"]), len(taps)
    x = embedding[[token, *[MASK] * (count - dspark)]]
    for layer in (f"layers.{i}" for i in range(LAYERS)):
        normed = _rms(x, weight[f"{layer}.input_layernorm"])
        both = torch.cat((context, normed))
        q, k, v = (of @ weight[f"{layer}.self_attn.{name}_proj"].T for of, name in ((normed, "q"), (both, "k"), (both, "v")))
        q = _turned(_rms(q.view(len(x), HEADS, SIZE), weight[f"{layer}.self_attn.q_norm"]), length)
        k = _turned(_rms(k.view(len(both), KV, SIZE), weight[f"{layer}.self_attn.k_norm"]), 0)
        k, v = (one.view(len(both), KV, SIZE).repeat_interleave(HEADS // KV, 1).transpose(0, 1) for one in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v).transpose(0, 1).flatten(1)
        x = x + out @ weight[f"{layer}.self_attn.o_proj"].T
        normed = _rms(x, weight[f"{layer}.post_attention_layernorm"])
        gate, up = (normed @ weight[f"{layer}.mlp.{name}_proj"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weight[f"{layer}.mlp.down_proj"].T
    states, found, chances = _rms(x, weight["norm"]), list[int](), list[float]()
    for state in states if dspark else states[1:]:
        line = head @ state
        if dspark:
            before = weight["markov_head.markov_w1"][found[-1] if found else token]
            line = line + weight["markov_head.markov_w2"] @ before
            score = weight["confidence_head.proj"][0] @ torch.cat((state, before)) + weight["confidence_head.proj.bias"][0]
            chances.append(float(score.sigmoid()))
        found.append(int(line.argmax()))
    return found, chances


@pytest.mark.parametrize("dspark", [False, True], ids=["dflash", "dspark"])
def test_it_drafts_what_the_papers_say(dspark: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.worker.drafters.block import Block
    from penstock.worker.drafting import Drafting

    folder = saved(tmp_path / "head", dspark)
    seen: list[tuple[list[int], list[int], list[float]]] = []
    told: list[list[float]] = []
    propose = Block.propose

    def watched(self: Block, drafting: Drafting) -> torch.Tensor | None:
        said = propose(self, drafting)
        if len(drafting.segments):
            row, length = drafting.row.tolist()[0], drafting.length.tolist()[0]
            chances = [] if said is None else said.tolist()
            seen.append((drafting.rows.tokens[row, :length].tolist(), drafting.written().tolist(), chances))
        return said

    monkeypatch.setattr(Block, "propose", watched)
    prompt = [5, 80, 300, 41, 907, 66]
    foresee = Drafts.foresee
    monkeypatch.setattr(Drafts, "foresee", lambda self, step, chances: (told.append(chances), foresee(self, step, chances))[1])
    with opened(speculative_model=str(folder), dtype="float32", **FIXED) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(CANARY, dtype=torch.float32)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    kept: list[torch.Tensor] = []
    # The last of transformers' hidden states is normed.
    model.model.layers[-1].register_forward_hook(lambda _module, _given, out: kept.append(out.view(-1, out.shape[-1])))
    assert [chances for _, _, chances in seen][:len(told)] == told and bool(told) is dspark
    for known, drafts, chances in seen[:4]:
        with torch.no_grad():
            states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
            taps = torch.cat([*(states[layer][0] for layer in (1, 4)), kept[-1]], -1)
            ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            expected, likely = _drafts(tensors, taps, *ends, known[-1], len(drafts), dspark)
        assert drafts == expected
        assert chances == pytest.approx(likely, abs=1e-3)
    assert len(seen) >= 4


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "head", False)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [99]}}, "reads layers"),
                            ({"dflash_config": {"target_layer_ids": [1]}}, "needs mask_token_id"),
                            ({"markov_head_type": "gated"}, "vanilla")):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=message), opened(speculative_model=str(folder)):
            pass
    folder = saved(tmp_path / "other", True)
    tensors = load_file(folder / "model.safetensors")
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="confidence head reads"), opened(speculative_model=str(folder)):
        pass
