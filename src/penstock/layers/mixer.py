"""The protocol of a mixer: one sublayer of a block. Attention mixes tokens; a feed-forward layer is a mixer without a state.

A new mixer is one file: a frozen dataclass that describes it, and the layer that it builds. Scheduler, cache, worker and loader
find out what they need (states, parameters, projections) by this protocol alone."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from penstock.core.state import StateSpec
from penstock.layers.build import Build
from penstock.layers.linear import Linear
from penstock.layers.parameter import Parameter
from penstock.layers.step import StateView, Step, Works


class MixerSpec(Protocol):
    """A mixer as data: frozen, comparable, and equal for layers that are built alike."""

    @property
    def name(self) -> str:
        """Its parameters' path within the block; different for the mixers of one block."""
        ...

    @property
    def width(self) -> int:
        """Of the stream that it reads and adds to."""
        ...

    def parameters(self, path: str) -> Iterator[Parameter]: ...

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        """Its cache entries, per position or per page; `dtype` is the model's, a torch name."""
        ...

    def share(self, ranks: int) -> "MixerSpec":
        """One rank's part: the same mixer with fewer heads or channels, whose parameters have the shapes that
        `Parameter.share` leaves to a rank. It is the same for every rank: those that get fewer are filled up with zeros. A
        mixer whose parameters are all WHOLE returns itself."""
        ...

    def build(self, path: str, build: Build) -> "Mixer": ...


class Mixer(Protocol):
    """x [T, width] -> [T, width]: what it adds to the stream. The methods that do something here are those of a mixer without
    projections, states and sums."""

    looks_around: bool
    """Whether a token's result depends on other tokens than itself."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Its projections, which are warmed up at start."""
        return ()

    def attach(self, views: Sequence[StateView], works: Works) -> None:  # noqa: ARG002
        """Gives it its windows into the cache, one for each state, and has it enter in `works` what steps prepare for it."""
        return

    def detach(self) -> None:
        """Lets go of the cache."""
        return

    def leave_sum(self) -> bool:
        """From now on returns this rank's part, if the last thing that it does is to sum over ranks; else returns False."""
        return False

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Runs on a step, updating its states for all of its tokens. With `ends` [E], results are for those tokens alone."""
        ...
