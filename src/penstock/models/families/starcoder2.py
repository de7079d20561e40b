"""StarCoder 2: LayerNorms, biases, a plain feed-forward layer, perhaps a sliding window."""

from penstock.models.family import Config, HeadSpec, ModelSpec, Rule, parts, rope, rules

ARCHITECTURES = ("Starcoder2ForCausalLM",)
MODEL_TYPES = ("starcoder2",)
DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "num_key_value_heads": 2}
RULES = (
    *Rule.named("model.layers.#.", {"mlp.c_fc.*": "mlp.up.*", "mlp.c_proj.*": "mlp.down.*"}),
    *rules.LAYER_NORM_LLAMA,
)


def spec(config: Config) -> ModelSpec:
    norm, bias = parts.layer_norm(config, "norm_epsilon"), config.flag("use_bias", True)
    attention = parts.attention(config, rope=rope(config, parts.head_size(config)), bias=bias,
                                window=config.nullable_integer("sliding_window", 0))
    return parts.uniform(config, attention, parts.plain_mlp(config, bias=bias), norm,
                         head=HeadSpec(config.flag("tie_word_embeddings", True)))
