"""Runs a model's forward pass for plans: by a captured CUDA graph where one fits, else eagerly."""

import torch

from penstock.core.plan import Ints, StepPlan
from penstock.layers.decoder import Decoder
from penstock.models.adapters import APART, EMBEDDING
from penstock.parallel.lockstep import Lockstep
from penstock.parallel.pipe import Pipe
from penstock.worker.adapters import Adapters
from penstock.worker.graphs import Graphs
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows
from penstock.worker.step import Branches, Bucket, StepBuilder, picks_of


class Runner:
    """One model on the rows of a worker."""

    def __init__(self, model: Decoder, rows: Rows, page: int) -> None:
        self.model = model
        self.builder = StepBuilder(model, rows, page)
        self.graphs: Graphs | None = None
        self.adapters: Adapters | None = None
        self.pipe: Pipe | None = None
        """The links of a pipeline stage."""

    def begin_at(self, length: torch.Tensor) -> None:
        """Segments with slack begin at these numbers of known tokens [row]."""
        self.builder.length = length
        if self.graphs is not None:
            self.graphs.builder.length = length

    def forward(self, plan: StepPlan, every: bool = False,
                behind: Ints | None = None, branches: Branches | None = None,
                reach: Ints | None = None) -> tuple[torch.Tensor, torch.Tensor, LogitsRows]:
        """Returns hidden states of all tokens if `every`, hidden states of the logits rows (possibly padded), and the logits
        rows' owners. `behind`, `reach`: as in `StepBuilder.fill`. `branches`: of draft trees."""
        picks = picks_of(plan)
        count = len(picks.segments)
        adapted = self.adapters is not None and self.adapters.adapted(plan)
        # CUDA graphs return neither the hidden states of all tokens, nor embeddings that adapters have changed.
        eager = every or branches is not None or (self.adapters is not None and self.adapters.adapted(plan, EMBEDDING, APART))
        found = self.graphs.bucket(plan, count) if self.graphs is not None and not eager else None
        if self.model.lockstep is not None:
            found = self._agreed(self.model.lockstep, plan, count, found)
        bucket = self.builder.bucket(plan, count) if found is None else found
        if self.pipe is not None and not self.model.spec.begins:
            self.pipe.receive(self.model.entry(bucket.tokens))
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

    def _agreed(self, lockstep: Lockstep, plan: StepPlan, count: int, bucket: Bucket | None) -> Bucket | None:
        """The bucket of a captured step, which all ranks must replay together: of decode steps of the size of the largest."""
        decodes = bucket is not None and bucket.tokens == bucket.segments
        tokens = bucket.tokens if bucket is not None and decodes else self.builder.bucket(plan, count).tokens
        return Bucket(lockstep.most, lockstep.most) if lockstep.begin(tokens, decodes) else None

    def _pass_on(self, stream: torch.Tensor, copied: bool = False) -> None:
        """Sends a stage's result to the next."""
        if self.pipe is not None and not self.model.spec.ends:
            self.pipe.send(stream.clone() if copied else stream)
