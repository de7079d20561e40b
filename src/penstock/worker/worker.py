"""The worker: owns a device's rows, cache bytes and model, and executes plans in order. This is the whole of a step."""

from __future__ import annotations

import time

import numpy as np
import torch

from penstock.core.layout import CacheLayout
from penstock.core.plan import NOT_SAMPLED, StepPlan, StepResult, Want
from penstock.layers.decoder import Decoder
from penstock.worker import scoring
from penstock.worker.arena import Arena
from penstock.worker.rows import Rows
from penstock.worker.sampler import sample
from penstock.worker.step import StepBuilder


class Worker:
    """One device's half of the engine. Not thread-safe: one thread runs it."""

    def __init__(self, model: Decoder, layout: CacheLayout, max_num_seqs: int, max_model_len: int,
                 device: torch.device) -> None:
        self.model = model
        self.layout = layout
        self.arena = Arena(layout, device)
        self.rows = Rows(max_num_seqs, max_model_len, layout.page, len(layout.groups), device)
        model.attach(self.arena.views(model.states))
        self.builder = StepBuilder(model, self.rows, layout.page)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Executes a plan; the result is on the host."""
        began = time.perf_counter()
        self.rows.apply(plan)
        self.arena.copy(plan.moves)
        capacity = self.builder.exact(plan)
        step = self.builder.step(capacity, self.builder.fill(plan, capacity))
        last = np.cumsum(plan.counts, dtype=np.int64) - 1
        entered = time.perf_counter()
        hidden = self.model.forward(step)
        wanted = np.flatnonzero(plan.wants & int(Want.SAMPLE))
        logits = self.model.head(hidden[torch.from_numpy(last[wanted]).to(hidden.device)]) if len(wanted) else None
        left = time.perf_counter()
        tokens = np.full(len(plan.rows), NOT_SAMPLED, np.int32)
        result = StepResult(plan.id, tokens)
        if logits is not None:
            row, position = plan.rows[wanted], (plan.starts + plan.counts)[wanted].astype(np.int64)
            lines = scoring.reported(logits, self.rows, row)
            picks = sample(logits, self.rows, row, position)
            self.rows.tokens[torch.from_numpy(row.astype(np.int64)), torch.from_numpy(position)] = picks.int().clamp(min=0)
            tokens[wanted] = picks.cpu().numpy()
            result.logprobs = scoring.sampled(lines, picks, self.rows, row, wanted, position)
        result.scores = scoring.prompts(self.model, hidden, plan, self.rows)
        result.seconds, result.kernel_seconds = time.perf_counter() - began, left - entered
        return result
