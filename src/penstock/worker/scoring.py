"""Log probabilities of sampled tokens and of prompts, and their copies to the host."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, Logprobs, StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.worker.rows import Rows
from penstock.worker.staging import to_host

_LINES, _SCORES = 128, 1 << 20
"""Logits rows computed, and log probabilities reported, at a time. Bounds the memory of scoring long prompts."""

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The result of `SampleOps.score`: ids, log probabilities, ranks."""


class Scores:
    """Log probabilities of a step. Call `logprobs` after the device has computed them."""

    def __init__(self, parts: Iterable[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], Found]]) -> None:
        """parts: (segments [L], positions [L], result of `SampleOps.score`)."""
        self.parts = [(segments.astype(np.int32), positions.astype(np.int32), tuple(map(to_host, found)))
                       for segments, positions, found in parts]

    def logprobs(self, *others: "Scores") -> Logprobs | None:
        """Concatenates all parts and those of `others`. Entries with fewer alternatives are padded at the end with token -1."""
        parts = [part for scores in (self, *others) for part in scores.parts]
        if not parts:
            return None
        segments, positions, found = zip(*parts, strict=True)
        ids, values, ranks = zip(*found, strict=True)
        return Logprobs(np.concatenate(segments), np.concatenate(positions), _stack(ids, -1).astype(np.int32, copy=False),
                        _stack(values, 0.0).astype(np.float32, copy=False), _stack(ranks, 0).astype(np.int32, copy=False))


def _stack(blocks: tuple[torch.Tensor, ...], padding: float) -> npt.NDArray[Any]:
    if len(blocks) == 1:
        return np.asarray(blocks[0])
    width = max(block.shape[1] for block in blocks)
    return np.concatenate([np.pad(block.numpy(), ((0, 0), (0, width - block.shape[1])), constant_values=padding)
                           for block in blocks])


HeadOf = Callable[[torch.Tensor, npt.NDArray[np.integer]], torch.Tensor]
"""(hidden states, segments of all or of the first of them) -> their logits."""


def prompts(model: Decoder, head: HeadOf, hidden: torch.Tensor, plan: StepPlan, rows: Rows,
            size: Callable[[int], int]) -> Scores:
    """Scores the known prompt tokens that follow the positions of segments with Want.SCORE, given the step's hidden states.
    `size` maps a number of logits rows to its GEMM bucket."""
    scoring = np.flatnonzero(plan.wants & int(Want.SCORE)).tolist()
    parts: list[tuple[Ints, Ints, Found]] = []
    query_start = np.cumsum(plan.counts) - plan.counts
    for segment in scoring:
        row, start = int(plan.rows[segment]), int(plan.starts[segment])
        end = min(start + int(plan.counts[segment]), rows.parameters.prompt_len(row) - 1)
        top = rows.parameters.prompt_logprobs(row)
        lines = max(1, min(_LINES, _SCORES // (1 + top)))
        for first in range(start, end, lines):
            last = min(end, first + lines)
            at = int(query_start[segment]) + first - start
            states = hidden[at:at + size(last - first)]
            logits = model.whole(head(states, np.full(last - first, segment))[:last - first])
            found = model.kernels.sample.score(logits, rows.tokens[row, first + 1:last + 1], top)
            parts.append((np.full(last - first, segment, np.int32), np.arange(first + 1, last + 1, dtype=np.int32), found))
    return Scores(parts)
