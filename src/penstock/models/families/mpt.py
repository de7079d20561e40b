"""MPT: ALiBi, LayerNorms without bias, no biases."""

from penstock.models.family import Config, HeadSpec, MLPSpec, ModelSpec, Rule, parts

ARCHITECTURES = ("MptForCausalLM", "MPTForCausalLM")
MODEL_TYPES = ("mpt",)
RULES = (
    *Rule.named("", {"[transformer.]wte.weight": "embedding.weight", "[transformer.]norm_f.weight": "norm.weight",
        "lm_head.weight": "head.weight"}, stem=""),
    *Rule.named("[transformer.]blocks.#.", {"norm_1.weight": "attention.pre.weight", "attn.Wqkv.weight": "attention.qkv.weight",
        "attn.out_proj.weight": "attention.o.weight", "norm_2.weight": "mlp.pre.weight", "ffn.up_proj.weight": "mlp.up.weight",
        "ffn.down_proj.weight": "mlp.down.weight"}))


def spec(config: Config) -> ModelSpec:
    config = config.renamed(d_model="hidden_size", n_heads="num_attention_heads", n_layers="num_hidden_layers")
    given = Config(config.values.get("attn_config") or {})
    given.absent("prefix_lm", "qk_ln", "attn_uses_sequence_id")
    given.only("alibi", True, "true: learned positions are not there")
    config.only("no_bias", True, "true")
    config.absent("logit_scale")
    width, norm = config.integer("hidden_size"), parts.layer_norm(config, "layer_norm_epsilon", bias=False)
    slopes = parts.slopes(config.integer("num_attention_heads"), most=given.integer("alibi_bias_max", 8))
    attention = parts.attention(config, rope=None, scale=given.number("softmax_scale", parts.head_size(config) ** -0.5),
                                slopes=slopes, clip=given.nullable_number("clip_qkv", 0.0))
    # transformers' modules have this ratio whatever the config says.
    return parts.layered(config, attention, MLPSpec(width, 4 * width, "gelu", gated=False), norm,
                         head=HeadSpec(config.flag("tie_word_embeddings", True)),
                         max_positions=config.integer("max_seq_len", 2048))
