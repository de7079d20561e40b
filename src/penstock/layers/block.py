"""One layer of the decoder: branches around the residual stream, each with one mixer, in the order that a BlockSpec says; and
the norms, in two forms: of a tensor, and of the stream after a branch's result is added.

The stream is carried as a sum not yet done, `residual + delta`, so that the addition can be part of the next norm's kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from penstock.layers.build import Build, Coming, Mixer, MixerSpec, Parameter
from penstock.layers.step import Step
from penstock.layers.streams import Streams, StreamsSpec
from penstock.ops.linear import Weight
from penstock.parallel.group import Group, Runs


@dataclass(frozen=True)
class RMSNormSpec:
    """x / rms(x) * (offset + weight); without a `weight`, which only queries and keys may lack, x / rms(x)."""

    eps: float
    offset: float = 0.0
    weight: bool = True

    def parameters(self, path: str, width: int) -> Iterator[Parameter]:
        if self.weight:
            yield Parameter(f"{path}.weight", (width,), rest=1.0 - self.offset)


@dataclass(frozen=True)
class LayerNormSpec:
    """(x - mean) / deviation * (offset + weight) + bias; either may be missing."""

    eps: float
    bias: bool = True
    weight: bool = True
    offset: float = 0.0

    def parameters(self, path: str, width: int) -> Iterator[Parameter]:
        if self.weight:
            yield Parameter(f"{path}.weight", (width,), rest=1.0 - self.offset)
        if self.bias:
            yield Parameter(f"{path}.bias", (width,))


@dataclass(frozen=True)
class NoNormSpec:
    """x itself, where a decoder has no norm of its own."""

    def parameters(self, _path: str, _width: int) -> Iterator[Parameter]:
        yield from ()


NormSpec = RMSNormSpec | LayerNormSpec | NoNormSpec


class RMSNorm:
    def __init__(self, spec: RMSNormSpec, path: str, build: Build) -> None:
        self.weight = build.values.tensor(f"{path}.weight")
        self.eps, self.offset = spec.eps, spec.offset
        self._norm, self._add_norm = build.kernels.rms_norm, build.kernels.add_rms_norm
        self.reader: Weight | None = None
        """The matrix that results are multiplied with first."""
        self.ranks: Group | None = None
        """The ranks whose parts `add` is given, if it is not given their sum."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W], last dimension contiguous."""
        return self._norm(x, self.weight, self.eps, self.offset, self.reader)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); `residual` may be overwritten."""
        if self.ranks is not None:
            return self.ranks.add_norm(x, residual, self.weight, self.eps, self.offset,
                                       partial(self._add_norm, reader=self.reader))
        return self._add_norm(x, residual, self.weight, self.eps, self.offset, self.reader)

    def add_own(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`add`, of which x is all."""
        return self._add_norm(x, residual, self.weight, self.eps, self.offset, self.reader)


class LayerNorm:
    def __init__(self, spec: LayerNormSpec, path: str, build: Build) -> None:
        self.weight = build.values.tensor(f"{path}.weight") if spec.weight else None
        if self.weight is not None and spec.offset:
            self.weight = self.weight + spec.offset
        self.bias = build.values.tensor(f"{path}.bias") if spec.bias else None
        self.eps = spec.eps
        self._norm = build.kernels.layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W], last dimension contiguous."""
        return self._norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        total = x + residual
        return self(total), total


class NoNorm:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + residual, x + residual)."""
        total = x + residual
        return total, total


Norm = RMSNorm | LayerNorm | NoNorm


def build_norm(spec: NormSpec, path: str, build: Build) -> Norm:
    if isinstance(spec, NoNormSpec):
        return NoNorm()
    return RMSNorm(spec, path, build) if isinstance(spec, RMSNormSpec) else LayerNorm(spec, path, build)


def entered(norm: Norm | None, delta: torch.Tensor | None, residual: torch.Tensor,
            runs: Runs | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the stream, normed; the stream) for the stream `residual + delta`. `residual` may change; `runs` may keep it."""
    if runs is not None:
        if runs.holds(delta):
            assert isinstance(norm, RMSNorm)
            return torch.cat([run() for run in runs.enter(residual, norm.add_own)]), residual
        residual = runs.whole(residual)
    if delta is None:
        return (residual if norm is None else norm(residual)), residual
    if norm is None:
        total = delta + residual
        return total, total
    return norm.add(delta, residual)


@dataclass(frozen=True)
class BranchSpec:
    """scale * post(body(pre(x))): what one sublayer adds to the stream, which `after` norms then."""

    body: MixerSpec
    pre: NormSpec | None = None
    post: NormSpec | None = None
    after: NormSpec | None = None
    """Of the stream with the result added, in whose place it is. The branch is the only one of its stage."""
    joint: NormSpec | None = None
    """Of the sum of its stage's branches, of which it is the first."""
    keeps: bool = False
    """Its result has its normed input added."""
    factor: float = 1.0
    """The stream with the results of its stage, of which it is the first branch, is multiplied by this; 0: by a learned number,
    of which a block has one."""
    scale: float = 1.0
    same: bool = False
    """It reads the normed input of its stage's first branch."""
    replaces: bool = False
    """Its result takes the stream's place instead of being added to it. It is the only branch of its stage."""

    def parameters(self, path: str) -> Iterator[Parameter]:
        for name, norm in (("pre", self.pre), ("post", self.post), ("joint", self.joint), ("after", self.after)):
            if norm is not None:
                yield from norm.parameters(f"{path}.{self.body.name}.{name}", self.body.width)
        if not self.factor:
            yield Parameter(f"{path}.factor", (1,), rest=1.0)
        yield from self.body.parameters(f"{path}.{self.body.name}")


@dataclass(frozen=True)
class BlockSpec:
    """Stages, one after another; the branches of a stage read the same stream and are added to it together.

    ((attention,), (mlp,)) is the usual block, ((attention, mlp),) has a parallel residual (Wang and Komatsuzaki 2021)."""

    stages: tuple[tuple[BranchSpec, ...], ...]
    streams: StreamsSpec | None = None
    """It has one of several streams. Its last stage, of one branch, reads and adds to them as `Streams.correct` says."""

    @property
    def mixers(self) -> list[MixerSpec]:
        """In the order in which they run."""
        return [branch.body for stage in self.stages for branch in stage]

    def parameters(self, path: str) -> Iterator[Parameter]:
        for stage in self.stages:
            for branch in stage:
                yield from branch.parameters(path)
        if self.streams is not None:
            yield from self.streams.parameters(f"{path}.streams")


class Branch:
    def __init__(self, spec: BranchSpec, path: str, build: Build) -> None:
        self.factor = None if spec.factor == 1.0 else spec.factor or build.values.tensor(f"{path}.factor")
        path = f"{path}.{spec.body.name}"
        self.body: Mixer = spec.body.build(path, build)
        self.pre = build_norm(spec.pre, f"{path}.pre", build) if spec.pre is not None else None
        self.post = build_norm(spec.post, f"{path}.post", build) if spec.post is not None else None
        self.joint = build_norm(spec.joint, f"{path}.joint", build) if spec.joint is not None else None
        self.after = build_norm(spec.after, f"{path}.after", build) if spec.after is not None else None
        if isinstance(self.pre, RMSNorm):
            self.pre.reader = self.body.reader(spec.body.width)
        self.scale = spec.scale
        self.keeps = spec.keeps
        self.same = spec.same
        self.replaces = spec.replaces
        self.leaves = False
        """The body's result is this rank's part of a sum, which the next norm makes."""

    def by_runs(self, delta: torch.Tensor | None, residual: torch.Tensor, step: Step,
                runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Enters and leaves a body that looks at one token at a time, so that sums travel while other runs are computed."""
        if runs.holds(delta):
            assert isinstance(self.pre, RMSNorm)
            rows = runs.enter(residual, self.pre.add_own)
        else:
            x, residual = entered(self.pre, delta, residual, runs)
            rows = [partial(x.__getitem__, slice(*border)) for border in runs.borders]
        return runs.leave(lambda run: self.body(rows[run](), step.run(runs.borders[run][0]))), residual

    def leave(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None) -> torch.Tensor:
        """Returns the branch's contribution to the stream, given the body's input; with `ends`, at those tokens alone."""
        out = self.body(x, step, ends)
        if self.post is not None:
            out = self.post(out)
        if self.keeps:
            out = out + (x if ends is None else x.index_select(0, ends))
        return out if self.scale == 1.0 else out * self.scale


class Block:
    def __init__(self, spec: BlockSpec, path: str, build: Build) -> None:
        self.stages = [[Branch(branch, path, build) for branch in stage] for stage in spec.stages]
        self.mixers: list[Mixer] = [branch.body for stage in self.stages for branch in stage]
        looking = [i for i, stage in enumerate(self.stages) if any(branch.body.looks_around for branch in stage)]
        # From this stage on, nothing looks at another token than its own.
        self._last = max(looking, default=0)
        self.streams = Streams(spec.streams, f"{path}.streams", build) if spec.streams is not None else None

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor, step: Step,
                 ends: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Takes and gives the stream as (delta, residual), all [T, W]; with `ends` [E], gives it at those tokens alone. Several
        streams are given as (None, all of them)."""
        if self.streams is None:
            return self._through(self.stages, delta, residual, step, ends)
        predicted, (own,) = self.streams.predict(residual), self.stages[-1]
        delta, result = self._through(self.stages[:-1], None, predicted[:, self.streams.spec.active].clone(), step, ends)
        predicted, step = step.narrow(predicted, ends)
        return None, self.streams.correct(predicted, result if delta is None else result + delta,
                                          lambda active: own.leave(active, step, None))

    def _through(self, stages: Sequence[Sequence[Branch]], delta: torch.Tensor | None, residual: torch.Tensor, step: Step,
                 ends: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        for i, (first, *others) in enumerate(stages):
            at, runs = ends if i == self._last else None, step.runs
            if runs is not None and at is None and first.leaves and not first.body.looks_around:
                delta, residual = first.by_runs(delta, residual, step, runs)
                continue
            x, residual = entered(first.pre, delta, residual, runs)
            if runs is not None and (at is not None or not first.leaves):
                residual = runs.whole(residual)
            delta = first.leave(x, step, at)
            for branch in others:
                if not branch.same:
                    x, _ = entered(branch.pre, None, residual)
                delta = delta + branch.leave(x, step, at)
            if first.joint is not None:
                delta = first.joint(delta)
            if at is not None:
                residual, step = step.narrow(residual, at)
            if first.after is not None:
                delta = first.after.add(delta, residual)[0]
            if first.replaces or first.after is not None:
                residual, delta = delta, None
            elif first.factor is not None:
                residual, delta = (residual + delta) * first.factor, None
        return delta, residual


class Visiting(Block):
    """One whose matrices are on the device only while it runs."""

    def __init__(self, spec: BlockSpec, path: str, build: Build, away: Coming, number: int) -> None:
        super().__init__(spec, path, build)
        self._away, self._number = away, number

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor, step: Step,
                 ends: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor]:
        self._away.enter(self._number)
        found = super().__call__(delta, residual, step, ends)
        self._away.leave(self._number)
        return found


def sums_left(blocks: Sequence[Block], end: Norm | None, ranks: Group | None) -> list[bool]:
    """Has the norm after each branch sum the parts that the branch leaves, of ranks or of picked experts, so that one kernel
    can do both; `end` is the norm after the last block. Returns of each block, and of the end, whether its stream comes with
    parts of ranks."""
    found = [False] * (len(blocks) + 1)
    stages = [(number, stage) for number, block in enumerate(blocks) for stage in block.stages]
    for place, (number, stage) in enumerate(stages):
        after = stages[place + 1] if place + 1 < len(stages) else (len(blocks), None)
        norm, (branch, *others) = after[1][0].pre if after[1] is not None else end, stage
        changes = branch.post, branch.joint, branch.after, branch.factor
        plain = all(one is None for one in changes) and branch.scale == 1.0 and not branch.replaces
        if not plain or others or not isinstance(norm, RMSNorm):
            continue
        if ranks is None:
            branch.body.leave_parts()
        elif branch.body.leave_sum():
            norm.ranks, branch.leaves = ranks, True
            found[after[0]] |= after[0] != number
    return found
