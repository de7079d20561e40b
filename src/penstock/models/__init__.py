"""Model families as data: each describes itself as a ModelSpec and a table of names; one decoder and one loader serve all.

These are the package's public names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.layers.decoder import Decoder
from penstock.layers.embedding import EmbeddingSpec
from penstock.layers.spec import ModelSpec
from penstock.models import weights
from penstock.models.away import Away
from penstock.models.registry import checkpoint_of, configured, describe, family_of, registry, rules_of
from penstock.models.translated import Checkpoint
from penstock.models.weights import Progress
from penstock.ops.registry import Kernels
from penstock.parallel.axis import ALONE, Place
from penstock.parallel.group import Group
from penstock.parallel.lockstep import Lockstep

__all__ = ["Decoder", "ModelSpec", "configured", "describe", "family_of", "load", "registry"]


def load(folder: Path | None, config: dict[str, Any], *, dtype: torch.dtype, device: torch.device, kernels: Kernels,
         load_format: str = "auto", max_model_len: int, seed: int = 0, progress: Progress | None = None, place: Place = ALONE,
         group: Group | None = None, data: Lockstep | None = None, context: Group | None = None, resident: int = 0,
         away: int = 0, folder_away: str | None = None, lends: bool = False) -> Decoder:
    """A model ready to run: described by `config` (as `read_config` gives it), weights from `folder`'s safetensors.

    load_format "dummy" needs no folder: weights are random, a function of `seed`. `max_model_len` is the length of the rope
    tables, and decides how some rope scalings behave (layers/rope.py). `progress` is called with (bytes done, bytes in all).
    `place` is that of a rank, which loads its share and exchanges with its `group`, `data` and `context`. `resident`: experts
    of a layer on the device, if not all (`ModelSpec.resident`). `away`: blocks whose matrices are not (`ModelSpec.away`);
    on a CPU, or with `folder_away`, they are in a file. `lends`: `ModelSpec.lends`. ModelError names what is wrong
    with the config or the files."""
    spec = replace(describe(config), resident=resident, away=away, lends=lends)
    learned = spec.embedding.positions if isinstance(spec.embedding, EmbeddingSpec) else 0
    if learned and max_model_len > spec.longest:
        raise ModelError(f"max_model_len {max_model_len} is beyond the {learned} positions that this model has learned; "
                         f"lower it to at most {spec.longest}")

    def checkpoint() -> Checkpoint:
        assert folder is not None, "only dummy weights need no folder"
        return checkpoint_of(Path(folder), config, spec, str(dtype).removeprefix("torch."), device)

    turns = device.type != "cpu"
    elsewhere = Away(device, folder_away if turns else folder_away or "", turns) if away else None
    values = weights.load(spec, rules_of(config), checkpoint, load_format, seed=seed, dtype=dtype, device=device,
                          kernels=kernels, progress=progress, place=place, away=elsewhere)
    return Decoder(spec.at(place), values, kernels, dtype=dtype, device=device, max_model_len=max_model_len,
                   group=group, data=data, context=context)
