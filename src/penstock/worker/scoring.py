"""Log probabilities for those who ask: of sampled tokens and of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, Logprobs, StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.worker.rows import Feature, Rows

_LINES = 128
"""Lines of the vocabulary's width that are worked on at a time, which bounds the memory of scoring long prompts."""


@dataclass(slots=True)
class Reported:
    """The model's own logits of the lines that ask for log probabilities, set aside before sampling changes them."""

    lines: npt.NDArray[np.int64]
    logits: torch.Tensor


def reported(logits: torch.Tensor, rows: Rows, row: Ints) -> Reported | None:
    """Sets logits aside for the rows that want log probabilities of what is sampled from them; None if no row does."""
    lines = np.flatnonzero(rows.features[row] & int(Feature.LOGPROBS))
    if not len(lines):
        return None
    return Reported(lines, logits[torch.from_numpy(lines).to(logits.device)])


def sampled(kept: Reported | None, picks: torch.Tensor, rows: Rows, row: Ints, segments: npt.NDArray[np.int64],
            position: npt.NDArray[np.int64]) -> Logprobs | None:
    """Log probabilities of the sampled tokens `picks` [S] for the lines that were set aside."""
    if kept is None:
        return None
    lines = kept.lines
    asked = [rows.params[r].logprobs or 0 for r in row[lines].tolist()]
    mine = picks[torch.from_numpy(lines).to(picks.device)]
    return _logprobs(kept.logits, mine, max(asked), segments[lines].astype(np.int32), position[lines].astype(np.int32))


def prompts(model: Decoder, hidden: torch.Tensor, plan: StepPlan, rows: Rows) -> Logprobs | None:
    """Log probabilities of the known prompt tokens that follow the positions of segments with Want.SCORE."""
    found: list[Logprobs] = []
    query_start = np.cumsum(plan.counts) - plan.counts
    for segment in np.flatnonzero(plan.wants & int(Want.SCORE)).tolist():
        row, start = int(plan.rows[segment]), int(plan.starts[segment])
        end = min(start + int(plan.counts[segment]), int(rows.prompt_len[row]) - 1)
        top = rows.params[row].prompt_logprobs or 0
        for first in range(start, end, _LINES):
            last = min(end, first + _LINES)
            at = int(query_start[segment]) + first - start
            logits = model.head(hidden[at:at + last - first])
            tokens = rows.tokens[row, first + 1:last + 1].long()
            positions = np.arange(first + 1, last + 1, dtype=np.int32)
            found.append(_logprobs(logits, tokens, top, np.full(last - first, segment, np.int32), positions))
    return _join(found)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int, segments: Ints, positions: Ints) -> Logprobs:
    """Of `tokens` [L], and of the `top` most likely ones, under logits [L, V] float32. Ranks count from 1."""
    lines = logits.log_softmax(-1)
    mine = tokens.clamp(min=0)[:, None]
    value = lines.gather(1, mine)
    rank = (lines > value).sum(-1, keepdim=True) + 1
    best = lines.topk(min(top, lines.shape[1]), -1)
    ranks = torch.arange(1, best.indices.shape[1] + 1, device=lines.device).expand(len(mine), -1)
    return Logprobs(segments, positions, torch.cat((mine, best.indices), 1).int().cpu().numpy(),
                    torch.cat((value, best.values), 1).cpu().numpy(), torch.cat((rank, ranks), 1).int().cpu().numpy())


def _join(parts: list[Logprobs]) -> Logprobs | None:
    """Several into one; lines that asked for fewer alternatives are padded with token -1, at the end."""
    if not parts:
        return None
    width = max(part.ids.shape[1] for part in parts)

    def stack(name: str, padding: float) -> npt.NDArray[np.generic]:
        blocks = [getattr(part, name) for part in parts]
        return np.concatenate([np.pad(b, ((0, 0), (0, width - b.shape[1])), constant_values=padding) for b in blocks])

    return Logprobs(np.concatenate([p.segments for p in parts]), np.concatenate([p.positions for p in parts]),
                    stack("ids", -1), stack("values", 0.0), stack("ranks", 0))
