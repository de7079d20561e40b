"""Loads the drafter that the options name, and checks that it suits the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock import models
from penstock.checkpoint import read_config, resolve_folder
from penstock.config.speculation import Speculation
from penstock.core.errors import ConfigError
from penstock.layers.spec import ModelSpec
from penstock.ops.registry import Kernels
from penstock.worker.drafters.model import LoadedDraftModel, lag
from penstock.worker.drafters.ngram import LoadedNGram
from penstock.worker.drafting import LoadedDrafter


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft model as its folder describes it."""

    folder: Path
    config: Mapping[str, Any]
    spec: ModelSpec


def survey(asked: Speculation | None, target: ModelSpec, max_model_len: int) -> DraftCheckpoint | None:
    """Reads the draft model's description, if there is one. ConfigError if it cannot draft for the target."""
    if asked is None or asked.model is None:
        return None
    folder = resolve_folder(asked.model, None)
    config = read_config(folder)
    spec = models.describe(config)
    # Models of one tokenizer may pad their vocabularies differently.
    if abs(spec.vocab_size - target.vocab_size) > 1024:
        raise ConfigError(f"the draft model {asked.model} has {spec.vocab_size} tokens, the model {target.vocab_size}: they do "
                          "not have the same tokenizer; take a smaller model of the same family")
    if spec.max_positions < max_model_len:
        raise ConfigError(f"the draft model {asked.model} handles {spec.max_positions} tokens, but max_model_len is "
                          f"{max_model_len}; lower it to {spec.max_positions} (--max-model-len) or take another")
    if not lag(spec.states("float32")):
        raise ConfigError(f"the draft model {asked.model} keeps states that cannot go back by a few tokens (recurrent, "
                          "chunked, or very short windows); possible are models with full attention or sliding windows")
    return DraftCheckpoint(folder, config, spec)


def load(asked: Speculation, found: DraftCheckpoint | None, *, dtype: torch.dtype, max_model_len: int, kernels: Kernels,
         device: torch.device, load_format: str, seed: int) -> LoadedDrafter:
    """Loads the drafter. ModelError if its files are wrong."""
    if found is None:
        return LoadedNGram(asked.shortest, asked.longest)
    return LoadedDraftModel(models.load(found.folder, dict(found.config), dtype=dtype, device=device, kernels=kernels,
                                        load_format=load_format, max_model_len=max_model_len, seed=seed))
