"""DeepSeek V2, V3 and R1, Kimi K2: latent attention, dense layers first, then mixtures of experts."""

from __future__ import annotations

from penstock.layers.spec import ModelSpec
from penstock.models import parts, rules
from penstock.models.config import Config, rope

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048}
RULES = (*rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.MLP, *rules.PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    norm, layers = parts.rms_norm(config), config.integer("num_hidden_layers")
    turn = rope(config, config.integer("qk_rope_head_dim"), interleaved=config.flag("rope_interleave", True))
    attention = parts.latent_attention(config, turn)
    dense = min(config.integer("first_k_dense_replace", 0, least=0), layers)
    if dense < layers:
        raise config.wrong("first_k_dense_replace", f"{layers}, the number of layers: mixtures of experts are not there yet")
    block = parts.pre_norm_block(attention, parts.gated_mlp(config), norm)
    return parts.decoder(config, [block] * layers, norm)
