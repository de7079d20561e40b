"""Linear attention by the gated delta rule: a state of constant size in place of keys and values. Description and layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.core.state import Field, Snapshot, StateSpec
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece, Split
from penstock.layers.step import StateView, Step, Works
from penstock.ops.delta import DeltaShape, DeltaState, DeltaWeights


@dataclass(frozen=True)
class DeltaSpec:
    """One projection of x, the recurrence (`ops/delta.py`), and the projection of its results. Ranks divide the key heads."""

    width: int
    shape: DeltaShape
    back: int = 0
    """Positions that its state can go back by, as rejected drafts need it."""

    name = "attention"

    @property
    def input(self) -> LinearSpec:
        heads, shared = self.shape.key_heads, self.shape.shared
        pieces = Piece("qkvz", heads * self.shape.unit, self.shape.unit), Piece("ba", heads * 2 * shared, 2 * shared)
        return LinearSpec(self.width, pieces, split=Split.ROWS)

    @property
    def output(self) -> LinearSpec:
        size = self.shape.value_size
        return LinearSpec(self.shape.heads * size, (Piece("o", self.width),), False, Split.COLUMNS, self.shape.shared * size)

    def share(self, ranks: int) -> "DeltaSpec":
        heads = Piece("k", self.shape.key_heads).room(ranks)
        return replace(self, shape=self.shape._replace(key_heads=heads, heads=heads * self.shape.shared))

    def parameters(self, path: str) -> Iterator[Parameter]:
        shape = self.shape
        yield from self.input.parameters(f"{path}.input")
        pieces = tuple(Piece(f"{path}.conv.{name}", shape.key_heads * unit, unit) for name, unit in zip(
            "qkv", (size * shape.kernel for size in (shape.key_size, shape.key_size, shape.shared * shape.value_size)),
            strict=True))
        yield Parameter(f"{path}.conv.weight", (sum(piece.rows for piece in pieces),), None, pieces, 0.5, Split.ROWS)
        for name in ("decay", "step"):
            yield Parameter(f"{path}.{name}", (shape.heads,), split=Split.ROWS, unit=shape.shared, dtype="float32")
        yield Parameter(f"{path}.norm.weight", (shape.value_size,), rest=1.0)
        yield from self.output.parameters(f"{path}.o")

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        shape = self.shape
        fields = (Field("state", (shape.heads, shape.key_size, shape.value_size), "float32", per="page"),
                  Field("inputs", (shape.key_heads, shape.kernel - 1 + self.back, shape.kept), dtype, per="page"),
                  Field("at", (shape.key_heads,), "int32", per="page"))
        return (StateSpec(fields, Snapshot(self.back)),)

    def build(self, path: str, build: Build) -> "Delta":
        return Delta(self, path, build)


class Delta:
    """x [T, W] -> [T, W]."""

    looks_around = True

    def __init__(self, spec: DeltaSpec, path: str, build: Build) -> None:
        self.shape = shape = spec.shape
        self.input = Linear(spec.input, f"{path}.input", build)
        self.o = Linear(spec.output, f"{path}.o", build)
        flat = build.values.tensor(f"{path}.conv.weight")
        keys = shape.key_heads * shape.key_size * shape.kernel
        parts = flat.split((keys, keys, len(flat) - 2 * keys))
        conv = torch.cat([part.view(shape.key_heads, -1, shape.kernel) for part in parts], 1)
        self.weights = DeltaWeights(conv, *(build.values.tensor(f"{path}.{name}") for name in ("decay", "step", "norm.weight")))
        self._run = build.kernels.delta_rule

    @property
    def linears(self) -> Sequence[Linear]:
        return self.input, self.o

    def attach(self, views: Sequence[StateView], works: Works) -> None:  # noqa: ARG002
        (view,) = views
        self.group, self.state = view.group, DeltaState(page=view.page, **view.fields)

    def detach(self) -> None:
        del self.state

    def leave_sum(self) -> bool:
        return self.o.leave_sum()

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        out = self._run(self.input(x, step), self.shape, self.weights, self.state, step.groups[self.group].table,
                        step.query_start, step.context)
        return self.o(*step.narrow(out, ends))
