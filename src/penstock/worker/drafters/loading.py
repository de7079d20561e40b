"""Finds out how the engine drafts, from the options, checkpoints' configs and tensors' names, and loads the drafter."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock import models
from penstock.checkpoint import read_config, resolve_folder
from penstock.checkpoint.tensors import read_headers
from penstock.config.schema import METHODS
from penstock.config.speculation import TREES, Speculation, own_drafters
from penstock.core.errors import ConfigError, ModelError
from penstock.layers.attention import AttentionSpec
from penstock.layers.decoder import Decoder, computation
from penstock.layers.spec import ModelSpec
from penstock.models import draft_heads
from penstock.models.draft_heads import BlockHead, DraftHead
from penstock.ops import registry
from penstock.ops.registry import Kernels
from penstock.parallel.axis import ALONE, Place
from penstock.parallel.group import Group
from penstock.platform.facts import detect, device_name
from penstock.worker.drafters import layers, medusa
from penstock.worker.drafters.ahead import LoadedAhead
from penstock.worker.drafters.block import LoadedBlock
from penstock.worker.drafters.head import LoadedHead
from penstock.worker.drafters.layers import Layers
from penstock.worker.drafters.lookahead import Lookahead
from penstock.worker.drafters.model import LoadedDraftModel, lag
from penstock.worker.drafters.ngram import NGram
from penstock.worker.drafters.suffix import Suffix
from penstock.worker.drafters.translation import Translation, translation
from penstock.worker.drafting import Drafter, Host, LoadedDrafter


@dataclass(frozen=True)
class Found:
    asked: Speculation
    """With the method that was found."""
    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    spec: ModelSpec | None = None
    """Of the draft model or head, if there is one on the target's device."""
    head: DraftHead | None = None
    mask: int | None = None
    """The token in whose place a draft model predicts one, if it drafts all tokens in one pass."""
    translation: Translation | None = None
    """From the target's tokenizer to a draft model's, if that is another."""

    def place(self, target: Place) -> Place:
        """The place, among the ranks that divide the drafter's weights, of the one at the target's `place`."""
        whole = self.asked.ranks == 1 or (self.asked.ranks == 0 and self.asked.method == "draft_model")
        return ALONE if whole or self.asked.ahead else Place(target.tensor, target.tensors)

    def part(self, target: Place) -> ModelSpec | None:
        """The part of `spec` that the rank at the target's `place` has. ModelError if it cannot be divided so."""
        try:
            return self.spec and self.spec.at(self.place(target))
        except ModelError as error:
            raise ModelError(f"the draft model: {error}; or set draft_tensor_parallel_size to 1") from None

    @property
    def late(self) -> bool:
        """Whether the last pipeline stage drafts, and not the first, which has tokens alone."""
        asked = self.asked
        alone = asked.method in ("ngram", "suffix", "lookahead", "draft_model")
        return not alone or asked.tree is not None or bool(asked.rejection or asked.ahead)


def survey(asked: Speculation, folder: Path, config: Mapping[str, Any], target: ModelSpec, max_model_len: int,
           dummy: bool = False) -> Found:
    """Decides how to draft for the whole model `target` of a folder and a config. ConfigError or ModelError if what is asked
    for cannot draft for it. `dummy`: the folder has no weights."""
    found = _survey(asked, folder, config, target, max_model_len, dummy)
    if asked.tree is not None:
        _check_tree(found, target)
    if asked.ahead and (found.asked.method != "draft_model" or found.mask is not None or asked.rejection or asked.tree):
        raise ConfigError("speculative_config: ahead is possible with a draft model that drafts chains one token after another "
                          "and rejection_sample_method strict or synthetic: heads read the target's states, other rules the "
                          f"drafts' distributions. {asked.model} drafts as {found.asked.method}. Leave ahead and device out")
    return found


def _check_tree(found: Found, target: ModelSpec) -> None:
    """ConfigError if the drafter gives one candidate a position, or the models cannot hide keys from queries."""
    method = found.asked.method
    if method not in TREES or found.mask is not None or (found.head is not None and found.head.mask is not None):
        raise ConfigError("speculative_eagle_topk needs a drafter with several candidates for each position "
                          f"({', '.join(TREES)}, without parallel_drafting); speculate is {method}. Leave it out")
    for spec in (target, found.spec):
        for mixer in () if spec is None else (mixer for block in spec.blocks for mixer in block.mixers):
            fit = isinstance(mixer, AttentionSpec) and mixer.causal and mixer.stripes < 2 and not (mixer.window or mixer.slopes)
            if mixer.states("float32") and not fit:
                raise ConfigError("speculative_eagle_topk is not possible with a model that has windows, ALiBi, latents or "
                                  "states of another kind: trees need keys and values of full attention; leave it out")


def _survey(asked: Speculation, folder: Path, config: Mapping[str, Any], target: ModelSpec, max_model_len: int,
            dummy: bool) -> Found:
    if asked.method not in METHODS:
        return Found(asked)
    if asked.model is None:
        head = draft_heads.mtp(folder, config, target) if asked.method in ("auto", "mtp") and not dummy else None
        if head is None and asked.method == "mtp":
            raise ConfigError(f"speculate mtp: {folder} has no layer for multi-token prediction of a layout that Penstock "
                              "knows (DeepSeek, GLM, MiMo, Ernie, Qwen3-Next, Qwen3.5); leave speculate out, or use ngram")
        if head is not None:
            return _of_head(asked, head)
        if asked.method == "layer_skip":
            return Found(replace(asked, layers=layers.check(target, asked.layers)))
        return Found(replace(asked, method="suffix" if asked.method == "auto" else asked.method))
    own = resolve_folder(asked.model, None)
    described = read_config(own)
    method = draft_heads.method_of(described, {} if dummy and not any(own.glob("*.safetensors")) else read_headers(own))
    if asked.method not in ("auto", method) and not {asked.method, method} <= {"eagle", "eagle3"}:
        raise ConfigError(f"speculate is {asked.method}, but {asked.model} is for {method}; use --speculate {method} or auto")
    if method in ("eagle", "eagle3"):
        return _of_head(asked, draft_heads.eagle(own, described, method, target, asked.parallel))
    if method in ("dflash", "dspark"):
        return _of_head(asked, draft_heads.block(own, described, method, target))
    if method == "medusa":
        medusa.check(own, described, asked.tokens)
        return Found(replace(asked, method=method), own)
    return _of_model(asked, folder, own, described, target, max_model_len)


def _of_head(asked: Speculation, head: DraftHead) -> Found:
    if not lag(head.spec.states("float32")):
        raise ConfigError(f"the draft head of {head.folder} keeps states that cannot go back by a few tokens")
    return Found(replace(asked, method=head.method), head.folder, head.config, head.spec, head)


def _of_model(asked: Speculation, own: Path, folder: Path, config: Mapping[str, Any], target: ModelSpec,
              max_model_len: int) -> Found:
    spec = models.describe(config)
    mask = draft_heads.mask_token(config, asked.parallel)
    other = translation(own, folder, target.vocab_size, spec.vocab_size)
    # Models of one tokenizer may pad their vocabularies differently.
    if other is None and abs(spec.vocab_size - target.vocab_size) > 1024:
        raise ConfigError(f"the draft model {asked.model} has {spec.vocab_size} tokens, the model {target.vocab_size}, and "
                          "there are no tokenizers to compare; take a smaller model of the same family")
    if other is not None and mask is not None:
        raise ConfigError(f"the draft model {asked.model} drafts in one pass, by a mask token of its own tokenizer, which is "
                          "not the model's; set parallel_drafting to false, or take one of the same family")
    if spec.max_positions < max_model_len:
        raise ConfigError(f"the draft model {asked.model} handles {spec.max_positions} tokens, but max_model_len is "
                          f"{max_model_len}; lower it to {spec.max_positions} (--max-model-len) or take another")
    if not lag(spec.states("float32")):
        raise ConfigError(f"the draft model {asked.model} keeps states that cannot go back by a few tokens (recurrent, "
                          "chunked, or very short windows); possible are models with full attention or sliding windows")
    return Found(replace(asked, method="draft_model"), folder, config, None if asked.ahead else spec, mask=mask,
                 translation=other)


def load(found: Found, target: Decoder, room: int, **how: Any) -> LoadedDrafter:
    """Loads the drafter. `room`: the most tokens of a padded step. `how`: the arguments of `models/registry.py::load`, among
    them `place` and `group`. ModelError if its files are wrong."""
    place, late = how["place"], found.late
    here = place.stage == (place.stages - 1) * late
    # Drafters of users say what their states are once they are loaded.
    drafter = _load(found, target, room, **how) if here or found.asked.method not in METHODS else LoadedDrafter()
    drafter.asked, drafter.here, drafter.late = found.asked, here, late
    spec = None if here else found.part(place)
    if spec is not None:
        drafter.states = spec.states(str(how["dtype"]).removeprefix("torch."))
        drafter.computation = computation(spec, drafter.states, how["kernels"].table(), str(how["dtype"]), how["max_model_len"])
        if found.head is not None and found.head.taps:
            target.tap(found.head.taps, room)
    return drafter


def _load(found: Found, target: Decoder, room: int, place: Place, group: Group | None, **how: Any) -> LoadedDrafter:
    if found.asked.method not in METHODS:
        drafter: LoadedDrafter = own_drafters()[found.asked.method].load()(found.asked, target)
        return drafter
    place = found.place(place)
    shared: dict[str, Any] = {"place": place, "group": None if place.alone else group}
    if found.head is not None:
        head = found.head
        model = head.load(**how, **shared)
        if isinstance(head, BlockHead):
            return LoadedBlock(model, target, head, room)
        return LoadedHead(model, target, head, room)
    if found.asked.method == "medusa":
        assert found.folder is not None
        return medusa.LoadedMedusa(found.folder, target, place)
    asked = found.asked
    weightless: dict[str, Callable[[Host], Drafter]] = {
        "layer_skip": lambda host: Layers(layers.first(host.model, asked.layers), host),
        "lookahead": lambda host: Lookahead(1, asked.longest, asked.tokens, host),
        "suffix": lambda host: Suffix(asked.shortest, asked.longest, host),
        "ngram": lambda _: NGram(asked.shortest, asked.longest)}
    if asked.method in weightless:
        return LoadedDrafter(drafter=weightless[asked.method])
    assert found.folder is not None and found.config is not None
    if asked.ahead:
        return _load_ahead(found, found.folder, found.config, **how)
    return LoadedDraftModel(models.load(found.folder, dict(found.config), **how, **shared), found.mask, found.translation)


def _load_ahead(found: Found, folder: Path, config: Mapping[str, Any], device: torch.device, kernels: Kernels,
                dtype: torch.dtype, **how: Any) -> LoadedDrafter:
    asked, facts = found.asked, detect(found.asked.device)
    own = torch.device(device_name(asked.device, facts))
    if own == device and facts.kind != "cpu":
        raise ConfigError(f"speculative_config: device is {own}, on which the model itself runs; give the draft model another "
                          "one, or cpu, or leave ahead and device out")
    if own.type != device.type:
        kernels = registry.bind(facts, dtype)
    with torch.cuda.device(own) if own.type == "cuda" else nullcontext():
        kernels.attention.warm_up(own)
        model = models.load(folder, dict(config), device=own, kernels=kernels, dtype=dtype, **how)
    return LoadedAhead(model, found.translation, asked)
