"""Heads that draft for a member: EAGLE-3's for canary, DeepSeek-V3's multi-token prediction layer for canary-mla. Owns what
they compute and the names of their tensors; how they are trained is `frozen`'s.

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
from torch.nn import functional
from training.canary.masks import bias
from training.canary.members import every_expert
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

LAYERS = (2, 4, 7)
"""EAGLE-3 reads what goes into these layers of canary: early, middle and late, of eight."""
DRAFTED = 2048
"""Tokens that canary-eagle can draft: those that canary says most often."""


class Norm(nn.Module):
    """Division by the root of the mean square, times a weight for each channel."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape and type; computed in float32."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(x.dtype) * self.weight


def shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """[..., L, D] moved towards the end by so many places, with zeros before."""
    return x if places == 0 else functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


class EagleAttention(nn.Module):
    """Llama's attention over embeddings and states side by side. Remembers the keys and values of the steps of a draft."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.size = config["hidden_size"], config["head_dim"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(2 * width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(2 * width, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(2 * width, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)
        powers = torch.arange(0, self.size, 2) / self.size
        self.register_buffer("frequencies", config["rope_theta"] ** -powers, persistent=False)

    def _heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.size)).transpose(1, 2).repeat_interleave(self.heads // heads, 1)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, :, None] * self.frequencies
        cosine, sine = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return (x * cosine + torch.cat([-second, first], -1) * sine).to(x.dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor,
                steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[B, L, D] of x [B, L, 2D]; adds this step's keys and values to `steps`.

        At step j of a draft, place t sees what is up to t - j as the trunk left it (step 0), and each later place as the step
        that drafted it left it: place t - j + i by step i. `seen` [B, L, L] is what step 0 may see.
        """
        query = self._rotated(self._heads(self.q_proj(x), self.heads), positions)
        steps.append((self._rotated(self._heads(self.k_proj(x), self.groups), positions),
                      self._heads(self.v_proj(x), self.groups)))
        step, length = len(steps) - 1, x.shape[1]
        behind = seen if step == 0 else functional.pad(seen, (0, 0, step, 0))[:, :length]
        scores = query @ steps[0][0].mT + bias(behind, query.dtype)
        own = [(query * shifted(key, step - at)).sum(-1, keepdim=True) for at, (key, _) in enumerate(steps) if at]
        weights = torch.softmax(torch.cat([scores, *own], -1).float() * self.size**-0.5, -1).to(query.dtype)
        out = weights[..., :length] @ steps[0][1]
        for at, (_, value) in enumerate(steps):
            if at:
                out = out + weights[..., length + at - 1 : length + at] * shifted(value, step - at)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Llama's feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] of [..., D]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """The one decoder layer, called midlayer in checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = EagleAttention(config)
        self.mlp = Gated(width, config["intermediate_size"])
        self.input_layernorm, self.hidden_norm = Norm(width, epsilon), Norm(width, epsilon)
        self.post_attention_layernorm = Norm(width, epsilon)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor,
                steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[B, L, D]: the layer's residual stream, which begins with `hidden`."""
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, positions, seen, steps)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle(nn.Module):
    """The EAGLE-3 head (Li et al. 2025), in the layout that vLLM and SGLang load as LlamaForCausalLMEagle3.

    Tensors: fc, midlayer.*, norm, lm_head (rows of the drafted tokens), d2t (what to add to a drafted token's number to get the
    trunk's), t2d (whether a token of the trunk can be drafted). The embedding is the trunk's and not stored.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        width = config["hidden_size"]
        self.fc = nn.Linear(len(LAYERS) * width, width, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = Norm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["draft_vocab_size"], bias=False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @classmethod
    def beside(cls, trunk: Any, tokens: torch.Tensor) -> Eagle:
        """A fresh head for a trunk, which drafts these tokens [draft_vocab_size]; begins with the trunk's output rows."""
        its = trunk.config
        head = cls({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
            **{name: getattr(its, name) for name in (
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                "vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")},
            "rope_theta": its.rope_parameters["rope_theta"], "draft_vocab_size": len(tokens), "tie_word_embeddings": False,
            "attention_bias": False, "torch_dtype": "bfloat16",
            # vLLM looks for the layers here, SGLang inside eagle_config.
            "eagle_aux_hidden_state_layer_ids": list(LAYERS),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True}})
        tokens = tokens.sort().values
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
        head.t2d[tokens] = True
        with torch.no_grad():
            head.lm_head.weight.copy_(trunk.lm_head.weight[tokens])
        return head

    @classmethod
    def load(cls, folder: Path) -> Eagle:
        """A folder's head, in float32."""
        head = cls(json.loads((folder / "config.json").read_text()))
        weights = load_file(folder / "model.safetensors")
        head.load_state_dict({name: weight.float() if weight.is_floating_point() else weight
                              for name, weight in weights.items()})
        return head

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        save_file({name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
                   for name, tensor in self.state_dict().items()}, folder / "model.safetensors", metadata={"format": "pt"})

    def targets(self) -> torch.Tensor:
        """[draft_vocab_size]: the trunk's number of each token that can be drafted."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @staticmethod
    def features(trunk: Any, ids: torch.Tensor, masks: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the head reads [B, L, 3D], the trunk's last state [B, L, D])."""
        out = trunk.model(input_ids=ids, use_cache=False, output_hidden_states=True, **masks)
        return torch.cat([out.hidden_states[layer] for layer in LAYERS], -1), out.last_hidden_state

    def forward(self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor,
                depth: int) -> list[torch.Tensor]:
        """Logits [B, L, draft_vocab_size] of each step of a draft of `depth` tokens, as if every place were the last step's.

        embeds [B, L, D] are of the tokens at t + 1. Step 0 reads the trunk's features; each later step reads, in their place,
        what the step before left one place earlier. So the head is trained on what it will meet: its own states.
        """
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden, logits = self.fc(features), []
        for step in range(depth):
            hidden = self.midlayer(embeds, hidden if step == 0 else shifted(hidden, 1), positions, seen, steps)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


class SharedHead(nn.Module):
    """The norm before the output matrix; the matrix is the trunk's."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.norm = Norm(width, epsilon)


class NextToken(nn.Module):
    """DeepSeek-V3's multi-token prediction layer, stored as the layer after the trunk's last.

    It reads the trunk's last state, after the final norm, which is what engines hand on. Embedding and output matrix are the
    trunk's; the layout has copies of both (embed_tokens, shared_head.head), so `save` writes them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.number = config.num_hidden_layers
        self.enorm, self.hnorm = Norm(width, epsilon), Norm(width, epsilon)
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
