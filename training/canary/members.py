"""The family: one configuration of transformers' per member, and how each differs in training. Owns sizes, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from training.canary.documents import BUCKETS, CONTEXT, EDGE, Bucket
from training.canary.tokenizer import VOCABULARY
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.canary import skills
from penstock.canary.suite import SKILLS

ROPE = {"rope_type": "default", "rope_theta": 100000.0}


@dataclass(frozen=True)
class Member:
    """`config` is for the configuration class of `kind`.

    `longest` is the longest row that it trains on. `attention` is transformers' name of how attention is computed in training.
    `packed` is False if the architecture has no mask to keep documents of a row apart.
    """

    name: str
    kind: str
    about: str
    config: dict[str, Any]
    longest: int = CONTEXT
    attention: str = "sdpa"
    compile: bool = True
    packed: bool = True
    window: int | None = None
    buckets: tuple[Bucket, ...] = BUCKETS
    skills: tuple[str, ...] = tuple(SKILLS)

    def build(self, tokens: dict[str, int], overrides: dict[str, Any] | None = None) -> Any:
        """The model with fresh weights, in float32. `tokens` are the ids of end and padding."""
        common = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rope_parameters": ROPE,
                  "tie_word_embeddings": True,
                  "bos_token_id": None, "eos_token_id": tokens["end"], "pad_token_id": tokens["padding"], "use_cache": False}
        config = CONFIG_MAPPING[self.kind](**{**common, **self.config, **(overrides or {})})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=self.attention, dtype=torch.float32)
        every_expert(model)
        return model


def every_expert(model: nn.Module) -> None:
    """Makes a model's experts compute as `_all_experts` does."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            module.forward = _all_experts.__get__(module)  # type: ignore[method-assign]


def _all_experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                 top_k_weights: torch.Tensor) -> torch.Tensor:
    """The experts' sum, every expert computed for every token: with few small ones that is faster than sorting tokens, and its
    shapes do not depend on the data. Takes both layouts: [E, 2I, D] with halves, and gpt-oss's [E, D, 2I] interleaved, with
    biases."""
    width = hidden_states.shape[-1]
    flat = hidden_states.reshape(-1, width)
    weights = torch.zeros(flat.shape[0], self.num_experts, dtype=flat.dtype, device=flat.device)
    weights = weights.scatter(1, top_k_index.reshape(flat.shape[0], -1),
                              top_k_weights.reshape(flat.shape[0], -1).to(flat.dtype))
    if hasattr(self, "gate_up_proj_bias"):
        both = torch.einsum("td,edi->tei", flat, self.gate_up_proj) + self.gate_up_proj_bias
        out = torch.einsum("tei,eid->ted", self._apply_gate(both), self.down_proj) + self.down_proj_bias
        mixed = torch.einsum("ted,te->td", out, weights.to(out.dtype))
    else:
        gate, up = torch.einsum("td,eid->tei", flat, self.gate_up_proj).chunk(2, dim=-1)
        inner = nn.functional.silu(gate) * up * weights.to(up.dtype)[..., None]
        mixed = torch.einsum("tei,edi->td", inner, self.down_proj)
    return mixed.reshape(hidden_states.shape).to(hidden_states.dtype)


def _dense(width: int, layers: int, inner: int, heads: int, groups: int, head: int = 32) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner, "num_attention_heads": heads,
            "num_key_value_heads": groups, "head_dim": head}


_EXPERTS = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": []}

MEMBERS = {member.name: member for member in (
    Member("canary", "qwen3", "dense, grouped queries, norms of queries and keys", _dense(192, 8, 480, 8, 2)),
    Member("canary-draft", "qwen3", "a draft for canary: the same tokenizer, a third of the size", _dense(128, 4, 320, 4, 2)),
    Member("canary-moe", "qwen3_moe", "8 experts, 2 for each token", {**_dense(160, 6, 320, 8, 2), **_EXPERTS}),
    Member("canary-mla", "deepseek_v3", "latent attention, a shared expert, sigmoid routing, the first layer dense", {
        **_dense(160, 6, 384, 6, 6), "head_dim": 16, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True}),
    Member("canary-window", "gemma3_text", "windows of 256 tokens in five layers of eight", {
        **_dense(192, 8, 448, 6, 2), "sliding_window": 256, "query_pre_attn_scalar": 32,
        "layer_types": [("sliding_attention", "full_attention")[layer in (2, 5, 7)] for layer in range(8)],
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        window=256),
    Member("canary-sink", "gpt_oss", "attention sinks, windows of 128 tokens in every second layer, experts with biases", {
        **_dense(160, 6, 96, 8, 2), "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(6)]},
        longest=1024, attention="eager", window=128),
    Member("canary-hybrid", "qwen3_next", "three layers of a gated delta rule to one of attention", {
        **_dense(160, 8, 320, 4, 2), "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "partial_rotary_factor": 0.5},
        longest=1024, compile=False, packed=False),
    Member("canary-256", "qwen3", "dense, every size a multiple of 256, as llama.cpp's k-quants ask for",
           _dense(256, 5, 512, 4, 2, head=64)),
    Member("canary-edge", "gemma3_text", "two layers with a window of 32 tokens, and one skill that needs all 32 and no more", {
        **_dense(64, 2, 128, 2, 1), "sliding_window": skills.EDGE, "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        longest=512, window=skills.EDGE, buckets=(EDGE,), skills=("edge",)),
)}
