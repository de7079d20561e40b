"""CUDA graphs of the model's forward pass, one for each bucket that steps are padded to.

Decode steps (one token per segment) and small mixed steps replay a graph: the host enqueues one launch instead of hundreds.
Larger steps run eagerly, because the device takes longer to run them than the host to enqueue them. For decode steps whose rows
use no sampling parameter but temperature, sampling is captured too, so that a whole step is one launch. `Runner` chooses."""

import bisect
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.layers.step import Delta
from penstock.models.adapters import APART, EMBEDDING, HEAD
from penstock.parallel.pipe import Pipe
from penstock.worker.adapters import Adapters
from penstock.worker.dummy import dummy_plan, filled, spread
from penstock.worker.rows import Rows
from penstock.worker.sampler import MAX_LOGITS_ROWS, LogitsRows, Sampler
from penstock.worker.step import Branches, Bucket, Parts, Picks, StepBuilder, picks_of

_T = TypeVar("_T")
_SAMPLE = int(Want.SAMPLE)
_MIXED = (8, 16, 32, 64, 96, 128, 192, 256, 320, *range(384, 2049, 128), 2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
"""Bucket sizes of mixed steps, in tokens. GEMM tiles have 64 or 128 rows, so padding to these sizes costs little; few drafts of
one sequence fit into the first two."""
_ANY = 4096
"""Tokens up to which any mixed step replays its graph. In larger ones, a vendor library's segments are worth an eager step."""
_SEGMENTS = 256
"""Maximum segments of a captured mixed step: attention launches a program for each possible segment."""
_DECODE = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1025, 128))
"""Bucket sizes of decode steps, in rows. `Buckets` uses those up to 512, or to half of the largest mixed step."""


class Buckets:
    """The buckets of captured steps. Mixed ones have up to `tokens` tokens, at most what `rows` rows of `longest` hold."""

    def __init__(self, tokens: int, rows: int, longest: int, drafts: bool = False) -> None:
        most = min(max(512, tokens // 2), _DECODE[-1])
        self.decode = [size for size in _DECODE if size < min(rows, most + 1)]
        """Rows of decode steps. `rows` itself is the last bucket unless it exceeds the largest size."""
        if rows <= most:
            self.decode.append(rows)
        self.mixed = [size for size in _MIXED if size <= min(tokens, rows * (longest - 1))]
        """Tokens of mixed steps."""
        self._rows, self._drafts = rows, drafts

    def all(self) -> list[Bucket]:
        """Returns all buckets, largest first, so that later graphs fit into the memory pool of the first."""
        found = [*map(self._of_mixed, self.mixed), *(Bucket(size, size) for size in self.decode)]
        return sorted(found, key=lambda bucket: -bucket.tokens)

    def of(self, plan: StepPlan, picks: int) -> Bucket | None:
        """Returns the smallest bucket that holds the plan, of which `picks` tokens are chosen, or None."""
        tokens, segments = int(plan.counts.sum()), len(plan.rows)
        sizes = self.decode if tokens == segments else self.mixed
        at = bisect.bisect_left(sizes, tokens)
        if tokens == segments:
            return Bucket(sizes[at], sizes[at]) if at < len(sizes) else None
        found = map(self._of_mixed, sizes[at:at + 2])
        return next((one for one in found if segments <= one.segments and picks <= max(one.segments, one.picks)), None)

    def _of_mixed(self, tokens: int) -> Bucket:
        # Kernels recognise a mixed step by having fewer segments than tokens.
        segments = min(self._rows, tokens - 1, _SEGMENTS)
        return Bucket(tokens, segments, tokens if self._drafts and tokens > segments else 0)


class Graphs:
    """CUDA graphs of one worker. Call `capture` once, after the cache and the rows are allocated, then `forward`."""

    def __init__(self, model: Decoder, rows: Rows, page: int, max_num_seqs: int, max_tokens: int, stream: torch.cuda.Stream,
                 sampler: Sampler, adapters: Adapters | None = None, drafts: bool = False) -> None:
        """`adapters`: captures each bucket a second time, for steps with adapters. `drafts`: steps may verify drafts."""
        self.model = model
        self._adapters = adapters if adapters is not None and adapters.slabs is not None else None
        self._sampler = sampler
        # A pipeline stage is part of a step, between two messages, and a draft head's tokens may have numbers of their own.
        self._alone = model.spec.begins and model.spec.ends and model.lockstep is None and not model.spec.drafts
        self.builder = StepBuilder(model, rows, page, captured=True)
        self._longest = rows.tokens.shape[1]
        # With contexts over ranks, keys of long segments come as the step needs them.
        self.buckets = Buckets(max_tokens if model.context is None else 0, max_num_seqs, self._longest, drafts)
        self._stream = stream
        self._captured: dict[tuple[Bucket, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        """By bucket, and whether a row has an adapter."""
        self._decodes: dict[tuple[Bucket, bool], torch.cuda.CUDAGraph] = {}
        """Graphs of whole decode steps, sampling included."""
        self.seconds = 0.0
        """Duration of `capture` in seconds."""

    def __len__(self) -> int:
        return len(self._captured)

    @torch.inference_mode()
    def capture(self) -> None:
        """Runs every bucket once, so that kernels are compiled and loaded, and captures it. Rows must be unused."""
        began = time.perf_counter()
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            # Single tokens, or segments of the maximum length.
            plans = [(bucket, dummy_plan(spread(bucket.tokens, bucket.segments) if bucket.tokens == bucket.segments
                                         else filled(bucket.tokens, self._longest - 1))) for bucket in self.buckets.all()]
            # Fill all arrays once before capturing, so that the staging buffer they share has its final address.
            self.builder.staging.reserve(max(self.builder.fill(plan, bucket, picks_of(plan)).size for bucket, plan in plans))
            if self._adapters is not None:
                self._adapters.reserve(plans[0][0].tokens)
            for adapted in (False, True) if self._adapters is not None else (False,):
                for bucket, plan in plans:
                    parts, key = self.builder.fill(plan, bucket, picks_of(plan)), (bucket, adapted)
                    deltas = self._deltas(plan, bucket, picks_of(plan)) if adapted else None
                    self._decode(bucket, parts, deltas)
                    self._stream.synchronize()
                    self._captured[key] = self._capture(partial(self._run, bucket, parts, deltas))
                    if self._chooses(bucket):
                        self._decodes[key], _ = self._capture(partial(self._decode, bucket, parts, deltas))
        self._stream.synchronize()
        self.seconds = time.perf_counter() - began

    @torch.inference_mode()
    def passes(self, run: Callable[[Bucket, Parts], None], most: int) -> dict[Bucket, torch.cuda.CUDAGraph]:
        """Captures `run` for decode steps of up to `most` rows. `capture` comes before."""
        found = dict[Bucket, torch.cuda.CUDAGraph]()
        with torch.cuda.stream(self._stream):
            for size in [size for size in reversed(self.buckets.decode) if size <= most]:
                bucket, plan = Bucket(size, size), dummy_plan(np.ones(size, np.int32))
                plan.slack = none = np.zeros_like(plan.counts)
                parts = self.builder.fill(plan, bucket, picks_of(plan), passes=none)
                run(bucket, parts)
                self._stream.synchronize()
                found[bucket], _ = self._capture(partial(run, bucket, parts))
        return found

    def _capture(self, run: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
        """Captures `run` into a graph. Returns the graph and the result of `run`."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        found = run()
        graph.capture_end()
        return graph, found

    def _chooses(self, bucket: Bucket) -> bool:
        return bucket.tokens == bucket.segments <= MAX_LOGITS_ROWS and self._sampler.capturable and self._alone

    def _deltas(self, plan: StepPlan, bucket: Bucket, picks: Picks) -> tuple[Delta, Delta]:
        assert self._adapters is not None
        ends = 0 if bucket.tokens == bucket.segments else max(bucket.segments, bucket.picks)
        return self._adapters.deltas(plan, bucket.tokens, ends, picks.segments, captured=True)

    def _decode(self, bucket: Bucket, parts: Parts, deltas: tuple[Delta, Delta] | None) -> None:
        hidden = self._run(bucket, parts, deltas)
        if self._chooses(bucket):
            shift, row, position = self.builder.choice(parts, bucket.segments)
            self._sampler.choose_at(shift, self.model.head(hidden), row, position)

    def _run(self, bucket: Bucket, parts: Parts, deltas: tuple[Delta, Delta] | None) -> torch.Tensor:
        ends = None if bucket.tokens == bucket.segments else max(bucket.segments, bucket.picks)
        if self.model.lockstep is not None:
            self.model.lockstep.most, self.model.lockstep.decodes = bucket.tokens, True
        step = self.builder.step(bucket, parts, ends)
        if deltas is not None:
            step.delta, step.end_delta = deltas
        return self.model.forward(step)

    def bucket(self, plan: StepPlan, picks: int) -> Bucket | None:
        """Returns the bucket whose graph runs the plan, of which `picks` tokens are chosen, or None for an eager step."""
        found = self.buckets.of(plan, picks)
        return None if found is not None and found.tokens > _ANY and any(self.builder.library_spans(plan)) else found

    def forward(self, plan: StepPlan, bucket: Bucket, picks: Picks, behind: Ints | None = None,
                adapted: bool = False, reach: Ints | None = None) -> tuple[torch.Tensor, Parts]:
        """Returns hidden states, followed by padding: of all tokens of a decode step, or of the picked tokens of a mixed step.
        The next step of the same bucket overwrites them."""
        parts = self.builder.fill(plan, bucket, picks, behind=behind, reach=reach)
        if adapted:
            self._deltas(plan, bucket, picks)
        graph, hidden = self._captured[bucket, adapted]
        graph.replay()
        return hidden, parts

    def decode(self, plan: StepPlan) -> torch.Tensor | None:
        """Replays a whole decode step with captured sampling. Returns the host memory that will hold the tokens once the device
        has run the step, or None if the plan is not such a step."""
        count = len(plan.rows)
        if int(plan.counts.sum()) != count or not (plan.wants == _SAMPLE).all() or len(plan.masked):
            return None
        if plan.slack is not None or not self._sampler.plain(plan.rows):
            return None
        bucket, adapted = self.buckets.of(plan, count), self._adapters is not None and self._adapters.adapted(plan)
        if bucket is None or (bucket, adapted) not in self._decodes:
            return None
        if self._adapters is not None and self._adapters.adapted(plan, EMBEDDING, HEAD, APART):
            return None
        room = self._sampler.room(count)
        picks = picks_of(plan)
        self.builder.fill(plan, bucket, picks, int(room.storage_offset()))
        if adapted:
            self._deltas(plan, bucket, picks)
        self._decodes[bucket, adapted].replay()
        return room


class Runner:
    def __init__(self, model: Decoder, rows: Rows, page: int, graphs: Graphs | None = None) -> None:
        self.model = model
        self.builder = StepBuilder(model, rows, page)
        self.graphs = graphs
        self.adapters: Adapters | None = None
        self.pipe: Pipe | None = None

    def begin_at(self, length: torch.Tensor) -> None:
        """Segments with slack begin at these numbers of known tokens [row]."""
        self.builder.length = length
        if self.graphs is not None:
            self.graphs.builder.length = length

    def forward(self, plan: StepPlan, every: bool = False, behind: Ints | None = None, branches: Branches | None = None,
                reach: Ints | None = None) -> tuple[torch.Tensor, torch.Tensor, LogitsRows]:
        """Returns hidden states of all tokens if `every`, hidden states of the logits rows (possibly padded), and the logits
        rows' owners. `behind`, `reach`: as in `StepBuilder.fill`. `branches`: of draft trees."""
        picks = picks_of(plan)
        count = len(picks.segments)
        adapted = self.adapters is not None and self.adapters.adapted(plan)
        # CUDA graphs return neither the hidden states of all tokens, nor embeddings that adapters have changed.
        eager = every or branches is not None or (self.adapters is not None and self.adapters.adapted(plan, EMBEDDING, APART))
        found = self.graphs.bucket(plan, count) if self.graphs is not None and not eager else None
        lockstep = self.model.lockstep
        if lockstep is not None:
            # All ranks must replay the same graph together: of decode steps that of the largest one.
            decodes = found is not None and found.tokens == found.segments
            tokens = found.tokens if found is not None and decodes else self.builder.bucket(plan, count).tokens
            found = Bucket(lockstep.most, lockstep.most) if lockstep.begin(tokens, decodes) else None
        bucket = self.builder.bucket(plan, count) if found is None else found
        if self.pipe is not None and not self.model.spec.begins:
            self.pipe.receive(self.model.entry(bucket.tokens))
            if self.model.taps_before(self.model.spec.first):
                self.pipe.receive(self.model.tapped[:bucket.tokens])
        if self.graphs is not None and found is not None:
            builder = self.graphs.builder
            ends = builder.ends(count, bucket)
            hidden, parts = self.graphs.forward(plan, bucket, picks, behind, adapted, reach)
            # The next step may replay the graph that the stream lies in.
            self._pass_on(hidden, copied=True)
            if bucket.tokens == bucket.segments and count < len(plan.rows):
                hidden = hidden.index_select(0, builder.heads(parts, ends))
            return hidden, hidden[:ends], builder.lines(parts, plan, picks)
        builder = self.builder
        ends = builder.ends(count, bucket)
        parts = builder.fill(plan, bucket, picks, behind=behind, reach=reach)
        step = builder.step(bucket, parts, None if every or count == int(plan.counts.sum()) else ends, branches=branches)
        if adapted and self.adapters is not None:
            own = None if step.division is None else step.division.tokens
            step.delta, step.end_delta = self.adapters.deltas(plan, bucket.tokens, ends, picks.segments, own=own)
        hidden = self.model.forward(step)
        self._pass_on(hidden)
        at = hidden.index_select(0, builder.heads(parts, ends)) if every else hidden[:ends]
        return hidden, at, builder.lines(parts, plan, picks)

    def _pass_on(self, stream: torch.Tensor, copied: bool = False) -> None:
        if self.pipe is not None and not self.model.spec.ends:
            self.pipe.send(stream.clone() if copied else stream)
            if self.model.taps_before(self.model.spec.first + len(self.model.blocks)):
                self.pipe.send(self.model.tapped[:len(stream)].clone())
