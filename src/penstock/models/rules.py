"""The mapping from checkpoint names to parameters, as data: a family lists rules, and this module applies them.

In a pattern `#` is a layer's number, `*` one name between dots, `**` any rest, and `[text]` is optional and means nothing.
The first rule that matches a name decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.layers.spec import ModelSpec

Change = Callable[[torch.Tensor, ModelSpec], torch.Tensor]
"""Takes a checkpoint's tensor to the parameter's shape, without copying where it can."""


@dataclass(frozen=True)
class Rule:
    """Maps tensors named `source` to the parameter, or the piece of one, named `target`; None ignores them."""

    source: str
    target: str | None
    change: Change | None = None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text = re.escape(self.source).replace(r"\[", "(?:").replace(r"\]", ")?").replace(r"\*\*", ".+")
        return re.compile(text.replace(r"\#", "(?P<layer>[0-9]+)").replace(r"\*", "(?P<name>[^.]+)"))

    def match(self, name: str) -> str | None:
        """The target of a checkpoint's name ("" if it is ignored), or None if the rule does not match."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        groups = found.groupdict()
        return (self.target or "").replace("#", groups.get("layer") or "#").replace("*", groups.get("name") or "*")

    def name_of(self, target: str) -> str | None:
        """The usual checkpoint name of a parameter, or None if the rule has another target."""
        if self.target is None:
            return None
        pattern = re.escape(self.target).replace(r"\#", "(?P<layer>[0-9]+)").replace(r"\*", "(?P<name>[^.]+)")
        found = re.fullmatch(pattern, target)
        if found is None:
            return None
        groups = found.groupdict()
        plain = re.sub(r"\[[^]]*\]", "", self.source)
        return plain.replace("#", groups.get("layer") or "#").replace("*", groups.get("name") or "*")


def transposed(tensor: torch.Tensor, _spec: ModelSpec) -> torch.Tensor:
    """For matrices stored as [inputs, outputs], as GPT-2's. Vectors are unchanged."""
    return tensor.t() if tensor.dim() == 2 else tensor


def interleaved(tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorders rows from (head, query/key/value), as GPT-NeoX stores them, to all queries, all keys, all values."""
    heads = spec.attentions[0].heads
    return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


EMBEDDING = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
)
"""Embedding, last norm and head of a Llama-like model."""

ATTENTION = (
    Rule("model.layers.#.self_attn.q_proj.*", "blocks.#.attention.q.*"),
    Rule("model.layers.#.self_attn.k_proj.*", "blocks.#.attention.k.*"),
    Rule("model.layers.#.self_attn.v_proj.*", "blocks.#.attention.v.*"),
    Rule("model.layers.#.self_attn.o_proj.*", "blocks.#.attention.o.*"),
    Rule("model.layers.#.self_attn.q_norm.weight", "blocks.#.attention.q_norm.weight"),
    Rule("model.layers.#.self_attn.k_norm.weight", "blocks.#.attention.k_norm.weight"),
    Rule("model.layers.#.self_attn.rotary_emb.inv_freq", None),
    Rule("model.rotary_emb.inv_freq", None),
)

MLP = (
    Rule("model.layers.#.mlp.gate_proj.*", "blocks.#.mlp.gate.*"),
    Rule("model.layers.#.mlp.up_proj.*", "blocks.#.mlp.up.*"),
    Rule("model.layers.#.mlp.down_proj.*", "blocks.#.mlp.down.*"),
)

PRE_NORMS = (
    Rule("model.layers.#.input_layernorm.weight", "blocks.#.attention.pre.weight"),
    Rule("model.layers.#.post_attention_layernorm.weight", "blocks.#.mlp.pre.weight"),
)

LLAMA = (*EMBEDDING, *ATTENTION, *MLP, *PRE_NORMS)
"""The names of Llama and of most later families."""

SANDWICH_NORMS = (
    Rule("model.layers.#.input_layernorm.weight", "blocks.#.attention.pre.weight"),
    Rule("model.layers.#.post_attention_layernorm.weight", "blocks.#.attention.post.weight"),
    Rule("model.layers.#.pre_feedforward_layernorm.weight", "blocks.#.mlp.pre.weight"),
    Rule("model.layers.#.post_feedforward_layernorm.weight", "blocks.#.mlp.post.weight"),
)
"""Gemma's: a norm before and after each branch."""
