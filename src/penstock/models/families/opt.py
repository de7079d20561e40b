"""OPT: learned positions from 2 on, LayerNorms before each branch, biases."""

from penstock.models.family import Config, EmbeddingSpec, LayerNormSpec, ModelSpec, Rule, parts, rules

ARCHITECTURES = ("OPTForCausalLM",)
MODEL_TYPES = ("opt",)
DEFAULTS = {"activation_function": "relu", "max_position_embeddings": 2048, "tie_word_embeddings": True}
RULES = (
    *Rule.named("[model.]decoder.", {"embed_tokens.weight": "embedding.weight", "embed_positions.weight": "positions.weight",
        "final_layer_norm.*": "norm.*"}, stem=""),
    *Rule.named("[model.]decoder.layers.#.", {**rules.projections("self_attn", "attention", "qkv"),
        "self_attn_layer_norm.*": "attention.pre.*", "self_attn.out_proj.*": "attention.o.*", "final_layer_norm.*": "mlp.pre.*",
        "fc1.*": "mlp.up.*", "fc2.*": "mlp.down.*"}), Rule("lm_head.weight", "head.weight"))


def spec(config: Config) -> ModelSpec:
    config.only("do_layer_norm_before", True, "true: norms after each sum (OPT-350m) are not there")
    config.absent("_remove_final_layer_norm")
    width = config.integer("hidden_size")
    config.only("word_embed_proj_dim", width, f"hidden_size ({width})")
    norm = LayerNormSpec(1e-5, *([config.flag("layer_norm_elementwise_affine", True)] * 2))
    bias, positions = config.flag("enable_bias", True), config.integer("max_position_embeddings")
    attention = parts.attention(config, rope=None, bias=bias)
    mlp = parts.plain_mlp(config, activation="activation_function", inner="ffn_dim", bias=bias)
    return parts.layered(config, attention, mlp, norm, max_positions=positions,
                         embedding=EmbeddingSpec(positions=positions, first_position=2))
