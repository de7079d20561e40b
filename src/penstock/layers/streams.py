"""Several streams of which layers compute with one (AltUp, Baykal et al. 2023, as Gemma 3n has it): each layer predicts all of
them, runs on the active one, and corrects the others by how its result differs from the prediction.

Between layers the streams lie side by side, [T, count x W]."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece
from penstock.layers.step import BASE


@dataclass(frozen=True)
class StreamsSpec:
    width: int
    """Of one stream."""
    count: int
    active: int
    eps: float
    """Of the norm before the router, whose tanh weighs the coefficients."""
    scaled: bool = True
    """The input that a layer has of its own reads the active stream times a learned vector."""

    @property
    def linears(self) -> dict[str, LinearSpec]:
        """By path: the projections that make the other streams of the embedding, and those that they go through at the end."""
        return {f"streams.{end}.{i}": LinearSpec(self.width, (Piece(end, self.width),))
                for end in ("entry", "exit") for i in range(self.count - 1)}

    def parameters(self, path: str) -> Iterator[Parameter]:
        """Of one layer."""
        yield Parameter(f"{path}.norm", (self.width,), rest=1.0)
        for name, shape in (("router", (self.count, self.width)), ("predict", (self.count**2, self.count)),
                            ("correct", (self.count, self.count)), ("scale", (self.width,))):
            yield Parameter(f"{path}.{name}", shape)


class StreamEnds:
    def __init__(self, spec: StreamsSpec, build: Build) -> None:
        self.spec = spec
        self.linears = [Linear(linear, path, build) for path, linear in spec.linears.items()]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """The streams of embeddings [T, W]: x, and its projections at x's magnitude."""
        others = [_levelled(linear(x, BASE), x) for linear in self.linears[:self.spec.count - 1]]
        return torch.cat((x, *others), 1)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """[T, W]: the mean of the first stream and the projections of the others at its magnitude."""
        first, *others = x.split(self.spec.width, 1)
        ends = [_levelled(linear(other.contiguous(), BASE), first)
                for linear, other in zip(self.linears[self.spec.count - 1:], others, strict=True)]
        return torch.stack((first, *ends)).mean(0)


def _levelled(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x [T, W] with the root mean square of `like`."""
    own, wanted = (one.float().pow(2).mean(-1, keepdim=True) for one in (x, like))
    return (x * (wanted / own.clamp(min=1e-5)).sqrt()).to(x.dtype)


class Streams:
    """The part of one layer."""

    def __init__(self, spec: StreamsSpec, path: str, build: Build) -> None:
        self.spec = spec
        self.norm, self.router, self.predicting, self.correcting, self.scale = (
            build.values.tensor(f"{path}.{name}") for name in ("norm", "router", "predict", "correct", "scale"))
        self._norm = build.kernels.rms_norm

    def _weights(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix times the tanh of routed x [T, W]."""
        routed = (self._norm(x, self.norm, self.spec.eps) / self.spec.width) @ self.router.t()
        return routed.float().tanh().to(x.dtype) @ matrix.t()

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """[T, count, W]: the streams [T, count x W], each plus a weighted sum of all."""
        count, streams = self.spec.count, x.view(len(x), -1, self.spec.width)
        weights = self._weights(streams[:, self.spec.active], self.predicting)
        return torch.baddbmm(streams, weights.view(-1, count, count), streams)

    def correct(self, predicted: torch.Tensor, result: torch.Tensor,
                own: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The streams [T, count x W] behind the layer, whose `result` is the active one's [T, W]. To all but the first, what
        the layer's own input makes of the active stream is added."""
        weights = self._weights(result, self.correcting) + 1.0
        streams = predicted + (result - predicted[:, self.spec.active])[:, None] * weights[:, :, None]
        active = streams[:, self.spec.active]
        streams[:, 1:] += own(active * self.scale if self.spec.scaled else active.contiguous())[:, None]
        return streams.flatten(1)
