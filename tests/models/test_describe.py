"""Configs as the hub has them, old and new: what is read from them, and what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.checkpoint import dtype_of, eos_ids, read_config, read_generation_config
from penstock.core.errors import ModelError
from penstock.core.state import Everything, Window
from penstock.layers.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from penstock.models import describe, families, registry
from tests.models.families import CASES
from tests.sampling import sampled

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
         "hidden_act": "silu",
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                          "original_max_position_embeddings": 8192}}

REAL: dict[str, tuple[dict[str, Any], int, int]] = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248, 131072),
    "Mistral-7B-v0.1": ({"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
                         "max_position_embeddings": 32768, "sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                         "hidden_act": "silu", "tie_word_embeddings": False}, 7_241_732_096, 32768),
    "Qwen2.5-0.5B": ({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
                      "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
                      "max_position_embeddings": 32768, "max_window_layers": 24, "sliding_window": 32768,
                      "use_sliding_window": False, "tie_word_embeddings": True, "rope_theta": 1000000.0, "hidden_act": "silu",
                      "rms_norm_eps": 1e-6}, 494_032_768, 32768),
    "Qwen3-0.6B": ({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
                    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
                    "max_position_embeddings": 40960, "sliding_window": None, "max_window_layers": 28,
                    "tie_word_embeddings": True, "rope_scaling": None, "rope_theta": 1000000, "hidden_act": "silu",
                    "attention_bias": False, "rms_norm_eps": 1e-6}, 596_049_920, 40960),
    "gemma-2-2b": ({"architectures": ["Gemma2ForCausalLM"], "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
                    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000,
                    "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0,
                    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, 2_614_341_888, 8192),
    "gemma-3-1b": ({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
                    "intermediate_size": 6912, "head_dim": 256, "num_hidden_layers": 26, "num_attention_heads": 4,
                    "num_key_value_heads": 1, "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512,
                    "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
                    "final_logit_softcapping": None, "attn_logit_softcapping": None, "query_pre_attn_scalar": 256,
                    "hidden_activation": "gelu_pytorch_tanh"}, 999_885_952, 32768),
    "gemma-3-4b": ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
                    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
                    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                                    "sliding_window": 1024}}, 3_880_263_168, 131072),
    "gemma-3n-E4B": ({"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "torch_dtype": "bfloat16",
                      "text_config": {"model_type": "gemma3n_text", "intermediate_size": [16384] * 35, "rope_theta": 1000000.0,
                                      "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "rope_scaling": None,
                                      "rope_local_base_freq": 10000.0}}, 6_835_235_568, 32768),
    "gemma-4-E2B": ({"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "torch_dtype": "bfloat16",
                     "text_config": {"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144,
                                     "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
                                     "global_head_dim": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
                                     "num_global_key_value_heads": None, "final_logit_softcapping": 30.0,
                                     "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}},
                    4_628_569_379, 131072),
    "gemma-4-26B-A4B": ({"architectures": ["Gemma4ForCausalLM"], "hidden_size": 2816, "intermediate_size": 2112,
                         "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
                         "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
                         "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
                         "use_bidirectional_attention": "vision", "sliding_window": 1024, "max_position_embeddings": 262144,
                         "final_logit_softcapping": 30.0}, 25_233_141_790, 262144),
    "gemma-4-12B": ({"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified",
                     "text_config": {"model_type": "gemma4_unified_text", "hidden_size": 3840, "intermediate_size": 15360,
                                     "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
                                     "num_global_key_value_heads": 1, "attention_k_eq_v": True}}, 11_907_350_320, 262144),
    "Phi-3-mini-128k": ({"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
                         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
                         "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
                         "rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
                         "rope_theta": 10000.0, "hidden_act": "silu", "rms_norm_eps": 1e-5,
                         "tie_word_embeddings": False}, 3_821_079_552, 131072),
    "Phi-4-mini": ({"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
                    "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
                    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
                    "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "hidden_act": "silu", "rms_norm_eps": 1e-5,
                    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
                    "tie_word_embeddings": True}, 3_836_021_760, 131072),
    "OLMo-2-1B": ({"architectures": ["Olmo2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
                   "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100352,
                   "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                   "tie_word_embeddings": False}, 1_484_916_736, 4096),
    "granite-3.1-2b": ({"architectures": ["GraniteForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
                        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155,
                        "max_position_embeddings": 131072, "rope_theta": 5000000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
                        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                        "residual_multiplier": 0.22, "tie_word_embeddings": True}, 2_533_531_648, 131072),
    "SmolLM3-3B": ({"architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008,
                    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
                    "max_position_embeddings": 65536, "rope_theta": 5000000.0, "no_rope_layer_interval": 4,
                    "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36, "use_sliding_window": False,
                    "sliding_window": None, "hidden_act": "silu", "rms_norm_eps": 1e-6}, 3_075_098_624, 65536),
    "pythia-70m": ({"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 512, "intermediate_size": 2048,
                    "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 50304, "max_position_embeddings": 2048,
                    "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True, "hidden_act": "gelu",
                    "layer_norm_eps": 1e-5, "tie_word_embeddings": False}, 70_426_624, 2048),
    "Llama-4-Scout": ({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
                       "tie_word_embeddings": False, "vision_config": {"hidden_size": 1408},
                       "text_config": {"attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
                                       "attn_temperature_tuning": 4, "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu",
                                       "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
                                       "intermediate_size_mlp": 16384, "max_position_embeddings": 262144,
                                       "model_type": "llama4_text", "moe_layers": list(range(48)),
                                       "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1,
                                       "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
                                       "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048,
                                       "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                                        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}},
                      107_769_861_120, 8191),
    "GLM-4.7-Flash": ({"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880,
                       "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47,
                       "num_attention_heads": 20, "num_key_value_heads": 20, "hidden_act": "silu", "rms_norm_eps": 1e-5,
                       "attention_bias": False, "max_position_embeddings": 202752, "rope_theta": 1000000.0,
                       "rope_scaling": None, "partial_rotary_factor": 1.0, "q_lora_rank": 768, "kv_lora_rank": 512,
                       "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
                       "n_shared_experts": 1,
                       "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1,
                       "topk_group": 1, "topk_method": "noaux_tc", "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
                       "tie_word_embeddings": False}, 29_943_393_920, 202752),
    "Ministral-3-8B": ({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                        "vision_config": {"model_type": "pixtral"},
                        "text_config": {"model_type": "ministral3", "hidden_size": 4096, "num_hidden_layers": 34,
                                        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                                        "intermediate_size": 14336, "vocab_size": 131072, "rms_norm_eps": 1e-5,
                                        "max_position_embeddings": 262144, "rope_parameters": {
                                            "rope_type": "yarn", "rope_theta": 1000000, "factor": 16.0,
                                            "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
                                            "llama_4_scaling_beta": 0.1}}}, 8_489_553_920, 262144),
    "gpt2": ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
              "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5}, 124_439_808, 1024),
}
"""Published models: what matters of their config.json, their number of (text) parameters, their context length."""


@pytest.mark.parametrize("name", REAL)
def test_real_configs(name: str, tmp_path: Path) -> None:
    config, size, positions = REAL[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = describe(read_config(tmp_path))
    assert (spec.size, spec.max_positions, spec.architecture) == (size, positions, config["architectures"][0])


def test_what_a_token_uses(tmp_path: Path) -> None:
    """Of a mixture, the experts that it picks: 17B of Llama 4 Scout's parameters, as its name says."""
    (tmp_path / "config.json").write_text(json.dumps(REAL["Llama-4-Scout"][0]))
    assert 3.8e9 < describe(REAL["gemma-4-26B-A4B"][0]).used < 3.9e9
    scout, dense = describe(read_config(tmp_path)), describe(REAL["SmolLM3-3B"][0])
    assert 17.1e9 < scout.used < 17.3e9 and dense.used == dense.size


def test_windows_and_rotations_by_layer() -> None:
    gemma = describe({**REAL["gemma-3-1b"][0]})
    assert [state.keep for state in gemma.states("bfloat16")][:7] == [Window(512)] * 5 + [Everything()] + [Window(512)]
    assert [attention.rope.theta for attention in gemma.attentions if attention.rope][4:6] == [10000.0, 1000000.0]
    gemma4 = describe(read_config_of(REAL["gemma-4-E2B"][0]))
    assert [state.keep for state in gemma4.states("bfloat16")] == ([Window(512)] * 4 + [Everything()]) * 3
    assert [state.fields[0].shape for state in gemma4.states("bfloat16")][3:5] == [(1, 256), (1, 512)]
    assert [one.reads for one in gemma4.attentions][14:20] == [None, 13, 13, 13, 13, 14]
    gemma3n = describe(read_config_of(REAL["gemma-3n-E4B"][0]))
    assert len(gemma3n.states("bfloat16")) == 20
    assert [one.reads for one in gemma3n.attentions][19:26] == [None, *[18] * 4, 19, 18]
    assert [one.rope.theta for one in gemma3n.attentions if one.rope][18:20] == [10000.0, 1000000.0]
    kinds = {(one.head_size, one.kv_heads, one.keys_only) for one in describe(REAL["gemma-4-26B-A4B"][0]).attentions}
    assert kinds == {(256, 8, False), (512, 2, True)}
    smol = describe(REAL["SmolLM3-3B"][0])
    assert [attention.rope is None for attention in smol.attentions] == [False, False, False, True] * 9
    field = gemma.states("bfloat16")[0].fields[1]
    assert (field.name, field.shape, field.dtype) == ("v", (1, 256), "bfloat16")
    nested = read_config_of(REAL["gemma-3-4b"][0])
    assert describe(nested).attentions[5].rope == describe(nested).attentions[11].rope
    assert describe(nested).attentions[5].rope.scaling == LinearScaling(8.0)  # type: ignore[union-attr]
    assert describe(nested).attentions[0].rope.scaling == RopeScaling()  # type: ignore[union-attr]


def read_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The text part, as `read_config` takes it."""
    outer = {name: value for name, value in config.items() if name not in ("text_config", "vision_config")}
    return {**outer, **config["text_config"]}


@pytest.mark.parametrize(("scaling", "expected", "positions"), [
    (None, RopeScaling(), 131072),
    ({"type": "linear", "factor": 2.0}, LinearScaling(2.0), 262144),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 131072), 262144),
    (LLAMA["rope_scaling"], Llama3Scaling(8.0, 1.0, 4.0, 8192), 131072),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536}, YarnScaling(4.0, 65536), 262144),
    ({"rope_type": "longrope", "short_factor": [1] * 64, "long_factor": [2] * 64, "original_max_position_embeddings": 4096},
     LongRopeScaling((1.0,) * 64, (2.0,) * 64, 4096, 32.0), 131072),
])
def test_old_and_new_names_of_rope_scalings_agree(scaling: Any, expected: Any, positions: int) -> None:
    old = describe({**LLAMA, "rope_scaling": scaling})
    modern = {name: value for name, value in LLAMA.items() if name not in ("rope_scaling", "rope_theta")}
    new = describe({**modern, "rope_parameters": {"rope_theta": 500000.0, **(scaling or {})}})
    assert old == new
    assert (old.attentions[0].rope.scaling, old.max_positions) == (expected, positions)  # type: ignore[union-attr]


@pytest.mark.parametrize(("changes", "words"), [
    ({"hidden_act": "xielu"}, ["hidden_act is 'xielu'", "silu", "gelu_new"]),
    ({"rope_scaling": {"rope_type": "mrope"}}, ["rope_type is 'mrope'", "llama3", "longrope"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["factor is missing"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 1000}}, ["alpha", "'linear'"]),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 64}}, ["short_factor", "64"]),
    ({"rope_scaling": "linear"}, ["rope_scaling is 'linear'", "object"]),
    ({"quantization_config": {"quant_method": "vptq", "bits": 4}}, ["quantization_config", "vptq", "gptq"]),
    ({"num_key_value_heads": 5}, ["num_key_value_heads is 5", "32"]),
    ({"hidden_size": 4095}, ["hidden_size is 4095", "num_attention_heads (32)"]),
    ({"num_hidden_layers": "32"}, ["num_hidden_layers is '32'", "whole number"]),
    ({"vocab_size": True}, ["vocab_size is True"]),
    ({"intermediate_size": None}, ["intermediate_size is missing"]),
    ({"rms_norm_eps": -1}, ["rms_norm_eps is -1", "above 0"]),
    ({"attention_bias": "yes"}, ["attention_bias is 'yes'", "true or false"]),
    ({"architectures": ["LlamaForCausaLM"]}, ["'LlamaForCausaLM'", "nearest", "LlamaForCausalLM;", "GPT2LMHeadModel"]),
    ({"architectures": ["Qwen3NewForCausalLM"]}, ["nearest that it knows is Qwen3NextForCausalLM"]),
    ({"architectures": None, "model_type": "lama"}, ["model_type 'lama'", "is llama;"]),
    ({"architectures": [], "model_type": None}, ["neither architectures nor model_type"]),
])
def test_refusals(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        describe({**LLAMA, **changes})
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("name", "changes", "word"), [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma-4-26B-A4B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention.*null or vision"),
    ("gemma-4-26B-A4B", {"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30; possible is a number that leaves"),
    ("gemma-4-26B-A4B", {"num_kv_shared_layers": 25}, "num_kv_shared_layers is 25"),
    ("gemma-4-26B-A4B", {"per_layer_config": {"3": 7}}, "per_layer_config.*possible is an object of objects"),
    ("gemma-4-26B-A4B", {"per_layer_config": [1]}, "per_layer_config.*possible is an object of objects"),
    ("gemma-3n-E4B", {"altup_active_idx": 4}, "altup_active_idx is 4; possible is a number below altup_num_inputs"),
    ("gemma-3n-E4B", {"activation_sparsity_pattern": [1.0] * 35}, "activation_sparsity_pattern.*a share below 1"),
    ("gemma-3n-E4B", {"intermediate_size": [7] * 3}, "intermediate_size.*a list of 35 values"),
    ("gemma-4-26B-A4B", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ("Qwen2.5-0.5B", {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
    ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("Qwen2.5-0.5B", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ("GLM-4.7-Flash", {"scoring_func": "softmax"}, "scoring_func.*sigmoid"),
    ("GLM-4.7-Flash", {"n_group": 2, "topk_group": 3}, "topk_group is 3; possible is at most 2"),
    ("GLM-4.7-Flash", {"n_group": 32, "topk_group": 1}, "topk_group is 1; possible is .* hold num_experts_per_tok"),
    ("GLM-4.7-Flash", {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "shared"]}, "indexer_types"),
    ("GLM-4.7-Flash", {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk_pattern": "FFS"}, "index_topk_pattern"),
    ("Qwen2.5-0.5B", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.11}}, "YaRN with 7 "),
    ("gpt2", {"architectures": ["GPTJForCausalLM"], "rotary_dim": 80}, "rotary_dim is 80; possible is at most 64"),
    ("SmolLM3-3B", {"architectures": ["AfmoeForCausalLM"], "attention_bias": True}, "attention_bias is True"),
])
def test_variants_that_would_compute_something_else_are_refused(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        describe({**REAL[name][0], **changes})


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM"])
def test_positions_of_gpt2_by_both_of_their_names(architecture: str) -> None:
    config = {**REAL["gpt2"][0], "architectures": [architecture]}
    assert describe(config).max_positions == config.pop("n_positions") == 1024
    assert describe({**config, "max_position_embeddings": 512}).max_positions == 512


@pytest.mark.parametrize("kind", sampled(dict.fromkeys(case.kind for case in CASES if case.kind != "Exaone"), 10, 4))
def test_absent_values_are_those_of_the_configuration_class(kind: str) -> None:
    """Each alone, left out or null, as hand-written configs and older files have some; or it is asked for by name."""
    transformers = pytest.importorskip("transformers")
    case, make = next(case for case in CASES if case.kind == kind), getattr(transformers, f"{kind}Config")
    # transformers saves Sarvam by the names of GLM's and DeepSeek's classes. Files that leave values out are published ones.
    model = f"{kind}ForCausalLM" if kind.startswith("Sarvam") else case.model
    full, named = make(**case.config).to_dict(), {"architectures": [model]}
    derived = {"architectures", "model_type", "qk_head_dim", "layer_types", "mlp_layer_types"}
    # Every file has these: the number of layers for drafting, the rotation that Ministral 3 is trained with, and what
    # transformers makes of Gemma 4's layer_types.
    said = {"num_nextn_predict_layers", "per_layer_config", *({"rope_parameters"} if kind == "Ministral3" else ())}
    for name in full.keys() - said:
        for given in ({key: value for key, value in full.items() if key != name}, {**full, name: None}):
            if name == "first_k_dense_replace":
                given.pop("mlp_layer_types", None)
            try:
                stated = make(**{key: given[key] for key in given if key == name or key not in derived}).to_dict()
                wanted = describe({**stated, **{key: given[key] for key in derived & given.keys() - {name}}, **named})
            except Exception:  # the class refuses it, too, in many ways
                continue
            try:
                assert describe(given | named) == wanted, name
            except ModelError as error:
                assert name not in given and "is missing" in str(error), name


@pytest.mark.parametrize(("kind", "old", "new"), [
    ("Olmoe", "num_experts", "num_local_experts"), ("FlexOlmo", "num_experts", "num_local_experts"),
    ("HYV3", "num_experts", "num_local_experts"), ("Kolibri1", "num_experts", "num_local_experts"),
    ("Qwen3Moe", "num_experts", "num_local_experts"), ("Ernie4_5_Moe", "moe_k", "num_experts_per_tok")])
def test_numbers_of_experts_by_both_of_their_names(kind: str, old: str, new: str) -> None:
    """transformers takes either, and writes now the one, now the other."""
    transformers = pytest.importorskip("transformers")
    case = next(case for case in CASES if case.kind == kind)
    full = getattr(transformers, f"{kind}Config")(**case.config).to_dict() | {"architectures": [case.model]}
    value, rest = case.config[old], {key: full[key] for key in full.keys() - {old, new}}
    assert describe({**rest, old: value}) == describe({**rest, new: value}) == describe(full)


def test_rotations_of_older_files_replace_the_class_s() -> None:
    """A scaling that is given is used whole, and a base that is given alone moves the class's."""
    oss = {**LLAMA, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    old, alone = (describe(oss | {"rope_theta": 777.0, "rope_scaling": given}).attentions[0].rope
                  for given in ({"type": "linear", "factor": 2.0}, None))
    assert old is not None and alone is not None and (old.theta, old.scaling) == (777.0, LinearScaling(2.0))
    assert (alone.theta, alone.scaling) == (777.0, YarnScaling(32.0, 4096, truncate=False))


def test_the_default_rotation_of_ministral_3() -> None:
    """Files written by transformers have max_position_embeddings in it."""
    transformers = pytest.importorskip("transformers")
    given = transformers.Ministral3Config().to_dict() | {"architectures": ["Ministral3ForCausalLM"]}
    assert "max_position_embeddings" in given["rope_parameters"]
    assert describe(given).max_positions == 262144


def test_model_type_is_enough() -> None:
    assert describe({**LLAMA, "architectures": None}).architecture == "LlamaForCausalLM"


def test_every_family_declares_itself() -> None:
    known = registry()
    files = {path.stem for path in Path(families.__path__[0]).glob("*.py")} - {"__init__"}
    modules = [family for family in known.architectures.values() if isinstance(family, ModuleType)]
    assert {module.__name__.rpartition(".")[2] for module in modules} == files
    assert set(known.architectures.values()) == set(known.model_types.values())


FAMILY = """
from penstock.models.families import llama
ARCHITECTURES, MODEL_TYPES, RULES, spec = ("AlpacaForCausalLM",), ("alpaca",), llama.RULES, llama.spec
DEFAULTS = {"hidden_act": "gelu", "max_position_embeddings": 77}
"""


def test_a_new_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alpaca.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    registry.cache_clear()
    try:
        config = {name: value for name, value in LLAMA.items() if name not in ("hidden_act", "max_position_embeddings")}
        spec = describe({**config, "architectures": ["AlpacaForCausalLM"]})
        assert (spec.architecture, spec.max_positions) == ("AlpacaForCausalLM", 77)
    finally:
        registry.cache_clear()


def test_nested_config_keeps_the_outer_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL["gemma-3-4b"][0]))
    config = read_config(tmp_path)
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert (config["hidden_size"], config["eos_token_id"]) == (2560, [1, 106])
    assert dtype_of(None, config) == "bfloat16"


@pytest.mark.parametrize(("text", "word"), [
    (None, "missing"), ("{", "cannot be read"), ("[1]", "list"), ("\xff", "cannot be read")])
def test_unreadable_config(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(ModelError, match=word):
        read_config(tmp_path)


def test_end_of_sequence_tokens_of_both_files(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    assert eos_ids(tmp_path, {"eos_token_id": 2}) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9], "temperature": 0.6}')
    assert eos_ids(tmp_path, {"eos_token_id": 2}) == [7, 2, 9]
    assert eos_ids(tmp_path, {"eos_token_id": None}) == [7, 2, 9]
    assert read_generation_config(tmp_path)["temperature"] == 0.6
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_ids(tmp_path, {})


def test_a_mixture_of_experts_is_called_one() -> None:
    """Mixtral's hint used to name Mistral, whose folder would not help."""
    mixtral = LLAMA | {"architectures": ["MixedForCausalLM"], "model_type": "mixed", "num_local_experts": 8}
    with pytest.raises(ModelError, match="MixedForCausalLM', a mixture-of-experts model") as caught:
        describe(mixtral)
    assert "nearest" not in str(caught.value)
    dbrx = {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}
    with pytest.raises(ModelError, match="DbrxForCausalLM', a mixture-of-experts model"):
        describe(LLAMA | dbrx)


@pytest.mark.parametrize("option", [{"num_hash_layers": 3}, {"mlp_layer_types": ["hash_moe", "moe"]}], ids=str)
def test_routing_by_hashes_is_refused_by_name(option: dict[str, Any]) -> None:
    for name in ("DeepseekV4ForCausalLM", "DeepseekV3ForCausalLM"):
        with pytest.raises(ModelError, match=f"{next(iter(option))} .* chosen by a hash of the token"):
            describe({"architectures": [name], "n_routed_experts": 8, **option})
