"""Linear attention by the gated delta rule: a state of constant size in place of keys and values. Description and layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.core.state import Field, Snapshot, StateSpec
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece, Split, TokenMixer
from penstock.layers.step import StateView, Step, Works
from penstock.ops.delta import DeltaShape, DeltaState, DeltaWeights


@dataclass(frozen=True)
class DeltaSpec:
    """One projection of x, the recurrence (`ops/delta.py`), and the projection of its results. Ranks divide the key heads."""

    width: int
    shape: DeltaShape
    back: int = 0
    """Positions that its state can go back by, as rejected drafts need it."""
    apart: bool = False
    """Whether queries, keys and values of all heads are one matrix, and gates, step sizes and decays others (Qwen3.5)."""

    name = "attention"

    @property
    def input(self) -> LinearSpec:
        """All inputs of the recurrence; if `apart`, queries, keys and values."""
        keys, values = self.shape.key_size, self.shape.shared * self.shape.value_size
        whole = {"qkvz": self.shape.unit, "ba": 2 * self.shape.shared}
        return self._pieces({"queries": keys, "keys": keys, "values": values} if self.apart else whole)

    @property
    def gates(self) -> LinearSpec:
        """The other inputs, if `apart`."""
        shared = self.shape.shared
        return self._pieces({"z": shared * self.shape.value_size, "b": shared, "a": shared})

    def _pieces(self, units: dict[str, int]) -> LinearSpec:
        """A projection to these outputs. `units`: rows of each key head, by name."""
        pieces = tuple(Piece(name, self.shape.key_heads * unit, unit) for name, unit in units.items())
        return LinearSpec(self.width, pieces, split=Split.ROWS)

    @property
    def output(self) -> LinearSpec:
        size = self.shape.value_size
        return LinearSpec(self.shape.heads * size, (Piece("out", self.width),), False, Split.COLUMNS, self.shape.shared * size)

    def share(self, ranks: int) -> "DeltaSpec":
        heads = Piece("k", self.shape.key_heads).room(ranks)
        return replace(self, shape=self.shape._replace(key_heads=heads, heads=heads * self.shape.shared))

    def parameters(self, path: str) -> Iterator[Parameter]:
        shape = self.shape
        yield from self.input.parameters(f"{path}.input")
        if self.apart:
            yield from self.gates.parameters(f"{path}.gates")
        pieces = tuple(Piece(f"{path}.conv.{name}", shape.key_heads * unit, unit) for name, unit in zip(
            "qkv", (size * shape.kernel for size in (shape.key_size, shape.key_size, shape.shared * shape.value_size)),
            strict=True))
        yield Parameter(f"{path}.conv.weight", (sum(piece.rows for piece in pieces),), None, pieces, 0.5, Split.ROWS)
        for name in ("decay", "step"):
            yield Parameter(f"{path}.{name}", (shape.heads,), split=Split.ROWS, unit=shape.shared, dtype="float32")
        yield Parameter(f"{path}.norm.weight", (shape.value_size,), rest=1.0)
        yield from self.output.parameters(f"{path}.out")

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        shape = self.shape
        fields = (Field("state", (shape.heads, shape.key_size, shape.value_size), "float32", per="page"),
                  Field("inputs", (shape.key_heads, shape.kernel - 1 + self.back, shape.kept), dtype, per="page"),
                  Field("at", (shape.key_heads,), "int32", per="page"))
        return (StateSpec(fields, Snapshot(self.back)),)

    def build(self, path: str, build: Build) -> "Delta":
        return Delta(self, path, build)


class Delta(TokenMixer):
    """x [T, W] -> [T, W]."""

    def __init__(self, spec: DeltaSpec, path: str, build: Build) -> None:
        self.shape = shape = spec.shape
        self.input = Linear(spec.input, f"{path}.input", build)
        self.gates = Linear(spec.gates, f"{path}.gates", build) if spec.apart else None
        self.o = Linear(spec.output, f"{path}.out", build)
        flat = build.values.tensor(f"{path}.conv.weight")
        keys = shape.key_heads * shape.key_size * shape.kernel
        parts = flat.split((keys, keys, len(flat) - 2 * keys))
        conv = torch.cat([part.view(shape.key_heads, -1, shape.kernel) for part in parts], 1)
        self.weights = DeltaWeights(conv, *(build.values.tensor(f"{path}.{name}") for name in ("decay", "step", "norm.weight")))
        self._run = build.kernels.delta_rule

    def attach(self, views: Sequence[StateView], works: Works) -> None:  # noqa: ARG002
        (view,) = views
        self.group, self.state = view.group, DeltaState(page=view.page, **view.fields)

    def detach(self) -> None:
        del self.state

    def _given(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The recurrence's inputs, by key head (`ops/delta.py::delta_rule`)."""
        found, shape = self.input(x, step), self.shape
        if self.gates is None:
            return found
        keys, values = shape.key_heads * shape.key_size, shape.heads * shape.value_size
        q, k, v = found.split((keys, keys, values), 1)
        z, b, a = self.gates(x, step).split((values, shape.heads, shape.heads), 1)
        return torch.cat([torch.cat([part.reshape(len(x), shape.key_heads, -1) for part in parts], 2).flatten(1)
                          for parts in ((q, k, v, z), (b, a))], 1)

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        out = self._run(self._given(x, step), self.shape, self.weights, self.state, step.groups[self.group].table,
                        step.query_start, step.context)
        return self.o(*step.narrow(out, ends))
