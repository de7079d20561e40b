"""Writes a plain model's folder quantized: module by module, in shards, with everything else of the folder beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from penstock.checkpoint.tensors import INDEX, SINGLE
from penstock.core.errors import ConfigError
from penstock.layers.spec import ModelSpec
from penstock.models.registry import checkpoint_of, configured, describe, family_of
from penstock.models.translated import Translated
from penstock.models.weights import Progress
from penstock.quant import writing
from penstock.quant.rounding import gptq, serves

_SHARD = 4 << 30
"""Bytes that are collected before a file is written."""


class Moments(Protocol):
    """Second moments of projections' inputs (`worker/calibration.py`)."""

    def of(self, path: str) -> torch.Tensor | None: ...


def write(folder: Path, out: Path, scheme: str, rules: Mapping[str, str], dtype: str, progress: Progress | None = None,
          moments: Moments | None = None) -> int:
    """Writes compressed-tensors, rounded by GPTQ where there are moments; returns the bytes of all tensors. ConfigError or
    ModelError: why not."""
    given = configured(folder, scheme, rules)
    if given["quantization_config"].get("quant_method") != "at-load":
        raise ConfigError(f"{folder} is quantized already; take the model's unquantized folder")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name a new folder")
    checkpoint = checkpoint_of(folder, given, describe(given), dtype)
    assert isinstance(checkpoint, Translated)
    modules = checkpoint.modules()
    schemes = {name: writing.writable(form.scheme, dtype) for name, form in modules.items()}
    if not schemes:
        raise ConfigError(f"no matrix of {folder} can be stored as {scheme}: its blocks do not fill the rows")
    unusual = [name for name in modules if checkpoint.rearranged(name)]
    if unusual:
        raise ConfigError(f"{unusual[0]} is not stored as a matrix [outputs, inputs], which compressed-tensors needs; quantize "
                          "this model while it is loaded, with --quantization")
    paths = _paths(describe({name: value for name, value in given.items() if name != "quantization_config"}), given)
    out.mkdir(parents=True, exist_ok=True)
    files = _Files(out)
    with checkpoint.mapped():
        done = 0
        raw = checkpoint.raw()
        total = sum(stored.nbytes for stored in raw.values())
        for name, stored in raw.items():
            module = name.removesuffix(".weight")
            tensor = checkpoint.view(stored)
            if module in schemes:
                known = moments.of(paths[module]) if moments is not None and serves(schemes[module]) else None
                parts = schemes[module].encode(tensor.float()) if known is None else gptq(
                    schemes[module], tensor.float().to(known.device), known)
                parts = {name: part.cpu() for name, part in parts.items()}
                found = writing.tensors(schemes[module], parts, getattr(torch, dtype), tensor.shape[-1])
                files.add({f"{module}.{suffix}": part for suffix, part in found.items()})
            else:
                files.add({name: tensor.clone()})
            del tensor
            checkpoint.release(stored)
            done += stored.nbytes
            if progress is not None:
                progress(done, total)
    files.close()
    plain = sorted(name for name in checkpoint.linears() if name not in schemes)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = writing.config(schemes, plain)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in folder.iterdir():
        if path.suffix in (".json", ".model", ".jinja", ".txt") and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, out / path.name)
    return files.nbytes


def _paths(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, str]:
    """The paths of the projections that modules of a checkpoint are part of."""
    rules, found = family_of(config)[1].RULES, dict[str, str]()
    for parameter in spec.parameters():
        for one in parameter.pieces or (parameter,):
            name = next((name for rule in rules if (name := rule.name_of(one.name)) is not None), None)
            if parameter.scheme is not None and name is not None:
                found[name.removesuffix(".weight")] = parameter.stem
    return found


class _Files:
    """The shards of a folder."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._waiting: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self.nbytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._waiting |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= _SHARD:
            self._flush()

    def _flush(self) -> None:
        save_file(self._waiting, self._out / f"part-{len(self._shards)}.safetensors", {"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting = {}

    def close(self) -> None:
        """Writes the rest, and names the files as an index or a single file wants them."""
        if self._waiting:
            self._flush()
        count = len(self._shards)
        if count == 1:
            (self._out / "part-0.safetensors").rename(self._out / SINGLE)
            return
        places: dict[str, Any] = {}
        for at, names in enumerate(self._shards):
            target = f"model-{at + 1:05}-of-{count:05}.safetensors"
            (self._out / f"part-{at}.safetensors").rename(self._out / target)
            places |= dict.fromkeys(names, target)
        (self._out / INDEX).write_text(json.dumps({"metadata": {"total_size": self.nbytes}, "weight_map": places}))

