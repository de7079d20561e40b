"""Small random models of every family, made by transformers: the configurations of the tests, three shapes or more each.

A case is (name, transformers' model class, its configuration, options). Between them the shapes of a family have odd head
counts, head sizes unequal to width / heads, tied and untied heads, biases, partial rotation and windows shorter than the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPT = 75
"""Tokens in a prompt; windows are shorter."""

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Case:
    """`config` is given to transformers' configuration class `kind` + "Config"; `model` names the model class."""

    name: str
    kind: str
    model: str
    config: dict[str, Any]
    max_model_len: int = 256
    greedy: int = 64


def small(**changes: Any) -> dict[str, Any]:
    """A Llama-like configuration with odd head counts."""
    return {"vocab_size": 199, "hidden_size": 60, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 5,
            "num_key_value_heads": 5, "head_dim": 12, "max_position_embeddings": 512, "tie_word_embeddings": False, **ENDS,
            **changes}


GROUPED = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
"""Head size unequal to width / heads, two queries a key."""
EVEN = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def wide(**changes: Any) -> dict[str, Any]:
    """GROUPED where transformers insists that the heads divide the width."""
    return small(**{"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, **changes})


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DIVISORS = {"short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 2.0, 2.1, 2.4], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 7.0, 9.0]}


def _llama(name: str, config: dict[str, Any], **options: Any) -> Case:
    return Case(f"llama-{name}", "Llama", "LlamaForCausalLM", config, **options)


CASES = [
    _llama("plain", small(rms_norm_eps=1e-5)),
    _llama("tied-biased", wide(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    _llama("one-kv", small(num_key_value_heads=1, hidden_act="gelu", rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
    _llama("linear", small(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5})),
    _llama("dynamic", small(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}), max_model_len=512),
    _llama("dynamic-beyond", small(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                                   max_position_embeddings=40), max_model_len=PROMPT, greedy=1),
    _llama("llama3", wide(rope_parameters=LLAMA3)),
    _llama("yarn", wide(rope_parameters=YARN)),
    _llama("yarn-scaled", small(rope_parameters={**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3})),
    _llama("longrope", wide(rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
                                             "original_max_position_embeddings": 48, **DIVISORS})),
    Case("mistral-window", "Mistral", "MistralForCausalLM", small(sliding_window=20)),
    Case("mistral-all", "Mistral", "MistralForCausalLM", small(**GROUPED, sliding_window=None, tie_word_embeddings=True)),
    Case("mistral-narrow", "Mistral", "MistralForCausalLM", small(**EVEN, sliding_window=2)),
    Case("qwen2-plain", "Qwen2", "Qwen2ForCausalLM", small(hidden_size=60, use_sliding_window=False)),
    Case("qwen2-window", "Qwen2", "Qwen2ForCausalLM",
         small(**EVEN, use_sliding_window=True, sliding_window=24, max_window_layers=1, tie_word_embeddings=True)),
    Case("qwen2-yarn", "Qwen2", "Qwen2ForCausalLM", small(hidden_size=84, num_attention_heads=7, num_key_value_heads=1,
                                                          rope_parameters=YARN)),
    Case("qwen3-plain", "Qwen3", "Qwen3ForCausalLM", small()),
    Case("qwen3-tied", "Qwen3", "Qwen3ForCausalLM", small(**GROUPED, tie_word_embeddings=True, attention_bias=True)),
    Case("qwen3-window", "Qwen3", "Qwen3ForCausalLM", small(**EVEN, use_sliding_window=True, sliding_window=17,
                                                           max_window_layers=2)),
    Case("gemma2-plain", "Gemma2", "Gemma2ForCausalLM", small(sliding_window=16, query_pre_attn_scalar=10, tie_word_embeddings=True)),
    Case("gemma2-grouped", "Gemma2", "Gemma2ForCausalLM", wide(sliding_window=33, attn_logit_softcapping=5.0,
                                                               final_logit_softcapping=8.0, attention_bias=True)),
    Case("gemma2-uncapped", "Gemma2", "Gemma2ForCausalLM", small(**EVEN, attn_logit_softcapping=None, final_logit_softcapping=None,
                                                                 query_pre_attn_scalar=16)),
    Case("gemma3-plain", "Gemma3Text", "Gemma3ForCausalLM", small(sliding_window=16, query_pre_attn_scalar=10,
                                                                  tie_word_embeddings=True, sliding_window_pattern=2)),
    Case("gemma3-grouped", "Gemma3Text", "Gemma3ForCausalLM", wide(
        sliding_window=30, final_logit_softcapping=9.0, num_hidden_layers=4, sliding_window_pattern=3,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}})),
    Case("gemma3-local", "Gemma3Text", "Gemma3ForCausalLM", small(**EVEN, sliding_window=8, tie_word_embeddings=True)),
    Case("phi3-plain", "Phi3", "Phi3ForCausalLM", small(head_dim=12, sliding_window=30)),
    Case("phi3-partial", "Phi3", "Phi3ForCausalLM", small(**EVEN, tie_word_embeddings=True, partial_rotary_factor=0.75)),
    Case("phi3-short", "Phi3", "Phi3ForCausalLM", small(
        **EVEN, original_max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **DIVISORS})),
    Case("phi3-long", "Phi3", "Phi3ForCausalLM", small(
        **EVEN, original_max_position_embeddings=40,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **DIVISORS})),
    Case("olmo2-plain", "Olmo2", "Olmo2ForCausalLM", small()),
    Case("olmo2-grouped", "Olmo2", "Olmo2ForCausalLM", small(**EVEN, attention_bias=True)),
    Case("olmo2-tied", "Olmo2", "Olmo2ForCausalLM", small(num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-6)),
    Case("granite-plain", "Granite", "GraniteForCausalLM", small(embedding_multiplier=12.0, attention_multiplier=0.2,
                                                                 residual_multiplier=0.22, logits_scaling=0.5)),
    Case("granite-tied", "Granite", "GraniteForCausalLM", small(**EVEN, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
                                                                embedding_multiplier=3.3, attention_multiplier=0.125,
                                                                residual_multiplier=0.7, logits_scaling=2.0)),
    Case("granite-one-kv", "Granite", "GraniteForCausalLM", small(num_key_value_heads=1, attention_multiplier=0.3)),
    Case("smollm3-plain", "SmolLM3", "SmolLM3ForCausalLM", small(num_hidden_layers=4)),
    Case("smollm3-chosen", "SmolLM3", "SmolLM3ForCausalLM", small(**EVEN, no_rope_layers=[0, 1, 0], tie_word_embeddings=True,
                                                                  attention_bias=True, mlp_bias=True)),
    Case("smollm3-window", "SmolLM3", "SmolLM3ForCausalLM", small(no_rope_layer_interval=2, use_sliding_window=True, num_hidden_layers=4,
                                                                  sliding_window=19)),
    Case("neox-parallel", "GPTNeoX", "GPTNeoXForCausalLM", small(rotary_pct=0.25, hidden_size=80)),
    Case("neox-serial", "GPTNeoX", "GPTNeoXForCausalLM", small(use_parallel_residual=False, rotary_pct=1.0, hidden_act="gelu_new",
                                                               rotary_emb_base=500)),
    Case("neox-unbiased", "GPTNeoX", "GPTNeoXForCausalLM", small(attention_bias=False, num_attention_heads=3, rotary_pct=0.5,
                                                                 tie_word_embeddings=True)),
    Case("gpt2-plain", "GPT2", "GPT2LMHeadModel", {"vocab_size": 199, "n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 256,
                                                   **ENDS}),
    Case("gpt2-inner", "GPT2", "GPT2LMHeadModel", {"vocab_size": 211, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 100,
                                                   "n_positions": 160, "activation_function": "relu", "tie_word_embeddings": False,
                                                   **ENDS}, 160),
    Case("gpt2-scaled", "GPT2", "GPT2LMHeadModel", {"vocab_size": 199, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256,
                                                    "scale_attn_by_inverse_layer_idx": True, **ENDS}),
]


def make(case: Case, folder: Path) -> torch.nn.Module:
    """A model with weights large enough that its logits vary, saved to `folder` as float32 safetensors."""
    keys = {name: value for name, value in case.config.items() if case.kind != "GPTNeoX" or name not in (
        "num_key_value_heads", "head_dim")}
    config = getattr(transformers, f"{case.kind}Config")(**keys)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(config).float().eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Matrices N(0, 1.5 / columns), norms about their rest, biases well away from zero."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            embedding = any(word in name for word in ("embed", "wte", "wpe"))
            columns = parameter.shape[0] if "c_" in name else parameter.shape[-1]
            parameter.copy_(noise * (0.7 if embedding else (1.5 / columns) ** 0.5))
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.3)
        else:
            parameter.add_(noise * 0.3)
