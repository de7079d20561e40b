"""GPT-2: learned positions, LayerNorms, biases, matrices kept as [inputs, outputs]."""

from penstock.models.family import (
    ACTIVATIONS,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    Config,
    EmbeddingSpec,
    HeadSpec,
    LayerNormSpec,
    MLPSpec,
    ModelSpec,
    Rule,
    transposed,
)

ARCHITECTURES = ("GPT2LMHeadModel",)
MODEL_TYPES = ("gpt2",)
DEFAULTS = {"activation_function": "gelu_new", "n_positions": 1024}
RULES = (
    Rule("[transformer.]wte.weight", "embedding.weight"),
    Rule("[transformer.]wpe.weight", "positions.weight"),
    Rule("[transformer.]h.#.ln_1.*", "blocks.#.attention.pre.*"),
    Rule("[transformer.]h.#.attn.c_attn.*", "blocks.#.attention.qkv.*", transposed),
    Rule("[transformer.]h.#.attn.c_proj.*", "blocks.#.attention.o.*", transposed),
    Rule("[transformer.]h.#.ln_2.*", "blocks.#.mlp.pre.*"),
    Rule("[transformer.]h.#.mlp.c_fc.*", "blocks.#.mlp.up.*", transposed),
    Rule("[transformer.]h.#.mlp.c_proj.*", "blocks.#.mlp.down.*", transposed),
    Rule("[transformer.]ln_f.*", "norm.*"),
    Rule("lm_head.weight", "head.weight"),
    Rule("[transformer.]h.#.attn.bias", None),
    Rule("[transformer.]h.#.attn.masked_bias", None),
)


def spec(config: Config) -> ModelSpec:
    config.absent("add_cross_attention")
    width, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    if width % heads:
        raise config.wrong("n_embd", f"a multiple of n_head ({heads})")
    size, norm = width // heads, LayerNormSpec(config.number("layer_norm_epsilon", 1e-5))
    scale = size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    mlp = BranchSpec(MLPSpec(width, config.integer("n_inner", 4 * width), config.choice("activation_function", ACTIVATIONS),
                             gated=False, bias=True), pre=norm)
    blocks = []
    for layer in range(config.integer("n_layer")):
        attention = AttentionSpec(width, heads, heads, size, scale / (layer + 1) if by_layer else scale, bias=True,
                                  output_bias=True)
        blocks.append(BlockSpec(((BranchSpec(attention, pre=norm),), (mlp,))))
    return ModelSpec(architecture="", vocab_size=config.integer("vocab_size"), width=width, max_positions=positions,
                     blocks=tuple(blocks), norm=norm, head=HeadSpec(config.flag("tie_word_embeddings", True)),
                     embedding=EmbeddingSpec(positions=positions))
