"""What a decoder is made of, as data: frozen dataclasses that a family fills in, `Decoder` builds and `models/weights` loads.

A spec also lists its parameters, so that memory can be planned and a checkpoint checked before a byte of it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.state import DTYPE_BYTES, Everything, Field, StateSpec, Window
from penstock.layers.rope import RopeSpec


@dataclass(frozen=True)
class Piece:
    """A part of a parameter as checkpoints name it: the rows from the previous piece's end on."""

    name: str
    rows: int


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model. `name` is its path in the tree; `pieces`, if there are several, are its rows in order.

    A packed parameter is a matrix that `kernels.linear` reads, every other is a plain tensor in the model's dtype.
    """

    name: str
    shape: tuple[int, ...]
    packed: bool
    pieces: tuple[Piece, ...] = ()
    rest: float = 0.0
    """The value of a plain tensor that changes nothing: 1 for the weight of a norm."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RMSNormSpec:
    """x / rms(x) * (offset + weight)."""

    eps: float
    offset: float = 0.0

    def parameters(self, path: str, width: int) -> Iterator[Parameter]:
        yield Parameter(f"{path}.weight", (width,), False, rest=1.0 - self.offset)


@dataclass(frozen=True)
class LayerNormSpec:
    """(x - mean) / deviation * weight + bias."""

    eps: float

    def parameters(self, path: str, width: int) -> Iterator[Parameter]:
        yield Parameter(f"{path}.weight", (width,), False, rest=1.0)
        yield Parameter(f"{path}.bias", (width,), False)


NormSpec = RMSNormSpec | LayerNormSpec


@dataclass(frozen=True)
class LinearSpec:
    """A product with one packed matrix, the rows of `outputs` (name, rows) stacked in order, and perhaps a bias."""

    inputs: int
    outputs: tuple[tuple[str, int], ...]
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.outputs)

    def parameters(self, path: str) -> Iterator[Parameter]:
        """`path` is that of the merged parameter; pieces are its siblings."""
        for kind, shape in (("weight", (self.rows, self.inputs)), ("bias", (self.rows,))):
            if kind == "bias" and not self.bias:
                continue
            parent = path.rpartition(".")[0]
            pieces = tuple(Piece(f"{parent}.{name}.{kind}", rows) for name, rows in self.outputs)
            yield Parameter(f"{path}.{kind}", shape, kind == "weight", pieces if len(pieces) > 1 else ())


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMSNorm of queries and keys before the rotation: of each head alone, or of all heads together (`whole`)."""

    norm: RMSNormSpec
    whole: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped queries. `window` 0 sees all, `softcap` 0 caps nothing, `rope` None turns nothing."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    rope: RopeSpec | None = None
    window: int = 0
    softcap: float = 0.0
    norm: QueryKeyNorm | None = None
    bias: bool = False
    output_bias: bool = False

    name = "attention"

    @property
    def qkv(self) -> LinearSpec:
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return LinearSpec(self.width, (("q", queries), ("k", keys), ("v", keys)), self.bias)

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.heads * self.head_size, (("o", self.width),), self.output_bias)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.qkv.parameters(f"{path}.qkv")
        if self.norm is not None:
            heads, kv_heads = (self.heads, self.kv_heads) if self.norm.whole else (1, 1)
            yield from self.norm.norm.parameters(f"{path}.q_norm", heads * self.head_size)
            yield from self.norm.norm.parameters(f"{path}.k_norm", kv_heads * self.head_size)
        yield from self.output.parameters(f"{path}.o")

    def state(self, dtype: str) -> StateSpec:
        """What this layer remembers of each position."""
        shape = (self.kv_heads, self.head_size)
        keep = Window(self.window) if self.window else Everything()
        return StateSpec((Field("k", shape, dtype), Field("v", shape, dtype)), keep)


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)) if gated, else down(activation(up(x)))."""

    width: int
    inner: int
    activation: str
    gated: bool = True
    bias: bool = False

    name = "mlp"

    @property
    def input(self) -> LinearSpec:
        outputs = (("gate", self.inner), ("up", self.inner)) if self.gated else (("up", self.inner),)
        return LinearSpec(self.width, outputs, self.bias)

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.inner, (("down", self.width),), self.bias)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.input.parameters(f"{path}.gate_up" if self.gated else f"{path}.up")
        yield from self.output.parameters(f"{path}.down")


@dataclass(frozen=True)
class BranchSpec:
    """scale * post(body(pre(x))): what one sublayer adds to the stream."""

    body: AttentionSpec | MLPSpec
    pre: NormSpec | None = None
    post: NormSpec | None = None
    scale: float = 1.0

    def parameters(self, path: str) -> Iterator[Parameter]:
        for name, norm in (("pre", self.pre), ("post", self.post)):
            if norm is not None:
                yield from norm.parameters(f"{path}.{self.body.name}.{name}", self.body.width)
        yield from self.body.parameters(f"{path}.{self.body.name}")


@dataclass(frozen=True)
class BlockSpec:
    """Stages, one after another; the branches of a stage read the same stream and are added to it together.

    ((attention,), (mlp,)) is the usual block, ((attention, mlp),) has a parallel residual (Wang and Komatsuzaki 2021).
    """

    stages: tuple[tuple[BranchSpec, ...], ...]

    @property
    def attention(self) -> AttentionSpec:
        """The block's one attention."""
        (found,) = (branch.body for stage in self.stages for branch in stage if isinstance(branch.body, AttentionSpec))
        return found

    def parameters(self, path: str) -> Iterator[Parameter]:
        for stage in self.stages:
            for branch in stage:
                yield from branch.parameters(path)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Rows of a table times `scale`, plus rows of a table of `positions` learned positions if that is not 0.

    `round_scale`: the scale is rounded to the model's dtype first.
    """

    scale: float = 1.0
    round_scale: bool = False
    positions: int = 0


@dataclass(frozen=True)
class HeadSpec:
    """Logits: the product with a matrix (the embedding's, if `tied`) divided by `divisor`, then softcap * tanh(x / softcap)."""

    tied: bool
    bias: bool = False
    divisor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder. `max_positions` is the model's own context length."""

    architecture: str
    vocab_size: int
    width: int
    max_positions: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    head: HeadSpec
    embedding: EmbeddingSpec = EmbeddingSpec()

    def states(self, dtype: str) -> list[StateSpec]:
        """One a layer, in layer order; `dtype` is a torch name."""
        return [block.attention.state(dtype) for block in self.blocks]

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, in the order of their use."""
        yield Parameter("embedding.weight", (self.vocab_size, self.width), True)
        if self.embedding.positions:
            yield Parameter("positions.weight", (self.embedding.positions, self.width), True)
        for i, block in enumerate(self.blocks):
            yield from block.parameters(f"blocks.{i}")
        yield from self.norm.parameters("norm", self.width)
        if not self.head.tied:
            yield Parameter("head.weight", (self.vocab_size, self.width), True)
        if self.head.bias:
            yield Parameter("head.bias", (self.vocab_size,), False)

    @property
    def size(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(parameter.size for parameter in self.parameters())

    def nbytes(self, dtype: str) -> int:
        """Bytes of the parameters in `dtype`; packing and the rope tables may add a little."""
        return self.size * DTYPE_BYTES[dtype]
