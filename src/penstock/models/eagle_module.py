"""The EAGLE-3 head (Li et al. 2025) as a module that can be trained, in the layout that published heads have. Owns its
arithmetic and its tensors' names; `worker/draft_training.py` trains it, and engines run it by `models/draft_heads.py`.

At place t the head reads the target's states there and the token at t + 1, and predicts the token at t + 2."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional


def shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """[..., L, D] moved towards the end by so many places, with zeros before."""
    return x if places == 0 else functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


class EagleAttention(nn.Module):
    """Llama's attention over embeddings and states side by side. Remembers the keys and values of the steps of a draft."""

    frequencies: torch.Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.size = config["hidden_size"], config["head_dim"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * width, heads * self.size, bias=False)
                                                 for heads in (self.heads, self.groups, self.groups))
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)
        powers = torch.arange(0, self.size, 2) / self.size
        self.register_buffer("frequencies", config["rope_theta"] ** -powers, persistent=False)

    def _heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:-1], heads, self.size).transpose(1, 2).repeat_interleave(self.heads // heads, 1)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, :, None] * self.frequencies
        cosine, sine = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return (x * cosine + torch.cat([-second, first], -1) * sine).to(x.dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor,
                steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[B, L, D] of x [B, L, 2D]; adds this step's keys and values to `steps`.

        At step j of a draft, place t sees what is up to t - j as the target left it (step 0), and each later place as the step
        that drafted it left it: place t - j + i by step i. `seen` [B, L, L] is what step 0 may see."""
        query = self._rotated(self._heads(self.q_proj(x), self.heads), positions)
        steps.append((self._rotated(self._heads(self.k_proj(x), self.groups), positions),
                      self._heads(self.v_proj(x), self.groups)))
        step, length = len(steps) - 1, x.shape[1]
        behind = seen if step == 0 else functional.pad(seen, (0, 0, step, 0))[:, :length]
        scores = (query @ steps[0][0].mT).masked_fill(~behind[:, None], torch.finfo(query.dtype).min)
        own = [(query * shifted(key, step - at)).sum(-1, keepdim=True) for at, (key, _) in enumerate(steps) if at]
        weights = torch.softmax(torch.cat([scores, *own], -1).float() * self.size**-0.5, -1).to(query.dtype)
        out = weights[..., :length] @ steps[0][1]
        for at, (_, value) in enumerate(steps):
            if at:
                out = out + weights[..., length + at - 1 : length + at] * shifted(value, step - at)
        joined: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return joined


class EagleLayer(nn.Module):
    """The one decoder layer, called midlayer in checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = EagleAttention(config)
        inner = config["intermediate_size"]
        self.mlp = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in (
            ("gate_proj", (width, inner)), ("up_proj", (width, inner)), ("down_proj", (inner, width)))})
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (nn.RMSNorm(width, epsilon) for _ in range(3))

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor,
                steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """[B, L, D]: the layer's residual stream, which begins with `hidden`."""
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, positions, seen, steps)
        x = self.post_attention_layernorm(hidden)
        out: torch.Tensor = hidden + self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))
        return out


class Eagle(nn.Module):
    """The EAGLE-3 head (Li et al. 2025), in the layout that vLLM and SGLang load as LlamaForCausalLMEagle3.

    Tensors: fc, midlayer.*, norm, lm_head (rows of the drafted tokens), d2t (what to add to a drafted token's number to get the
    target's), t2d (whether a token of the target can be drafted). The embedding is the target's and not stored."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        width = config["hidden_size"]
        self.fc = nn.Linear(len(config["eagle_aux_hidden_state_layer_ids"]) * width, width, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["draft_vocab_size"], bias=False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @classmethod
    def fresh(cls, config: dict[str, Any], taps: list[int], tokens: torch.Tensor, head: torch.Tensor) -> "Eagle":
        """A head to train for a target with this config, of which it reads these layers' inputs, and which drafts these tokens
        [draft_vocab_size]. It begins with the target's rows [draft_vocab_size, width] of them."""
        named = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                 "vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "rope_theta")
        own = cls({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
            **{name: config[name] for name in named if config.get(name) is not None}, "draft_vocab_size": len(tokens),
            "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
            # vLLM looks for the layers here, SGLang inside eagle_config.
            "eagle_aux_hidden_state_layer_ids": taps,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True}})
        order = tokens.sort()
        own.d2t.copy_(order.values - torch.arange(len(tokens), device=tokens.device))
        own.t2d[order.values] = True
        with torch.no_grad():
            own.lm_head.weight.copy_(head[order.indices])
        return own

    @classmethod
    def load(cls, folder: Path) -> "Eagle":
        """A folder's head, in float32."""
        head = cls(json.loads((folder / "config.json").read_text()))
        head.load_state_dict({name: weight.float() if weight.is_floating_point() else weight
                              for name, weight in load_file(folder / "model.safetensors").items()})
        return head

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        save_file({name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).cpu().contiguous()
                   for name, tensor in self.state_dict().items()}, folder / "model.safetensors", metadata={"format": "pt"})

    def targets(self) -> torch.Tensor:
        """[draft_vocab_size]: the target's number of each token that can be drafted."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor,
                depth: int) -> list[torch.Tensor]:
        """Logits [B, L, draft_vocab_size] of each step of a draft of `depth` tokens, as if every place were the last step's.

        embeds [B, L, D] are of the tokens at t + 1. Step 0 reads the target's features; each later step reads, in their place,
        what the step before left one place earlier. So the head is trained on what it will meet: its own states."""
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden, logits = self.fc(features), []
        for step in range(depth):
            hidden = self.midlayer(embeds, hidden if step == 0 else shifted(hidden, 1), positions, seen, steps)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits
