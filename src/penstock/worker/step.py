"""Builds the layers' inputs of a step from a plan and the rows: the host lays out segments, a kernel gathers their tokens.

The host uploads one int32 array per step in one copy. The offsets of its parts depend on the bucket alone, so that a captured
CUDA graph finds the next step's values at the same addresses."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.plan import Ints, StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.layers.step import Step, TokenShare
from penstock.ops.attention import SharedPrefixes, Span, Tree
from penstock.ops.step import Moving
from penstock.parallel.contexts import FEW, divided, long_segments
from penstock.worker.rows import Rows, Staging, upload
from penstock.worker.sampler import LogitsRows

Places = npt.NDArray[np.int64]
_MULTIPLES = ((64, 1), (256, 16), (512, 32), (1024, 64), (8192, 128))
"""Of the tokens of a step: (up to, multiple of). GEMM tiles have such sizes, so that a few rows of padding cost nothing."""


def fitted(count: int) -> int:
    """The smallest bucket that holds `count` rows. cuBLAS picks kernels by it, whose first use synchronises the device."""
    multiple = next((multiple for most, multiple in _MULTIPLES if count <= most), 512)
    return -(-count // multiple) * multiple


def fitted_sizes(most: int) -> Iterator[int]:
    """All buckets that `fitted` returns for 1 to `most` rows."""
    size = fitted(1)
    while size < fitted(most):
        yield size
        size = fitted(size + 1)
    yield size


@dataclass(frozen=True)
class Bucket:
    """The size that a step is padded to."""

    tokens: int
    segments: int
    picks: int = 0
    """Number of logits rows if it may exceed the segments, else 0."""


@dataclass(slots=True)
class Parts:
    """Offsets of the parts of a step's array."""

    work: list[slice | None]
    """Attention work list of each of the model's works; None if nothing is prepared."""
    size: int
    row: slice
    start: slice
    context: slice
    query_start: slice
    heads: slice
    """Token index of each logits row; padded with 0."""
    lines_row: slice
    """Row of each logits row; padded with -1."""
    lines_position: slice
    """Position of the token that each logits row chooses."""
    lines_segment: slice
    """Segment of each logits row. Filled only for plans with slack, like the next three (`ops/step.py::Moving`)."""
    slack: slice
    behind: slice
    left: slice
    shift: slice
    """Offset in host memory of the tokens of captured sampling."""


FAR = 1 << 30
"""Behind every context."""


class Branches(NamedTuple):
    """The way in which a plan's tokens see each other where they are draft trees."""

    begins: Ints
    """[S] from each segment's start on, the place of the first draft, from which on bits say what is seen; FAR: none."""
    bits: torch.Tensor
    """[T] int64, on the device: `Tree.bits`."""
    shift: torch.Tensor
    """[T] int32, on the device: what is added to the tokens' positions."""


class Picks(NamedTuple):
    """The positions of a plan after which a token is chosen, in order; L logits rows."""

    segments: Places
    """[L] indices of the plan's segments."""
    offsets: Places
    """[L] offsets within the segments."""


def picks_of(plan: StepPlan) -> Picks:
    """Returns the last position of each sampling segment, or all positions of a segment whose drafts are verified."""
    segments = (plan.wants & int(Want.SAMPLE)).nonzero()[0]
    last = plan.counts[segments].astype(np.int64) - 1
    each = (plan.wants[segments] & int(Want.EACH)) > 0
    if not each.any():
        return Picks(segments, last)
    count = np.where(each, last + 1, 1)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return Picks(np.repeat(segments, count), np.where(np.repeat(each, count), within, np.repeat(last, count)))


class StepBuilder:
    """Call `fill`, which uploads a plan's values, then `step`. `step` can be captured and replayed after each `fill`."""

    def __init__(self, model: Decoder, rows: Rows, page: int, captured: bool = False) -> None:
        """captured: steps are replayed, so their launches must not depend on the composition of a plan."""
        self.device = rows.device
        self._rows = rows
        self._page = page
        self._context = model.context
        self._ahead = int(model.spec.drafts)
        self._tokens = rows.tokens[:, self._ahead:]
        self.length = rows.before if self._ahead else rows.length
        """[row] number of known tokens, from which segments with slack begin."""
        self._build, self._move = model.kernels.build_step, model.kernels.move_step
        self._works = list(model.works)
        self._sharing = [work.ops.shares(work.geometry) for work in self._works]
        self._parts: dict[Bucket, Parts] = {}
        self.staging = Staging(rows.device, rows.bring)
        self._columns = rows.tables[0].shape[1]
        self._captured = captured
        self.fits = rows.device.type == "cuda"
        """Whether steps are padded to buckets. On a CPU they are not: kernels serve any size, and padding would cost time."""
        self._library: list[list[Span]] = [[] for _ in self._works]
        self._few = True
        self._dividers = [work.ops.divider(work.geometry) for work in self._works]

    def size(self, count: int) -> int:
        """Returns the GEMM row bucket of `count`."""
        return fitted(count) if self.fits else count

    def bucket(self, plan: StepPlan, picks: int) -> Bucket:
        tokens, segments = int(plan.counts.sum()), len(plan.rows)
        size = self.size(tokens)
        # Kernels recognise a decode step by having as many segments as tokens.
        room = size if tokens == segments else min(self.size(segments), size - 1)
        return Bucket(size, room, self.size(picks) if picks > room else 0)

    def ends(self, count: int, bucket: Bucket) -> int:
        """Returns the padded number of logits rows for `count` chosen tokens."""
        return min(self.size(count), max(bucket.segments, bucket.picks))

    def fill(self, plan: StepPlan, bucket: Bucket, picks: Picks, shift: int = 0, behind: Ints | None = None,
             reach: Ints | None = None, passes: Ints | None = None) -> Parts:
        """Uploads the plan's values in stream order. `shift`: the value of Parts.shift. `behind` [segments]: one with slack
        begins so many positions before its row's last known token (default 0). `reach` [segments]: it sees so many positions
        behind its last one; possible for segments of one token. `passes` [segments]: these run so often, and nothing is chosen
        for the others; the plan has the last pass, with slack for those before it."""
        counts, context = plan.counts, plan.starts + plan.counts
        if reach is not None:
            context = context + reach
        if not self._captured:
            decodes = bucket.tokens == bucket.segments
            self._library = [[]] * len(self._works) if decodes else self.library_spans(plan, context)
            self._few = bool(((counts > 0) & (counts <= FEW)).any())
        shared = self._rows.sharing.of(plan) if self._rows.sharing is not None else None
        prepared = [self._divide(place, plan, context, bucket, shared if shares else None)
                    for place, shares in enumerate(self._sharing)]
        parts = self._lay_out(bucket, prepared)
        host = self.staging.host(parts.size)
        segments, tail = len(plan.rows), bucket.segments - len(plan.rows)

        def put(part: slice, values: Ints | Places, rest: int = 0) -> None:
            host[part.start:part.start + len(values)] = values
            host[part.start + len(values):part.stop] = rest

        put(parts.row, plan.rows)
        put(parts.start, plan.starts)
        put(parts.context, context)
        first, chosen = parts.query_start.start, picks.segments
        host[first] = 0
        counts.cumsum(out=host[first + 1:first + 1 + segments])
        # Hidden states are gathered for all logits rows of a bucket; padding refers to the first token.
        put(parts.heads, host[first + chosen] + picks.offsets)
        put(parts.lines_row, (plan.rows if passes is None else np.where(passes > 0, plan.rows, -1))[chosen], -1)
        put(parts.lines_position, plan.starts[chosen] + picks.offsets + 1 + self._ahead)
        host[parts.shift.start] = shift
        if tail:
            host[first + 1 + segments:parts.query_start.stop] = host[first + segments]
        for place, array in zip(parts.work, prepared, strict=True):
            if place is not None and array is not None:
                host[place] = array
        if plan.slack is not None:
            before, left = (np.zeros_like(plan.slack) if given is None else given for given in (behind, passes))
            unsure = plan.slack - np.maximum(left - 1, 0)
            put(parts.slack, unsure)
            put(parts.behind, before)
            put(parts.left, left)
            put(parts.lines_segment, chosen)
        self.staging.send(parts.size)
        if plan.slack is not None:
            self.move(bucket, parts, self.length)
        # Eager steps copy only the block table columns in use; captured steps copy all.
        if not self._captured:
            self._columns = -(-int(context.max()) // self._page)
        # All of a launch that does not need the drafts is done.
        self._rows.settle()
        return parts

    def library_spans(self, plan: StepPlan, context: Ints | None = None) -> list[list[Span]]:
        """Returns for each of the model's works the segments that a vendor library computes in an eager step. `context`
        [segments]: positions that each segment sees, if not up to its last."""
        counts, context = plan.counts, plan.starts + plan.counts if context is None else context
        return [work.ops.library_spans(work.geometry, counts, context) if work.geometry.stripe.of == 1
                else long_segments(counts, context) for work in self._works]

    def _divide(self, place: int, plan: StepPlan, context: Ints, bucket: Bucket, shared: SharedPrefixes | None) -> Ints | None:
        divider, work = self._dividers[place], self._works[place]
        if divider is not None and bucket.tokens == bucket.segments and plan.slack is None:
            return divider.decode(plan.counts, context, bucket.segments, shared)
        return work.ops.prepare(work.geometry, plan.counts, context, bucket.segments, bucket.tokens, self._library[place],
                                shared, plan.slack)

    def move(self, bucket: Bucket, parts: Parts, length: torch.Tensor | None = None) -> None:
        """Moves segments filled with slack on the device: to where they begin, by rows' `length`, or to their next pass."""
        there = self.staging.device(parts.size)
        of = Moving(*(there[part] for part in (parts.row, parts.start, parts.context, parts.slack, parts.behind, parts.left,
                                               parts.lines_row, parts.lines_position, parts.lines_segment)))
        lists = (work.ops.items(work.geometry, there[part], bucket.segments, bucket.tokens)
                 for work, part in zip(self._works, parts.work, strict=True) if part is not None)
        self._move(of, list(chain.from_iterable(lists)), length)

    def _lay_out(self, bucket: Bucket, prepared: list[Ints | None]) -> Parts:
        parts = self._parts.get(bucket)
        if parts is not None:
            return parts
        at = 0

        def take(size: int) -> slice:
            nonlocal at
            begin = at
            at = -(-(at + size) // 16) * 16
            return slice(begin, begin + size)

        segments, lines = bucket.segments, max(bucket.segments, bucket.picks)
        laid = [take(size) for size in (*[segments] * 3, segments + 1, *[lines] * 4, *[segments] * 3, 1)]
        work = [None if array is None else take(len(array)) for array in prepared]
        if len(self._parts) > 512:
            self._parts.clear()
        self._parts[bucket] = parts = Parts(work, at, *laid)
        return parts

    def heads(self, parts: Parts, count: int) -> torch.Tensor:
        """Returns the token indices of the first `count` logits rows, int32."""
        return self.staging.device(parts.size)[parts.heads][:count]

    def choice(self, parts: Parts, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the inputs of captured sampling for the first `count` logits rows: shift, rows, positions."""
        there = self.staging.device(parts.size)
        return there[parts.shift][:1], there[parts.lines_row][:count], there[parts.lines_position][:count]

    def lines(self, parts: Parts, plan: StepPlan, picks: Picks) -> LogitsRows:
        there, chosen, count = self.staging.device(parts.size), picks.segments, len(picks.segments)
        row, position = there[parts.lines_row][:count], there[parts.lines_position][:count]
        return LogitsRows(chosen, plan.rows[chosen], plan.starts[chosen] + picks.offsets + 1 + self._ahead, row, position)

    def step(self, bucket: Bucket, parts: Parts, ends: int | None = None, branches: Branches | None = None) -> Step:
        """Returns the step that was filled last. `ends`: logits rows whose hidden states are wanted; None: all tokens."""
        there = self.staging.device(parts.size)
        rows = self._rows
        row, start, context, query_start = (there[part] for part in (parts.row, parts.start, parts.context, parts.query_start))
        built = self._build(self._tokens, rows.device_tables, row, start, query_start, self._page, bucket.tokens, self._columns)
        work = [None if part is None else there[part] for part in parts.work]
        at = None if ends is None else self.heads(parts, ends)
        tree = None if branches is None else self._tree(bucket, parts, branches, built.positions)
        return Step(built.tokens, built.positions, query_start, context, built.groups, work, self._library, at,
                    self._division(bucket.tokens), tree=tree)

    def _tree(self, bucket: Bucket, parts: Parts, branches: Branches, positions: torch.Tensor) -> Tree:
        """Moves the positions of tokens, and of the tokens chosen behind them, to where the tree has them."""
        there, room = self.staging.device(parts.size), bucket.tokens - len(branches.bits)
        begins = upload(np.append(branches.begins, np.full(bucket.segments - len(branches.begins), FAR)).astype(np.int32),
                        self.device)
        bits, shift = F.pad(branches.bits, (0, room)), F.pad(branches.shift, (0, room))
        positions += shift
        there[parts.lines_position] += shift[there[parts.heads].long()]
        return Tree(there[parts.start] + begins, bits)

    def _division(self, tokens: int) -> TokenShare | None:
        """The ranks' shares of the tokens, if ranks divide contexts and the step has long segments."""
        spans = next((spans for spans, work in zip(self._library, self._works, strict=True) if work.geometry.stripe.of > 1), [])
        if self._context is None or not spans:
            return None
        found = divided(spans, tokens, self._context.rank, self._context.size)
        own, places = (upload(line.astype(np.int32), self.device).long() for line in (found.own, found.places))
        return TokenShare(own, places, found.pieces, self._few, found.own)
