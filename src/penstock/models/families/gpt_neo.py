"""GPT-Neo: learned positions, scores without a scale, a window in every second layer."""

from penstock.models.family import AttentionSpec, Config, EmbeddingSpec, HeadSpec, ModelSpec, Rule, parts

ARCHITECTURES = ("GPTNeoForCausalLM",)
MODEL_TYPES = ("gpt_neo",)
DEFAULTS = {"activation_function": "gelu_new", "max_position_embeddings": 2048}
RULES = (
    Rule("[transformer.]wte.weight", "embedding.weight"),
    Rule("[transformer.]wpe.weight", "positions.weight"),
    *Rule.named("[transformer.]h.#.", {"ln_1.*": "attention.pre.*", "attn.attention.q_proj.weight": "attention.q.weight",
        "attn.attention.k_proj.weight": "attention.k.weight", "attn.attention.v_proj.weight": "attention.v.weight",
        "attn.attention.out_proj.*": "attention.o.*", "attn.attention.bias": None, "attn.attention.masked_bias": None,
        "ln_2.*": "mlp.pre.*", "mlp.c_fc.*": "mlp.up.*", "mlp.c_proj.*": "mlp.down.*"}),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.weight", "head.weight"),
)


def _local(config: Config, layers: int) -> list[bool]:
    """Returns for each layer whether it has a window, by attention_types: [[[kind, ...], repetitions], ...]."""
    given = config.values.get("attention_types") or [[["global", "local"], layers // 2]]
    found = [kind == "local" for kinds, times in given for _ in range(times) for kind in kinds]
    if len(found) != layers:
        raise config.wrong("attention_types", f"kinds for {layers} layers")
    return found


def spec(config: Config) -> ModelSpec:
    config = config.renamed(num_heads="num_attention_heads", num_layers="num_hidden_layers")
    width, heads, size = parts.even_heads(config)
    layers, norm = config.integer("num_hidden_layers"), parts.layer_norm(config, "layer_norm_epsilon")
    positions, window = config.integer("max_position_embeddings"), config.integer("window_size", 256)
    mlp = parts.plain_mlp(config, activation="activation_function", multiple=4, bias=True)
    blocks = []
    for local in _local(config, layers):
        attention = AttentionSpec(width, heads, heads, size, 1.0, window=window if local else 0, output_bias=True)
        blocks.append(parts.pre_norm_block(attention, mlp, norm))
    return parts.decoder(config, blocks, norm, embedding=EmbeddingSpec(positions=positions), max_positions=positions,
                         head=HeadSpec(config.flag("tie_word_embeddings", True)))
