"""Youtu-LLM: dense layers with latent attention."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("YoutuForCausalLM",)
MODEL_TYPES = ("youtu",)
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 131072, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "tie_word_embeddings": True}
RULES = (*rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.MLP, *rules.PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    norm = parts.rms_norm(config)
    turn = rope(config, config.integer("qk_rope_head_dim"), interleaved=config.flag("rope_interleave", True))
    return parts.layered(config, parts.latent_attention(config, turn), parts.gated_mlp(config), norm)
