"""Chooses tokens from logits, vectorised over the rows of a step.

A row's choice depends on its own logits, parameters, seed and position alone.

Order, as in vLLM: edits (allowed tokens, bias, bad words, minimum length), penalties, temperature, min_p, top_k, top_p, draw.
Reported log probabilities are those of the model's own logits, before all of that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import NOT_FINITE, Ints
from penstock.core.sampling import SamplingParams
from penstock.worker import noise
from penstock.worker.rows import Feature, Rows


def sample(logits: torch.Tensor, rows: Rows, row: Ints, position: npt.NDArray[np.int64]) -> torch.Tensor:
    """The next tokens [S] int64 for logits [S, V] float32 (changed in place).

    row [S] is whose logits these are; position [S] is where the sampled token will stand, which is also how many tokens the row
    has. NOT_FINITE where no token can be chosen.
    """
    features = Feature(int(np.bitwise_or.reduce(rows.features[row])) if len(row) else 0)
    # A NaN or +inf anywhere in a row shows in its maximum.
    bad = ~torch.isfinite(logits.amax(-1))
    if features & Feature.EDIT:
        _edit(logits, rows, row, position)
    if features & Feature.PENALTY:
        _penalize(logits, rows, row, position)
    if features & (Feature.EDIT | Feature.PENALTY):
        bad |= ~torch.isfinite(logits.amax(-1))
    tokens = logits.argmax(-1)
    if features & Feature.RANDOM:
        chosen = np.flatnonzero(rows.features[row] & int(Feature.RANDOM))
        where = torch.from_numpy(chosen).to(logits.device)
        drawn = _draw(logits if len(chosen) == len(row) else logits[where], rows, row[chosen], position[chosen])
        tokens[where] = drawn
    return tokens.masked_fill_(bad, NOT_FINITE)


def _column(values: npt.NDArray[np.generic], logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(logits.device)[:, None]


def _draw(logits: torch.Tensor, rows: Rows, row: Ints, position: npt.NDArray[np.int64]) -> torch.Tensor:
    """Draws from softmax(logits / temperature), filtered."""
    logits = logits / _column(rows.temperature[row], logits)
    if int(np.bitwise_or.reduce(rows.features[row])) & int(Feature.FILTER):
        logits = _filter(logits, rows, row)
    key = _column(noise.keys(rows.seed[row], position), logits)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    race = noise.exponential(key, ids)
    # argmax(logit - log E) is argmin(E / p) without the exponential and the sum of a softmax.
    return race.log_().neg_().add_(logits).argmax(-1)


def _filter(logits: torch.Tensor, rows: Rows, row: Ints) -> torch.Tensor:
    """min_p, top_k, top_p: logits outside become -inf. Ties at a border are kept, so the result does not depend on sorting."""
    min_p, top_k, top_p = rows.min_p[row], rows.top_k[row], rows.top_p[row]
    if min_p.any():
        floor = logits.amax(-1, keepdim=True) + _column(np.log(np.maximum(min_p, 1e-38)), logits)
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if not (top_k.any() or (top_p < 1).any()):
        return logits
    k = np.where(top_k > 0, np.minimum(top_k, logits.shape[1]), logits.shape[1])
    widest = int(k.max())
    descending = logits.topk(widest, -1).values if widest < logits.shape[1] else logits.sort(-1, descending=True).values
    last = descending.gather(1, _column(k - 1, logits))
    logits = logits.masked_fill(logits < last, float("-inf"))
    if (top_p < 1).any():
        descending = descending.masked_fill(descending < last, float("-inf"))
        shares = descending.softmax(-1)
        before = shares.cumsum(-1) - shares
        kept = (before < _column(top_p, logits)).sum(-1, keepdim=True).clamp_(min=1)
        last = descending.gather(1, kept - 1)
        logits = logits.masked_fill(logits < last, float("-inf"))
    return logits


def _edit(logits: torch.Tensor, rows: Rows, row: Ints, position: npt.NDArray[np.int64]) -> None:
    """Bias, allowed tokens, bad words and minimum length: rare, and a few tokens each, so row by row."""
    for i in np.flatnonzero(rows.features[row] & int(Feature.EDIT)):
        r = int(row[i])
        params, line, known = rows.params[r], logits[i], int(position[i])
        assert params is not None
        if params.allowed_token_ids:
            allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
            kept = line[allowed]
            line.fill_(float("-inf"))
            line[allowed] = kept
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            line[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
        if known - int(rows.prompt_len[r]) < params.min_tokens and rows.banned[r]:
            line[torch.tensor(rows.banned[r], device=logits.device)] = float("-inf")
        for token in _completed_bad_words(params, rows, r, known):
            line[token] = float("-inf")


def _completed_bad_words(params: SamplingParams, rows: Rows, row: int, known: int) -> list[int]:
    """The last tokens of those bad words whose other tokens end the output so far."""
    words = params.bad_words_token_ids or []
    longest = max((len(word) for word in words), default=0)
    if not longest:
        return []
    first = max(int(rows.prompt_len[row]), known - longest + 1)
    tail = rows.tokens[row, first:known].tolist()
    return [word[-1] for word in words if len(word) - 1 <= len(tail) and tail[len(tail) - len(word) + 1:] == word[:-1]]


def _penalize(logits: torch.Tensor, rows: Rows, row: Ints, position: npt.NDArray[np.int64]) -> None:
    """Presence, frequency and repetition penalties, from the tokens in the rows: there is no state to keep in step."""
    chosen = np.flatnonzero(rows.features[row] & int(Feature.PENALTY))
    where = torch.from_numpy(chosen).to(logits.device)
    mine = row[chosen]
    lengths = position[chosen]
    tokens = rows.tokens[torch.from_numpy(mine.astype(np.int64)).to(logits.device), :int(lengths.max())].long()
    at = torch.arange(tokens.shape[1], device=logits.device)[None]
    known = at < _column(lengths, logits)
    generated = known & (at >= _column(rows.prompt_len[mine], logits))
    # Positions beyond a row's tokens may hold anything: point them at token 0 with weight 0.
    tokens = tokens.masked_fill(~known, 0)
    lines = logits[where]
    counts = torch.zeros_like(lines).scatter_add_(1, tokens, generated.float())
    seen = torch.zeros_like(lines).scatter_add_(1, tokens, known.float()) > 0
    repetition = _column(rows.repetition[mine], logits)
    lines = torch.where(seen, torch.where(lines > 0, lines / repetition, lines * repetition), lines)
    lines -= counts * _column(rows.frequency[mine], logits)
    lines -= (counts > 0) * _column(rows.presence[mine], logits)
    logits[where] = lines
