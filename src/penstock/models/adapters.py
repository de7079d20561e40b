"""Reads a LoRA adapter's tensors for a model: which projection each belongs to, checked by names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from penstock.checkpoint.adapter import WEIGHTS, read_adapter
from penstock.core.errors import ModelError
from penstock.layers.spec import ModelSpec
from penstock.models.rules import Rule

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LowRank:
    """An adapter's addition to rows [row, row + rows) of a projection: (x A^T) B^T, with its scale in B."""

    row: int
    a: torch.Tensor
    """[r, K]"""
    b: torch.Tensor
    """[rows, r]"""


Deltas = dict[str, list[LowRank]]
"""By the path of the projection (`layers/linear.py::Linear.path`)."""


@dataclass(frozen=True)
class _Place:
    path: str
    row: int
    rows: int
    columns: int
    stacked: bool


def _places(spec: ModelSpec) -> dict[str, _Place]:
    """Every matrix that a checkpoint may name, by its path."""
    found = {}
    for parameter in spec.parameters():
        if parameter.scheme is None or len(parameter.shape) != 2:
            continue
        path, row = parameter.name.removesuffix(".weight"), 0
        found[parameter.name] = _Place(path, 0, *parameter.shape, parameter.stack > 0)
        for piece in parameter.pieces:
            found[piece.name] = _Place(path, row, piece.rows, parameter.shape[1], parameter.stack > 0)
            row += piece.rows
    return found


def room(spec: ModelSpec, rank: int) -> int:
    """The most numbers that an adapter of this rank has."""
    return sum(rank * (place.rows + place.columns) for place in _places(spec).values()
               if not place.stacked and place.path.startswith("blocks."))


def read(folder: Path, spec: ModelSpec, rules: Sequence[Rule], dtype: torch.dtype, most: int) -> Deltas:
    """An adapter's matrices, of rank at most `most`, in the model's dtype on the CPU. ModelError lists every tensor that does
    not fit the model."""
    config = read_adapter(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder / WEIGHTS} is not a whole safetensors file: {error}") from None
    places, wrong, found = _places(spec), list[str](), Deltas()
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in ("lora_A", "lora_B"):
            wrong.append(f"{name}: only lora_A and lora_B are supported")
        elif tensor.dim() != 2 or not tensor.dtype.is_floating_point:
            wrong.append(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be a matrix of floating-point numbers")
        elif not bool(tensor.isfinite().all()):
            wrong.append(f"{name} has numbers that are not finite")
        else:
            pairs.setdefault(module.removeprefix(_PREFIX), {})[kind] = tensor
    for module, pair in pairs.items():
        place, problem = _place(module, rules, places)
        if place is None:
            wrong.append(f"{module}: {problem}")
            continue
        if len(pair) != 2:
            wrong.append(f"{module} has {next(iter(pair))} alone")
            continue
        rank, scale = config.scale(module)
        a, b = pair["lora_A"], pair["lora_B"]
        if rank > most:
            wrong.append(f"{module} has rank {rank}; at most {most} is possible (--max-lora-rank)")
            continue
        if a.shape != (rank, place.columns) or b.shape != (place.rows, rank):
            wrong.append(f"{module} has A {list(a.shape)} and B {list(b.shape)}; this model and rank {rank} ask for "
                         f"{[rank, place.columns]} and {[place.rows, rank]}")
            continue
        found.setdefault(place.path, []).append(LowRank(place.row, a.to(dtype), (b.float() * scale).to(dtype)))
    if wrong or not found:
        listed = "\n  ".join(sorted(wrong)[:20]) or "it has no matrices"
        raise ModelError(f"the adapter {folder} does not fit this model:\n  {listed}")
    return found


def _place(module: str, rules: Sequence[Rule], places: dict[str, _Place]) -> tuple[_Place | None, str]:
    name = f"{module}.weight"
    rule, target = next(((rule, target) for rule in rules if (target := rule.match(name)) is not None), (None, None))
    place = places.get(target or "")
    if rule is None or place is None:
        return None, "this model has no such projection"
    if rule.change is not None or place.stacked or not place.path.startswith("blocks."):
        return None, "adapters of this matrix are not supported; possible are projections of attention and of dense MLPs"
    return place, ""
