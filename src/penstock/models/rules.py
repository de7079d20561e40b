"""The mapping from checkpoint names to parameters, as data: a family lists rules, and this module applies them.

In a pattern `#` is a layer's number, `@` an expert's, `*` one name between dots, `**` any rest, and `[text]` is optional and
means nothing. The first rule that matches a name decides."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from penstock.layers.spec import ModelSpec

Change = Callable[[torch.Tensor, ModelSpec], torch.Tensor]
"""Takes a checkpoint's tensor to the parameter's shape, without copying where it can."""
Names = Mapping[str, str | tuple[str, Change] | None]
"""Ends of checkpoints' names, and those of the parameters that they mean, perhaps with a change; None ignores a tensor."""


@dataclass(frozen=True)
class Rule:
    """Maps tensors named `source` to the parameter, or the piece of one, named `target`; None ignores them."""

    source: str
    target: str | None
    change: Change | None = None
    spare: bool = False
    """Tensors whose parameter the model does not have are left out."""

    @classmethod
    def named(cls, source: str, names: Names, stem: str = "blocks.#.") -> "tuple[Rule, ...]":
        """A rule for each name: a checkpoint's behind `source`, a parameter's behind `stem`."""
        pairs = ((name, target if isinstance(target, tuple) else (target, None)) for name, target in names.items())
        return tuple(cls(source + name, target and stem + target, change) for name, (target, change) in pairs)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text = re.escape(self.source).replace(r"\[", "(?:").replace(r"\]", ")?")
        return re.compile(_with_groups(text))

    def match(self, name: str) -> str | None:
        """The target of a checkpoint's name ("" if it is ignored), or None if the rule does not match."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        return _filled(self.target or "", found)

    def name_of(self, target: str) -> str | None:
        """The usual checkpoint name of a parameter, or None if the rule has another target."""
        if self.target is None:
            return None
        found = re.fullmatch(_with_groups(re.escape(self.target)), target)
        return None if found is None else _filled(re.sub(r"\[[^]]*\]", "", self.source), found)


OWN = (Rule("**", "**"),)
"""For checkpoints whose tensors have the names of parameters."""


def matched(rules: Sequence[Rule], *names: str) -> tuple[Rule | None, str]:
    """The first rule that matches the first of a checkpoint's names, or else the next one, and its target; None: none does."""
    return next(((rule, target) for name in names for rule in rules if (target := rule.match(name)) is not None), (None, ""))


def usual(rules: Sequence[Rule], parameter: str) -> str | None:
    """The usual checkpoint name of a parameter or of one of its pieces; None if no rule names it."""
    return next((found for rule in rules if (found := rule.name_of(parameter)) is not None), None)


_WILD = {"**": ("rest", ".+"), "#": ("layer", "[0-9]+"), "@": ("expert", "[0-9]+"), "*": ("name", "[^.]+")}
"""The wild cards: the group that each is in a regular expression, and its text."""


def _with_groups(escaped: str) -> str:
    """An escaped pattern as a regular expression."""
    for card, (group, text) in _WILD.items():
        escaped = escaped.replace(re.escape(card), f"(?P<{group}>{text})")
    return escaped


def _filled(pattern: str, found: re.Match[str]) -> str:
    """A pattern with what its wild cards stood for."""
    groups = found.groupdict()
    for card, (group, _) in _WILD.items():
        pattern = pattern.replace(card, groups.get(group) or card)
    return pattern


def transposed(tensor: torch.Tensor, _spec: ModelSpec) -> torch.Tensor:
    """For matrices stored as [inputs, outputs], as GPT-2's. Vectors are unchanged."""
    return tensor.t() if tensor.dim() == 2 else tensor


def interleaved(tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorders rows from (head, query/key/value), as GPT-NeoX stores them, to all queries, all keys, all values."""
    return tensor.view(spec.attentions[0].heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def stacked(tensor: torch.Tensor, _spec: ModelSpec) -> torch.Tensor:
    """For the experts of a layer stored as one tensor [E, outputs, inputs]: they are joined by rows."""
    return tensor.flatten(0, 1)


def stacked_transposed(tensor: torch.Tensor, _spec: ModelSpec) -> torch.Tensor:
    """The same stored as [E, inputs, outputs]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def by_group(tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorders rows from (KV head, its queries, key, value), as Falcon stores them, to all queries, all keys, all values."""
    attention = spec.attentions[0]
    rows = tensor.view(attention.kv_heads, -1, attention.head_size, *tensor.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])


def flat(tensor: torch.Tensor, _spec: ModelSpec) -> torch.Tensor:
    """All elements in a row."""
    return tensor.reshape(-1)


def projections(source: str, target: str, names: Iterable[str] = ("gate", "up", "down")) -> dict[str, str]:
    """The names of a layer's matrices, by default those of a gated feed-forward layer, for `Rule.named`."""
    return {f"{source}.{name}_proj.*": f"{target}.{name}.*" for name in names}


def text_part(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of a text model, which may lie beside towers for images and sound: their tensors are left out."""
    found = (replace(rule, source=rule.source.replace("model.", "[language_model.]model.[language_model.]", 1)
                     if rule.source.startswith("model.") else f"[language_model.]{rule.source}") for rule in rules)
    return (*(Rule(f"[model.]{tower}.**", None) for tower in (
        "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "embed_vision", "embed_audio", "visual")),
            *found)


EMBEDDING = Rule.named("", {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "norm.weight",
                            "lm_head.weight": "head.weight", "score.weight": "head.weight"}, stem="")
"""Embedding, last norm and head of a Llama-like model."""

ATTENTION = (*Rule.named("model.layers.#.", {
    **projections("self_attn", "attention", "qkvo"), "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight", "self_attn.sinks": "attention.sinks",
    "self_attn.rotary_emb.inv_freq": None}), Rule("model.rotary_emb.inv_freq", None))

LATENT_ATTENTION = Rule.named("model.layers.#.", {
    **projections("self_attn", "attention", ("q", "q_a", "q_b", "kv_b", "o")),
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight", "self_attn.kv_a_proj_with_mqa.*": "attention.kv_a.*",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight", "self_attn.rotary_emb.inv_freq": None})
"""DeepSeek's MLA."""

MLP = Rule.named("model.layers.#.", projections("mlp", "mlp"))

PRE_NORMS = Rule.named("model.layers.#.", {
    "input_layernorm.weight": "attention.pre.weight", "post_attention_layernorm.weight": "mlp.pre.weight"})

LLAMA = (*EMBEDDING, *ATTENTION, *MLP, *PRE_NORMS)
"""The names of Llama and of most later families."""

LAYER_NORM_LLAMA = (Rule("model.norm.*", "norm.*"), *Rule.named("model.layers.#.", {
    "input_layernorm.*": "attention.pre.*", "post_attention_layernorm.*": "mlp.pre.*"}), *LLAMA)
"""The names of Llama-like models with LayerNorms, which may have biases."""

SANDWICH_NORMS = Rule.named("model.layers.#.", {"input_layernorm.weight": "attention.pre.weight",
    "post_attention_layernorm.weight": "attention.post.weight", "pre_feedforward_layernorm.weight": "mlp.pre.weight",
    "post_feedforward_layernorm.weight": "mlp.post.weight"})
"""Gemma's: a norm before and after each branch."""

MIXTRAL_EXPERTS = Rule.named("model.layers.#.", {"block_sparse_moe.gate.weight": "mlp.router.weight",
    "block_sparse_moe.experts.@.w1.*": "mlp.experts.@.gate.*", "block_sparse_moe.experts.@.w3.*": "mlp.experts.@.up.*",
    "block_sparse_moe.experts.@.w2.*": "mlp.experts.@.down.*", "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up.weight", stacked),
    "mlp.experts.down_proj": ("mlp.experts.down.weight", stacked)})
"""Router and experts as Mixtral names them."""

EXPERTS = Rule.named("model.layers.#.", {
    "mlp.gate.weight": "mlp.router.weight", "mlp.gate.e_score_correction_bias": "mlp.correction",
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_up.weight", stacked),
    "mlp.experts.down_proj": ("mlp.experts.down.weight", stacked),
    **projections("mlp.experts.@", "mlp.experts.@"), **projections("mlp.shared_experts", "mlp.shared")})
"""Router, experts (one by one, or a layer's as one tensor) and shared experts, as DeepSeek names them."""

QWEN_EXPERTS = (*Rule.named("model.layers.#.mlp.", {
    **projections("shared_expert", "mlp.shared"), "shared_expert_gate.weight": "mlp.shared_gate.weight"}), *EXPERTS)
"""The same as Qwen names them. A config's lists of modules are of exact names, so each family has its own first."""
