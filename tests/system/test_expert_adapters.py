"""Adapters of experts, routers and MLA's latents: each answers as the model that it was merged into."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from penstock import LLM, LoRARequest, SamplingParams
from penstock.core.errors import RequestError

SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
         "num_experts_per_tok": 2, "pad_token_id": None}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MODELS: dict[str, Any] = {
    "qwen3": Qwen3MoeConfig(**SIZES, num_experts=5, moe_intermediate_size=40),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2),
    "deepseek": DeepseekV3Config(**{**SIZES, **MLA, "num_key_value_heads": 4, "head_dim": 8}, n_routed_experts=4, n_group=1,
                                 topk_group=1, moe_intermediate_size=40, n_shared_experts=1, first_k_dense_replace=1),
}
PROMPTS = [[5, 17, 40, 3], [60, 2, 9, 9, 31, 8, 44], [11, 12, 13]]
RANK, SCALE = 3, 2.0


def base(kind: str, folder: Path) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(MODELS[kind], dtype=torch.float32)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() > 1:
                one.normal_(0, (4.0 if "gate.weight" in name or "router" in name else 1.2) * one.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def pair(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(RANK, columns) * columns ** -0.5, torch.randn(rows, RANK) * 0.5


def adapted(model: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """An adapter on every matrix of the layers, and the model that has it merged. `form`: "modules" (of each expert), "stacked"
    (a layer's experts at once), "turned" (the same as older versions of PEFT wrote it)."""
    low, merged, stacks = {}, load_file(model / "model.safetensors"), dict[str, list[torch.Tensor]]()
    for name, weight in list(merged.items()):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if "layers" not in name or weight.dim() == 1 or "bias" in name:
            continue
        if weight.dim() == 2 and (".experts." not in name or form == "modules"):
            a, b = pair(*weight.shape)
            low[f"{module}.lora_A.weight"], low[f"{module}.lora_B.weight"] = a, b
            merged[name] = weight + SCALE * b @ a
        else:
            stacks.setdefault(name.partition(".experts.")[0] + ".experts", []).append(torch.empty(0))
    for stack in stacks if form != "modules" else ():
        _stack(stack, merged, low, form == "turned")
    for place, tensors in (("adapter", low), ("merged", merged)):
        (folder / place).mkdir(parents=True)
        name = "adapter_model.safetensors" if place == "adapter" else "model.safetensors"
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / place / name)
    shutil.copy(model / "config.json", folder / "merged")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, "bias": "none"} | (
            {} if form == "modules" else {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})))
    return folder / "adapter", folder / "merged"


def _stack(stack: str, merged: dict[str, torch.Tensor], low: dict[str, torch.Tensor], turned: bool) -> None:
    """PEFT wraps the module of the experts once for each parameter: the second around the first."""
    for parameter, wrapped in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
        whole = merged.get(f"{stack}.{parameter}")
        names = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else ("down_proj",)
        if whole is None:
            names = tuple({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[one] for one in names) \
                if f"{stack}.0.w1.weight" in merged else names
            count = sum(name.startswith(stack) and name.endswith(f".{names[0]}.weight") for name in merged)
            each = [torch.cat([merged[f"{stack}.{e}.{one}.weight"] for one in names]) for e in range(count)]
        else:  # [E, inputs, outputs]
            each = list(whole.transpose(1, 2))
        rows, columns = each[0].shape
        pairs = [pair(rows, columns) for _ in each]
        changes = [SCALE * b @ a for a, b in pairs]
        if turned:
            pairs = [(b.t(), a.t()) for a, b in pairs]
        module = f"base_model.model.{stack.replace('block_sparse_moe', 'mlp')}{wrapped}"  # as transformers 5 names it
        low[f"{module}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
        low[f"{module}.lora_B.weight"] = torch.stack([b for _, b in pairs], 2).flatten(1)
        if whole is not None:
            merged[f"{stack}.{parameter}"] = whole + torch.stack(changes).transpose(1, 2)
        else:
            for e, change in enumerate(changes):
                for one, part in zip(names, change.chunk(len(names)), strict=True):
                    merged[f"{stack}.{e}.{one}.weight"] = merged[f"{stack}.{e}.{one}.weight"] + part


def answers(model: Path, adapters: list[Any], **options: Any) -> list[list[int]]:
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(model), device="cpu", dtype="float32", threads=1, max_model_len=96, skip_tokenizer_init=True,
             enable_lora=any(adapters), **options) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for _ in adapters for ids in PROMPTS], asked, use_tqdm=False,
                             lora_request=[one for one in adapters for _ in PROMPTS])
        return [list(output.outputs[0].token_ids) for output in found]


@pytest.mark.parametrize(("kind", "form"), [
    ("qwen3", "modules"), ("qwen3", "stacked"), ("deepseek", "modules"), ("gpt-oss", "stacked"),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
        ("qwen3", "turned"), ("mixtral", "modules"), ("mixtral", "stacked"), ("deepseek", "stacked")))])
def test_adapters_of_every_matrix(kind: str, form: str, tmp_path: Path) -> None:
    model = base(kind, tmp_path / "base")
    adapter, merged = adapted(model, tmp_path, form)
    one = LoRARequest("one", 1, str(adapter))
    expected = answers(model, [None]), answers(merged, [None])
    assert expected[0] != expected[1]
    for options in ({}, {"kernels": {"*": "reference"}, "max_num_batched_tokens": 16, "max_num_seqs": 4}):
        found = answers(model, [one, None, one], **options)
        assert (found[3:6], found[:3], found[6:]) == (*expected, expected[1])


def test_adapters_that_leave_graphs_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = base("qwen3", tmp_path / "base")
    adapter, _ = adapted(model, tmp_path, "modules")
    with LLM(str(model), device="cpu", dtype="float32", threads=1, max_model_len=96, skip_tokenizer_init=True,
             enable_lora=True) as llm:
        llm.engine.add_adapter(str(adapter))
        assert "outside of CUDA graphs" not in caplog.text, "a CPU has none"
        llm.engine.rank.worker.graphs = object()  # type: ignore[attr-defined]
        llm.engine.add_adapter(str(adapter))
        llm.engine.rank.worker.graphs = None  # type: ignore[attr-defined]
    assert "outside of CUDA graphs" in caplog.text


@pytest.mark.parametrize(("kind", "options"), [
    ("qwen3", {"tensor_parallel_size": 2}), ("deepseek", {"pipeline_parallel_size": 2}),
    pytest.param("deepseek", {"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
    *(pytest.param("qwen3", {"tensor_parallel_size": 2, **more}, marks=pytest.mark.exhaustive)
      for more in ({"enable_expert_parallel": True}, {"pipeline_parallel_size": 2}))])
def test_ranks_divide_them(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = base(kind, tmp_path / "base")
    adapter, merged = adapted(model, tmp_path, "modules")
    assert answers(model, [LoRARequest("one", 1, str(adapter))], **options) == answers(merged, [None])


def test_matrices_that_fit_no_expert_are_refused(tmp_path: Path) -> None:
    model = base("qwen3", tmp_path / "base")
    adapter, _ = adapted(model, tmp_path, "stacked")
    low = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in low if "experts.lora_A" in name)
    save_file(low | {name: low[name][:-1].clone()}, adapter / "adapter_model.safetensors")
    with pytest.raises(RequestError, match="fit none of its matrices"):
        answers(model, [LoRARequest("one", 1, str(adapter))])
