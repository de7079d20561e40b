"""MiniCPM: Llama with scaled embeddings, branches and logits; MiniCPM 3 has latent attention."""

from penstock.models.family import Config, EmbeddingSpec, HeadSpec, MixerSpec, ModelSpec, parts, rope, rules

ARCHITECTURES = ("MiniCPMForCausalLM", "MiniCPM3ForCausalLM")
MODEL_TYPES = ("minicpm", "minicpm3")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4,
            "dim_model_base": 256}
RULES = (*rules.EMBEDDING, *rules.LATENT_ATTENTION, *rules.ATTENTION, *rules.MLP, *rules.PRE_NORMS)


def spec(config: Config) -> ModelSpec:
    config.absent("num_experts")
    norm, layers, width = parts.rms_norm(config), config.integer("num_hidden_layers"), config.integer("hidden_size")
    attention: MixerSpec
    if config.named("MiniCPM3ForCausalLM", "minicpm3"):
        if "v_head_dim" not in config.values:
            config = config.changed(v_head_dim=width // config.integer("num_attention_heads"))
        attention = parts.latent_attention(config, rope(config, config.integer("qk_rope_head_dim")))
    else:
        attention = parts.attention(config, rope=rope(config, parts.head_size(config)))
    head = HeadSpec(config.flag("tie_word_embeddings", True), divisor=width / config.number("dim_model_base"))
    return parts.layered(config, attention, parts.gated_mlp(config), norm, scale=config.number("scale_depth") / layers**0.5,
                         embedding=EmbeddingSpec(config.number("scale_emb")), head=head)
