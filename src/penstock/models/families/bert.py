"""BERT, RoBERTa and XLM-R: encoders with learned positions, a norm after each sum, and labels of the first token. In `LIKE`
those of this shape that rotate (NomicBERT, Jina 3) or slope (Jina 2) instead."""

from dataclasses import replace
from functools import partial

from penstock.models import family
from penstock.models.family import BranchSpec, Config, EmbeddingSpec, HeadSpec, Like, ModelSpec, NoNormSpec, Rule, parts, rope
from penstock.models.rules import projections

ARCHITECTURES = tuple(f"{name}{kind}" for name in ("Bert", "Roberta", "XLMRoberta", "Camembert")
                      for kind in ("Model", "ForMaskedLM"))
MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")
TASK = "embed"
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512}
_MODEL = "[bert.][roberta.][nomic_bert.]"
RULES = (
    *Rule.named(_MODEL, {"embeddings.word_embeddings.weight": "embedding.weight",
        "embeddings.position_embeddings.weight": "positions.weight", "embeddings.token_type_embeddings.weight": "types.weight",
        "embeddings.LayerNorm.*": "embedding.norm.*", "emb_ln.*": "embedding.norm.*", "embeddings.position_ids": None,
        "embeddings.token_type_ids": None, "pooler.dense.*": "head.dense.*"}, stem=""),
    *Rule.named(_MODEL + "encoder.layer.#.", {
        "attention.self.query.*": "attention.q.*", "attention.self.key.*": "attention.k.*",
        "attention.self.value.*": "attention.v.*", "attention.output.dense.*": "attention.o.*",
        "attention.output.LayerNorm.*": "attention.after.*", "intermediate.dense.*": "mlp.up.*", "output.dense.*": "mlp.down.*",
        "output.LayerNorm.*": "mlp.after.*", "mlp.gated_layers.*": "mlp.gate_up.*", "mlp.wo.*": "mlp.down.*",
        "mlp.layernorm.*": "mlp.after.*"}),
    *Rule.named(_MODEL + "[encoder.]layers.#.", {
        **projections("self_attn", "attention", "qkvo"), "post_attention_layernorm.*": "attention.after.*",
        **projections("mlp", "mlp"), "post_mlp_layernorm.*": "mlp.after.*",
        # The same in the models' own folders.
        "attn.Wqkv.*": "attention.qkv.*", "attn.out_proj.*": "attention.o.*", "mixer.Wqkv.*": "attention.qkv.*",
        "mixer.out_proj.*": "attention.o.*", "norm1.*": "attention.after.*", "norm2.*": "mlp.after.*",
        "mlp.fc12.*": "mlp.gate.*", "mlp.fc11.*": "mlp.up.*", "mlp.fc1.*": "mlp.up.*", "mlp.fc2.*": "mlp.down.*"}),
    *Rule.named("", {"classifier.dense.*": "head.dense.*", "classifier.out_proj.*": "head.*", "classifier.*": "head.*",
        "cls.**": None, "lm_head.**": None}, stem=""))
_NOMIC = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
          "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
          "max_trained_positions": "max_position_embeddings"}
"""Keys of the models' own configs, and transformers' for the same. Scalings beyond the trained positions are not offered."""


def spec(config: Config, *, theta: float = 0.0, sloped: bool = False, gated: bool = False, bias: bool = True) -> ModelSpec:
    """Positions are learned, unless they are `sloped`, or rotated by `theta`. `bias`: that of all matrices."""
    config.absent("is_decoder")
    kind = "rotary" if theta else "alibi" if sloped else "absolute"
    config.only("position_embedding_type", kind, kind)
    norm, types = parts.layer_norm(config), config.integer("type_vocab_size", least=0)
    positions = config.integer("max_position_embeddings")
    attention = parts.attention(config, rope=None, bias=bias, causal=False)
    embedding = EmbeddingSpec(norm=norm, types=types, second=config.integer("vocab_size") if types > 1 else 0)
    if theta:
        attention = replace(attention, rope=rope(config, attention.head_size, theta=theta))
    elif sloped:
        attention = replace(attention, slopes=parts.slopes(attention.heads))
    else:
        # RoBERTa's positions begin behind that of padding.
        first = 0 if config.values.get("model_type", "bert") == "bert" else config.integer("pad_token_id", 1, least=0) + 1
        positions -= first
        embedding = replace(embedding, positions=positions, first_position=first)
    mlp = replace(parts.gated_mlp(config) if gated else parts.plain_mlp(config, bias=bias), output_bias=bias)
    block = family.BlockSpec(((BranchSpec(attention, after=norm),), (BranchSpec(mlp, after=norm),)))
    return parts.decoder(config, [block] * config.integer("num_hidden_layers"), NoNormSpec(), max_positions=positions,
                         embedding=embedding, head=HeadSpec(tied=False, bias=True, dense=family.DenseSpec()))


def nomic(config: Config) -> ModelSpec:
    config.absent("prenorm", "parallel_block", "use_rms_norm", "causal", "rotary_emb_interleaved", "qkv_proj_bias",
                  "mlp_fc1_bias", "mlp_fc2_bias", "moe_every_n_layers")
    config.only("activation_function", "swiglu", "swiglu")
    return spec(config.renamed(**_NOMIC), theta=1000.0, gated=True, bias=False)


LIKE = (
    Like(("NomicBertModel", "NomicBertForMaskedLM"), ("nomic_bert",),
         {**DEFAULTS, "hidden_act": "silu", "max_position_embeddings": 2048}, nomic, RULES, TASK),
    Like(("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"), ("jina_embeddings_v3",), {**DEFAULTS, "layer_norm_eps": 1e-5,
         "type_vocab_size": 1, "max_position_embeddings": 8194}, partial(spec, theta=20000.0), RULES, TASK),
    Like(("JinaBertModel", "JinaBertForMaskedLM"), ("jina_bert",), {**DEFAULTS, "position_embedding_type": "alibi"},
         partial(spec, sloped=True, gated=True), RULES, TASK))
