"""A whole decoder as data: what a family fills in, `Decoder` builds and `models/weights.py` loads.

Its parts are described beside the layers that they build: `attention.py`, `mlp.py`, `norm.py`, `embedding.py`, `block.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from itertools import pairwise
from operator import or_

from penstock.core.errors import ModelError
from penstock.core.state import StateSpec
from penstock.layers.attention import AttentionSpec
from penstock.layers.block import BlockSpec, NormSpec
from penstock.layers.build import MixerSpec, Parameter, Piece, Split
from penstock.layers.draft_head import JoinSpec
from penstock.layers.embedding import EmbeddingSpec, HeadSpec
from penstock.layers.experts import ExpertsSpec
from penstock.layers.latent import LatentAttentionSpec, SparseLatentAttentionSpec
from penstock.layers.streams import StreamsSpec
from penstock.parallel.axis import Place, runs
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
    embedding: EmbeddingSpec | JoinSpec = EmbeddingSpec()
    streams: StreamsSpec | None = None
    """Its layers have several streams."""
    beyond: int = 0
    """Layers that a checkpoint stores behind the last block, for drafting; they are no blocks of this model."""
    schemes: tuple[tuple[str, Scheme], ...] = ()
    """The schemes of matrices, as (pattern, scheme) with * and ?: the first pattern that fits the path of a matrix (as
    "blocks.0.mlp.down"), or of a piece of it ("blocks.0.mlp.gate"), decides. Other matrices are plain."""
    labels: tuple[str, ...] = ()
    """Names of the labels of a classifier, whose head has one row for each."""
    task: str = "generate"
    """generate, or, where the checkpoint has no language model's head: embed or classify."""
    resident: int = 0
    """Experts of a layer that are on the device; all are in host memory then. 0: all are on the device alone."""
    away: int = 0
    """Blocks whose matrices are not on the device (`layers/away.py`)."""
    ranks: int = 1
    """This describes the part of one of so many ranks of tensor parallelism (`share`). `vocab_size` is that of all together."""
    stages: tuple[tuple[BlockSpec, ...], ...] = ()
    """The blocks of all pipeline stages, if this describes one of them (`stage`)."""
    first: int = 0
    """The number of the first block."""
    begins: bool = True
    """It has the embedding."""
    ends: bool = True
    """It has the last norm and the head."""
    lends: bool = False
    """A draft head on the last stage uses the embedding, which that stage has, too."""

    def at(self, place: Place) -> ModelSpec:
        whole = self.dealt(place)
        if place.datas > 1:
            whole = whole.changed(lambda mixer: mixer.deal(place.world) if isinstance(mixer, ExpertsSpec) else mixer)
        return whole.share(place.tensors).striped(place.contexts).stage(place.stage, place.stages, place.layers)

    def striped(self, ranks: int) -> ModelSpec:
        """The model of ranks among which the positions of every page are divided. Of layers with a window each rank has all."""
        if ranks == 1:
            return self
        for block in self.blocks:
            for mixer in block.mixers:
                if mixer.states("float32") and (isinstance(mixer, SparseLatentAttentionSpec)
                                                or not isinstance(mixer, AttentionSpec | LatentAttentionSpec)):
                    raise ModelError("context_parallel_size divides the keys, values and latents of softmax attention; this "
                                     f"model has layers of another kind ({type(mixer).__name__}): use tensor_parallel_size")
        return self.changed(lambda mixer: replace(mixer, stripes=ranks) if isinstance(mixer, LatentAttentionSpec) or (
            isinstance(mixer, AttentionSpec) and not mixer.window) else mixer)

    def dealt(self, place: Place) -> ModelSpec:
        """The whole model, where ranks divide experts and not the channels of each, if so."""
        if not place.experts:
            return self
        if not any(isinstance(mixer, ExpertsSpec) for block in self.blocks for mixer in block.mixers):
            raise ModelError("enable_expert_parallel is for mixtures of experts; this model has none")
        return self.changed(lambda mixer: replace(mixer, dealt=True, spare=place.spare)
                          if isinstance(mixer, ExpertsSpec) else mixer)

    def changed(self, change: Callable[[MixerSpec], MixerSpec]) -> ModelSpec:
        return replace(self, blocks=tuple(replace(block, stages=tuple(
            tuple(replace(branch, body=change(branch.body)) for branch in stage) for stage in block.stages))
            for block in self.blocks))

    def stage(self, stage: int, stages: int, layers: Sequence[int] = ()) -> ModelSpec:
        """One pipeline stage: `layers[stage]` consecutive blocks, the first with the embedding, the last with the head."""
        if stages == 1:
            return self
        count = len(self.blocks)
        if stages > count:
            raise ModelError(f"the model's {count} layers are too few for {stages} stages; lower pipeline_parallel_size")
        if not layers:
            head = sum(parameter.size for parameter in self.head.parameters(self.outputs, self.width))
            head = head or self.vocab.rows * self.width
            layers = runs([sum(parameter.size for parameter in block.parameters("")) for block in self.blocks], head, stages)
        if len(layers) != stages or sum(layers) != count or min(layers) < 1:
            given = ",".join(map(str, layers))
            raise ModelError(f"pipeline_layers is {given}; it must be {stages} numbers above 0 whose sum is {count}, the "
                             "model's layers")
        if self.inputs or any(attention.reads is not None for attention in self.attentions):
            raise ModelError("layers of this model have inputs of their own, or read the keys and values of earlier ones, "
                             "which a later stage would lack; use tensor_parallel_size in place of pipeline_parallel_size")
        borders = [sum(layers[:i]) for i in range(stages + 1)]
        every = tuple(self.blocks[a:b] for a, b in pairwise(borders))
        ends = stage == stages - 1
        return replace(self, blocks=every[stage], stages=every, first=borders[stage], begins=stage == 0, ends=ends,
                       lends=self.lends and ends)

    @property
    def staged(self) -> ModelSpec:
        if not self.stages:
            return self
        return replace(self, blocks=sum(self.stages, ()), stages=(), first=0, begins=True, ends=True, lends=False)

    def share(self, ranks: int) -> ModelSpec:
        """One rank's part. It is the same for every rank; which rows of a parameter are in it, `Parameter.share` says."""
        if ranks == 1:
            return self
        own = replace(self.changed(lambda mixer: mixer.share(ranks)), ranks=ranks)
        cut = {parameter.scheme.name for parameter in self.parameters()
               if parameter.scheme is not None and not _divides(parameter, ranks)}
        if cut or len(list(own.parameters())) != len(list(self.parameters())):
            names = ", ".join(sorted(cut))
            fewer = [str(n) for n in range(1, ranks) if all(_divides(parameter, n) for parameter in self.parameters())]
            raise ModelError(f"{ranks} ranks would cut apart blocks in which matrices are stored ({names}); possible for "
                             f"tensor_parallel_size {'are' if fewer[1:] else 'is'} {', '.join(fewer)}")
        return own

    def leaves(self, block: int) -> bool:
        """Whether its block with this place is away. They are spread evenly, so that others run meanwhile; the last is one."""
        count = len(self.blocks)
        return (block + 1) * self.away // count > block * self.away // count

    @property
    def vocab(self) -> Piece:
        """The rows of embedding and head that this describes."""
        # Rows of 64 tokens keep a rank's logits aligned.
        whole = Piece("vocabulary", self.vocab_size, 64 if self.vocab_size % 64 == 0 else 1)
        return replace(whole, rows=whole.room(self.ranks))

    @property
    def outputs(self) -> Piece:
        """The rows of the head: of the vocabulary, or one for each label."""
        if not self.labels:
            return self.vocab
        whole = Piece("labels", len(self.labels))
        return replace(whole, rows=whole.room(self.ranks))

    def states(self, dtype: str) -> list[StateSpec]:
        """Returns the states of all mixers, in the order in which they run; `dtype` is the model's, a torch name.

        A pipeline stage returns what all stages allot, so pages mean the same: of each kind as many as the stage with most."""
        if not self.stages:
            return _states(self.blocks, dtype)
        return list(reduce(or_, (Counter(_states(blocks, dtype)) for blocks in self.stages)).elements())

    def held(self, dtype: str) -> list[int]:
        """The places in `states` of the states of its own mixers, in the order in which they run."""
        if not self.stages:
            return list(range(len(self.states(dtype))))
        free: dict[StateSpec, list[int]] = {}
        for place, state in enumerate(self.states(dtype)):
            free.setdefault(state, []).append(place)
        return [free[state].pop(0) for state in _states(self.blocks, dtype)]

    @property
    def drafts(self) -> bool:
        """Whether it is a draft head: it reads hidden states, and `Decoder.forward` leaves the last norm to `Decoder.head`."""
        return isinstance(self.embedding, JoinSpec)

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The softmax attention layers with keys and values."""
        return [mixer for block in self.blocks for mixer in block.mixers if isinstance(mixer, AttentionSpec)]

    @property
    def whole(self) -> bool:
        """Whether a prompt has to be in one step, because its tokens see those behind them. Its labels are then those of the
        first one, or of the mean (`HeadSpec.mean`)."""
        return any(not mixer.causal for mixer in self.attentions)

    @property
    def pairs(self) -> str:
        """The way in which a classifier reads two texts: one behind the other (`joined`), or by the tokenizer's `template`."""
        return "template" if self.whole else "joined"

    @property
    def second(self) -> int:
        """`EmbeddingSpec.second`; 0 where texts of a pair are not told apart."""
        return self.embedding.second if isinstance(self.embedding, EmbeddingSpec) else 0

    @property
    def inputs(self) -> int:
        """The width of what layers are given beside the stream (`EmbeddingSpec.layers`)."""
        return self.embedding.layers.width if isinstance(self.embedding, EmbeddingSpec) and self.embedding.layers else 0

    @property
    def longest(self) -> int:
        """The largest max_model_len, which counts a token of output. An encoder has none."""
        return self.max_positions + self.whole

    @property
    def eager(self) -> bool:
        """Whether a mixer cannot be in a CUDA graph."""
        return any(getattr(mixer, "eager", False) for block in self.staged.blocks for mixer in block.mixers)

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, in the order of their use. Pieces of a joined matrix that are stored in several ways are several."""
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[Parameter, ...]:
        return tuple(one for parameter in self._parameters()
                     for one in (self._stored(parameter) if self.schemes and parameter.scheme is not None else (parameter,)))

    def _parameters(self) -> Iterator[Parameter]:
        for parameter in self.embedding.parameters(self.vocab, self.width):
            if self.begins or self.lends or (self.ends and self.head.tied and parameter.name == "embedding.weight"):
                yield parameter
        for i, block in enumerate(self.blocks, self.first):
            for parameter in block.parameters(f"blocks.{i}"):
                if 0 < self.resident < parameter.stack:
                    yield replace(parameter, resident=self.resident)
                elif self.leaves(i - self.first) and parameter.scheme is not None and not parameter.decoded:
                    yield replace(parameter, away=True)
                else:
                    yield parameter
        for path, linear in self.streams.linears.items() if self.streams is not None else ():
            yield from linear.parameters(path)
        if self.ends:
            yield from self.norm.parameters("norm", self.width)
            yield from self.head.parameters(self.outputs, self.width)

    def _stored(self, parameter: Parameter) -> Iterator[Parameter]:
        found = [self._scheme(piece.name.removesuffix(".weight"), parameter) for piece in parameter.pieces]
        scheme = found[0] if found else self._scheme(parameter.stem, parameter)
        grain = scheme.grain[0]
        # The parts of the whole are those of the pieces joined only if no block reaches over a border.
        if all(one == scheme for one in found) and all(grain and piece.rows % grain == 0 for piece in parameter.pieces):
            yield replace(parameter, scheme=scheme)
            return
        if parameter.stack:
            names = ", ".join(sorted({one.name for one in found}))
            raise ModelError(f"{parameter.stem}: the experts of a layer have to be stored alike, in whole blocks of rows; "
                             f"they are {names}")
        for piece, scheme in zip(parameter.pieces, found, strict=True):
            yield replace(parameter, name=piece.name, shape=(piece.rows, parameter.shape[1]), scheme=scheme,
                                      pieces=(), unit=piece.unit, groups=piece.groups, copied=piece.copied)

    def _scheme(self, stem: str, parameter: Parameter) -> Scheme:
        assert parameter.scheme is not None
        return next((scheme for pattern, scheme in self.schemes
                     if fnmatchcase(stem, pattern) or fnmatchcase(parameter.stem, pattern)), parameter.scheme)

    def with_blocks(self, numbers: Sequence[int]) -> ModelSpec:
        """The model of these blocks alone, numbered from 0 on. Matrices are stored as before. A stage's numbers are its own."""
        schemes: list[tuple[str, Scheme]] = []
        for pattern, scheme in self.schemes:
            if (layer := re.match(r"blocks\.([0-9]+)\.", pattern)) is None:
                schemes.append((pattern, scheme))
            else:
                schemes += [(f"blocks.{new}.{pattern[layer.end():]}", scheme) for new, old in enumerate(numbers)
                            if self.first + old == int(layer[1])]

        def moved(mixer: MixerSpec) -> MixerSpec:
            """Reads a layer like the one whose keys and values it read."""
            if not isinstance(mixer, AttentionSpec) or mixer.reads is None:
                return mixer
            return replace(mixer, reads=[self.blocks[old] for old in numbers].index(self.blocks[mixer.reads]))

        blocks = tuple(self.blocks[number] for number in numbers)
        return replace(self, first=0, stages=(), blocks=blocks, schemes=tuple(schemes), away=0).changed(moved)

    @property
    def size(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(parameter.size for parameter in self.parameters())

    @property
    def used(self) -> int:
        """The same without the experts that a token does not pick."""
        return sum(one.size // one.stack * one.picks if one.stack else one.size for one in self.parameters())

    def nbytes(self, dtype: str) -> int:
        """Bytes of the parameters as stored, in a model of `dtype`; packing and the rope tables may add a little."""
        return sum(parameter.nbytes(dtype) for parameter in self.parameters())


def _states(blocks: Sequence[BlockSpec], dtype: str) -> list[StateSpec]:
    return [state for block in blocks for mixer in block.mixers for state in mixer.states(dtype)]


def _divides(parameter: Parameter, ranks: int) -> bool:
    """Whether ranks divide a parameter between the blocks in which it is stored."""
    if parameter.scheme is None or parameter.split is Split.WHOLE:
        return True
    grain = parameter.scheme.grain[0 if parameter.split is Split.ROWS else 1]
    return grain == 1 or (bool(grain) and all(place % grain == 0 for rank in range(ranks)
                                            for share in parameter.share(rank, ranks) for place in share))
