"""The feed-forward layer, gated or plain: a mixer without a state."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from penstock.core.state import StateSpec
from penstock.layers.build import Activated, Build, Linear, LinearSpec, Mixer, Parameter, Piece, Split, even_unit, own_channels
from penstock.layers.step import Adapted, Step


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)) if gated, else down(activation(up(x)))."""

    width: int
    inner: int
    activation: str
    gated: bool = True
    bias: bool = False
    output_bias: bool | None = None
    """None: as the rest."""
    given: bool = False
    """Not gated: the activation is multiplied by what the layer is given beside the stream (`Step.inputs`)."""
    cut: tuple[float, int] | None = None
    """(d, inner width of all ranks): gates lose their mean and d of their standard deviations, before what is negative becomes
    0 and the activation follows (Gemma 3n)."""
    name: str = "mlp"

    @property
    def input(self) -> LinearSpec:
        names = ("gate", "up") if self.gated else ("up",)
        outputs = tuple(Piece(name, self.inner, even_unit(self.inner)) for name in names)
        return LinearSpec(self.width, outputs, self.bias, Split.ROWS)

    @property
    def output(self) -> LinearSpec:
        bias = self.bias if self.output_bias is None else self.output_bias
        return LinearSpec(self.inner, (Piece("down", self.width),), bias, Split.COLUMNS, even_unit(self.inner))

    def share(self, ranks: int) -> "MLPSpec":
        return replace(self, inner=Piece("up", self.inner, even_unit(self.inner)).room(ranks))

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.input.parameters(f"{path}.gate_up" if self.gated else f"{path}.up")
        if self.activation == "xielu":
            for name in ("alpha_p", "alpha_n", "beta", "eps"):
                yield Parameter(f"{path}.act.{name}", (1,), rest=0.5)
        yield from self.output.parameters(f"{path}.down")

    def states(self, _dtype: str) -> tuple[StateSpec, ...]:
        return ()

    def build(self, path: str, build: Build) -> "MLP":
        return MLP(self, path, build)


class MLP(Mixer):
    """x [T, W] -> [T, W]."""

    looks_around = False

    def __init__(self, spec: MLPSpec, path: str, build: Build) -> None:
        inner = f"{path}.gate_up" if spec.gated else f"{path}.up"
        self.up: Linear
        if spec.activation == "none":
            self.up = Linear(spec.input, inner, build)
        elif spec.activation == "xielu":
            self.up = Xielu(spec.input, inner, build, f"{path}.act")
        elif spec.cut is not None:
            self.up = Cut(spec.input, inner, build, spec.activation, *spec.cut)
        else:
            self.up = Activated(spec.input, inner, build, spec.activation, spec.gated)
        self.down = Linear(spec.output, f"{path}.down", build)
        self.up.weight.reader = self.down.weight
        self._number = int(path.split(".")[1]) if spec.given else -1
        self._share = (0, 1) if build.group is None else (build.group.rank, build.group.size)

    def leave_sum(self) -> bool:
        return self.down.leave_sum()

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        if ends is not None:
            x, step = step.narrow(x, ends)
        x = self.up(x, step)
        if self._number >= 0:
            assert step.inputs is not None
            x = x * own_channels(step.inputs[self._number], *self._share)
        return self.down(x, step)


class Cut(Linear):
    """The gated activation of a projection whose gates are cut (`MLPSpec.cut`)."""

    def __init__(self, spec: LinearSpec, path: str, build: Build, kind: str, deviations: float, inner: int) -> None:
        super().__init__(spec, path, build)
        self._kind, self._deviations, self._inner = kind, deviations, inner
        self._activate, self._group = build.kernels.gated, build.group

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        both = super().__call__(x, step)
        gates = both[:, :both.shape[1] // 2]
        sums = torch.stack((gates.float().sum(-1, keepdim=True), gates.float().pow(2).sum(-1, keepdim=True)))
        mean, square = (sums if self._group is None else self._group.reduce(sums)) / self._inner
        gates.copy_((gates - mean - self._deviations * (square - mean * mean).clamp(min=0.0).sqrt()).relu())
        return self._activate(both, self._kind)


class Xielu(Linear):
    """A projection followed by xIELU (Huang and Schlag 2024), whose two slopes are learned in each layer."""

    def __init__(self, spec: LinearSpec, path: str, build: Build, act: str) -> None:
        super().__init__(spec, path, build)
        self.rising, self.falling, self.beta, self.eps = (build.values.tensor(f"{act}.{name}")
                                                          for name in ("alpha_p", "alpha_n", "beta", "eps"))

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        x = super().__call__(x, step)
        rising, falling = F.softplus(self.rising), self.beta + F.softplus(self.falling)
        return torch.where(x > 0, rising * x * x, (torch.expm1(torch.minimum(x, self.eps)) - x) * falling) + self.beta * x
