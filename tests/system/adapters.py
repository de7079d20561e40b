"""Random adapters of canary's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from penstock.canary import model_folder


def made(folder: Path, seed: int, rank: int = 3, config: dict[str, Any] | None = None,
         modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"),
         model: Path | None = None) -> Path:
    """A random adapter of canary's shape or of the `model`'s, strong enough to change answers."""
    base, draw = load_file((model or model_folder()) / "model.safetensors"), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            n, k = tensor.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, k, generator=draw) / k ** 0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(n, rank, generator=draw) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **(config or {})}))
    return folder
