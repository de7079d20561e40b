"""Checkpoints of families that transformers lacks, rewritten from one whose arithmetic is the same."""

from __future__ import annotations

import re
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def _renamed(weights: Weights, *names: tuple[str, str]) -> Weights:
    found = {}
    for name, tensor in weights.items():
        for old, new in names:
            name = re.sub(old, new, name)
        found[name] = tensor
    return found


def _merged(weights: Weights, name: str, by_group: int = 0) -> Weights:
    """Queries, keys and values of a layer in one matrix `name`; with `by_group`, heads of that size beside their key and
    value."""
    found = {}
    for key, tensor in weights.items():
        if ".q_proj." not in key:
            if ".k_proj." not in key and ".v_proj." not in key:
                found[key] = tensor
            continue
        q, k, v = (weights[key.replace("q_proj", f"{part}_proj")] for part in "qkv")
        if by_group:
            count = k.shape[0] // by_group
            q, k, v = (part.view(count, -1, by_group, *part.shape[1:]) for part in (q, k, v))
            merged = torch.cat((q, k, v), 1).flatten(0, 2)
        else:
            merged = torch.cat((q, k, v))
        found[key.replace("q_proj", name)] = merged
    return found


def beside_towers(weights: Weights, config: dict[str, Any], *, architecture: str, model_type: str, old: bool = False,
                  **changes: Any) -> tuple[Weights, dict[str, Any]]:
    """As the text part of a checkpoint with images and sound, under its names of today, or the `old` ones."""
    prefix = ("language_model.model.", "language_model.lm_head.") if old else ("model.language_model.", "lm_head.")
    weights = _renamed(weights, ("^model[.]", prefix[0]), ("^lm_head[.]", prefix[1]))
    text = {name: value for name, value in config.items() if name != "architectures"} | changes
    towers = ("vision_model.norm.weight", "multi_modal_projector.linear_1.weight") if old else (
        "model.vision_tower.norm.weight", "model.audio_tower.norm.weight", "model.embed_audio.embedding.weight",
        "model.visual.patch_embed.proj.bias")
    return {**weights, **{name: torch.ones(3) for name in towers}}, {
        "architectures": [architecture], "model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 3}}


def sarvam(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    """Sarvam's configs by the names of the published checkpoints. transformers writes the tensors under their names itself."""
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"}
    assert config["model_type"] == "sarvam_mla" or "model.layers.0.attention.query_key_value.weight" in weights, sorted(weights)
    values = {names.get(name, name): value for name, value in config.items() if name != "rope_parameters"}
    turn = dict(config["rope_parameters"])
    if turn["rope_type"] == "yarn":
        values |= {"head_dim": 99, "rope_scaling": {**turn, "rope_type": "deepseek_yarn"}}
    kind = "SarvamMoEForCausalLM" if config["model_type"] == "sarvam_moe" else "SarvamMLAForCausalLM"
    return weights, {**values, "architectures": [kind], "rope_theta": turn["rope_theta"],
                     "auto_map": {"AutoModelForCausalLM": f"modeling_sarvam.{kind}"}}


def axk1(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    """Published checkpoints store a norm for dense layers, too, which nobody reads."""
    assert "model.layers.2.post_mlp_layernorm.weight" in weights, sorted(weights)
    return {**weights, "model.layers.0.post_mlp_layernorm.weight": weights["model.norm.weight"] * 9}, config


def internlm2(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    weights = _merged(weights, "wqkv", config["head_dim"])
    return _renamed(weights, ("embed_tokens", "tok_embeddings"), ("self_attn.wqkv", "attention.wqkv"),
                    ("self_attn.o_proj", "attention.wo"), ("input_layernorm", "attention_norm"), ("gate_proj", "w1"),
                    ("up_proj", "w3"), ("down_proj", "w2"), ("[.]mlp[.]", ".feed_forward."), ("lm_head", "output"),
                    ("post_attention_layernorm", "ffn_norm")), {
        **config, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}


def internlm3(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    return weights, {**config, "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": False,
                     "bias": False}


def baichuan(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    return _merged(weights, "W_pack"), {**config, "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan",
                                        "model_max_length": 512}


def minicpm(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        del config[name]
    return weights, {**config, "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 3,
                     "scale_depth": 1.4, "dim_model_base": 30}


def chatglm(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    weights = _merged(weights, "query_key_value")
    theta = config["rope_parameters"]["rope_theta"]
    return _renamed(
        weights, ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.layers", "transformer.encoder.layers"),
        ("model.norm", "transformer.encoder.final_layernorm"), ("lm_head", "transformer.output_layer"),
        ("self_attn.o_proj", "self_attention.dense"), ("self_attn", "self_attention"), ("gate_up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h")), {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"], "kv_channels": config["head_dim"], "num_layers": 3,
        "multi_query_attention": True, "multi_query_group_num": config["num_key_value_heads"], "rmsnorm": True,
        "ffn_hidden_size": config["intermediate_size"], "padded_vocab_size": config["vocab_size"], "seq_length": 512,
        "layernorm_epsilon": config["rms_norm_eps"], "add_qkv_bias": True, "add_bias_linear": False, "torch_dtype": "float32",
        "rope_ratio": theta / 10000.0, "post_layer_norm": True, "eos_token_id": 2}


def exaone(weights: Weights, config: dict[str, Any]) -> tuple[Weights, dict[str, Any]]:
    """EXAONE 3's config by the names of its published checkpoints, whose base of the rotation stands alone."""
    names = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
    values = {names.get(name, name): value for name, value in config.items() if name != "rope_parameters"}
    return weights, {**values, "architectures": ["ExaoneForCausalLM"], "rope_theta": config["rope_parameters"]["rope_theta"],
                     "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"}}
