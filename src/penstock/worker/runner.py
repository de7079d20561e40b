"""Runs a model's forward pass for plans: by a captured CUDA graph where one fits, else eagerly."""

from __future__ import annotations

import torch

from penstock.core.plan import Ints, StepPlan
from penstock.layers.decoder import Decoder
from penstock.worker.adapters import Adapters
from penstock.worker.graphs import Graphs
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows
from penstock.worker.step import StepBuilder, picks_of


class Runner:
    """One model on the rows of a worker."""

    def __init__(self, model: Decoder, rows: Rows, page: int) -> None:
        self.model = model
        self.builder = StepBuilder(model, rows, page)
        self.graphs: Graphs | None = None
        self.adapters: Adapters | None = None

    def forward(self, plan: StepPlan, every: bool = False,
                behind: Ints | None = None) -> tuple[torch.Tensor, torch.Tensor, LogitsRows]:
        """Returns hidden states of all tokens if `every`, hidden states of the logits rows (possibly padded), and the logits
        rows' owners. `behind`: as in `StepBuilder.fill`."""
        picks = picks_of(plan)
        count = len(picks.segments)
        delta = self.adapters.delta(plan) if self.adapters is not None else None
        # A delta finds its tokens by their places, so that all layers must have them all.
        every = every or delta is not None
        # CUDA graphs do not return the hidden states of all tokens.
        bucket = self.graphs.buckets.of(plan, count) if self.graphs is not None and not every else None
        if self.graphs is not None and bucket is not None:
            builder = self.graphs.builder
            ends = builder.ends(count, bucket)
            hidden, parts = self.graphs.forward(plan, bucket, picks, behind)
            if bucket.tokens == bucket.segments and count < len(plan.rows):
                hidden = hidden.index_select(0, builder.heads(parts, ends))
        else:
            builder = self.builder
            bucket = builder.bucket(plan, count)
            ends = builder.ends(count, bucket)
            parts = builder.fill(plan, bucket, picks, behind=behind)
            if every:
                step = builder.step(bucket, parts)
                step.delta = delta
                hidden = self.model.forward(step)
                return hidden, hidden.index_select(0, builder.heads(parts, ends)), builder.lines(parts, plan, picks)
            whole = count == int(plan.counts.sum())
            hidden = self.model.forward(builder.step(bucket, parts, None if whole else ends))
        return hidden, hidden[:ends], builder.lines(parts, plan, picks)
