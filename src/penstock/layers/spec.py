"""A whole decoder as data: what a family fills in, `Decoder` builds and `models/weights.py` loads.

Its parts are described beside the layers that they build: `attention.py`, `mlp.py`, `norm.py`, `embedding.py`, `block.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.core.state import StateSpec
from penstock.layers.attention import AttentionSpec
from penstock.layers.block import BlockSpec
from penstock.layers.embedding import EmbeddingSpec, HeadSpec
from penstock.layers.norm import NormSpec
from penstock.layers.parameter import Parameter
from penstock.quant.scheme import Scheme


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of any family. `max_positions` is the model's own context length."""

    architecture: str
    vocab_size: int
    width: int
    max_positions: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    head: HeadSpec
    embedding: EmbeddingSpec = EmbeddingSpec()
    schemes: tuple[tuple[str, Scheme], ...] = ()
    """How matrices are stored whose path (as "blocks.0.mlp.down") fits a pattern with * and ?; the first that fits decides.
    Others are plain."""
    labels: tuple[str, ...] = ()
    """Names of the labels of a classifier, whose head has one row for each."""
    task: str = "generate"
    """generate, or, where the checkpoint has no language model's head: embed or classify."""

    def states(self, dtype: str) -> list[StateSpec]:
        """Those of all mixers, in the order in which they run; `dtype` is the model's, a torch name."""
        return [state for block in self.blocks for mixer in block.mixers for state in mixer.states(dtype)]

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The softmax attention layers with keys and values."""
        return [mixer for block in self.blocks for mixer in block.mixers if isinstance(mixer, AttentionSpec)]

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, in the order of their use."""
        for parameter in self._parameters():
            yield self._stored(parameter) if self.schemes and parameter.scheme is not None else parameter

    def _parameters(self) -> Iterator[Parameter]:
        yield from self.embedding.parameters(self.vocab_size, self.width)
        for i, block in enumerate(self.blocks):
            yield from block.parameters(f"blocks.{i}")
        yield from self.norm.parameters("norm", self.width)
        yield from self.head.parameters(len(self.labels) or self.vocab_size, self.width)

    def _stored(self, parameter: Parameter) -> Parameter:
        scheme = next((scheme for pattern, scheme in self.schemes if fnmatchcase(parameter.stem, pattern)), parameter.scheme)
        return dataclasses.replace(parameter, scheme=scheme)

    @property
    def size(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(parameter.size for parameter in self.parameters())

    def nbytes(self, dtype: str) -> int:
        """Bytes of the parameters as stored, in a model of `dtype`; packing and the rope tables may add a little."""
        return sum(parameter.nbytes(dtype) for parameter in self.parameters())
