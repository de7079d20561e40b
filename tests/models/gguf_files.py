"""Writes the folders of `families.py` as GGUF files, with the gguf package's names, arranged as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.models.families import CASES, YARN, Case, rope
from tests.models.foreign import Weights

_GEMMA = {"vocab_size": 199, "vocab_size_per_layer_input": 199, "hidden_size": 48, "num_hidden_layers": 6,
          "layer_types": ["sliding_attention", "full_attention"] * 3, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 16, "sliding_window": 20, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0, "final_logit_softcapping": 20.0}
_SHARED = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
GEMMAS = [
    Case("gemma3n", "Gemma3nText", {**_GEMMA, **_SHARED, "laurel_rank": 4, "intermediate_size": [64] * 6,
                                    "activation_sparsity_pattern": [0.6, 0.6, 0.9, 0.0, 0.0, 0.0]}),
    Case("gemma4", "Gemma4Text", {**_GEMMA, **_SHARED, "global_head_dim": 32, "intermediate_size": 64,
                                  "use_double_wide_mlp": True}),
    Case("gemma4 plain", "Gemma4Text", {**_GEMMA, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                                        "global_head_dim": 32, "intermediate_size": 64, "attention_k_eq_v": True,
                                        "num_global_key_value_heads": 1, "final_logit_softcapping": None}),
    Case("gemma4 experts", "Gemma4Text", {
        **_GEMMA, "hidden_size": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 32,
        "intermediate_size": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}),
    Case("gemma4 wide", "Gemma4Text", {**_GEMMA, "hidden_size": 64, "hidden_size_per_layer_input": 32,
                                       "num_kv_shared_layers": 2, "global_head_dim": 32, "intermediate_size": 64}),
    Case("gemma3n wide", "Gemma3nText", {**_GEMMA, "hidden_size": 64, "hidden_size_per_layer_input": 32,
                                         "num_kv_shared_layers": 2, "laurel_rank": 32, "intermediate_size": [64] * 6,
                                         "activation_sparsity_pattern": [0.0] * 6})]
"""Gemma 3n and 4 as their files have them."""
_MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.9, mscale_all_dim=0.9)
_HERE = {
    "llama4": ("llama4-interleaved", {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "attention_bias": False,
                                      "tie_word_embeddings": False}),
    "llama4 unnormed": ("llama4-unnormed", {"num_local_experts": 128, "no_rope_layers": [1, 1, 1]}),
    "command-r": ("cohere-plain", {"tie_word_embeddings": True}), "cohere2": ("cohere2-window", {"tie_word_embeddings": True}),
    "minicpm3": ("minicpm3-plain", {"v_head_dim": 12, "scale_emb": 12, "dim_model_base": 256}),
    "gemma2": ("gemma2-plain", {"query_pre_attn_scalar": 12}), "gemma3": ("gemma3-local", {"query_pre_attn_scalar": 16}),
    "mpt clamped": ("mpt-plain", {"attn_config": {"clip_qkv": 0.5}}),
    "gptneox serial": ("neox-serial", {"hidden_act": "gelu", "rotary_pct": 0.5}),
    "phimoe": ("phimoe-longrope", {"lm_head_bias": True, "attention_bias": True}),
    "deepseek2": ("deepseek2-experts", {"q_lora_rank": 24}), "deepseek2 groups": ("deepseek2-grouped", {"q_lora_rank": 24}),
    "deepseek2 wide": ("deepseek3-experts", {
        **_MSCALE, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "hidden_size": 64,
        "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}),
    **{kind: (name, {"layer_types": None, "attention_bias": False}) for kind, name in {
        "qwen3next": "qwen3next-odd", "qwen3next input": "qwen3next-odd", "qwen35": "qwen3.5-odd",
        "qwen35 even": "qwen3.5-even", "qwen35moe": "qwen3.5-moe"}.items()},
    **{kind: (name, {"layer_types": None, "attention_bias": False, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                     "linear_key_head_dim": 32, "linear_value_head_dim": size, "hidden_size": 64}) for kind, name, size in (
        ("qwen3next wide", "qwen3next-odd", 32), ("qwen35 wide", "qwen3.5-odd", 32), ("qwen35 halves", "qwen3.5-odd", 16))},
    "falcon new": ("falcon-new", {"bias": False}),
    "deepseek32": ("deepseek32-long", _MSCALE), "deepseek32 experts": ("deepseek32-experts", {
        "tie_word_embeddings": False, "n_group": 1}),
    "hy_v3": ("hunyuan3-odd", {"router_scaling_factor": 1.7}), "mellum": ("mellum-odd", {
        "mlp_layer_types": None, "norm_topk_prob": True, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    "cohere2moe": ("cohere2moe-odd", {"expert_selection_fn": "sigmoid", "tie_word_embeddings": True}),
    "cohere2moe prefix": ("cohere2moe-odd", {"expert_selection_fn": "sigmoid", "tie_word_embeddings": True,
                                             "first_k_dense_replace": 2, "num_shared_experts": 0}),
    "gpt-oss wide": ("gpt-oss-plain", {"intermediate_size": 64}),
    "deepseek2 yarn": ("deepseek2-yarn", {**_MSCALE, "attention_bias": False}),
    "deepseek2 sigmoids": ("deepseek3-experts", {**_MSCALE, "q_lora_rank": 24})}
"""Cases of `families.py` with what a GGUF file cannot say otherwise."""
KINDS = {
    "llama": "llama-llama3", "llama mixtral": "mixtral-odd", "mistral3": "ministral3-plain",
    "qwen2": "qwen2-yarn", "qwen2vl": "qwen2-plain", "qwen2moe": "qwen2-moe-shared", "qwen3": "qwen3-plain",
    "qwen3vl": "qwen3-tied", "qwen3moe": "qwen3-moe-odd", "qwen3vlmoe": "qwen3-moe-odd", "gemma": "gemma-tied",
    "phi2": "phi-plain", "phi3": "phi3-short",
    "granite": "granite-plain", "granitemoe": "granite-moe-odd", "granitemoe shared": "granite-moe-shared",
    "olmo": "olmo-clamped", "olmo2": "olmo2-plain", "olmo2 windows": "olmo3-yarn", "olmoe": "olmoe-odd",
    "smollm3": "smollm3-plain", "arcee": "arcee-yarn", "starcoder": "bigcode-one-kv", "starcoder2": "starcoder2-plain",
    "glm4": "glm4-plain", "glm4moe": "glm4-moe-groups", "glm4moe normed": "glm4-moe-odd", "glm4moe solar": "solar-groups",
    "chatglm": "chatglm-grouped", "gpt2": "gpt2-plain",
    "gptneox": "neox-parallel", "bloom": "bloom-plain", "falcon": "falcon-multi-query",
    "falcon grouped": "falcon-one-norm", "mpt": "mpt-plain", "stablelm": "stablelm-plain",
    "stablelm normed": "stablelm-parallel", "internlm2": "internlm2-plain", "baichuan": "baichuan-7b",
    "minicpm": "minicpm-plain", "deepseek2 lite": "deepseek2-experts", "deepseek2 dense": "youtu-plain",
    "deepseek2 flash": "glm47flash-plain", "gpt-oss": "gpt-oss-plain", "gpt-oss yarn": "gpt-oss-yarn", "dots1": "dots1-odd",
    "seed_oss": "seed-oss-plain", "minimax-m2": "minimax-partial", "hunyuan-dense": "hunyuan-plain",
    "hunyuan-moe": "hunyuan-moe-odd", "ernie4_5": "ernie45-plain", "ernie4_5-moe": "ernie-moe-odd",
    "nemotron": "nemotron-plain", "phi3 partial": "phi3-partial", "jais2": "jais2-plain", "exaone4": "exaone4-plain",
    "exaone4 global": "exaone4-global", "exaone-moe": "exaone-moe-odd",
    "apertus": "apertus-llama3", "apertus odd": "apertus-plain", "falcon two": "falcon-grouped",
    "glm-dsa": "glm5-long", "afmoe": "afmoe-plain", "xverse": "llama-plain", "exaone": "llama-plain",

    **{kind: name for kind, (name, _) in _HERE.items()}, **{case.name: case.name for case in GEMMAS}}
"""Architectures, perhaps with a word that tells their entries apart, and cases of `families.py`."""
NEWER = {"deepseek32": "glm-dsa", "hy_v3": "dots1", "mellum": "qwen3moe", "cohere2moe": "dots1"}
"""Architectures that this version of the gguf package lacks, and those of it that name their tensors so."""
PERMUTED = {"llama", "mistral3", "granite", "granitemoe", "olmo", "smollm3", "arcee", "minicpm", "xverse", "internlm2",
            "baichuan"}
DELTA = {"qwen3next", "qwen35", "qwen35moe"}
NORMS_UP = {"gemma", "gemma2", "gemma3", "nemotron", *DELTA}
KEYS = {
    ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"): "context_length",
    ("hidden_size", "n_embd", "d_model"): "embedding_length", ("num_hidden_layers", "n_layer", "n_layers"): "block_count",
    ("intermediate_size", "n_inner", "ffn_hidden_size"): "feed_forward_length",
    ("num_attention_heads", "n_head", "n_heads"): "attention.head_count",
    ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"): "attention.head_count_kv",
    ("rms_norm_eps", "layernorm_epsilon"): "attention.layer_norm_rms_epsilon",
    ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"): "attention.layer_norm_epsilon",
    ("head_dim",): "attention.key_length", ("sliding_window",): "attention.sliding_window",
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"): "expert_count",
    ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"): "expert_used_count",
    ("moe_intermediate_size",): "expert_feed_forward_length",
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"): "expert_shared_count",
    ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"): "leading_dense_block_count",
    ("routed_scaling_factor", "route_scale", "router_scaling_factor"): "expert_weights_scale",
    ("norm_topk_prob", "route_norm"): "expert_weights_norm",
    ("n_group",): "expert_group_count", ("topk_group",): "expert_group_used_count",
    ("shared_expert_intermediate_size", "shared_intermediate_size"): "expert_shared_feed_forward_length",
    ("interleave_moe_layer_step", "moe_layer_interval"): "interleave_moe_layer_step",
    ("attention_multiplier",): "attention.scale", ("embedding_multiplier", "scale_emb"): "embedding_scale",
    ("residual_multiplier",): "residual_scale", ("logits_scaling", "logit_scale"): "logit_scale",
    ("attn_logit_softcapping",): "attn_logit_softcapping", ("final_logit_softcapping",): "final_logit_softcapping",
    ("kv_lora_rank",): "attention.kv_lora_rank", ("q_lora_rank",): "attention.q_lora_rank",
    ("clip_qkv",): "attention.clamp_kqv",
    ("use_parallel_residual",): "use_parallel_residual", ("num_nextn_predict_layers",): "nextn_predict_layers"}
"""Names of config.json, and GGUF's keys."""


def case_of(kind: str) -> Case:
    case = next(case for case in (*CASES, *GEMMAS) if case.name == KINDS[kind])
    if kind == "qwen35moe":
        case = replace(case, rewrite=None)
    return replace(case, config={**case.config, **_HERE.get(kind, ("", {}))[1]})


def convert(folder: Path, kind: str, path: Path, *, absorbed: bool = True, blocks: str = "", decoded: bool = False) -> None:
    """`absorbed`: latents' matrix in halves, as newer files have it. `blocks`: the type of matrices; `decoded`: they are
    written as what that type makes of them."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    arch = kind.partition(" ")[0]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata(arch, config, absorbed).items():
        _add(writer, f"{arch}.{key}", value)
    for name in ("alpha_n", "alpha_p", "beta", "eps") if arch == "apertus" else ():
        writer.add_array(f"xielu.{name}", [tensors[f"model.layers.{i}.mlp.act_fn.{name}"].float().item()
                                           for i in range(config["num_hidden_layers"])])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(config.get("vocab_size") or config["padded_vocab_size"])])
    writer.add_token_scores([0.0] * (config.get("vocab_size") or config["padded_vocab_size"]))
    writer.add_token_types([1] * (config.get("vocab_size") or config["padded_vocab_size"]))
    known = NEWER.get(arch, arch)
    names = gguf.get_tensor_name_map(next(one for one, said in gguf.MODEL_ARCH_NAMES.items() if said == known), 8)
    tied = config.get("tie_word_embeddings", arch != "chatglm")
    for name, tensor in arranged(arch, tensors, config, absorbed, input_whole=kind == "qwen3next input"):
        name = name.removeprefix("transformer.") if arch in ("bloom", "chatglm") else name
        target = names.get_name(name, try_suffixes=(".weight", ".bias")) or (name if name.startswith(("blk", "rope")) else None)
        assert target is not None, f"{name} has no name in {arch}"
        if not (tied and target == "output.weight"):
            _write(writer, target, np.ascontiguousarray(tensor.float().numpy()), blocks, decoded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(writer: gguf.GGUFWriter, name: str, data: np.ndarray, blocks: str, decoded: bool) -> None:
    plain = data.ndim < 2 or data.shape[-1] % 32 or name.endswith("bias") or any(
        part in name for part in ("norm", "ffn_gate_inp", "token_embd", "altup", "laurel", "per_layer_model_proj"))
    if plain or not blocks:
        writer.add_tensor(name, data)
        return
    kind = gguf.GGMLQuantizationType[blocks]
    codes = gguf.quants.quantize(data, kind)
    if decoded:
        writer.add_tensor(name, gguf.quants.dequantize(codes, kind))
    else:
        writer.add_tensor(name, codes, raw_dtype=kind)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    else:
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)


def metadata(arch: str, config: dict[str, Any], absorbed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, key in KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            found[key] = value[0] if isinstance(value, list) else value
    for key in ("num_layers", "kv_channels"):
        if key in config:
            found |= {"num_layers": {"block_count": config[key]}, "kv_channels": {"attention.key_length": config[key]}}[key]
    width, heads, layers = (found[key] for key in ("embedding_length", "attention.head_count", "block_count"))
    found.setdefault("context_length", 512)
    found.setdefault("feed_forward_length", 4 * width)
    turns = config.get("rope_parameters") or {}
    turns = turns.get("full_attention", turns)
    size = found.get("attention.key_length") or width // heads
    if "attention.key_length" in found:
        found["attention.value_length"] = size
    if "rope_theta" in turns:
        found["rope.freq_base"] = float(turns["rope_theta"])
    if "sliding_attention" in (config.get("rope_parameters") or {}):
        found["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    part = turns.get("partial_rotary_factor") or config.get("rotary_pct") or config.get("partial_rotary_factor") or 1.0
    if "rope_theta" in turns:
        found["rope.dimension_count"] = int(size * part)
    how = turns.get("rope_type")
    if how in ("yarn", "linear", "longrope"):
        found |= {"rope.scaling.type": how, "rope.scaling.factor": float(turns.get("factor") or 1.0)}
    if how == "yarn":
        found["rope.scaling.original_context_length"] = turns["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{name}": float(turns[name]) for name in ("beta_fast", "beta_slow") if turns.get(name)}
        found |= {"rope.scaling.attn_factor": turns["attention_factor"]} if turns.get("attention_factor") else {}
    if how == "longrope":
        found["rope.scaling.original_context_length"] = (turns.get("original_max_position_embeddings")
                                                         or config["original_max_position_embeddings"])
        # Of Phi-3 the converter computes it as transformers does.
        factor = found["context_length"] / found["rope.scaling.original_context_length"]
        usual = (1 + np.log(factor) / np.log(found["rope.scaling.original_context_length"])) ** 0.5 if factor > 1 else 1.0
        found["rope.scaling.attn_factor"] = float(turns.get("short_mscale") or usual)
    if config.get("layer_types") and arch in ("olmo2", "exaone4", "exaone-moe", "gemma3n", "gemma4", "mellum", "cohere2moe"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if arch in ("gemma3n", "gemma4"):
        found |= _gemmas(arch, config)
    if arch == "phi3":
        found.setdefault("attention.sliding_window", 0)
    if arch in ("deepseek2", "minicpm3", "glm-dsa", "deepseek32"):
        keys, turned, rank = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        found |= {"attention.key_length": keys + turned, "rope.dimension_count": turned,
                  "attention.value_length": config.get("v_head_dim", 0)}
    if arch in ("deepseek2", "glm-dsa", "deepseek32"):
        if absorbed:
            found |= {"attention.head_count_kv": 1, "attention.key_length": rank + turned, "attention.value_length": rank,
                      "attention.key_length_mla": keys + turned, "attention.value_length_mla": config["v_head_dim"]}
        if "DeepseekV2ForCausalLM" not in config["architectures"]:
            found["expert_gating_func"] = 2
        if turns.get("mscale_all_dim"):
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * turns["mscale_all_dim"]
        found.setdefault("leading_dense_block_count", layers)
    if arch == "cohere2moe":
        found |= {"feed_forward_length": config["prefix_dense_intermediate_size"],
                  "expert_feed_forward_length": config["intermediate_size"], "leading_dense_block_count": sum(
                      kind == "dense" for kind in config["mlp_layer_types"])}
    if arch == "hy_v3":
        found["expert_shared_feed_forward_length"] = found["expert_feed_forward_length"] * found.pop("expert_shared_count")
    if arch in ("cohere2moe", "hy_v3"):
        found["expert_gating_func"] = 2
    if arch in ("glm4moe", "exaone-moe", "dots1", "minimax-m2", "afmoe"):
        found["expert_gating_func"] = 2
        found.setdefault("leading_dense_block_count", 0)
    if arch in ("glm4moe", "exaone-moe", "deepseek2", "glm-dsa"):
        found["block_count"] = layers + found.get("nextn_predict_layers", 0)
    if "expert_count" in found:
        found.setdefault("expert_feed_forward_length", found["feed_forward_length"])
    if arch == "hunyuan-moe":
        found["expert_shared_feed_forward_length"] = found["feed_forward_length"]
    if arch == "ernie4_5-moe":
        found["expert_shared_feed_forward_length"] = found["expert_feed_forward_length"] * found["expert_shared_count"]
    if arch == "olmo":
        found["attention.layer_norm_epsilon"] = 1e-5
    if arch in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
        found["rope.dimension_sections"] = [2, 2, 2, 0]
    if arch == "llama4":
        found |= {"feed_forward_length": config["intermediate_size_mlp"],
                  "expert_feed_forward_length": config["intermediate_size"],
                  "expert_count": found["expert_count"] if config["use_qk_norm"] else 128}
    if arch in DELTA:
        found |= {"ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
                  "ssm.state_size": config["linear_key_head_dim"], "ssm.conv_kernel": config["linear_conv_kernel_dim"],
                  "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
                  "full_attention_interval": config["layer_types"].index("full_attention") + 1}
    if arch in ("glm-dsa", "deepseek32"):
        found |= {f"attention.indexer.{key}": config[f"index_{name}"] for key, name in (
            ("head_count", "n_heads"), ("key_length", "head_dim"), ("top_k", "topk"))}
    if arch == "mistral3":
        found["attention.temperature_scale"] = turns["llama_4_scaling_beta"]
    if arch == "minicpm":
        found |= {"residual_scale": config["scale_depth"] / layers**0.5, "logit_scale": width / config["dim_model_base"]}
    if arch == "mpt":
        given = config.get("attn_config") or {}
        found |= {"attention.max_alibi_bias": float(given.get("alibi_bias_max", 8))}
        found |= {"attention.clamp_kqv": given["clip_qkv"]} if given.get("clip_qkv") else {}
    if arch == "starcoder":
        found["attention.head_count_kv"] = 1
    if arch == "falcon" and not config["new_decoder_architecture"]:
        found["attention.head_count_kv"] = 1
    if arch == "chatglm":
        found |= {"rope.freq_base": 10000.0 * config["rope_ratio"], "rope.dimension_count": size // 2}
    ends = ("scale", "clamp_kqv", "attn_factor", "softcapping")
    return {key: float(value) if key.endswith(ends) and not isinstance(value, list) else value for key, value in found.items()}


def _gemmas(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3n and 4 have beside Gemma 3: values for each layer, and those of global layers."""
    found = {"attention.shared_kv_layers": config["num_kv_shared_layers"],
             "embedding_length_per_layer_input": config["hidden_size_per_layer_input"]}
    if arch == "gemma3n":
        scales = torch.distributions.Normal(0, 1).icdf(torch.tensor(config["activation_sparsity_pattern"]))
        return {**found, "altup.active_idx": config["altup_active_idx"], "altup.num_inputs": config["altup_num_inputs"],
                "activation_sparsity_scale": scales.tolist(), "feed_forward_length": config["intermediate_size"]}
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    apart = config["per_layer_config"][str(local.index(False))]
    size, heads, own = apart["head_dim"], apart.get("num_key_value_heads"), len(local) - config["num_kv_shared_layers"]
    found |= {"attention.key_length": size, "attention.value_length": size, "attention.key_length_swa": config["head_dim"],
              "attention.value_length_swa": config["head_dim"], "rope.dimension_count": size,
              "rope.dimension_count_swa": config["head_dim"]}
    if heads is not None:
        found["attention.head_count_kv"] = [config["num_key_value_heads"] if one else heads for one in local]
    if config["use_double_wide_mlp"]:
        found["feed_forward_length"] = [config["intermediate_size"] * (1 + (i >= own)) for i in range(len(local))]
    return found


def arranged(arch: str, tensors: Weights, config: dict[str, Any], absorbed: bool, *,
             input_whole: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    heads = next(config[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in config)
    kv_heads = next((config[name] for name in ("num_key_value_heads", "num_kv_heads") if config.get(name)), heads)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        yield "rope_freqs.weight", _divisors(config)
    if (config.get("rope_parameters") or {}).get("long_factor"):
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", torch.tensor(config["rope_parameters"][f"{which}_factor"])
    if arch == "gemma4":
        turns = config["rope_parameters"]["full_attention"]
        size = max(one["head_dim"] for one in config["per_layer_config"].values())
        count = int(size * turns["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * count + [1e30] * (size // 2 - count))
    if arch in ("gemma3n", "gemma4") and config["num_kv_shared_layers"]:
        # Files have what layers that share the keys of another never use.
        shared, width = config["num_hidden_layers"] - 1, config["hidden_size"]
        for name, shape in (("k", (32, width)), ("v", (32, width)), ("k_norm", (16,))):
            yield f"blk.{shared}.attn_{name}.weight", torch.ones(shape)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if arch in PERMUTED and re.search(r"[.][qk]_proj[.]", name):
            tensor = halves_to_pairs(tensor, heads if ".q_proj" in name else kv_heads)
        if arch in NORMS_UP and "norm" in name and name.endswith("weight") and "linear_attn" not in name:
            tensor = tensor + 1
        one = re.fullmatch(r"(.*[.]experts|.*layernorm[.]norms|.*altup[a-z_]*projections)[.]([0-9]+)[.](.*weight)", name)
        if one is not None:
            experts.setdefault(f"{one[1].removesuffix('.norms')}.{one[3]}", {})[int(one[2])] = tensor
            continue
        if "linear_attn" in name:
            yield from _delta(arch, name, tensor, config, input_whole)
        elif ".act_fn." not in name:
            yield from _changed(arch, name, tensor, config, heads, kv_heads, absorbed)
    if arch == "glm4moe":
        # As newer files may have them: gates and ups of all experts in one tensor.
        for name in [name for name in experts if "up_proj" in name]:
            layer = name.split(".")[2]
            gates, ups = experts.pop(name.replace("up_proj", "gate_proj")), experts.pop(name)
            yield f"blk.{layer}.ffn_gate_up_exps.weight", torch.stack([torch.cat((gates[i], ups[i])) for i in range(len(ups))])
    for name, ones in experts.items():
        old = re.search(r"[.]w[123][.]", name)
        stem = name.replace("block_sparse_moe", "feed_forward").replace("model.layers", "layers") if old else name
        yield stem, torch.stack([ones[i] for i in range(len(ones))])


def halves_to_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _divisors(config: dict[str, Any]) -> torch.Tensor:
    said, size = config["rope_parameters"], config["head_dim"]
    waves = 2 * np.pi * said["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    smooth = (said["original_max_position_embeddings"] / waves - said["low_freq_factor"]) / (
        said["high_freq_factor"] - said["low_freq_factor"])
    smooth = smooth.clamp(0, 1)
    return (1 / ((1 - smooth) / said["factor"] + smooth)).float()


def _changed(arch: str, name: str, tensor: torch.Tensor, config: dict[str, Any], heads: int, kv_heads: int,
             absorbed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    if arch == "granitemoe" and "input_linear" in name:
        which = "shexp" if "shared" in name else "exps"
        for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
            yield f"blk.{layer}.ffn_{part}_{which}.weight", half
    elif arch == "llama4" and "experts" in name:
        turned = tensor.transpose(1, 2)
        if "down" in name:
            yield f"blk.{layer}.ffn_down_exps.weight", turned
        else:
            yield f"blk.{layer}.ffn_gate_exps.weight", turned.chunk(2, 1)[0]
            yield f"blk.{layer}.ffn_up_exps.weight", turned.chunk(2, 1)[1]
    elif arch == "gpt-oss" and "experts" in name:
        bias = name.endswith("bias")
        turned, end = tensor if bias else tensor.transpose(1, 2), "bias" if bias else "weight"
        if "down" in name:
            yield f"blk.{layer}.ffn_down_exps.{end}", turned
        else:
            yield f"blk.{layer}.ffn_gate_exps.{end}", turned[:, ::2]
            yield f"blk.{layer}.ffn_up_exps.{end}", turned[:, 1::2]
    elif name.endswith("kv_b_proj.weight") and absorbed and arch in ("deepseek2", "glm-dsa", "deepseek32"):
        k, v = tensor.unflatten(0, (heads, -1)).split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
        yield name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), v
    elif "query_key_value" in name and arch in ("gptneox", "bloom"):
        yield name, tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(tensor.shape)
    elif "query_key_value" in name and arch == "falcon":
        count = kv_heads if config["new_decoder_architecture"] else 1
        groups = tensor.unflatten(0, (count, heads // count + 2, -1))
        yield name, torch.cat([groups[:, part].flatten(0, -2) for part in (slice(0, -2), slice(-2, -1), slice(-1, None))])
    elif "wqkv" in name:
        groups = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
        for part, rows in zip("qkv", (groups[:, :-2], groups[:, -2:-1], groups[:, -1:]), strict=True):
            count = {"q": heads, "k": kv_heads}.get(part)
            flat = rows.flatten(0, -2)
            yield f"model.layers.{layer}.attention.w{part}.weight", flat if count is None else halves_to_pairs(flat, count)
    elif "router.scale" in name or "per_expert_scale" in name:
        yield f"blk.{layer}.ffn_{'gate_inp' if 'router.scale' in name else 'down_exps'}.scale", tensor
    elif "W_pack" in name:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield f"blk.{layer}.attn_{part}.weight", rows if part == "v" else halves_to_pairs(rows, heads)
    elif arch == "gpt2" and tensor.dim() == 2 and ("c_" in name):
        yield name, tensor.t()
    else:
        yield _corrected(name), tensor


def _delta(arch: str, name: str, tensor: torch.Tensor, config: dict[str, Any], input_whole: bool,
           ) -> Iterator[tuple[str, torch.Tensor]]:
    """Delta nets: Qwen3-Next's queries, keys and values come by kind, in the first files with all by key head; Qwen3.5's heads
    of values come by their place among those of a key."""
    keys, heads, key_size, size = (config[f"linear_{one}"] for one in (
        "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    block, shared = f"blk.{name.split('.')[2]}", heads // keys

    def tiled(part: torch.Tensor, dim: int, each: int) -> torch.Tensor:
        return part.unflatten(dim, (keys, shared, each)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d" in name:
        tensor = tensor.squeeze(1)
    if "in_proj_qkvz" in name and not input_whole:
        parts = tensor.unflatten(0, (keys, -1)).split((key_size, key_size, shared * size, shared * size), 1)
        yield f"{block}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in parts[:3]])
        yield f"{block}.attn_gate.weight", parts[3].flatten(0, 1)
        return
    if arch != "qwen3next" and any(one in name for one in ("in_proj_qkv.", "conv1d")):
        first = 2 * keys * key_size
        tensor = torch.cat((tensor[:first], tiled(tensor[first:], 0, size)))
    elif arch != "qwen3next" and "norm" not in name:
        dim, each = ("out_proj" in name, size if "out_proj" in name or "in_proj_z" in name else 1)
        tensor = tiled(tensor, int(dim), each)
    end = {"in_proj_qkvz": "ssm_in.weight", "in_proj_ba": "ssm_ba.weight", "in_proj_qkv": "attn_qkv.weight",
           "in_proj_z": "attn_gate.weight", "in_proj_b": "ssm_beta.weight", "in_proj_a": "ssm_alpha.weight",
           "conv1d": "ssm_conv1d.weight", "norm": "ssm_norm.weight", "out_proj": "ssm_out.weight", "A_log": "ssm_a",
           "dt_bias": "ssm_dt.bias"}[name.split("linear_attn.")[1].removesuffix(".weight")]
    yield f"{block}.{end}", tensor


def _corrected(name: str) -> str:
    """Names that the converter changes before it looks them up."""
    for old, new in (("e_score_correction_bias", "e_score_correction.bias"), ("self_attn.sinks", "self_attn.sinks.weight"),
                     ("expert_bias", "expert_bias.bias"), ("layer_scalar", "layer_scalar.weight"),
                     ("output_scale", "output_scale.weight"), ("experts.gate_up_proj", "experts.gate_up_proj.weight"),
                     ("experts.down_proj", "experts.down_proj.weight")):
        name = name.replace(old, new) if name.endswith(old) else name
    return name
