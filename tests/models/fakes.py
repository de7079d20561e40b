"""Things that no model has yet, built on the contracts alone: a recurrent mixer, a scheme, and a family that has both."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.core.state import Field, Snapshot, StateSpec
from penstock.layers.block import BlockSpec, BranchSpec
from penstock.layers.build import Build, Linear, LinearSpec, Mixer, Parameter, Piece
from penstock.layers.spec import ModelSpec
from penstock.layers.step import StateView, Step, Works
from penstock.models import parts, rules
from penstock.models.config import Config, rope
from penstock.ops.linear import Weight
from penstock.ops.table import Implementation
from penstock.quant.scheme import Part, Scheme, Weights

DECAY = 0.75


@dataclass(frozen=True)
class RecurrenceSpec:
    """s_t = DECAY * s_(t-1) + W x_t; out_t = U tanh(s_t). A page holds s behind the last position written to it."""

    width: int

    name = "recurrence"

    @property
    def linears(self) -> tuple[LinearSpec, LinearSpec]:
        return LinearSpec(self.width, (Piece("w", self.width),)), LinearSpec(self.width, (Piece("u", self.width),))

    def parameters(self, path: str) -> Iterator[Parameter]:
        for name, linear in zip("wu", self.linears, strict=True):
            yield from linear.parameters(f"{path}.{name}")

    def states(self, _dtype: str) -> tuple[StateSpec, ...]:
        return (StateSpec((Field("s", (self.width,), "float32", per="page"),), Snapshot()),)

    def share(self, _ranks: int) -> RecurrenceSpec:
        return self

    def build(self, path: str, build: Build) -> Recurrence:
        return Recurrence(self, path, build)


class Recurrence(Mixer):
    looks_around = True

    def __init__(self, spec: RecurrenceSpec, path: str, build: Build) -> None:
        self.w, self.u = (Linear(linear, f"{path}.{name}", build) for name, linear in zip("wu", spec.linears, strict=True))

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        (self.view,) = views

    def detach(self) -> None:
        del self.view

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        table, page, states = step.groups[self.view.group].table, self.view.page, self.view["s"]
        added = self.w(x, step).float()
        out = torch.zeros_like(added)
        starts = step.query_start.tolist()
        for segment, length in enumerate(step.context.tolist()):
            first, last = starts[segment], starts[segment + 1]
            if first == last:
                continue
            begin = length - (last - first)
            state = states[table[segment, (begin - 1) // page]] if begin else torch.zeros(x.shape[1])
            for token in range(first, last):
                state = DECAY * state + added[token]
                out[token] = state
            states[table[segment, (length - 1) // page]] = state
        mixed = torch.tanh(out).to(x.dtype)
        return self.u(mixed if ends is None else mixed.index_select(0, ends), step)


@dataclass(frozen=True)
class Transposed(Weights):
    """A matrix stored as [inputs, outputs], and the largest number of each row beside it, which must be there and is not
    needed: two tensors that are joined along different axes."""

    name = "transposed"

    def parts(self, n: int, k: int, dtype: str) -> tuple[Part, ...]:
        return Part("weight_t", (k, n), dtype, rows=1, columns=0), Part("peak", (n,), "float32", rows=0, columns=None)

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight_t": matrix.t().contiguous(), "peak": matrix.float().amax(1)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        assert torch.equal(parts["weight_t"].float().amax(0), parts["peak"]), "the parts belong together"
        return parts["weight_t"].t().to(dtype)


class TransposedOps:
    """A kernel that computes with the matrix as it is stored."""

    packed = 0

    @classmethod
    def pack(cls, _scheme: Scheme, parts: Mapping[str, torch.Tensor], _shape: tuple[int, ...], _dtype: torch.dtype) -> Weight:
        cls.packed += 1
        weight = parts["weight_t"]
        return Weight(weight, weight.shape[1], weight.shape[0], weight.dtype)

    @staticmethod
    def apply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return F.linear(x, weight.data.t(), bias).to(out_dtype or x.dtype)

    @staticmethod
    def gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        gate, up = F.linear(x, weight.data.t(), bias).chunk(2, -1)
        return {"silu": F.silu}[kind](gate) * up

    @staticmethod
    def gather(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        return weight.data.t()[ids.long()]


def kernel(scheme: str = "transposed", fits: Any = lambda n, k: True) -> Implementation:
    """The kernel's entry in the table."""
    return Implementation("reference", TransposedOps, lambda facts, dtype: None, 1, fits=fits)


def family(schemes: tuple[tuple[str, Scheme], ...] = (), recurrent: bool = False) -> SimpleNamespace:
    """Llama, stored by these schemes, or with a recurrence in place of every other attention."""

    def spec(config: Config) -> ModelSpec:
        norm, mlp, blocks = parts.rms_norm(config), parts.gated_mlp(config), []
        for layer in range(config.integer("num_hidden_layers")):
            mixer: Any = RecurrenceSpec(mlp.width)
            if not recurrent or layer % 2:
                mixer = parts.attention(config, rope=rope(config, parts.head_size(config)))
            blocks.append(BlockSpec(((BranchSpec(mixer, pre=norm),), (BranchSpec(mlp, pre=norm),))))
        return dataclasses.replace(parts.decoder(config, blocks, norm), schemes=schemes)

    return SimpleNamespace(ARCHITECTURES=("FakeForCausalLM",), MODEL_TYPES=(), RULES=rules.LLAMA, spec=spec,
                           DEFAULTS={"hidden_act": "silu", "max_position_embeddings": 512})


def enter(monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace) -> None:
    """Makes the family known, as a file in models/families/ would."""
    # The package has a function of the module's name.
    registry = importlib.import_module("penstock.models.registry")
    known = registry.registry()
    found = registry.Registry({**known.architectures, "FakeForCausalLM": module}, known.model_types)
    monkeypatch.setattr(registry, "registry", lambda: found)


def configured(folder: Path, **changes: Any) -> Path:
    """A model folder of the fake family, without weights."""
    config = {"architectures": ["FakeForCausalLM"], "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131, "dtype": "float32", "eos_token_id": 2,
              "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
