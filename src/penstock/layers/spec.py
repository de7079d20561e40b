"""A whole decoder as data: what a family fills in, `Decoder` builds and `models/weights.py` loads.

Its parts are described beside the layers that they build: `attention.py`, `mlp.py`, `norm.py`, `embedding.py`, `block.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from penstock.core.errors import ModelError
from penstock.core.state import StateSpec
from penstock.layers.attention import AttentionSpec
from penstock.layers.block import BlockSpec
from penstock.layers.embedding import EmbeddingSpec, HeadSpec
from penstock.layers.norm import NormSpec
from penstock.layers.parameter import Parameter, Piece, Split
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
    beyond: int = 0
    """Layers that a checkpoint stores behind the last block, for drafting; they are not loaded."""
    schemes: tuple[tuple[str, Scheme], ...] = ()
    """How matrices are stored whose path (as "blocks.0.mlp.down"), or the path of a piece ("blocks.0.mlp.gate"), fits a pattern
    with * and ?; the first that fits decides. Others are plain."""
    labels: tuple[str, ...] = ()
    """Names of the labels of a classifier, whose head has one row for each."""
    task: str = "generate"
    """generate, or, where the checkpoint has no language model's head: embed or classify."""
    ranks: int = 1
    """This describes the part of one of so many ranks of tensor parallelism (`share`). `vocab_size` is that of all together."""

    def share(self, ranks: int) -> ModelSpec:
        """One rank's part. It is the same for every rank; which rows of a parameter are in it, `Parameter.share` says."""
        if ranks == 1:
            return self
        blocks = tuple(dataclasses.replace(block, stages=tuple(tuple(dataclasses.replace(branch, body=branch.body.share(ranks))
                                                                     for branch in stage) for stage in block.stages))
                       for block in self.blocks)
        own = dataclasses.replace(self, blocks=blocks, ranks=ranks)
        cut = {parameter.scheme.name for parameter in self.parameters()
               if parameter.scheme is not None and not _divides(parameter, ranks)}
        if cut or len(list(own.parameters())) != len(list(self.parameters())):
            names = ", ".join(sorted(cut))
            raise ModelError(f"{ranks} ranks would cut apart blocks in which matrices are stored ({names}); use another "
                             "tensor_parallel_size")
        return own

    @property
    def vocab(self) -> Piece:
        """The rows of embedding and head that this describes."""
        # Rows of 64 tokens keep a rank's logits aligned.
        whole = Piece("vocabulary", self.vocab_size, 64 if self.vocab_size % 64 == 0 else 1)
        return dataclasses.replace(whole, rows=whole.room(self.ranks))

    @property
    def outputs(self) -> Piece:
        """The rows of the head: of the vocabulary, or one for each label."""
        if not self.labels:
            return self.vocab
        whole = Piece("labels", len(self.labels))
        return dataclasses.replace(whole, rows=whole.room(self.ranks))

    def states(self, dtype: str) -> list[StateSpec]:
        """Those of all mixers, in the order in which they run; `dtype` is the model's, a torch name."""
        return [state for block in self.blocks for mixer in block.mixers for state in mixer.states(dtype)]

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The softmax attention layers with keys and values."""
        return [mixer for block in self.blocks for mixer in block.mixers if isinstance(mixer, AttentionSpec)]

    @property
    def eager(self) -> bool:
        """Whether a mixer cannot be in a CUDA graph."""
        return any(getattr(mixer, "eager", False) for block in self.blocks for mixer in block.mixers)

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, in the order of their use. A joined matrix whose pieces are stored in different ways is one
        parameter for each piece."""
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[Parameter, ...]:
        return tuple(one for parameter in self._parameters()
                     for one in (self._stored(parameter) if self.schemes and parameter.scheme is not None else (parameter,)))

    def _parameters(self) -> Iterator[Parameter]:
        yield from self.embedding.parameters(self.vocab, self.width)
        for i, block in enumerate(self.blocks):
            yield from block.parameters(f"blocks.{i}")
        yield from self.norm.parameters("norm", self.width)
        yield from self.head.parameters(self.outputs, self.width)

    def _stored(self, parameter: Parameter) -> Iterator[Parameter]:
        found = [self._scheme(piece.name.removesuffix(".weight"), parameter) for piece in parameter.pieces]
        scheme = found[0] if found else self._scheme(parameter.stem, parameter)
        grain = scheme.grain[0]
        # The parts of the whole are those of the pieces joined only if no block reaches over a border.
        if all(one == scheme for one in found) and all(grain and piece.rows % grain == 0 for piece in parameter.pieces):
            yield dataclasses.replace(parameter, scheme=scheme)
            return
        if parameter.stack:
            names = ", ".join(sorted({one.name for one in found}))
            raise ModelError(f"{parameter.stem}: the experts of a layer have to be stored alike, in whole blocks of rows; "
                             f"they are {names}")
        for piece, scheme in zip(parameter.pieces, found, strict=True):
            yield dataclasses.replace(parameter, name=piece.name, shape=(piece.rows, parameter.shape[1]), scheme=scheme,
                                      pieces=(), unit=piece.unit, groups=piece.groups, copied=piece.copied)

    def _scheme(self, stem: str, parameter: Parameter) -> Scheme:
        assert parameter.scheme is not None
        return next((scheme for pattern, scheme in self.schemes
                     if fnmatchcase(stem, pattern) or fnmatchcase(parameter.stem, pattern)), parameter.scheme)

    def with_blocks(self, numbers: Sequence[int]) -> ModelSpec:
        """The model of these blocks alone, numbered from 0 on. Their matrices are stored as before."""
        schemes: list[tuple[str, Scheme]] = []
        for pattern, scheme in self.schemes:
            layer = re.match(r"blocks\.([0-9]+)\.", pattern)
            if layer is None:
                schemes.append((pattern, scheme))
            else:
                schemes += [(f"blocks.{new}.{pattern[layer.end():]}", scheme) for new, old in enumerate(numbers)
                            if old == int(layer[1])]
        return dataclasses.replace(self, blocks=tuple(self.blocks[number] for number in numbers), schemes=tuple(schemes))

    @property
    def size(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(parameter.size for parameter in self.parameters())

    def nbytes(self, dtype: str) -> int:
        """Bytes of the parameters as stored, in a model of `dtype`; packing and the rope tables may add a little."""
        return sum(parameter.nbytes(dtype) for parameter in self.parameters())


def _divides(parameter: Parameter, ranks: int) -> bool:
    """Whether ranks divide a parameter between the blocks in which it is stored."""
    if parameter.scheme is None or parameter.split is Split.WHOLE:
        return True
    grain = parameter.scheme.grain[0 if parameter.split is Split.ROWS else 1]
    return grain == 1 or (bool(grain) and all(place % grain == 0 for rank in range(ranks)
                                            for share in parameter.share(rank, ranks) for place in share))
