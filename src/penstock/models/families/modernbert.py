"""ModernBERT: an encoder that rotates, gates and norms first. Two layers of three see only what is near on either side."""

from penstock.models import family
from penstock.models.family import BlockSpec, BranchSpec, Config, EmbeddingSpec, HeadSpec, ModelSpec, Rule, parts, rope

ARCHITECTURES = ("ModernBertModel", "ModernBertForMaskedLM")
MODEL_TYPES = ("modernbert",)
TASK = "embed"
DEFAULTS = {"hidden_activation": "gelu", "classifier_activation": "gelu", "classifier_pooling": "cls",
            "max_position_embeddings": 8192}
RULES = (
    *Rule.named("[model.]", {"embeddings.tok_embeddings.weight": "embedding.weight", "embeddings.norm.*": "embedding.norm.*",
        "final_norm.*": "norm.*"}, stem=""),
    *Rule.named("[model.]layers.#.", {
        "attn_norm.*": "attention.pre.*", "attn.Wqkv.*": "attention.qkv.*", "attn.Wo.*": "attention.o.*",
        "mlp_norm.*": "mlp.pre.*", "mlp.Wi.*": "mlp.gate_up.*", "mlp.Wo.*": "mlp.down.*"}),
    *Rule.named("", {"head.dense.*": "head.dense.*", "head.norm.*": "head.norm.*", "classifier.*": "head.*", "decoder.*": None},
                stem=""))


def spec(config: Config) -> ModelSpec:
    norm = parts.layer_norm(config, "norm_eps", bias=config.flag("norm_bias", False))
    bias, every = config.flag("attention_bias", False), config.integer("global_attn_every_n_layers", 3)
    mlp = parts.gated_mlp(config, activation="hidden_activation", bias=config.flag("mlp_bias", False))
    turns = (rope(config, parts.head_size(config), layer_type=f"{kind}_attention", theta=config.number(name, theta))
             for kind, name, theta in (("sliding", "local_rope_theta", 10000.0), ("full", "global_rope_theta", 160000.0)))
    near, far = (parts.attention(config, rope=turn, bias=bias, causal=False) for turn in turns)
    # Half of `local_attention` is seen on each side, and a window counts the token itself.
    windows = config.windows(lambda layer: layer % every != 0, config.integer("local_attention", 128) // 2 + 1)
    blocks = [BlockSpec(((BranchSpec(mixer, pre=norm if layer else None),), (BranchSpec(mlp, pre=norm),)))
              for layer, mixer in enumerate(parts.sliding(near, windows, far))]
    activation = config.choice("classifier_activation", family.ACTIVATIONS)
    dense = family.DenseSpec(activation, config.flag("classifier_bias", False), norm)
    mean = config.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}) == "mean"
    return parts.decoder(config, blocks, norm, embedding=EmbeddingSpec(norm=norm),
                         head=HeadSpec(tied=False, bias=True, dense=dense, mean=mean))
