"""BLOOM: ALiBi, a norm behind the embedding, LayerNorms and biases throughout."""

from penstock.models.family import Config, EmbeddingSpec, MLPSpec, ModelSpec, Rule, interleaved, parts

ARCHITECTURES = ("BloomForCausalLM",)
MODEL_TYPES = ("bloom",)
DEFAULTS = {"tie_word_embeddings": True}
RULES = (
    Rule("[transformer.]word_embeddings.weight", "embedding.weight"),
    Rule("[transformer.]word_embeddings_layernorm.*", "embedding.norm.*"),
    *Rule.named("[transformer.]h.#.", {"input_layernorm.*": "attention.pre.*",
        "self_attention.query_key_value.*": ("attention.qkv.*", interleaved), "self_attention.dense.*": "attention.o.*",
        "post_attention_layernorm.*": "mlp.pre.*", "mlp.dense_h_to_4h.*": "mlp.up.*", "mlp.dense_4h_to_h.*": "mlp.down.*"}),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.weight", "head.weight"),
)
LENGTH = 1 << 20
"""ALiBi has no longest context; the config names none."""


def spec(config: Config) -> ModelSpec:
    config.absent("apply_residual_connection_post_layernorm")
    config = config.renamed(n_embed="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers")
    width, norm = config.integer("hidden_size"), parts.layer_norm(config, "layer_norm_epsilon")
    attention = parts.attention(config, rope=None, bias=True, slopes=parts.slopes(config.integer("num_attention_heads")))
    return parts.layered(config, attention, MLPSpec(width, 4 * width, "gelu_tanh", gated=False, bias=True), norm,
                         embedding=EmbeddingSpec(norm=norm), max_positions=config.integer("seq_length", LENGTH))
