"""Gemma 2: norms around each branch, soft caps on scores and logits, a sliding window in every second layer."""

from penstock.models.family import BlockSpec, BranchSpec, Config, EmbeddingSpec, HeadSpec, ModelSpec, parts, rope, rules

ARCHITECTURES = ("Gemma2ForCausalLM",)
MODEL_TYPES = ("gemma2",)
DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "head_dim": 256,
            "num_key_value_heads": 4}
RULES = (*rules.EMBEDDING, *rules.ATTENTION, *rules.MLP, *rules.SANDWICH_NORMS)


def spec(config: Config) -> ModelSpec:
    config.absent("use_bidirectional_attention")
    norm, bias = parts.rms_norm(config, offset=1.0), config.flag("attention_bias", False)
    mlp = BranchSpec(parts.gated_mlp(config, activation="hidden_activation"), pre=norm, post=norm)
    turn, scale = rope(config, parts.head_size(config)), config.number("query_pre_attn_scalar", 256.0) ** -0.5
    blocks = []
    for window in config.windows(config.integer("num_hidden_layers"), lambda layer: layer % 2 == 0,
                                 config.nullable_integer("sliding_window", 4096)):
        attention = parts.attention(config, rope=turn, window=window, scale=scale, bias=bias,
                                    softcap=config.nullable_number("attn_logit_softcapping", 50.0))
        blocks.append(BlockSpec(((BranchSpec(attention, pre=norm, post=norm),), (mlp,))))
    head = HeadSpec(config.flag("tie_word_embeddings", True), softcap=config.nullable_number("final_logit_softcapping", 30.0))
    return parts.decoder(config, blocks, norm, head=head, embedding=EmbeddingSpec(config.integer("hidden_size") ** 0.5, True))
