"""Small random models of every family, made by transformers: three shapes or more each.

Between them the shapes of a family have odd head counts, head sizes unequal to width / heads, tied and untied heads, biases,
partial rotation and windows shorter than the prompt, as far as the family allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import foreign
from tests.models.foreign import Weights

PROMPT = 75
"""Tokens in a prompt; windows are shorter."""

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS = {"Llama4Text": "Llama4ForCausalLM", "Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel",
          "Gemma3nText": "Gemma3nForCausalLM", "Gemma4Text": "Gemma4ForCausalLM",
          "Gemma4UnifiedText": "Gemma4UnifiedForCausalLM",
          "Exaone": "LlamaForCausalLM", "SarvamMoE": "Glm4MoeForCausalLM", "SarvamMLA": "DeepseekV3ForCausalLM",
          "Qwen3_5Text": "Qwen3_5ForCausalLM", "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM"}
"""Model classes that are not called `kind` + ForCausalLM."""


@dataclass(frozen=True)
class Case:
    """`config` is given to transformers' configuration class, `kind` + Config."""

    name: str
    kind: str
    config: dict[str, Any]
    max_model_len: int = 256
    greedy: int = 64
    attention: str = "eager"
    """transformers' implementation of it."""

    rewrite: Callable[[Weights, dict[str, Any]], tuple[Weights, dict[str, Any]]] | None = None
    """To the tensors and the config of a family that transformers lacks, and whose arithmetic is that of `kind`."""

    @property
    def model(self) -> str:
        return MODELS.get(self.kind, f"{self.kind}ForCausalLM")


ODD = {"vocab_size": 199, "hidden_size": 60, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 5,
       "num_key_value_heads": 5, "head_dim": 12, "max_position_embeddings": 512, "tie_word_embeddings": False, **ENDS}
EVEN = {**ODD, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WIDE = {**ODD, "hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
"""Heads wider than their share of the width."""
NEOX = {name: value for name, value in ODD.items() if name not in ("num_key_value_heads", "head_dim")}
GPT2 = {"vocab_size": 199, "n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 256, **ENDS}
ONE_KV = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
DYNAMIC = rope("dynamic", factor=4.0)
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
DIVISORS = {"short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 2.0, 2.1, 2.4], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 7.0, 9.0]}
LONGROPE = rope("longrope", partial_rotary_factor=1.0, **DIVISORS)
PHIMOE = {**{name: value for name, value in EVEN.items() if name != "head_dim"}, "num_experts_per_tok": 2}
PHIMOE_ROPE = rope("longrope", short_mscale=1.2, long_mscale=1.2, original_max_position_embeddings=256, **DIVISORS)
"""Beyond that length transformers takes the short divisors with the long scale; Penstock takes the long ones."""
GEMMA3_ROPES = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}
GEMMA4 = {"vocab_size_per_layer_input": 203, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
          "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 20,
          "sliding_window": 19}
GEMMA4_SHARED = {"hidden_size_per_layer_input": 7, "num_kv_shared_layers": 3}
GEMMA4_ROPES = {"rope_parameters": {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.6, "rope_theta": 5000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}
GEMMA3N = {**{name: value for name, value in GEMMA4.items() if name != "global_head_dim"}, "laurel_rank": 5,
           "hidden_size_per_layer_input": 7, "activation_sparsity_pattern": [0.6, 0.95, 0.0, 0.3, 0.0, 0.8]}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 28}
MOE = {"moe_intermediate_size": 28, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True}
SHARED = {"shared_expert_intermediate_size": 52}
DELTA = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 34,
         "linear_conv_kernel_dim": 4, "full_attention_interval": 2, **rope("default", partial_rotary_factor=0.5)}
NEXT = {**MOE, **SHARED, **DELTA}
"""Narrower values, tied heads and more such layers in a row make transformers' own logits differ by more than the tests' limit
between a prompt at once and token by token."""
KOLIBRI = {**{name: value for name, value in ODD.items() if name != "intermediate_size"}, **MOE, **SHARED, "sliding_window": 19}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
SPARSE_DENSE = ["sparse", "dense", "sparse"]
SIGMOID = {"moe_intermediate_size": 28, "n_routed_experts": 7, "num_experts_per_tok": 3, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "norm_topk_prob": True}
ERNIE = {**{name: value for name, value in EVEN.items() if name != "head_dim"}, "moe_intermediate_size": 28, "moe_k": 3,
         "moe_num_experts": 7}
LLAMA4 = {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 70, "no_rope_layer_interval": 2}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 0.5}

MLA = {name: value for name, value in ODD.items() if name != "head_dim"} | {
    "first_k_dense_replace": 3, "kv_lora_rank": 20, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10}
MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9)
MIXED = {"first_k_dense_replace": 1, "n_routed_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
         "n_shared_experts": 1}
SPARSE = {**MLA, "q_lora_rank": 24, "index_head_dim": 14, "index_n_heads": 8, "n_routed_experts": 4}
AFMOE = {"num_hidden_layers": 4, "sliding_window": 20, "num_dense_layers": 1, "num_experts": 7, "num_experts_per_tok": 2,
         "moe_intermediate_size": 20, "num_shared_experts": 1}
OSS = {"num_local_experts": 7, "num_experts_per_tok": 2}
MLA3 = {name: value for name, value in MLA.items() if name != "first_k_dense_replace"} | {"q_lora_rank": 22}
FALCON = {"vocab_size": 199, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 5, "ffn_hidden_size": 88,
          "max_position_embeddings": 512, **ENDS}
BLOOM = {"vocab_size": 199, "hidden_size": 60, "n_layer": 3, **ENDS}
MPT = {"vocab_size": 199, "d_model": 60, "n_layers": 3, "n_heads": 5, "max_seq_len": 512, **ENDS}
OPT = {"vocab_size": 199, "hidden_size": 60, "ffn_dim": 88, "num_hidden_layers": 3, "num_attention_heads": 5,
       "max_position_embeddings": 300, "word_embed_proj_dim": 60, **ENDS}
NEO = {"vocab_size": 199, "hidden_size": 60, "num_layers": 4, "num_heads": 5, "max_position_embeddings": 300, **ENDS}

CASES = [
    Case("llama-plain", "Llama", {**ODD, "rms_norm_eps": 1e-5}),
    Case("llama-tied-biased", "Llama", {**WIDE, **TIED, **BIASED, "mlp_bias": True}),
    Case("llama-one-kv", "Llama", {**ODD, **ONE_KV, "hidden_act": "gelu", **rope("default", rope_theta=500.0)}),
    Case("llama-linear", "Llama", {**ODD, **rope("linear", factor=2.5)}),
    Case("llama-dynamic", "Llama", {**ODD, **DYNAMIC}, 512),
    # Beyond its length transformers rotates by each length in turn, Penstock by max_model_len: they meet where it is reached.
    Case("llama-dynamic-beyond", "Llama", {**ODD, **DYNAMIC, "max_position_embeddings": 40}, PROMPT, greedy=1),
    Case("llama-llama3", "Llama", {**WIDE, **LLAMA3}),
    Case("llama-yarn", "Llama", {**WIDE, **rope("yarn", **YARN)}),
    Case("llama-yarn-scaled", "Llama", {**ODD, **rope("yarn", **YARN, beta_fast=20.0, beta_slow=2.0, attention_factor=1.3)}),
    Case("llama-longrope", "Llama", {**WIDE, **rope("longrope", factor=4.0, original_max_position_embeddings=48, **DIVISORS)}),
    Case("mistral-window", "Mistral", {**ODD, "sliding_window": 20}),
    Case("mistral-all", "Mistral", {**WIDE, **TIED, "sliding_window": None}),
    Case("mistral-narrow", "Mistral", {**EVEN, "sliding_window": 2}),
    Case("qwen2-plain", "Qwen2", {**ODD, "use_sliding_window": False}),
    Case("qwen2-window", "Qwen2", {**EVEN, **TIED, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    Case("qwen2-yarn", "Qwen2", {**ODD, **ONE_KV, "hidden_size": 84, "num_attention_heads": 7, **rope("yarn", **YARN)}),
    Case("qwen3-plain", "Qwen3", ODD),
    Case("qwen3-tied", "Qwen3", {**WIDE, **TIED, **BIASED}),
    Case("qwen3-window", "Qwen3", {**EVEN, "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2}),
    Case("qwen3-moe-odd", "Qwen3Moe", {**ODD, **MOE}),
    Case("qwen3-moe-top-1", "Qwen3Moe", {**WIDE, **TIED, **MOE, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    Case("qwen3-moe-window", "Qwen3Moe", {**EVEN, **MOE, "use_sliding_window": True, "sliding_window": 18,
                                          "max_window_layers": 2}),
    Case("qwen3-moe-mixed", "Qwen3Moe", {**EVEN, **MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "num_experts": 5,
                                         "mlp_only_layers": [1]}),
    Case("qwen2-moe-shared", "Qwen2Moe", {**ODD, **MOE, **SHARED, "norm_topk_prob": False}),
    Case("qwen2-moe-every", "Qwen2Moe", {**EVEN, **TIED, **MOE, **SHARED, "num_experts": 1, "num_experts_per_tok": 1,
                                         "qkv_bias": False}),
    Case("qwen2-moe-window", "Qwen2Moe", {**EVEN, **MOE, **SHARED, "decoder_sparse_step": 2, "use_sliding_window": True,
                                          "sliding_window": 21, "max_window_layers": 2}),
    Case("qwen3next-odd", "Qwen3Next", {**ODD, **NEXT}),
    Case("qwen3next-mixed", "Qwen3Next", {**EVEN, **NEXT, "num_hidden_layers": 4, "decoder_sparse_step": 2,
                                          "mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_key_heads": 1,
                                          "linear_num_value_heads": 5, "linear_conv_kernel_dim": 2}),
    Case("qwen3next-last", "Qwen3Next", {**WIDE, **BIASED, **NEXT, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
                                         "linear_key_head_dim": 21, "linear_value_head_dim": 9, "num_experts_per_tok": 1,
                                         "layer_types": ["full_attention", "linear_attention", "linear_attention"]}),
    Case("qwen3.5-odd", "Qwen3_5Text", {**ODD, **DELTA,
                                        "layer_types": ["full_attention", "linear_attention", "full_attention"]}),
    Case("qwen3.5-even", "Qwen3_5Text", {**EVEN, **DELTA, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
                                         "num_hidden_layers": 2,
                                         **rope("default", mrope_section=[2, 1, 1], mrope_interleaved=True)}),
    Case("qwen3.5-moe", "Qwen3_5MoeText", {**WIDE, **NEXT, "intermediate_size": None, "num_experts_per_tok": 1,
                                           "linear_num_key_heads": 1, "linear_num_value_heads": 5, "linear_conv_kernel_dim": 2,
                                           "layer_types": ["linear_attention", "full_attention", "full_attention"]},
         rewrite=partial(foreign.beside_towers, architecture="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe")),
    Case("kolibri1-odd", "Kolibri1", {**KOLIBRI, "norm_topk_prob": False, "layer_types": SLIDING}),
    Case("kolibri1-fifth", "Kolibri1", {**KOLIBRI, **TIED, **ONE_KV, "num_hidden_layers": 5, "num_experts_per_tok": 1}),
    Case("kolibri1-full", "Kolibri1", {**KOLIBRI, "head_dim": 16, "num_experts": 12, "layer_types": ["full_attention"] * 3}),
    Case("mixtral-odd", "Mixtral", {**ODD, "num_local_experts": 5, "num_experts_per_tok": 2}),
    Case("mixtral-all", "Mixtral", {**WIDE, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 25}),
    Case("mixtral-top-1", "Mixtral", {**EVEN, **TIED, "num_local_experts": 9, "num_experts_per_tok": 1}),
    Case("olmoe-odd", "Olmoe", {**ODD, "num_experts": 7, "num_experts_per_tok": 3}),
    Case("olmoe-normalised", "Olmoe", {**EVEN, **BIASED, "num_experts": 16, "norm_topk_prob": True, "num_experts_per_tok": 5}),
    Case("olmoe-one-kv", "Olmoe", {**ODD, **ONE_KV, **TIED, "num_experts": 3, "num_experts_per_tok": 1}),
    Case("granite-moe-odd", "GraniteMoe", {**ODD, **GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3}),
    Case("granite-moe-top-1", "GraniteMoe", {**EVEN, **TIED, **BIASED, **GRANITE, "num_local_experts": 4,
                                             "num_experts_per_tok": 1}),
    Case("granite-moe-shared", "GraniteMoeShared", {**ODD, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2,
                                                    "shared_intermediate_size": 44}),
    Case("phimoe-plain", "Phimoe", {**PHIMOE, "num_local_experts": 7}),
    Case("phimoe-biased", "Phimoe", {**PHIMOE, **BIASED, "lm_head_bias": True, "router_jitter_noise": 0.2,
                                     "sliding_window": 23}),
    Case("phimoe-longrope", "Phimoe", {**PHIMOE, **PHIMOE_ROPE, "num_local_experts": 3, "num_key_value_heads": 1}),
    Case("minimax-odd", "MiniMaxM2", {**ODD, "num_local_experts": 7, "num_experts_per_tok": 3}),
    Case("minimax-partial", "MiniMaxM2", {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 1,
                                          **rope("default", partial_rotary_factor=0.5)}),
    Case("minimax-all", "MiniMaxM2", {**EVEN, **TIED, "num_local_experts": 4, "num_experts_per_tok": 4}),
    Case("glm4-moe-odd", "Glm4Moe", {**ODD, **SIGMOID, "use_qk_norm": True}),
    Case("glm4-moe-groups", "Glm4Moe", {**WIDE, **SIGMOID, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                                        "attention_bias": True, "routed_scaling_factor": 2.5}),
    Case("glm4-moe-dense", "Glm4Moe", {**EVEN, **TIED, **SIGMOID, "first_k_dense_replace": 2, "n_shared_experts": 2,
                                       "norm_topk_prob": False}),
    Case("sarvam-saved", "SarvamMoE", {**ODD, **SIGMOID, "attention_bias": True}),
    Case("sarvam-odd", "SarvamMoE", {**ODD, **SIGMOID, "routed_scaling_factor": 1.7}, rewrite=foreign.sarvam),
    Case("sarvam-groups", "SarvamMoE", {**WIDE, **TIED, **SIGMOID, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                                        "attention_bias": True, "first_k_dense_replace": 0, **rope("default")},
         rewrite=foreign.sarvam),
    Case("dots1-odd", "Dots1", {**ODD, **SIGMOID, "n_shared_experts": 2}),
    Case("dots1-window", "Dots1", {**EVEN, **SIGMOID, "sliding_window": 19, "max_window_layers": 1, "n_group": 7,
                                   "n_routed_experts": 14, "topk_group": 3, "num_experts_per_tok": 4}),
    Case("dots1-biased", "Dots1", {**WIDE, **TIED, **BIASED, **SIGMOID, "first_k_dense_replace": 0}),
    Case("solar-odd", "SolarOpen", {**ODD, **{name: SIGMOID[name] for name in SIGMOID if name != "first_k_dense_replace"}}),
    Case("solar-groups", "SolarOpen", {**WIDE, **TIED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                                       "moe_intermediate_size": 20, "num_experts_per_tok": 3, "attention_bias": True}),
    Case("exaone3-saved", "Exaone", {**ODD, **LLAMA3}),
    Case("exaone3-published", "Exaone", {**EVEN, **TIED}, rewrite=foreign.exaone),
    Case("exaone-moe-odd", "ExaoneMoe", {**ODD, **MOE, "num_hidden_layers": 5, "sliding_window": 20}),
    Case("exaone-moe-global", "ExaoneMoe", {**WIDE, **TIED, **MOE, "num_experts": 8, "n_group": 2, "topk_group": 1,
                                            "num_shared_experts": 2, "sliding_window": 18, "norm_topk_prob": False,
                                            "layer_types": SLIDING,
                                            "mlp_layer_types": SPARSE_DENSE}),
    Case("flex-olmo-odd", "FlexOlmo", {**ODD, "num_experts": 5, "num_experts_per_tok": 2}),
    Case("flex-olmo-one-kv", "FlexOlmo", {**EVEN, **ONE_KV, **TIED, **BIASED, "num_experts": 7, "num_experts_per_tok": 1,
                                          "norm_topk_prob": True}),
    Case("ernie-moe-odd", "Ernie4_5_Moe", {**ERNIE, "num_key_value_heads": 5, "num_attention_heads": 5, "hidden_size": 60}),
    Case("ernie-moe-biased", "Ernie4_5_Moe", {**ERNIE, "use_bias": True, "moe_layer_start_index": 0, "moe_layer_interval": 2,
                                              "moe_num_shared_experts": 1, "tie_word_embeddings": True}),
    Case("ernie-moe-middle", "Ernie4_5_Moe", {**ERNIE, "moe_layer_end_index": 1, "moe_k": 1, "moe_num_shared_experts": 0}),
    Case("hunyuan-moe-odd", "HunYuanMoEV1", {**ODD, "num_experts": 7, "moe_topk": 3}),
    Case("hunyuan-moe-top-1", "HunYuanMoEV1", {**EVEN, **TIED, **BIASED, "num_experts": 4, "moe_topk": 1}),
    Case("hunyuan-moe-alpha", "HunYuanMoEV1", {**WIDE, "num_experts": 5, "moe_topk": 2,
                                               **rope("dynamic", alpha=1000.0, factor=1.0)}),
    Case("llama4-odd", "Llama4Text", {**ODD, **LLAMA4, **rope("yarn", **YARN)}),
    Case("llama4-interleaved", "Llama4Text", {**EVEN, **TIED, **BIASED, **LLAMA4, "interleave_moe_layer_step": 2,
                                              "num_experts_per_tok": 2, "attn_temperature_tuning": False}),
    Case("llama4-unnormed", "Llama4Text", {**WIDE, **LLAMA4, "use_qk_norm": False, "no_rope_layers": [1, 0, 1]}),
    Case("llama4-beside-vision", "Llama4Text", {**ODD, **LLAMA4}, rewrite=partial(
        foreign.beside_towers, architecture="Llama4ForConditionalGeneration", model_type="llama4", old=True,
        attn_temperature_tuning=4)),
    Case("gemma2-plain", "Gemma2", {**ODD, **TIED, "sliding_window": 16, "query_pre_attn_scalar": 10}),
    Case("gemma2-grouped", "Gemma2", {**WIDE, **BIASED, "sliding_window": 33, "attn_logit_softcapping": 5.0,
                                      "final_logit_softcapping": 8.0}),
    Case("gemma2-uncapped", "Gemma2", {**EVEN, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Case("gemma3-plain", "Gemma3Text", {**ODD, **TIED, "sliding_window": 16, "query_pre_attn_scalar": 10,
                                        "sliding_window_pattern": 2}),
    Case("gemma3-grouped", "Gemma3Text", {**WIDE, "sliding_window": 30, "final_logit_softcapping": 9.0, "num_hidden_layers": 4,
                                          "sliding_window_pattern": 3, **GEMMA3_ROPES}),
    Case("gemma3-local", "Gemma3Text", {**EVEN, **TIED, "sliding_window": 8}),
    Case("gemma3n-plain", "Gemma3nText", {**ODD, **GEMMA3N, **TIED}),
    Case("gemma3n-shared", "Gemma3nText", {**EVEN, **GEMMA3N, "num_kv_shared_layers": 3, "altup_num_inputs": 2,
                                           "intermediate_size": [70, 71, 72, 73, 74, 75], "vocab_size_per_layer_input": 150}),
    Case("gemma3n-active", "Gemma3nText", {**ODD, **GEMMA3N, **BIASED, **ONE_KV, "num_hidden_layers": 5, "layer_types": None,
                                           "activation_sparsity_pattern": [0.5, 0.9, 0.0, 0.0, 0.3], "altup_active_idx": 2,
                                           "altup_num_inputs": 3, "altup_correct_scale": False}),
    Case("gemma3n-beside-towers", "Gemma3nText", {**ODD, **GEMMA3N, **GEMMA3_ROPES, "num_kv_shared_layers": 2}, rewrite=partial(
        foreign.beside_towers, architecture="Gemma3nForConditionalGeneration", model_type="gemma3n")),
    Case("gemma4-shared", "Gemma4Text", {**ODD, **GEMMA4, **GEMMA4_SHARED, **TIED, "use_double_wide_mlp": True,
                                         "final_logit_softcapping": 9.0, "num_key_value_heads": 1}),
    Case("gemma4-inputs", "Gemma4Text", {**EVEN, **GEMMA4, "hidden_size_per_layer_input": 16, "num_hidden_layers": 3,
                                         "layer_types": None, **GEMMA4_ROPES}),
    Case("gemma4-reading", "Gemma4Text", {**WIDE, **GEMMA4, **BIASED, **GEMMA4_SHARED, "num_kv_shared_layers": 2,
                                          "attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    Case("gemma4-keys", "Gemma4Text", {**WIDE, **GEMMA4, **TIED, **GEMMA4_ROPES, "global_head_dim": 32,
                                       "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    Case("gemma4-unified", "Gemma4UnifiedText", {**ODD, **GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    Case("gemma4-experts", "Gemma4Text", {**EVEN, **GEMMA4, **GEMMA4_EXPERTS, **GEMMA4_SHARED}),
    Case("gemma4-eleven", "Gemma4Text", {**ODD, **GEMMA4, "num_hidden_layers": 11, "layer_types": None, "global_head_dim": 24}),
    Case("gemma4-beside-towers", "Gemma4Text", {**ODD, **GEMMA4, **GEMMA4_EXPERTS, **TIED}, rewrite=partial(
        foreign.beside_towers, architecture="Gemma4ForConditionalGeneration", model_type="gemma4")),
    Case("phi3-plain", "Phi3", {**ODD, "sliding_window": 30}),
    Case("phi3-partial", "Phi3", {**EVEN, **TIED, "partial_rotary_factor": 0.75}),
    Case("phi3-short", "Phi3", {**EVEN, "original_max_position_embeddings": 256, **LONGROPE}),
    Case("phi3-long", "Phi3", {**EVEN, "original_max_position_embeddings": 40, **LONGROPE}),
    Case("olmo2-plain", "Olmo2", ODD),
    Case("olmo2-grouped", "Olmo2", {**EVEN, **BIASED}),
    Case("olmo2-tied", "Olmo2", {**ODD, **ONE_KV, **TIED, "rms_norm_eps": 1e-6}),
    Case("granite-plain", "Granite", {**ODD, **GRANITE}),
    Case("granite-tied", "Granite", {**EVEN, **TIED, **BIASED, **GRANITE, "mlp_bias": True, "embedding_multiplier": 3.3}),
    Case("granite-one-kv", "Granite", {**ODD, **ONE_KV, "attention_multiplier": 0.3}),
    Case("hyperclovax-odd", "HyperCLOVAX", {**ODD, **GRANITE, "logits_scaling": 0.4}),
    Case("hyperclovax-even", "HyperCLOVAX", {**EVEN, **TIED, **BIASED, "mlp_bias": True, "use_post_norm": False,
                                             "embedding_multiplier": 2.5, "logits_scaling": 0.7}),
    Case("graniteswa-odd", "GraniteSWA", {**ODD, **GRANITE, **rope("yarn", **YARN), "num_hidden_layers": 4,
                                           "sliding_window": 20, "layer_rope_theta": [10000.0, 500.0, 0, 10000.0]}),
    Case("graniteswa-even", "GraniteSWA", {**EVEN, **TIED, **BIASED, **GRANITE, "sliding_window": 17}),
    Case("granitemoeswa-odd", "GraniteMoeSWA", {**ODD, **GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3,
                                                  "sliding_window": 20, "shared_intermediate_size": 44}),
    Case("granitemoeswa-nope", "GraniteMoeSWA", {**EVEN, **TIED, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 1,
                                                   "sliding_window": 18, "layer_rope_theta": [0, 10000, 70.0]}),
    Case("cohere2moe-odd", "Cohere2Moe", {**ODD, "num_hidden_layers": 4, "num_experts": 7, "num_experts_per_tok": 3,
                                          "num_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 19,
                                          "prefix_dense_intermediate_size": 44, "sliding_window_pattern": 3,
                                          "logit_scale": 0.7}),
    Case("cohere2moe-sum", "Cohere2Moe", {**EVEN, **BIASED, "num_experts": 5, "num_experts_per_tok": 1, "num_shared_experts": 1,
                                          "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid",
                                          "norm_topk_prob": False, "rms_norm_eps": 1e-5, "sliding_window": 20,
                                          "prefix_dense_sliding_window_pattern": 2, "mlp_layer_types": SPARSE_DENSE,
                                          "layer_types": SLIDING, "logit_scale": 0.9}),
    Case("hunyuan3-odd", "HYV3", {**ODD, **MOE, "num_shared_experts": 2}),
    Case("hunyuan3-biased", "HYV3", {**EVEN, **MOE, "num_shared_experts": 1, "mlp_bias": True}),
    Case("hunyuan3-top-1", "HYV3", {**WIDE, **TIED, **BIASED, **MOE, "num_experts_per_tok": 1, "num_experts": 9,
                                    "norm_topk_prob": False, "mlp_layer_types": SPARSE_DENSE}),
    Case("mellum-odd", "Mellum", {**ODD, **MOE, "sliding_window": 19, "norm_topk_prob": False, "mlp_layer_types": SPARSE_DENSE,
                                  "layer_types": SLIDING, "rope_parameters": {
                                      "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
                                      "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    Case("mellum-full", "Mellum", {**EVEN, **TIED, **MOE, "num_experts_per_tok": 1}),
    Case("flint-odd", "Flint", {**ODD, **MOE, **SHARED, "num_hidden_layers": 4, "sliding_window": 19}),
    Case("flint-sparse", "Flint", {**WIDE, **TIED, **BIASED, **MOE, **SHARED, "num_experts_per_tok": 1, "mlp_only_layers": [],
                                   "norm_topk_prob": False, "layer_types": SLIDING, "sliding_window": 18}),
    Case("smollm3-plain", "SmolLM3", {**ODD, "num_hidden_layers": 4}),
    Case("smollm3-chosen", "SmolLM3", {**EVEN, **TIED, **BIASED, "no_rope_layers": [0, 1, 0], "mlp_bias": True}),
    Case("smollm3-window", "SmolLM3", {**ODD, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 19}),
    Case("deepseek2-experts", "DeepseekV2", {**MLA, **MIXED, "n_shared_experts": 2, "routed_scaling_factor": 1.7}),
    Case("deepseek2-grouped", "DeepseekV2", {**MLA, **MIXED, "topk_method": "group_limited_greedy", "n_group": 3,
                                             "topk_group": 2, "n_routed_experts": 9}),
    Case("deepseek2-greedy", "DeepseekV2", {**MLA, **MIXED, "n_group": 3, "topk_group": 2, "n_routed_experts": 8}),
    Case("deepseek2-biased", "DeepseekV2", {**MLA, **MIXED, "n_shared_experts": 2, "mlp_bias": True}),
    Case("deepseek3-experts", "DeepseekV3", {**MLA, **MIXED, **MSCALE, "n_group": 2, "topk_group": 1, "n_routed_experts": 6,
                                             "num_nextn_predict_layers": 1}),
    Case("deepseek3-ungrouped", "DeepseekV3", {**MLA, **MIXED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    Case("axk1-odd", "AXK1", {**MLA, **MIXED, "q_lora_rank": 24, "n_group": 1, "topk_group": 1}),
    Case("axk1-published", "AXK1", {**MLA, **MIXED, **TIED, **MSCALE, "q_lora_rank": 7, "n_group": 3, "topk_group": 2,
                                    "n_routed_experts": 9, "rms_norm_eps": 1e-4, "first_k_dense_replace": 2},
         rewrite=foreign.axk1),
    Case("axk1-interleaved", "AXK1", {**MLA, **MIXED, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                      "mlp_layer_types": SPARSE_DENSE, "n_shared_experts": 2, "rope_interleave": False}),
    Case("sarvammla-saved", "SarvamMLA", {**MLA, **MIXED}),
    Case("sarvammla-published", "SarvamMLA", {**MLA, **MIXED, **MSCALE, "q_lora_rank": None, "n_shared_experts": 2},
         rewrite=foreign.sarvam),
    Case("deepseek32-short", "DeepseekV32", {**SPARSE, "index_topk": 200}),
    Case("deepseek32-long", "DeepseekV32", {**SPARSE, **MSCALE, "index_topk": 11, "index_n_heads": 9}),
    Case("deepseek32-experts", "DeepseekV32", {**SPARSE, **TIED, **MIXED, "index_topk": 40, "n_group": 1, "topk_group": 1}),
    Case("glm5-long", "GlmMoeDsa", {**SPARSE, **MIXED, "index_topk": 11, "n_group": 1, "topk_group": 1}),
    Case("glm5-short", "GlmMoeDsa", {**SPARSE, **MIXED, **TIED, **MSCALE, "index_topk": 200, "n_group": 2, "topk_group": 1,
                                     "n_routed_experts": 6, "norm_topk_prob": False, "num_attention_heads": 3,
                                     "num_key_value_heads": 3}),
    Case("gpt-oss-plain", "GptOss", {**EVEN, **OSS, "sliding_window": 20}),
    Case("gpt-oss-odd", "GptOss", {**ODD, **OSS, **TIED, "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 1.0,
                                   "attention_bias": False}),
    Case("gpt-oss-yarn", "GptOss", {**WIDE, **OSS, **rope("yarn", **YARN, truncate=False), "sliding_window": 9}),
    Case("deepseek2-plain", "DeepseekV2", {**MLA, "n_routed_experts": 4}),
    Case("deepseek2-biased", "DeepseekV2", {**MLA, **BIASED}),
    Case("deepseek2-yarn", "DeepseekV2", {**MLA, **MSCALE, "q_lora_rank": 24, "v_head_dim": 16, "attention_bias": True}),
    Case("deepseek3-plain", "DeepseekV3", {**MLA, **MSCALE}),
    Case("glm47flash-plain", "Glm4MoeLite", {**MLA3, **MIXED, "q_lora_rank": 24, "routed_scaling_factor": 1.8,
                                             "num_nextn_predict_layers": 1}),
    Case("glm47flash-groups", "Glm4MoeLite", {**MLA3, **MIXED, **TIED, "n_group": 2, "topk_group": 1, "n_routed_experts": 6,
                                              "mlp_layer_types": SPARSE_DENSE, "norm_topk_prob": False}),
    Case("deepseek3-halved", "DeepseekV3", {**MLA, **TIED, **MSCALE, "rope_interleave": False, "q_lora_rank": 28,
                                            "attention_bias": True, "kv_lora_rank": 32}),
    Case("deepseek3-one", "DeepseekV3", {**MLA, "num_attention_heads": 1, "num_key_value_heads": 1, "q_lora_rank": 7}),
    Case("afmoe-plain", "Afmoe", {**ODD, **AFMOE, "mup_enabled": True}),
    Case("afmoe-wide", "Afmoe", {**WIDE, **AFMOE, "num_dense_layers": 0, "num_experts": 5, "route_scale": 1.6}),
    Case("afmoe-dense", "Afmoe", {**EVEN, **AFMOE, **TIED, "num_dense_layers": 4}),
    Case("arcee-plain", "Arcee", ODD),
    Case("arcee-biased", "Arcee", {**WIDE, **TIED, **BIASED, "mlp_bias": True}),
    Case("arcee-yarn", "Arcee", {**EVEN, **rope("yarn", **YARN)}),
    Case("apertus-plain", "Apertus", ODD),
    Case("apertus-llama3", "Apertus", {**WIDE, **LLAMA3, **TIED}),
    Case("apertus-one-kv", "Apertus", {**EVEN, **ONE_KV, **BIASED}),
    Case("seed-oss-plain", "SeedOss", ODD),
    Case("seed-oss-biased", "SeedOss", {**WIDE, "attention_out_bias": True, "mlp_bias": True}),
    Case("seed-oss-unbiased", "SeedOss", {**EVEN, **TIED, "attention_bias": False}),
    Case("internlm2-plain", "Llama", ODD, rewrite=foreign.internlm2),
    Case("internlm2-grouped", "Llama", WIDE, rewrite=foreign.internlm2),
    Case("internlm3-dynamic", "Llama", {**EVEN, **DYNAMIC}, 512, rewrite=foreign.internlm3),
    Case("helium-plain", "Helium", ODD),
    Case("helium-grouped", "Helium", {**EVEN, **BIASED, "mlp_bias": True}),
    Case("ernie45-plain", "Ernie4_5", ODD),
    Case("ernie45-biased", "Ernie4_5", {**WIDE, **TIED, "use_bias": True}),
    Case("hunyuan-plain", "HunYuanDenseV1", ODD),
    Case("hunyuan-biased", "HunYuanDenseV1", {**WIDE, **TIED, **BIASED}),
    Case("hunyuan-one-kv", "HunYuanDenseV1", {**EVEN, **ONE_KV}),
    Case("cwm-plain", "Cwm", {**ODD, "sliding_window": 20, "num_hidden_layers": 5, **LLAMA3}),
    Case("jais2-plain", "Jais2", ODD),
    Case("jais2-unbiased", "Jais2", {**EVEN, **TIED, "attention_bias": False, "mlp_bias": False}),
    Case("nemotron-plain", "Nemotron", ODD),
    Case("nemotron-biased", "Nemotron", {**WIDE, **TIED, **BIASED, "mlp_bias": True}),
    Case("nemotron-partial", "Nemotron", {**EVEN, "partial_rotary_factor": 0.25}),
    Case("starcoder2-plain", "Starcoder2", {**ODD, "sliding_window": None}),
    Case("starcoder2-window", "Starcoder2", {**EVEN, "sliding_window": 22, "use_bias": False}),
    Case("glm-plain", "Glm", ODD),
    Case("glm-unbiased", "Glm", {**WIDE, **TIED, "attention_bias": False, "partial_rotary_factor": 1.0}),
    Case("glm4-plain", "Glm4", ODD),
    Case("glm4-one-kv", "Glm4", {**EVEN, **ONE_KV, "partial_rotary_factor": 0.25}),
    Case("chatglm-plain", "Glm", ODD, rewrite=foreign.chatglm),
    Case("chatglm-grouped", "Glm", {**EVEN, **rope("default", rope_theta=50000.0, partial_rotary_factor=0.5)},
         rewrite=foreign.chatglm),
    Case("cohere-plain", "Cohere", {**ODD, "logit_scale": 0.7}),
    Case("cohere-normed", "Cohere", {**EVEN, **BIASED, "use_qk_norm": True, "logit_scale": 1.3, "tie_word_embeddings": True}),
    Case("cohere2-window", "Cohere2", {**EVEN, "sliding_window": 21, "num_hidden_layers": 5, "logit_scale": 0.9}),
    Case("cohere2-chosen", "Cohere2", {**ODD, **TIED, "sliding_window": 9, "logit_scale": 0.9, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}),
    Case("exaone4-plain", "Exaone4", {**ODD, "sliding_window": 20, "num_hidden_layers": 5}),
    Case("exaone4-global", "Exaone4", {**WIDE, **TIED, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    Case("exaone4-pattern", "Exaone4", {**EVEN, "sliding_window": 18, "sliding_window_pattern": 2}),
    Case("gemma-plain", "Gemma", ODD),
    Case("gemma-tied", "Gemma", {**WIDE, **TIED, **BIASED}),
    Case("gemma-one-kv", "Gemma", {**EVEN, **ONE_KV}),
    Case("olmo-plain", "Olmo", ODD),
    Case("olmo-clamped", "Olmo", {**EVEN, **TIED, **BIASED, "clip_qkv": 0.8}),
    Case("olmo3-plain", "Olmo3", {**ODD, "sliding_window": 20, "num_hidden_layers": 5}),
    Case("olmo3-yarn", "Olmo3", {**EVEN, **rope("yarn", **YARN, attention_factor=1.2), "sliding_window": 20,
                                 "num_hidden_layers": 4}),
    Case("phi-plain", "Phi", ODD),
    Case("phi-normed", "Phi", {**EVEN, "qk_layernorm": True, "partial_rotary_factor": 0.75}),
    Case("stablelm-plain", "StableLm", {**ODD, "partial_rotary_factor": 0.5}),
    Case("stablelm-parallel", "StableLm", {**EVEN, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    Case("persimmon-plain", "Persimmon", NEOX),
    Case("persimmon-unnormed", "Persimmon", {**NEOX, "qk_layernorm": False, "num_attention_heads": 3}),
    Case("falcon-new", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 5, "bias": True}),
    Case("falcon-grouped", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 6}),
    Case("falcon-one-norm", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1,
                                       "num_ln_in_parallel_attn": 1}),
    Case("falcon-multi-query", "Falcon", FALCON),
    # transformers' eager attention adds Falcon's slopes twice.
    Case("falcon-alibi", "Falcon", {**FALCON, "hidden_size": 64, "num_attention_heads": 4, "alibi": True, "multi_query": False,
                                    "parallel_attn": False, "bias": True, "tie_word_embeddings": True}, attention="sdpa"),
    Case("bloom-plain", "Bloom", {**BLOOM, "n_head": 5}),
    Case("bloom-even", "Bloom", {**BLOOM, "n_head": 4, "tie_word_embeddings": False}),
    Case("bloom-one", "Bloom", {**BLOOM, "n_head": 1}),
    Case("mpt-plain", "Mpt", MPT),
    Case("mpt-untied", "Mpt", {**MPT, "tie_word_embeddings": False}),
    Case("mpt-clamped", "Mpt", {**MPT, "n_heads": 4, "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.3}}),
    Case("opt-plain", "OPT", OPT),
    Case("opt-unbiased", "OPT", {**OPT, "enable_bias": False, "num_attention_heads": 3, "tie_word_embeddings": False}),
    Case("gptj-plain", "GPTJ", {**GPT2, "rotary_dim": 6}),
    Case("gptj-inner", "GPTJ", {**GPT2, "n_embd": 64, "n_head": 4, "rotary_dim": 16, "n_inner": 90}),
    Case("bigcode-one-kv", "GPTBigCode", GPT2),
    Case("bigcode-all", "GPTBigCode", {**GPT2, "n_head": 3, "multi_query": False, "tie_word_embeddings": False}),
    Case("gpt-neo-plain", "GPTNeo", {**NEO, "attention_types": [[["global", "local"], 2]], "window_size": 19}),
    Case("gpt-neo-global", "GPTNeo", {**NEO, "attention_types": [[["global"], 4]], "intermediate_size": 77}),
    Case("baichuan-7b", "Llama", ODD, rewrite=foreign.baichuan),
    Case("minicpm-plain", "Granite", {**ODD, "embedding_multiplier": 3.0, "attention_multiplier": 12 ** -0.5,
                                      "residual_multiplier": 1.4 / 3 ** 0.5, "logits_scaling": 2.0}, rewrite=foreign.minicpm),
    Case("minicpm3-plain", "MiniCPM3", {**MLA3, "scale_emb": 3, "dim_model_base": 30}),
    Case("minicpm3-biased", "MiniCPM3", {**MLA3, "scale_emb": 3, "dim_model_base": 30, "mlp_bias": True}),
    Case("minicpm3-tied", "MiniCPM3", {**MLA3, **TIED, "q_lora_rank": 25, "v_head_dim": 9, "scale_depth": 2.0}),
    Case("youtu-plain", "Youtu", {**MLA3, "q_lora_rank": None}),
    Case("youtu-halved", "Youtu", {**MLA3, **TIED, "rope_interleave": False}),
    Case("ministral3-plain", "Ministral3", {**ODD, **rope("yarn", factor=4.0, original_max_position_embeddings=20,
                                                           llama_4_scaling_beta=0.3)}),
    Case("ministral3-window", "Ministral3", {**EVEN, "sliding_window": 24, **rope(
        "yarn", factor=8.0, original_max_position_embeddings=32, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0)}),
    Case("ministral3-beside-vision", "Ministral3", {**ODD, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=20, llama_4_scaling_beta=0.3)}, rewrite=partial(
            foreign.beside_towers, architecture="Mistral3ForConditionalGeneration", model_type="mistral3")),
    Case("mistral3-beside-vision", "Mistral", {**WIDE, "sliding_window": None}, rewrite=partial(
        foreign.beside_towers, architecture="Mistral3ForConditionalGeneration", model_type="mistral3", old=True)),
    Case("neox-parallel", "GPTNeoX", {**NEOX, "hidden_size": 80, "rotary_pct": 0.25}),
    Case("neox-serial", "GPTNeoX", {**NEOX, "use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new",
                                    "rotary_emb_base": 500}),
    Case("neox-unbiased", "GPTNeoX", {**NEOX, **TIED, "attention_bias": False, "num_attention_heads": 3, "rotary_pct": 0.5}),
    Case("gpt2-plain", "GPT2", GPT2),
    Case("gpt2-inner", "GPT2", {**GPT2, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 100, "n_positions": 160,
                                "activation_function": "relu", "tie_word_embeddings": False}, 160),
    Case("gpt2-scaled", "GPT2", {**GPT2, "n_embd": 64, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}),
]

SAMPLED = {cases[at].name for family in {case.name.partition("-")[0]: None for case in CASES}
           for cases in [[case for case in CASES if case.name.partition("-")[0] == family]] for at in (0, -1)}
"""The first and the last case of each family, which CI runs; `make test-all` runs all."""


def make(case: Case, folder: Path) -> torch.nn.Module:
    """A model whose logits vary, saved to `folder` as float32 safetensors."""
    config = getattr(transformers, f"{case.kind}Config")(**case.config)
    config._attn_implementation, config._experts_implementation = case.attention, "eager"
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(config).float().eval()
    randomise(model)
    model.save_pretrained(folder)
    if case.rewrite is not None:
        weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        weights, values = case.rewrite(weights, json.loads((folder / "config.json").read_text()))
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(values))
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Matrices N(0, 1.5 / columns), norms off their rest by about 0.3, biases well away from zero."""
    generator = torch.Generator().manual_seed(3)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if "correction" in name or "scalar" in name]
    for name, parameter in (*model.named_parameters(), *buffers):
        noise = torch.randn(parameter.shape, generator=generator)
        if "e_score_correction_bias" in name:
            parameter.copy_(noise * 0.2)
        elif parameter.dim() >= 2:
            embedding = any(word in name for word in ("embed", "wte", "wpe"))
            columns = parameter.shape[0] if "c_" in name else parameter.shape[-1]
            parameter.copy_(noise * (0.7 if embedding else (1.5 / columns) ** 0.5))
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.3)
        else:
            parameter.add_(noise * 0.3)
