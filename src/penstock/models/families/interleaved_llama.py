"""Helium and Ernie 4.5 (dense): Llama whose rotated neighbours belong together."""

from penstock.models.family import Config, ModelSpec, parts, rope, rules

ARCHITECTURES = ("Ernie4_5ForCausalLM", "HeliumForCausalLM")
MODEL_TYPES = ("ernie4_5", "helium")
DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 4096, "head_dim": 128}
RULES = rules.LLAMA


def spec(config: Config) -> ModelSpec:
    norm, whole = parts.rms_norm(config), config.flag("use_bias", False)
    turn = rope(config, parts.head_size(config), interleaved=True,
                theta=500000.0 if config.named("Ernie4_5ForCausalLM", "ernie4_5") else 100000.0)
    attention = parts.attention(config, rope=turn, bias=whole or config.flag("attention_bias", False), output_bias=whole)
    mlp = parts.gated_mlp(config, bias=whole or config.flag("mlp_bias", False))
    return parts.uniform(config, attention, mlp, norm)
