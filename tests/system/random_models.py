"""Models with random weights, wide enough that their continuations vary, saved as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock import models
from penstock.checkpoint import read_config


def saved_random(model: Any, folder: Path, deviation: float) -> Path:
    """The folder, with a transformers model in it whose parameters are all drawn anew from a normal distribution."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, deviation)
    model.save_pretrained(folder)
    return folder


def saved_head(target: Path, out: Path, version: int, **config: Any) -> Path:
    """A folder with a random EAGLE head of version 1 or 3 for a target: it is nearly always wrong."""
    spec = models.describe(read_config(target))
    width, inner, heads, size = spec.width, 40, 6, 8
    config = {"architectures": [f"LlamaForCausalLMEagle{version if version > 1 else ''}"], "model_type": "llama",
              "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": 3,
              "head_dim": size, "num_hidden_layers": 1, "vocab_size": spec.vocab_size, "torch_dtype": "float32",
              "draft_vocab_size": 60, **config}
    draw = torch.Generator().manual_seed(version)
    layer, inputs = ("midlayer", 2 * width) if version == 3 else ("layers.0", width)
    shapes = {f"{layer}.self_attn.q_proj": (heads * size, inputs), f"{layer}.self_attn.k_proj": (3 * size, inputs),
              f"{layer}.self_attn.v_proj": (3 * size, inputs), f"{layer}.self_attn.o_proj": (width, heads * size),
              f"{layer}.mlp.gate_proj": (inner, width), f"{layer}.mlp.up_proj": (inner, width),
              f"{layer}.mlp.down_proj": (width, inner), f"{layer}.post_attention_layernorm": (width,)}
    if version == 3:
        shapes |= {"fc": (width, 3 * width), "lm_head": (60, width), "norm": (width,), f"{layer}.hidden_norm": (width,),
                   f"{layer}.input_layernorm": (width,)}
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, len(spec.blocks)]
    else:
        shapes |= {"fc": (width, 2 * width), "embed_tokens": (spec.vocab_size, width)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * 0.25 for name, shape in shapes.items()}
    if version == 3:
        chosen = torch.randperm(spec.vocab_size, generator=draw)[:60].sort().values
        tensors["d2t"] = chosen - torch.arange(60)
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, chosen, value=True)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out
