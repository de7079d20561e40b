"""The one decoder that every family is: embedding, blocks, a last norm, the head. Built from a ModelSpec and loaded values."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import asdict

from penstock.core.errors import ModelError
from penstock.core.state import StateSpec
from penstock.layers.attention import AttentionSpec
from penstock.layers.block import Block, Visiting, build_norm, entered, sums_left
from penstock.layers.build import Build, Linear, Values
from penstock.layers.draft_head import Join
from penstock.layers.embedding import Embedding, Head
from penstock.layers.experts import Experts
from penstock.layers.rope import RopeSpec
from penstock.layers.spec import ModelSpec
from penstock.layers.step import BASE, Adapted, StateView, Step, Works
from penstock.layers.streams import StreamEnds
from penstock.ops.registry import Kernels
from penstock.parallel.group import Group, Runs
from penstock.parallel.lockstep import Lockstep


class Decoder:
    """Tokens in, logits out. `values` has every parameter that the spec lists, by its path."""

    def __init__(self, spec: ModelSpec, values: Values, kernels: Kernels, *, dtype: torch.dtype, device: torch.device,
                 max_model_len: int, group: Group | None = None, data: Lockstep | None = None,
                 context: Group | None = None) -> None:
        """`group`: the ranks of tensor parallelism, if `spec` is one rank's part. `data`: engines that step together.
        `context`: ranks that divide the positions of every context."""
        self.spec, self.dtype, self.device, self.kernels, self._max_model_len = spec, dtype, device, kernels, max_model_len
        self.states: list[StateSpec] = spec.states(str(dtype).removeprefix("torch."))
        build = Build(values, kernels, device, max_model_len, group, data, context)
        self.group, self.context, self.lockstep = group, context, data
        self._entry = torch.empty(0, spec.width, dtype=dtype, device=device)
        self.lent = spec.embedding.build(build, dtype) if spec.begins or spec.lends else None
        """The embedding, where it is."""
        self.embedding: Embedding | Join | None = self.lent if spec.begins else None
        self.streams = StreamEnds(spec.streams, build) if spec.streams is not None else None
        self._away = values.away
        self.blocks = [Block(block, f"blocks.{i}", build) if self._away is None or not spec.leaves(i - spec.first)
                       else Visiting(block, f"blocks.{i}", build, self._away, i)
                       for i, block in enumerate(spec.blocks, spec.first)]
        self.norm = build_norm(spec.norm, "norm", build) if spec.ends else None
        self._parts = sums_left(self.blocks, None if spec.drafts else self.norm, group)
        """Of each block, and of the end, whether the stream comes with a part that is to be summed over ranks."""
        self._mixture = bool(self.experts)
        self.logits: Head | None = None
        if spec.ends and not spec.head.borrowed:
            self.logits = Head(spec.head, build, len(spec.labels) or spec.vocab_size)
        self._taps: tuple[int, ...] = ()
        self.tapped = self._entry
        self.works = Works()
        held = [*values.values(), *(tensor for table in build.tables.values() for tensor in table), *build.stages.values()]
        self.weight_bytes: int = sum(value.nbytes for value in held) - (0 if values.away is None else values.away.saved)
        """Bytes of all that the model holds on the device: parameters as packed, and the rope tables."""

    @property
    def computation(self) -> str:
        """Equal where equal weights and tokens give equal cache entries (`layers/decoder.py`)."""
        # The place of matrices changes no number, and stages may differ in it.
        spec = dataclasses.replace(self.spec.staged, away=0)
        return computation(spec, self.states, self.kernels.table(), str(self.dtype), self._max_model_len)

    def attach(self, views: Sequence[StateView]) -> None:
        """Gives each mixer its windows into the cache, in the order of `states`."""
        assert len(views) == len(self.states), (len(views), len(self.states))
        self.works, at = Works(), 0
        dtype = str(self.dtype).removeprefix("torch.")
        views = [views[place] for place in self.spec.held(dtype)]
        kept: dict[int, Sequence[StateView]] = {}
        for number, (block, spec) in enumerate(zip(self.blocks, self.spec.blocks, strict=True), self.spec.first):
            for mixer, described in zip(block.mixers, spec.mixers, strict=True):
                own: Sequence[StateView] = views[at:at + len(described.states(dtype))]
                at += len(own)
                if isinstance(described, AttentionSpec):
                    own = kept[number] = own if described.reads is None else kept[described.reads]
                mixer.attach(own, self.works)

    def detach(self) -> None:
        """Lets go of the cache; `attach` must come before the next step."""
        for block in self.blocks:
            for mixer in block.mixers:
                mixer.detach()

    def entry(self, tokens: int) -> torch.Tensor:
        """Where a pipeline stage but the first finds the stream of a step's tokens, and a draft head their hidden states,
        [T, width]. The memory stays the same once it was asked for the most tokens of a step."""
        if len(self._entry) < tokens:
            self._entry = torch.zeros(tokens, self.spec.width, dtype=self.dtype, device=self.device)
        return self._entry[:tokens]

    def tap(self, layers: Sequence[int], tokens: int) -> None:
        """From now on `forward` leaves in `tapped` [tokens, layers x width] what goes into these blocks, of every token of its
        step; no layers: the hidden states after the last norm. A pipeline stage has those of the stages before it, too."""
        if self.streams is not None:
            raise ModelError("draft heads read one stream, and layers of this model have several; use a draft model or ngram")
        self._taps = tuple(layers) or (-1,)
        self.tapped = torch.zeros(tokens, len(self._taps) * self.spec.width, dtype=self.dtype, device=self.device)

    def taps_before(self, block: int) -> bool:
        """Whether some are of blocks before this one."""
        return any(0 <= tap < block for tap in self._taps)

    def _tap(self, block: int, delta: torch.Tensor | None, stream: torch.Tensor) -> None:
        if block in self._taps:
            at = self._taps.index(block) * self.spec.width
            room = self.tapped[:len(stream), at:at + self.spec.width]
            if delta is not None and self.group is not None and self._parts[block - self.spec.first]:
                delta = self.group.reduce(delta.clone())
            elif delta is not None and delta.dim() > 2:
                delta = delta.sum(1, dtype=torch.float32).to(delta.dtype)
            room.copy_(stream if delta is None else stream + delta)

    def forward(self, step: Step) -> torch.Tensor:
        """The hidden state of each of the step's T tokens after the last norm, [T, width] in the model's dtype; or, if the step
        says so, at its `ends` alone, [E, width]. A pipeline stage but the last returns the stream of all tokens.

        Updates the states of all tokens in the cache."""
        if self.spec.drafts:
            step.beside = self.entry(len(step.tokens))
        division, ends = step.division, step.ends if self.spec.ends else None
        step.runs = None if self.group is None else self._runs(step, self.group)
        if division is not None and self.context is not None:
            hidden = division.whole(self._divided(step, division.own), self.context)
            if self._taps:
                self.tapped[:len(hidden)] = division.whole(self.tapped[:len(division.own)], self.context)
                self._tap(-1, None, hidden)
            return hidden if ends is None else hidden.index_select(0, ends)
        residual = self.entry(len(step.tokens)) if self.embedding is None else self._begin(self.embedding, step)
        *blocks, last = self.blocks
        end = self.spec.first + len(blocks)
        delta, residual = self._through(blocks, residual, step)
        if not self._taps or not self.spec.ends or (max(self._taps) <= end and min(self._taps) >= 0):
            return self._end(*last(delta, residual, step, ends), step.runs)
        delta, residual = last(delta, residual, step)
        self._tap(end + 1, delta, residual)
        hidden = self._end(delta, residual)
        self._tap(-1, None, hidden)
        return hidden if step.ends is None else hidden.index_select(0, step.ends)

    def _begin(self, embedding: Embedding | Join, step: Step) -> torch.Tensor:
        return embedding(step) if self.streams is None else self.streams.spread(embedding(step))

    def _divided(self, step: Step, own: torch.Tensor) -> torch.Tensor:
        """The hidden states of this rank's own tokens."""
        part = step.part(own)
        residual = self._begin(self.embedding, part) if self.embedding is not None else \
            self.entry(len(step.tokens)).index_select(0, own)
        step.inputs = part.inputs
        if self._taps:
            self.tapped[:len(own)] = self.tapped.index_select(0, own)
        return self._end(*self._through(self.blocks, residual, step), step.runs)

    def _through(self, blocks: Sequence[Block], residual: torch.Tensor, step: Step) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The stream behind the first blocks, of which what goes into each and comes out at the end is tapped."""
        delta: torch.Tensor | None = None
        for number, block in enumerate(blocks, self.spec.first):
            self._tap(number, delta, residual)
            delta, residual = block(delta, residual, step)
        self._tap(self.spec.first + len(blocks), delta, residual)
        return delta, residual

    def _runs(self, step: Step, group: Group) -> Runs | None:
        """None where sums are made at once; always where something else reads or adds to what a branch leaves."""
        if not any(self._parts) or self._taps or step.delta is not None:
            return None
        tokens = len(step.tokens) if step.division is None else len(step.division.own)
        nbytes = tokens * self.spec.width * self.dtype.itemsize
        # Each run of a mixture would read all experts.
        count = self.kernels.messages(tokens, nbytes, group.copies and not self._mixture)
        return Runs(group, tokens, count) if count > 1 else None

    def _end(self, delta: torch.Tensor | None, residual: torch.Tensor, runs: Runs | None = None) -> torch.Tensor:
        if self.streams is not None:
            residual = self.streams.merge(residual)
        return entered(None if self.spec.drafts else self.norm, delta, residual, runs)[0]

    def follow(self) -> None:
        """Takes part in a step of the other engines, of which this one has no token."""
        for layer in self.experts:
            layer.follow(self._entry[:0])

    @property
    def picks(self) -> torch.Tensor | None:
        """[layers with experts, E] int64 on the device: how often each expert was picked. None without experts."""
        found = [layer.counts for layer in self.experts]
        return torch.stack(found) if found else None

    @property
    def experts(self) -> list[Experts]:
        return [mixer for block in self.blocks for mixer in block.mixers if isinstance(mixer, Experts)]

    def forget_picks(self) -> None:
        for layer in self.experts:
            layer.counts.zero_()

    @property
    def linears(self) -> list[Linear]:
        return [linear for block in self.blocks for mixer in block.mixers for linear in mixer.linears]

    def rows(self, path: str, first: int, end: int) -> torch.Tensor:
        """Rows of the matrix of the projection at `path`, in float32."""
        linear = next(one for one in self.linears if one.path == path)
        with nullcontext() if self._away is None else self._away.there(int(path.split(".")[1])):
            return linear.weight.ops.gather(torch.arange(first, end, device=self.device), linear.weight).float()

    def warm_up_gemms(self, tokens: Iterable[int], rows: Iterable[int]) -> None:
        """Runs every GEMM shape once with each number of tokens, and the head with each number of logits rows, on
        uninitialised memory: a library loads its kernels at their first use, which synchronises the device."""
        beside = [] if self.streams is None else self.streams.linears
        if isinstance(self.embedding, Embedding) and self.embedding.layers is not None:
            beside = [*beside, self.embedding.layers.projection]
        shapes = {linear.shape: linear for linear in (*self.linears, *beside)}
        for count in tokens:
            if isinstance(self.embedding, Join):
                self.embedding.reduce(torch.empty(count, self.embedding.spec.read, dtype=self.dtype, device=self.device))
            for linear in shapes.values():
                linear(torch.empty(count, linear.weight.k, dtype=self.dtype, device=self.device), BASE)
        for count in rows if self.logits is not None else ():
            self.head(torch.empty(count, self.spec.width, dtype=self.dtype, device=self.device))

    def head(self, hidden: torch.Tensor, step: Adapted = BASE) -> torch.Tensor:
        """Logits [M, vocabulary], float32, of hidden states [M, width]; of several ranks their shares. `step`: rows'
        adapters."""
        assert self.logits is not None, "another pipeline stage has the head"
        if self.spec.drafts and self.norm is not None:
            hidden = self.norm(hidden)
        return self.logits(hidden, step)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary, given this rank's share."""
        if self.group is None:
            return logits
        outputs = len(self.spec.labels) or self.spec.vocab_size
        return self.group.gather(logits).transpose(0, 1).flatten(1)[:, :outputs].contiguous()


def computation(spec: ModelSpec, states: Sequence[StateSpec], kernels: Sequence[tuple[str, str]], dtype: str,
                max_model_len: int) -> str:
    """Hex digits that differ if anything differs that may change a key or a value, or how they are stored.

    They are derived from the whole resolved description: every field of every dataclass in the spec and the states, rotary
    embeddings as the frequencies that they have at this `max_model_len`, and kernels by name, as implementations agree within a
    tolerance only. A new field is in it the day it appears; a value of a kind that is not known here is an error.

    `max_positions` is left out, because it changes neither and differs between engines that should share: it is the limit that
    a config states for `max_model_len`, which itself enters through the frequencies."""
    described = {"spec": dataclasses.replace(spec, max_positions=0), "states": list(states), "kernels": sorted(kernels),
                 "dtype": dtype}
    return hashlib.sha256(json.dumps(_plain(described, max_model_len), sort_keys=True).encode()).hexdigest()


def _plain(value: Any, max_model_len: int) -> Any:
    """A value as JSON, with the types of dataclasses and structs named. TypeError for what is none of the kinds below."""
    if isinstance(value, RopeSpec):
        frequencies, amplitude = value.resolve(max_model_len)
        return ["rope", value.dim, value.interleaved, [frequency.hex() for frequency in frequencies.tolist()],
                float(amplitude).hex()]
    if isinstance(value, Struct):
        return [type(value).__name__, {name: _plain(one, max_model_len) for name, one in asdict(value).items()}]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name), max_model_len) for field in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(one, max_model_len) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, max_model_len) for one in value]
    raise TypeError(f"{type(value).__name__} in a model's description: say in layers/decoder.py how it enters the identity")
