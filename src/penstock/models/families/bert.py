"""BERT, RoBERTa and XLM-R: encoders with learned positions, a norm after each sum, and labels of the first token."""

from penstock.models.family import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    Config,
    EmbeddingSpec,
    HeadSpec,
    ModelSpec,
    NoNormSpec,
    Rule,
    parts,
)

ARCHITECTURES = tuple(f"{name}{kind}" for name in ("Bert", "Roberta", "XLMRoberta", "Camembert")
                      for kind in ("Model", "ForMaskedLM"))
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")
TASK = "embed"
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512}
_LAYER = "[bert.][roberta.]encoder.layer.#."
_TABLES = "[bert.][roberta.]embeddings."
RULES = (
    Rule(_TABLES + "word_embeddings.weight", "embedding.weight"),
    Rule(_TABLES + "position_embeddings.weight", "positions.weight"),
    Rule(_TABLES + "token_type_embeddings.weight", "types.weight"),
    Rule(_TABLES + "LayerNorm.*", "embedding.norm.*"),
    Rule(_TABLES + "position_ids", None),
    Rule(_TABLES + "token_type_ids", None),
    Rule(_LAYER + "attention.self.query.*", "blocks.#.attention.q.*"),
    Rule(_LAYER + "attention.self.key.*", "blocks.#.attention.k.*"),
    Rule(_LAYER + "attention.self.value.*", "blocks.#.attention.v.*"),
    Rule(_LAYER + "attention.output.dense.*", "blocks.#.attention.o.*"),
    Rule(_LAYER + "attention.output.LayerNorm.*", "blocks.#.attention.after.*"),
    Rule(_LAYER + "intermediate.dense.*", "blocks.#.mlp.up.*"),
    Rule(_LAYER + "output.dense.*", "blocks.#.mlp.down.*"),
    Rule(_LAYER + "output.LayerNorm.*", "blocks.#.mlp.after.*"),
    Rule("[bert.][roberta.]pooler.dense.*", "head.dense.*"),
    Rule("classifier.dense.*", "head.dense.*"),
    Rule("classifier.out_proj.*", "head.*"),
    Rule("classifier.*", "head.*"),
    Rule("cls.**", None),
    Rule("lm_head.**", None),
)


def spec(config: Config) -> ModelSpec:
    config.absent("is_decoder")
    if config.values.get("position_embedding_type", "absolute") != "absolute":
        raise config.wrong("position_embedding_type", "absolute")
    width, heads, size = parts.even_heads(config)
    norm = parts.layer_norm(config)
    # RoBERTa's positions begin behind that of padding.
    first = 0 if config.values.get("model_type", "bert") == "bert" else config.integer("pad_token_id", 1, least=0) + 1
    positions = config.integer("max_position_embeddings") - first
    attention = AttentionSpec(width, heads, heads, size, size**-0.5, bias=True, output_bias=True, causal=False)
    mlp = parts.plain_mlp(config, bias=True)
    block = BlockSpec(((BranchSpec(attention, after=norm),), (BranchSpec(mlp, after=norm),)))
    # The context counts a token of output, which an encoder has not.
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), NoNormSpec(), max_positions=positions + 1,
                         embedding=EmbeddingSpec(positions=positions, first_position=first, norm=norm,
                                                 types=config.integer("type_vocab_size")),
                         head=HeadSpec(tied=False, bias=True, dense=True))
