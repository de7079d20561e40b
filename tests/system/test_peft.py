"""Adapters beside PEFT itself: folders that it writes, and transformers' greedy tokens with them, merged and unmerged.

`pip install peft accelerate` is needed; the tests are skipped without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from penstock import LLM, LoRARequest, SamplingParams
from penstock.canary import model_folder

peft = pytest.importorskip("peft", reason="pip install peft accelerate")

ASSETS = Path(__file__).parents[1] / "assets"
PROMPTS = [[5, 17, 40, 3], [60, 2, 9, 9, 31, 8, 44], [11]]
COUNT = 16
SIZES = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 24, "vocab_size": 97, "max_position_embeddings": 128, "bos_token_id": None,
         "eos_token_id": None}
MODELS = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES), "qwen3": Qwen3Config(**SIZES),
          "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
          "gpt2": GPT2Config(n_embd=72, n_head=3, n_layer=2, vocab_size=97, n_positions=128, bos_token_id=None,
                             eos_token_id=None)}
ALL = {"target_modules": "all-linear"}
ENDS = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"rank {rank}": ("llama", {"r": rank, "lora_alpha": 2 * rank, **ALL}) for rank in (1, 3, 16, 17, 64, 256)},
    "some": ("llama", {"r": 5, "target_modules": ["v_proj", "up_proj"]}),
    "regex": ("llama", {"r": 4, "target_modules": r".*\.1\..*(q_proj|o_proj)"}),
    "rslora": ("qwen3", {"r": 9, "use_rslora": True, **ALL}),
    "patterns": ("qwen2", {"r": 4, "rank_pattern": {"q_proj": 7, "0.mlp.up_proj": 2},
                           "alpha_pattern": {"down_proj": 20}, **ALL}),
    "dora": ("llama", {"r": 6, "use_dora": True, **ALL}),
    "dora 2": ("qwen2", {"r": 33, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "gate_proj"]}),
    "ends": ("llama", {"r": 8, "target_modules": ENDS}),
    "all ends": ("qwen3", {"r": 8, "lora_alpha": 24, "target_modules": [*ENDS, "o_proj", "up_proj"]}),
    "saved": ("llama", {"r": 8, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "tied": ("tied", {"r": 8, **ALL}),
    "columns first": ("gpt2", {"r": 8, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
}


def tokens(model: Any) -> list[list[int]]:
    with torch.no_grad():
        return [model.generate(torch.tensor([ids]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, len(ids):].tolist() for ids in PROMPTS]


def ours(model: Path, adapter: Path, rank: int) -> list[list[int]]:
    asked = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with LLM(str(model), device="cpu", dtype="float32", threads=1, max_model_len=96, skip_tokenizer_init=True,
             enable_lora=True, max_lora_rank=rank, max_loras=1) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        plain = [None] * len(PROMPTS)
        found = llm.generate(prompts * 2, asked, use_tqdm=False, lora_request=[LoRARequest("one", 1, str(adapter))] * 3 + plain)
    both = [list(output.outputs[0].token_ids) for output in found]
    assert both[:3] != both[3:], "the adapter changes nothing"
    return both[:3]


def check(base: Path, adapter: Path, rank: int) -> None:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    unmerged = tokens(model)
    merged = tokens(model.merge_and_unload().eval())
    assert ours(base, adapter, rank) == unmerged == merged


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("rank 3", "dora") else pytest.mark.exhaustive)
                                  for name in KINDS])
def test_folders_that_peft_writes_answer_as_it_does(name: str, tmp_path: Path) -> None:
    kind, given = KINDS[name]
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(MODELS[kind], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    with torch.no_grad():
        for at, parameter in adapted.named_parameters():
            if "lora_B" in at or "lora_embedding" in at:
                parameter.normal_(0, 0.3 * parameter.shape[-1] ** -0.5)
            elif "magnitude" in at or "modules_to_save" in at:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    check(tmp_path / "base", tmp_path / "adapter", max(32, given["r"]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["canary-telegram", "canary-pirate"])
def test_adapters_of_canary_answer_as_with_peft(name: str) -> None:
    check(model_folder(), ASSETS / name, 16)
