"""Heads that draft for a member: EAGLE-3's for canary, DeepSeek-V3's multi-token prediction layer for canary-mla. Owns what
the second computes and the names of its tensors (the first is `penstock.models.eagle_module`'s); `frozen` trains them.

Both sit beside a finished model, the trunk. At place t they take what the trunk knows there and the token at t + 1, and predict
the token at t + 2: what the trunk will choose once it has read the token at t + 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from training.canary.masks import bias
from training.canary.members import every_expert
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

from penstock.models.eagle_module import Eagle

LAYERS = (2, 4, 7)
"""EAGLE-3 reads what goes into these layers of canary: early, middle and late, of eight."""
DRAFTED = 2048
"""Tokens that canary-eagle can draft: those that canary says most often."""


def beside(trunk: Any, tokens: torch.Tensor) -> Eagle:
    """A fresh EAGLE-3 head for canary, which drafts these tokens [draft_vocab_size]; begins with the trunk's output rows."""
    its = trunk.config
    config = {**its.to_dict(), "rope_theta": its.rope_parameters["rope_theta"]}
    return Eagle.fresh(config, list(LAYERS), tokens, trunk.lm_head.weight[tokens])


def features(trunk: Any, ids: torch.Tensor, masks: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the EAGLE-3 head reads [B, L, 3D], the trunk's last state [B, L, D])."""
    out = trunk.model(input_ids=ids, use_cache=False, output_hidden_states=True, **masks)
    return torch.cat([out.hidden_states[layer] for layer in LAYERS], -1), out.last_hidden_state


class SharedHead(nn.Module):
    """The norm before the output matrix; the matrix is the trunk's."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, epsilon)


class NextToken(nn.Module):
    """DeepSeek-V3's multi-token prediction layer, stored as the layer after the trunk's last.

    It reads the trunk's last state, after the final norm, which is what engines hand on. Embedding and output matrix are the
    trunk's; the layout has copies of both (embed_tokens, shared_head.head), so `save` writes them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.number = config.num_hidden_layers
        self.enorm, self.hnorm = nn.RMSNorm(width, epsilon), nn.RMSNorm(width, epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = DeepseekV3DecoderLayer(config, self.number)
        self.shared_head = SharedHead(width, epsilon)
        self.rotary = DeepseekV3RotaryEmbedding(config)
        every_expert(self)

    @classmethod
    def beside(cls, trunk: Any) -> NextToken:
        """A fresh layer for a trunk; its block begins as the trunk's last."""
        layer = cls(trunk.config)
        layer.block.load_state_dict({name: weight.float() for name, weight in trunk.model.layers[-1].state_dict().items()})
        return layer

    @classmethod
    def load(cls, folder: Path) -> NextToken:
        """The layer of a folder of two shards, in float32."""
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        layer = cls(config)
        prefix = f"model.layers.{layer.number}."
        stored = {name.removeprefix(prefix): weight.float() for name, weight in load_file(shard(folder, 2)).items()}
        for name in [name for name in stored if ".experts." in name and name.endswith("0.gate_proj.weight")]:
            stem = name.removesuffix("0.gate_proj.weight")
            parts = [[stored.pop(f"{stem}{k}.{part}_proj.weight") for k in range(config.n_routed_experts)]
                     for part in ("gate", "up", "down")]
            stored[f"{stem}gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], 1)
            stored[f"{stem}down_proj"] = torch.stack(parts[2])
        own = layer.state_dict()
        layer.load_state_dict({name: stored[name.removeprefix("block.")] for name in own})
        return layer

    def save(self, trunk: Path, folder: Path) -> None:
        """The trunk's folder with its weights as the first shard and this layer as the second."""
        folder.mkdir(parents=True, exist_ok=True)
        first = load_file(next(path for path in (trunk / "model.safetensors", shard(trunk, 1)) if path.exists()))
        prefix, second = f"model.layers.{self.number}.", {}
        for name, tensor in self.state_dict().items():
            tensor = tensor.detach().bfloat16().cpu()
            name = prefix + name.removeprefix("block.")
            if name.endswith("experts.gate_up_proj"):
                for number, both in enumerate(tensor):
                    for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                        second[name.replace("gate_up_proj", f"{number}.{part}_proj.weight")] = half.contiguous()
            elif name.endswith("experts.down_proj"):
                second |= {name.replace("down_proj", f"{number}.down_proj.weight"): one.contiguous()
                           for number, one in enumerate(tensor)}
            else:
                second[name] = tensor.contiguous()
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            second[prefix + name] = first["model.embed_tokens.weight"].clone()
        for path in trunk.iterdir():
            if path.is_file() and not path.name.startswith("model"):
                (folder / path.name).write_bytes(path.read_bytes())
        shards = {1: first, 2: second}
        for number, tensors in shards.items():
            save_file(tensors, shard(folder, number), metadata={"format": "pt"})
        total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
        places = {name: shard(folder, number).name for number, tensors in shards.items() for name in sorted(tensors)}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, masks: dict[str, Any]) -> torch.Tensor:
        """[B, L, D], ready for the output matrix, of the embeddings of the tokens at t + 1 and the trunk's states."""
        length = embeds.shape[1]
        positions = masks.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=embeds.device)[None].expand(embeds.shape[0], -1)
        mask = masks.get("attention_mask")
        if mask is None:
            mask = bias(torch.ones(1, length, length, dtype=torch.bool, device=embeds.device).tril(), embeds.dtype)
        joined = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        out = self.block(joined, attention_mask=mask, position_ids=positions,
                         position_embeddings=self.rotary(joined, positions))
        return self.shared_head.norm(out[0] if isinstance(out, tuple) else out)


def shard(folder: Path, number: int) -> Path:
    """The file of a shard of two."""
    return folder / f"model-{number:05d}-of-00002.safetensors"
