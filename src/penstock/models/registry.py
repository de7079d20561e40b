"""Finds the family of a config. Families are discovered by listing their folder; there is no list to maintain."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from penstock.checkpoint import read_config
from penstock.config.resolve import CacheAsked
from penstock.core.errors import ModelError
from penstock.layers.embedding import HeadSpec
from penstock.layers.spec import ModelSpec
from penstock.models import caching, fallback, families
from penstock.models.config import Config
from penstock.models.rules import OWN, Rule
from penstock.models.translated import Checkpoint, Translated, with_schemes
from penstock.quant import dialects
from penstock.quant.dialects import at_load
from penstock.quant.form import Reader
from penstock.quant.scheme import PLAIN


@dataclass(frozen=True)
class Registry:
    """Families by the names that config.json calls them."""

    architectures: Mapping[str, ModuleType]
    model_types: Mapping[str, ModuleType]


@cache
def registry() -> Registry:
    """Every family in `families/`."""
    files = [importlib.import_module(f"{families.__name__}.{found.name}") for found in pkgutil.iter_modules(families.__path__)]
    every = [family for file in files for family in (file, *getattr(file, "LIKE", ()))]
    return Registry({name: family for family in every for name in family.ARCHITECTURES},
                    {name: family for family in every for name in family.MODEL_TYPES})


def family_of(config: Mapping[str, Any]) -> tuple[str, ModuleType | SimpleNamespace]:
    """(architecture, family) by `architectures[0]`, or by `model_type` where no architecture is named.

    ModelError names the nearest that is known, and all."""
    known = registry()
    if named := config.get("architectures"):
        name, table = str(named[0] if isinstance(named, list) else named), known.architectures
        base, _ = _task(name)
        if name in table or base in table:
            return name, table.get(name) or table[base]
        what = f"architecture {name!r}"
    else:
        name, table = str(config.get("model_type") or ""), known.model_types
        if name in table:
            return table[name].ARCHITECTURES[0], table[name]
        what = f"model_type {name!r} (and no architecture)" if name else "neither architectures nor model_type"
    if (foreign := fallback.family(config)) is not None:
        return foreign.ARCHITECTURES[0], foreign
    if config.get("auto_map"):
        raise ModelError(f"config.json names {what}, whose checkpoint brings code of its own, which Penstock does not run; it "
                         f"knows {', '.join(sorted(table))}")
    if any(config.get(key) for key in fallback.EXPERTS):
        raise ModelError(f"config.json names {what}, a mixture-of-experts model, which Penstock does not know; it knows "
                         f"{', '.join(sorted(table))}")
    nearest = difflib.get_close_matches(name, table, 1, 0.0)
    raise ModelError(f"config.json names {what}, which Penstock does not know. The nearest that it knows is "
                     f"{nearest[0] if nearest else next(iter(table))}; all are {', '.join(sorted(table))}")


def describe(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config (as `read_config` gives it) describes; ModelError if Penstock cannot run it as described."""
    hashed = "num_hash_layers" if config.get("num_hash_layers") else "mlp_layer_types"
    if config.get("num_hash_layers") or "hash_moe" in (config.get("mlp_layer_types") or ()):
        raise ModelError(f"config.json has {hashed} {config[hashed]!r}: experts chosen by a hash of the token (DeepSeek V4) "
                         "are not supported; possible are routers that compute scores")
    architecture, family = family_of(config)
    spec: ModelSpec = family.spec(Config(config, {"hidden_act": "silu", **getattr(family, "DEFAULTS", {})}))
    spec = caching.applied(replace(spec, architecture=architecture), config)
    spec = stored_as(spec, rules_of(config), config)
    _, task = _task(architecture)
    if task == "embed":
        # There is no head; the embedding's matrix stands in, and no token is chosen with it.
        return replace(spec, task=task, head=HeadSpec(tied=True))
    if task == "classify":
        head = spec.head if spec.head.dense is not None else HeadSpec(tied=False)
        return replace(spec, task=task, head=head, labels=_labels(config))
    return spec


def rules_of(config: Mapping[str, Any]) -> Sequence[Rule]:
    """The names of a checkpoint's tensors: those of its family, but in GGUF files, whose reader knows parameters."""
    given = config.get("quantization_config") or {}
    return OWN if given.get("quant_method") == "gguf" else family_of(config)[1].RULES


def stored_as(spec: ModelSpec, rules: Sequence[Rule], config: Mapping[str, Any]) -> ModelSpec:
    """The model with its matrices stored as the config's `quantization_config` says, if it has one. ConfigError: options on
    weights that change nothing."""
    if not config.get("quantization_config"):
        return spec
    reader = _reader(config)
    found = with_schemes(spec, rules, reader)
    if isinstance(reader, at_load.AtLoad):
        reader.check(stored=any(one.scheme not in (None, PLAIN) and not one.decoded for one in found.parameters()))
    return found


def _task(architecture: str) -> tuple[str, str]:
    """(the architecture with a language model's head, the task): a backbone embeds, one with labels classifies."""
    if (family := registry().architectures.get(architecture)) is not None:
        return architecture, getattr(family, "TASK", "generate")
    if (base := architecture.replace("ForSequenceClassification", "Model")) in registry().architectures:
        return base, "classify"
    for suffix, task in (("ForSequenceClassification", "classify"), ("TextModel", "embed"), ("Model", "embed")):
        if architecture.endswith(suffix) and architecture not in registry().architectures:
            return architecture.removesuffix(suffix) + "ForCausalLM", task
    return architecture, "generate"


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a classifier's labels, in the order of the head's rows."""
    names = config.get("id2label") or {}
    count = len(names) or int(config.get("num_labels", 2))
    return tuple(str(names.get(str(place), f"LABEL_{place}")) for place in range(count))


def configured(folder: Path, quantization: str | None = None, rules: Mapping[str, str] | None = None,
               cache: CacheAsked | None = None) -> dict[str, Any]:
    """A folder's config with options on weights (`quantization`, `quantization_rules`) and cache. ConfigError: impossible."""
    config = at_load.requested(read_config(folder), quantization, rules or {})
    return config if cache is None else caching.requested(config, folder, cache)


def checkpoint_of(folder: Path, config: Mapping[str, Any], spec: ModelSpec, dtype: str, device: torch.device | None = None,
                  rules: Sequence[Rule] = ()) -> Checkpoint:
    """A folder's tensors as the loader takes them, of any dialect; `rules`: if not the family's. ModelError for misfits."""
    if not config.get("quantization_config"):
        return Checkpoint(folder)
    return Translated(folder, spec, rules or rules_of(config), _reader(config), dtype, device)


def _reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a config's `quantization_config`, which is told the model's dtype: some formats leave scales in it."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return dialects.reader({"model_dtype": dtype, **config["quantization_config"]})
