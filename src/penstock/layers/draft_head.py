"""The first layers of a draft head (EAGLE, multi-token prediction), which reads the target's hidden states beside tokens.

At position t a head takes the target's hidden state at t and the token at t + 1, and predicts the token at t + 2. For further
drafts it takes its own result in place of the target's state. `models/draft_heads.py` says which heads there are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from penstock.layers.attention import Attention, AttentionSpec
from penstock.layers.block import NormSpec, build_norm
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece
from penstock.layers.step import BASE, Step
from penstock.quant.scheme import PLAIN


@dataclass(frozen=True)
class JoinSpec:
    """The stream at its beginning: a matrix times [embedding, hidden state]; if not `joined`, the hidden state alone."""

    width: int
    inputs: int
    """Width of the target's hidden states."""
    taps: int = 0
    """Hidden states of so many of the target's layers, side by side, are made one by a matrix; 0: it takes the last one."""
    joined: bool = True
    bias: bool = False
    embeds_norm: NormSpec | None = None
    hidden_norm: NormSpec | None = None
    hidden_first: bool = False
    """The order is [hidden state, embedding]."""
    tokens: int = 0
    """Rows of an embedding of its own; 0: it has the target's."""

    @property
    def read(self) -> int:
        """The width of what `Decoder.tap` keeps of the target."""
        return max(1, self.taps) * self.inputs

    @property
    def reduction(self) -> LinearSpec:
        return LinearSpec(self.taps * self.inputs, (Piece("reduce", self.width),))

    @property
    def join(self) -> LinearSpec:
        return LinearSpec(2 * self.width, (Piece("join", self.width),), self.bias)

    def parameters(self, _vocab: Piece, width: int) -> Iterator[Parameter]:
        if self.tokens:
            yield Parameter("embedding.weight", (self.tokens, width), PLAIN)
        if self.taps:
            yield from self.reduction.parameters("entry.reduce")
        if self.joined:
            yield from self.join.parameters("entry.join")
        for name, norm in (("embeds", self.embeds_norm), ("hidden", self.hidden_norm)):
            if norm is not None:
                yield from norm.parameters(f"entry.{name}", width)

    def build(self, build: Build, dtype: torch.dtype) -> "Join":
        return Join(self, build, dtype)


class Join:
    """`Step.beside` [T, width] with the tokens' embeddings. Leaves the embeddings there."""

    def __init__(self, spec: JoinSpec, build: Build, dtype: torch.dtype) -> None:
        self.spec = spec
        table = build.values.matrix("embedding.weight") if spec.tokens else None
        self.embed: Callable[[Step], torch.Tensor] = lambda step: (
            step.tokens.new_zeros(len(step.tokens), spec.width, dtype=dtype) if table is None
            else table.ops.gather(step.tokens, table))
        """Zeros where it has no embedding of its own, until it is given the target's."""
        self._reduce = Linear(spec.reduction, "entry.reduce", build) if spec.taps else None
        self._join = Linear(spec.join, "entry.join", build) if spec.joined else None
        self._norms = [None if norm is None else build_norm(norm, f"entry.{name}", build)
                       for name, norm in (("embeds", spec.embeds_norm), ("hidden", spec.hidden_norm))]

    def reduce(self, taps: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, width] of what `Decoder.tap` keeps of the target."""
        return taps if self._reduce is None else self._reduce(taps, BASE)

    def __call__(self, step: Step) -> torch.Tensor:
        assert step.beside is not None
        hidden, step.beside = step.beside, self.embed(step)
        embeds, hidden = (x if norm is None else norm(x) for x, norm in zip((step.beside, hidden), self._norms, strict=True))
        if self._join is None:
            return hidden
        return self._join(torch.cat((hidden, embeds) if self.spec.hidden_first else (embeds, hidden), -1), BASE)


@dataclass(frozen=True)
class PairAttentionSpec(AttentionSpec):
    """EAGLE-3's attention: its input is the normed embedding beside the normed stream. The branch has no norm of its own."""

    embeds: NormSpec | None = None
    hidden: NormSpec | None = None
    """None: the stream is normed already."""

    @property
    def qkv(self) -> LinearSpec:
        whole = super().qkv
        return LinearSpec(2 * self.width, whole.outputs, whole.bias, whole.split)

    def parameters(self, path: str) -> Iterator[Parameter]:
        for name, norm in (("embeds", self.embeds), ("hidden", self.hidden)):
            if norm is not None:
                yield from norm.parameters(f"{path}.{name}", self.width)
        yield from super().parameters(path)

    def build(self, path: str, build: Build) -> "PairAttention":
        return PairAttention(self, path, build)


class PairAttention(Attention):
    """The stream [T, W] beside `Step.beside` [T, W] -> [T, W]."""

    def __init__(self, spec: PairAttentionSpec, path: str, build: Build) -> None:
        super().__init__(spec, path, build)
        self._pair = [None if norm is None else build_norm(norm, f"{path}.{name}", build)
                      for name, norm in (("embeds", spec.embeds), ("hidden", spec.hidden))]

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        assert step.beside is not None
        both = [x if norm is None else norm(x) for x, norm in zip((step.beside, x), self._pair, strict=True)]
        return super().__call__(torch.cat(both, -1), step, ends)
