"""The two ends of a decoder that are as long as its vocabulary: the embedding's rows, and the head's logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.layers.block import NormSpec, build_norm
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece, Split
from penstock.layers.step import BASE, Adapted, Step
from penstock.ops.activation import ACTIVATIONS
from penstock.parallel.group import Group
from penstock.quant.scheme import PLAIN


@dataclass(frozen=True)
class LayerInputsSpec:
    """Inputs of each layer beside the stream (Gemma 3n and 4): (norm(x * matrix / sqrt(width of x)) + sqrt(size) * token's row
    of a table) / sqrt(2). The table has `tokens` rows; other tokens have the first one. Every rank has all of it."""

    size: int
    """Of one layer's."""
    layers: int
    tokens: int
    norm: NormSpec

    @property
    def width(self) -> int:
        return self.size * self.layers

    def projection(self, width: int) -> LinearSpec:
        return LinearSpec(width, (Piece("projection", self.width),))

    def parameters(self, width: int) -> Iterator[Parameter]:
        yield Parameter("inputs.table.weight", (self.tokens, self.width), PLAIN)
        yield from self.projection(width).parameters("inputs.projection")
        yield from self.norm.parameters("inputs.norm", self.size)


class LayerInputs:
    """[layers, T, size] of tokens [T] and their embeddings [T, W]."""

    def __init__(self, spec: LayerInputsSpec, width: int, build: Build, dtype: torch.dtype) -> None:
        self.spec = spec
        self.table = build.values.matrix("inputs.table.weight")
        self.projection = Linear(spec.projection(width), "inputs.projection", build)
        self.norm = build_norm(spec.norm, "inputs.norm", build)
        self._scale = torch.tensor(spec.size**0.5, dtype=dtype).item()

    def __call__(self, tokens: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        own = self.table.ops.gather(torch.where(tokens < spec.tokens, tokens, 0), self.table) * self._scale
        projected = self.projection(stream, BASE) * stream.shape[1]**-0.5
        both = self.norm(projected.view(-1, spec.size)).view(own.shape) + own
        return (both * 2**-0.5).view(-1, spec.layers, spec.size).transpose(0, 1)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Rows of a table times `scale`, plus rows of a table of `positions` learned positions if that is not 0.

    `round_scale`: to the model's dtype, first. `first_position`: rows before that of position 0. `norm` is of the sum."""

    scale: float = 1.0
    round_scale: bool = False
    positions: int = 0
    first_position: int = 0
    norm: NormSpec | None = None
    types: int = 0
    """Rows of a table of token types, of which the first is added to every token; 0: there is none."""
    layers: LayerInputsSpec | None = None
    second: int = 0
    """Ids from this one on are the vocabulary's again, for tokens of a pair's second text, to which the second row is added."""

    def parameters(self, vocab: Piece, width: int) -> Iterator[Parameter]:
        yield Parameter("embedding.weight", (vocab.rows, width), PLAIN, split=Split.ROWS, unit=vocab.unit)
        if self.positions:
            yield Parameter("positions.weight", (self.first_position + self.positions, width), PLAIN)
        if self.types:
            yield Parameter("types.weight", (self.types, width))
        if self.norm is not None:
            yield from self.norm.parameters("embedding.norm", width)
        if self.layers is not None:
            yield from self.layers.parameters(width)

    def build(self, build: Build, dtype: torch.dtype) -> "Embedding":
        return Embedding(self, build, dtype)


class Embedding:
    """The stream at its beginning, [T, width]. The step gets what layers are given beside it."""

    def __init__(self, spec: EmbeddingSpec, build: Build, dtype: torch.dtype) -> None:
        self.weight = build.values.matrix("embedding.weight")
        self.positions = build.values.matrix("positions.weight") if spec.positions else None
        self.types = build.values.tensor("types.weight") if spec.types else None
        self._second = spec.second
        self.norm = build_norm(spec.norm, "embedding.norm", build) if spec.norm is not None else None
        self.layers = LayerInputs(spec.layers, self.weight.k, build, dtype) if spec.layers is not None else None
        self._first = spec.first_position
        self._scale = torch.tensor(spec.scale, dtype=dtype).item() if spec.round_scale else spec.scale
        self._group = build.group
        self.reads: torch.Tensor | None = None
        """[vocabulary of the steps] int32: the row of each token, where steps have another vocabulary than the table."""

    def __call__(self, step: Step) -> torch.Tensor:
        tokens, group, later = step.tokens, self._group, None
        if self.reads is not None:
            tokens = self.reads[tokens.long()]
        if self._second:
            later = tokens >= self._second
            tokens = torch.where(later, tokens - self._second, tokens)
        out = self.weight.ops.gather(tokens, self.weight) if group is None else self._shared(tokens, group)
        if step.delta is not None:
            out = step.delta.embed(tokens, out)
        if self._scale != 1.0:
            out = out * self._scale
        if self.positions is not None:
            at = step.positions + self._first if self._first else step.positions
            out = out + self.positions.ops.gather(at, self.positions)
        if self.types is not None:
            out = out + (self.types[0] if later is None else self.types[later.long()])
        if self.layers is not None:
            step.inputs = self.layers(tokens, out)
        return out if self.norm is None else self.norm(out)

    def _shared(self, tokens: torch.Tensor, group: Group) -> torch.Tensor:
        """Each rank has the rows of its share of the vocabulary, and zeros for other tokens. The sum over ranks is exact."""
        rows = self.weight.n
        place = tokens - group.rank * rows
        held = (place >= 0) & (place < rows)
        out = self.weight.ops.gather(place.clamp(0, rows - 1), self.weight)
        return group.reduce(out.masked_fill_(~held[:, None], 0))


@dataclass(frozen=True)
class DenseSpec:
    """A layer of the model's own width before a head: norm(activation(x * matrix))."""

    activation: str = "tanh"
    bias: bool = True
    norm: NormSpec | None = None

    def parameters(self, width: int) -> Iterator[Parameter]:
        yield from self.linear(width).parameters("head.dense")
        if self.norm is not None:
            yield from self.norm.parameters("head.norm", width)

    def linear(self, width: int) -> LinearSpec:
        return LinearSpec(width, (Piece("dense", width),), self.bias)


@dataclass(frozen=True)
class HeadSpec:
    """Logits: x times a matrix (the embedding's, if `tied`) divided by `divisor`, then softcap * tanh(x / softcap)."""

    tied: bool
    bias: bool = False
    divisor: float = 1.0
    softcap: float = 0.0
    borrowed: bool = False
    """It is another model's."""
    dense: DenseSpec | None = None
    """A layer that x goes through first."""
    mean: bool = False
    """A classifier's x is the mean over all tokens, not one token's."""

    def parameters(self, vocab: Piece, width: int) -> Iterator[Parameter]:
        if self.borrowed:
            return iter(())
        found = LinearSpec(width, (Piece("head", vocab.rows, vocab.unit),), self.bias, Split.ROWS).parameters("head")
        first = self.dense.parameters(width) if self.dense is not None else ()
        return (parameter for parameter in (*first, *found) if not (self.tied and parameter.name == "head.weight"))


class Dense:
    def __init__(self, spec: DenseSpec, width: int, build: Build) -> None:
        self._linear = Linear(spec.linear(width), "head.dense", build)
        self._norm = build_norm(spec.norm, "head.norm", build) if spec.norm is not None else None
        self._activation = {**ACTIVATIONS, "tanh": torch.tanh}[spec.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._activation(self._linear(x, BASE))
        return x if self._norm is None else self._norm(x)


class Head(Linear):
    """Hidden states [M, width] -> logits [M, vocabulary], float32; of several ranks, each its share of the vocabulary."""

    def __init__(self, spec: HeadSpec, build: Build, vocab_size: int) -> None:
        """`vocab_size`: that of all ranks together."""
        self.path = "head"
        self.spec = spec
        self.weight = build.values.matrix("embedding.weight" if spec.tied else "head.weight")
        self.bias = build.values.tensor("head.bias") if spec.bias else None
        self.dense = Dense(spec.dense, self.weight.k, build) if spec.dense is not None else None
        rank = 0 if build.group is None else build.group.rank
        self._real = min(self.weight.n, max(0, vocab_size - rank * self.weight.n))
        """Columns that are tokens; those behind are padding."""

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        if self.dense is not None:
            x = self.dense(x)
        logits = self.weight.ops.apply(x, self.weight, self.bias, torch.float32)
        if step.delta is not None:
            logits = step.delta.head(x, logits, self.bias)
        if self.spec.divisor != 1.0:
            logits.div_(self.spec.divisor)
        if self.spec.softcap:
            logits.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        if self._real < logits.shape[1]:
            logits[:, self._real:] = -torch.inf
        return logits
