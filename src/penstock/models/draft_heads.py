"""Draft heads as data: EAGLE heads in folders of their own, and the layer for multi-token prediction (MTP, NEXTN) inside a
target's checkpoint. They are recognised by their configs and by the names of their tensors; one decoder runs them all."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.tensors import Stored, read_headers
from penstock.core.errors import ModelError
from penstock.layers.block import BlockSpec, BranchSpec, NoNormSpec
from penstock.layers.decoder import Decoder
from penstock.layers.delta import DeltaSpec
from penstock.layers.draft_head import JoinSpec, PairAttentionSpec
from penstock.layers.embedding import HeadSpec
from penstock.layers.experts import ExpertsSpec
from penstock.layers.spec import ModelSpec
from penstock.models import parts, rules, weights
from penstock.models.config import Config, rope
from penstock.models.registry import checkpoint_of, describe, family_of, stored_as
from penstock.models.rules import Rule
from penstock.models.translated import Checkpoint
from penstock.ops.registry import Kernels
from penstock.parallel.axis import Place
from penstock.parallel.group import Group


@dataclass(frozen=True)
class DraftHead:
    method: str
    """eagle, eagle3 or mtp."""
    folder: Path
    config: Mapping[str, Any]
    """Of the folder."""
    spec: ModelSpec
    rules: tuple[Rule, ...]
    stems: tuple[str, ...]
    """The beginnings of its tensors' names; empty: all tensors of the folder are its own."""
    taps: tuple[int, ...] = ()
    """The target's blocks whose inputs it reads; empty: it reads the hidden states after the last norm."""
    normed: bool = False
    """For further drafts it reads its own result after the last norm."""
    mask: int | None = None
    """The token in whose place it drafts further tokens, all in one pass (P-EAGLE); None: one after the other."""

    @property
    def borrows(self) -> bool:
        """Whether it uses the target's embedding."""
        return not (isinstance(self.spec.embedding, JoinSpec) and self.spec.embedding.tokens)

    def checkpoint(self, dtype: str, device: torch.device | None = None) -> Checkpoint:
        found = checkpoint_of(self.folder, self.config, self.spec, dtype, device, self.rules)
        if self.stems:
            found.tensors = {name: stored for name, stored in found.tensors.items() if name.startswith(self.stems)}
        return found

    def load(self, *, dtype: torch.dtype, device: torch.device, kernels: Kernels, load_format: str, max_model_len: int,
             seed: int, place: Place, group: Group | None) -> Decoder:
        """The head, or a rank's share of it. ModelError if its tensors do not fit."""
        values = weights.load(self.spec, self.rules, lambda: self.checkpoint(str(dtype).removeprefix("torch."), device),
                              load_format, seed=seed, dtype=dtype, device=device, kernels=kernels, progress=None, place=place)
        return Decoder(self.spec.at(place), values, kernels, dtype=dtype, device=device, max_model_len=max_model_len,
                       group=group)

    def own(self, *names: str) -> dict[str, torch.Tensor]:
        """The tensors of these names that its folder has."""
        checkpoint = Checkpoint(self.folder)
        with checkpoint.mapped():
            return {name: checkpoint.read(name).clone() for name in names if name in checkpoint.tensors}

    def targets(self) -> torch.Tensor | None:
        """[draft vocabulary] int64: the target's number of each token that it can draft; None if they are numbered alike."""
        found = {} if self.stems else self.own("d2t")
        return found["d2t"].long() + torch.arange(len(found["d2t"])) if found else None

    def masks(self) -> tuple[int, torch.Tensor] | None:
        """`mask`, and what it reads there in place of the target's states [taps x width]."""
        if self.mask is None:
            return None
        zeros = torch.zeros(max(1, len(self.taps)) * self.spec.width)
        return self.mask, self.own("mask_hidden").get("mask_hidden", zeros).flatten()


_MASKS = ("pard_token", "ptd_token_id", "mask_token_id")
"""Names of the mask token in configs."""


def mask_token(config: Mapping[str, Any], asked: bool | None) -> int | None:
    """The token in whose place a one-pass draft model or head drafts: as `asked`, or by its config. ModelError if none."""
    named = [int(config[name]) for name in _MASKS if config.get(name) is not None]
    parallel = config.get("parallel_drafting") or any(config.get(name) is not None for name in _MASKS[:2])
    if asked is False or (asked is None and not parallel):
        return None
    if not named:
        raise ModelError(f"parallel_drafting needs a draft model or head that was trained for it, whose config has one of "
                         f"{', '.join(_MASKS)}; this one has none")
    return named[0]


_EAGLE_RULES = Rule.named("", {
    "d2t": None, "t2d": None, "mask_hidden": None, "[model.]embed_tokens.weight": "embedding.weight",
    "[model.]norm.weight": "norm.weight", "lm_head.weight": "head.weight"}, stem="")
_EAGLE_1 = (*_EAGLE_RULES, Rule("[model.]fc.*", "entry.join.*"), *rules.ATTENTION, *rules.MLP, *rules.PRE_NORMS)
_EAGLE_3 = (
    *_EAGLE_RULES, Rule("[model.]fc.*", "entry.reduce.*"),
    *(Rule(rule.source.replace("model.layers.#", "midlayer"), rule.target.replace("#", "0"))
      for rule in (*rules.ATTENTION, *rules.MLP) if rule.target is not None),
    *(Rule(f"{layer}.{source}.weight", f"blocks.0.{target}.weight") for layer in ("midlayer", "model.layers.0")
      for source, target in (("input_layernorm", "attention.embeds"), ("hidden_norm", "attention.hidden"),
                             ("post_attention_layernorm", "mlp.pre"))),
    *rules.ATTENTION, *rules.MLP, *rules.PRE_NORMS)


def method_of(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> str:
    """The method that a folder is for: eagle, eagle3, medusa, dflash, dspark, or draft_model. ModelError for others."""
    named = str(config.get("speculators_model_type") or "")
    if named and named not in ("eagle", "eagle3", "peagle"):
        raise ModelError(f"config.json has speculators_model_type {named!r}; possible are eagle, eagle3 and peagle")
    architecture = str((config.get("architectures") or [""])[0])
    if "markov_head.markov_w1.weight" in tensors or "dspark" in architecture.lower():
        return "dspark"
    if "dflash_config" in config or "dflash" in architecture.lower():
        return "dflash"
    if "medusa_num_heads" in config or config.get("model_type") == "medusa" or "medusa" in architecture.lower():
        return "medusa"
    if named in ("eagle3", "peagle") or "eagle3" in architecture.lower() or any(name in ("d2t", "t2d") for name in tensors):
        return "eagle3"
    if named or "eagle" in architecture.lower() or any(name.endswith("fc.weight") for name in tensors):
        return "eagle3" if any(name.startswith("midlayer.") for name in tensors) else "eagle"
    return "draft_model"


def eagle(folder: Path, config: Mapping[str, Any], method: str, target: ModelSpec, parallel: bool | None = None) -> DraftHead:
    """An EAGLE head of any version, as the EAGLE repositories, SpecForge and speculators publish them; `parallel` as in
    `mask_token`. ModelError if it is not for this target."""
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    given = Config({**config, **inner}, {"hidden_act": "silu", "max_position_embeddings": 2048, "num_hidden_layers": 1})
    given.absent("norm_before_fc", "fc_norm", "norm_output", "layernorms")
    names = {name.removeprefix("model.") for name in read_headers(folder)}
    width, norm = given.integer("hidden_size"), parts.rms_norm(given)
    inputs = given.integer("target_hidden_size", width)
    if inputs != target.width or (method == "eagle" and width != inputs):
        raise ModelError(f"{folder} drafts for a model of width {inputs}; this one has {target.width}")
    attention = parts.attention(given, rope=rope(given, parts.head_size(given)), bias=given.flag("attention_bias", False))
    block = BlockSpec(((BranchSpec(attention, norm),), (BranchSpec(parts.gated_mlp(given), norm),)))
    own = given.integer("vocab_size", target.vocab_size) if "embed_tokens.weight" in names else 0
    if not own and width != target.width:
        raise ModelError(f"{folder} has no embedding and width {width}, but the model's embedding has {target.width}")
    layers = given.integer("num_hidden_layers")
    tokens, taps, last = target.vocab_size, tuple[int, ...](), norm if "norm.weight" in names else NoNormSpec()
    if method == "eagle":
        entry = JoinSpec(width, inputs, bias="fc.bias" in names, tokens=own)
        # The first layer of EAGLE 1 and 2 reads the joined stream as it is.
        first = block if "layers.0.input_layernorm.weight" in names else BlockSpec(((BranchSpec(attention),), block.stages[1]))
    else:
        tokens, taps = given.integer("draft_vocab_size", target.vocab_size), _taps(given, target)
        before = given.flag("norm_before_residual", False)
        entry = JoinSpec(width, inputs, len(taps), joined=False, hidden_norm=norm if before else None, tokens=own)
        pair = PairAttentionSpec(**{field.name: getattr(attention, field.name) for field in fields(attention)}, embeds=norm,
                                 hidden=None if before else norm)
        first = BlockSpec(((BranchSpec(pair),), block.stages[1]))
    spec = ModelSpec(method, tokens, width, target.max_positions, (first, *[block] * (layers - 1)), last,
                     HeadSpec(False, borrowed="lm_head.weight" not in names), entry)
    found = _EAGLE_1 if method == "eagle" else _EAGLE_3
    if method == "eagle3" and entry.hidden_norm is not None:
        found = tuple(replace(rule, target="entry.hidden.weight") if rule.target == "blocks.0.attention.hidden.weight" else rule
                      for rule in found)
    return DraftHead(method, folder, config, stored_as(spec, found, config), found, (), taps,
                     mask=mask_token(given.values, parallel))


@dataclass(frozen=True)
class BlockHead(DraftHead):
    """A block diffusion head (DFlash, DSpark)."""

    mask_token: int = 0
    """Of the slots without a known token."""
    anchored: bool = False
    """The slot of the last known token predicts the first draft; else mask tokens predict all of them."""
    eps: float = 1e-6
    """Of the norm of what it reads of the target."""


EXTRA = ("fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
         "confidence_head.proj.weight", "confidence_head.proj.bias")
"""The tensors of a block diffusion head that are no part of its decoder."""
_BLOCK = (*(Rule(name, None) for name in (*EXTRA, "embed_tokens.weight", "lm_head.weight")),
          Rule("norm.weight", "norm.weight"), *rules.ATTENTION, *rules.MLP, *rules.PRE_NORMS)


def block(folder: Path, config: Mapping[str, Any], method: str, target: ModelSpec) -> BlockHead:
    """A DFlash or DSpark head: layers as Qwen3's. ModelError if it is not for this target, or computes otherwise."""
    given = {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}
    mask, taps = given.get("mask_token_id"), given.get("target_layer_ids")
    if mask is None or not taps:
        raise ModelError(f"{folder}: config.json of a {method} head needs mask_token_id and target_layer_ids")
    if given.get("markov_head_type", "vanilla") != "vanilla" or given.get("fc_layernorm"):
        raise ModelError(f"{folder}: markov_head_type {given.get('markov_head_type')!r} and fc_layernorm are not supported; "
                         "possible is vanilla, without fc_layernorm")
    spec = describe({**given, "architectures": ["Qwen3ForCausalLM"], "vocab_size": target.vocab_size,
                     "tie_word_embeddings": False})
    count, shapes = len(target.blocks), {name: one.shape for name, one in read_headers(folder).items() if name in EXTRA}
    if spec.width != target.width or not all(isinstance(tap, int) and 0 <= tap < count for tap in taps) \
            or tuple(shapes.get("fc.weight", ())) != (target.width, len(taps) * target.width):
        raise ModelError(f"{folder} reads layers {taps} of a model of width {spec.width}; this model has {count} layers of "
                         f"width {target.width}")
    wide = shapes.get("confidence_head.proj.weight", (1, spec.width))[1]
    if wide not in (spec.width, spec.width + shapes.get("markov_head.markov_w1.weight", (0, 0))[1]):
        raise ModelError(f"{folder}: its confidence head reads {wide} numbers; possible are the {spec.width} of a slot's "
                         "state, and with them those of the Markov head's token before")
    spec = replace(spec, architecture=method, begins=False, head=HeadSpec(False, borrowed=True),
                   max_positions=target.max_positions)
    return BlockHead(method, folder, config, stored_as(spec, _BLOCK, config), _BLOCK, (), tuple(tap + 1 for tap in taps),
                     mask_token=int(mask), anchored=bool(given.get("sample_from_anchor", method == "dspark")),
                     eps=float(given.get("rms_norm_eps", 1e-6)))


def _taps(config: Config, target: ModelSpec) -> tuple[int, ...]:
    """The blocks whose inputs an EAGLE-3 head reads: an early, a middle and a late one, unless it says otherwise."""
    inner = config.values.get("eagle_config") or {}
    given = config.values.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    count = len(target.blocks)
    found = tuple(given or usual_taps(count))
    if not all(isinstance(layer, int) and 0 <= layer <= count for layer in found):
        raise ModelError(f"the head reads layers {list(found)} of its target; this model has layers 0 to {count}")
    return found


def usual_taps(layers: int) -> tuple[int, ...]:
    """The blocks whose inputs an EAGLE-3 head reads if nothing else is said, of a target of so many."""
    return 2, layers // 2, layers - 3


@dataclass(frozen=True)
class _Layout:
    """A family's names for the first of its layers for multi-token prediction. # is the number of the target's layers."""

    layer: str
    entry: tuple[str, str, str, str]
    """Names besides those of the layer, in the order of `_ENTRY`. Tensors of the joining matrix tell that it is there."""
    ignored: tuple[str, ...] = ()
    """Copies of the target's matrices."""
    hidden_first: bool = False
    normed: bool = False


_ENTRY = ("entry.embeds.weight", "entry.hidden.weight", "entry.join.*", "norm.weight")
_LAYOUTS = (
    _Layout("model.layers.#", ("model.layers.#.enorm.weight", "model.layers.#.hnorm.weight", "model.layers.#.eh_proj.*",
                               "model.layers.#.shared_head.norm.weight"),
            ("model.layers.#.embed_tokens.weight", "model.layers.#.shared_head.head.weight")),
    _Layout("model.mtp_layers.0", ("model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.hidden_layernorm.weight",
                                   "model.mtp_layers.0.input_proj.*", "model.mtp_layers.0.final_layernorm.weight"),
            hidden_first=True, normed=True),
    # The target's last norm is this layer's too.
    _Layout("model.mtp_block.0", ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.*",
                                  "model.norm.weight")),
    _Layout("mtp.layers.0", ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.*",
                             "mtp.norm.weight"), normed=True))
"""DeepSeek V3 and GLM 4.5; MiMo; Ernie 4.5; Qwen3-Next and 3.5."""


def mtp(folder: Path, config: Mapping[str, Any], target: ModelSpec) -> DraftHead | None:
    """The layer for multi-token prediction inside a target's checkpoint; None if it has none."""
    tensors, number = read_headers(folder), str(len(target.blocks))
    layout = next((one for one in _LAYOUTS for sign in (one.entry[2].replace("#", number).rstrip("*"),)
                   if any(name.startswith(sign) for name in tensors)), None)
    if layout is None:
        return None
    stem, family = layout.layer.replace("#", number), family_of(config)[1]
    mixture = any(name.startswith(f"{stem}.mlp.experts.") for name in tensors)
    block = next(block for block in reversed(target.blocks)
                 if any(isinstance(mixer, ExpertsSpec) for mixer in block.mixers) is mixture
                 and not any(isinstance(mixer, DeltaSpec) for mixer in block.mixers))
    norm = target.norm
    spec = ModelSpec("mtp", target.vocab_size, target.width, target.max_positions, (block,), norm,
                     replace(target.head, borrowed=True),
                     JoinSpec(target.width, target.width, embeds_norm=norm, hidden_norm=norm, hidden_first=layout.hidden_first))
    found = (*(Rule(source.replace("#", number), parameter) for source, parameter in zip(layout.entry, _ENTRY, strict=True)),
             *(Rule(source.replace("#", number), None) for source in layout.ignored),
             *(replace(rule, source=f"{stem}.{rule.source.partition('layers.#.')[2]}",
                       target=rule.target and rule.target.replace("blocks.#", "blocks.0"))
               for rule in family.RULES if "layers.#." in rule.source))
    stems = (f"{stem}.", *(source.replace("#", number).rstrip("*") for source in layout.entry))
    return DraftHead("mtp", folder, config, stored_as(spec, found, config), found, stems, normed=layout.normed)
