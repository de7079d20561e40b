"""A layer's view of the step it runs in: a ragged batch on the device. Built by `worker/step.py`, read only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.ops.attention import AttentionOps, Geometry, Span, Tree
from penstock.ops.linear import Weight
from penstock.ops.step import GroupStep
from penstock.parallel.group import Group, Runs

Apart = Sequence[tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]]
"""(rows, matrices) of each adapter that changes a layer otherwise than by its projections."""


class Delta(Protocol):
    """The adapters of a step: what is added to a projection's result for the rows that have one; by default nothing."""

    def apart(self, path: str, /) -> Apart:  # noqa: ARG002
        """The adapters that change the matrices at `path`, with factors that the layer there knows."""
        return ()

    def shrink(self, path: str, x: torch.Tensor, /) -> torch.Tensor | None:
        """The first factor of the deltas of the projection at `path`, for `expand`, given its input x; None: it has none."""

    def expand(self, path: str, low: torch.Tensor | None, out: torch.Tensor, bias: torch.Tensor | None,  # noqa: ARG002
               /) -> torch.Tensor:
        """`out`, which may be changed in place, with its deltas. `bias` is what `out` contains of one."""
        return out

    def product(self, path: str, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None,  # noqa: ARG002
                kind: str | None, /) -> torch.Tensor | None:  # noqa: ARG002
        """The projection of x with its deltas, of a `kind` gated, where that is faster than the two above; None elsewhere."""
        return None

    def embed(self, tokens: torch.Tensor, out: torch.Tensor, /) -> torch.Tensor:  # noqa: ARG002
        """The embeddings `out` of tokens with their deltas."""
        return out

    def head(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:  # noqa: ARG002
        """The logits `out` of hidden states x with their deltas; `bias` as above."""
        return out


@dataclass(frozen=True)
class Base:
    """Rows outside of a step."""

    delta: Delta | None = None
    runs: Runs | None = None


BASE = Base()
"""Rows without adapters."""


@dataclass(slots=True)
class TokenShare:
    """The tokens of a step, divided among ranks (`parallel/contexts.py::Division`), on the device."""

    own: torch.Tensor
    places: torch.Tensor
    pieces: list[Span]
    few: bool
    """Whether the step has other segments, too."""
    tokens: npt.NDArray[np.int64]
    """`own` on the host."""

    def whole(self, x: torch.Tensor, ranks: Group) -> torch.Tensor:
        """[T, ...]: all tokens' of what each rank has of its own."""
        return ranks.gather(x.contiguous()).flatten(0, 1).index_select(0, self.places)


@dataclass(slots=True)
class Step:
    """T tokens of S segments, segment after segment, and perhaps padding: empty segments, and tokens that belong to none."""

    tokens: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int32."""
    query_start: torch.Tensor
    """[S + 1] int32: where each segment's tokens begin."""
    context: torch.Tensor
    """[S] int32: positions of the row that exist after this step, those of the segment included."""
    groups: list[GroupStep]
    work: list[torch.Tensor | None]
    """The results of `prepare` for each of the model's `Works`, on the device."""
    library: list[list[Span]]
    """The long prefill segments that were named to `prepare`, for each of the model's `Works`."""
    ends: torch.Tensor | None = None
    """[E] int32: the only tokens whose hidden states are wanted after the last layer; None: those of all."""
    division: TokenShare | None = None
    """The ranks' shares of the tokens, where ranks divide contexts and the step has long segments."""
    delta: Delta | None = None
    """None if no row has an adapter. Of a divided step: for this rank's own tokens."""
    end_delta: Delta | None = None
    """The same for the tokens `ends` alone."""
    runs: Runs | None = None
    """The runs in which a projection that leaves a sum over ranks is computed. None: all rows at once."""
    tree: Tree | None = None
    """Hides keys from the tokens of draft trees."""
    beside: torch.Tensor | None = None
    """[T, width]: of a draft head, the hidden states that go with the tokens; behind its entry, the tokens' embeddings."""
    inputs: torch.Tensor | None = None
    """[layers, T, D]: what each layer is given beside the stream, if the model has such inputs."""

    def part(self, at: torch.Tensor) -> "Step":
        """This step as the embedding sees it, of the tokens `at` alone."""
        return replace(self, tokens=self.tokens.index_select(0, at), positions=self.positions.index_select(0, at))

    def narrow(self, x: torch.Tensor, ends: torch.Tensor | None) -> "tuple[torch.Tensor, Step]":
        """(x, this step) for the tokens `ends` alone; None: for all."""
        if ends is None:
            return x, self
        if self.delta is None and self.runs is None and self.inputs is None:
            return x.index_select(0, ends), self
        inputs = None if self.inputs is None else self.inputs.index_select(1, ends)
        return x.index_select(0, ends), replace(self, delta=self.delta and self.end_delta, runs=None, inputs=inputs)

    def run(self, first: int) -> "Step":
        """This step as a layer sees it that is given a run of its rows, from `first` on."""
        return replace(self, query_start=self.query_start[-1:] - first, runs=None)


Adapted = Base | Step
"""Facts about a projection's rows."""


@dataclass(frozen=True)
class Work:
    """Host-side preparation of each step that layers share."""

    group: int
    geometry: Geometry
    ops: AttentionOps
    """The operations whose `library_spans` and `prepare` are called."""


@dataclass
class Works:
    """All that a model's layers have prepared, one for each (cache group, geometry)."""

    found: dict[tuple[int, Geometry], Work] = field(default_factory=dict)

    def index(self, group: int, geometry: Geometry, ops: AttentionOps) -> int:
        """Where a layer finds its own in `Step.work` and `Step.library`."""
        self.found.setdefault((group, geometry), Work(group, geometry, ops))
        return list(self.found).index((group, geometry))

    def __iter__(self) -> Iterator[Work]:
        return iter(self.found.values())


@dataclass(slots=True)
class StateView:
    """A mixer's window into the arena: the fields of one of its states by name, and the group whose pages they are in."""

    group: int
    page: int
    """Positions to a page."""
    fields: Mapping[str, torch.Tensor]
    """A field of shape (..., d) per position is [pages, ..., page, d], strided; one per page is [pages, ...]."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]
