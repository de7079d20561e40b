"""Sampling parameters of the rows: a table on the device, which the kernels read, and the host's copy for launching them."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from penstock.core.plan import Enter, Ints
from penstock.core.sampling import SamplingParams
from penstock.ops.noise import seed_key
from penstock.ops.sample_table import EDIT_WIDTH, WIDTH, Column, Edit, Feature
from penstock.ops.step import bring
from penstock.worker.staging import Staging

_EVER = 2**31 - 1


class Parameters:
    """`table` [rows, WIDTH] and `lists` [N] are inputs of `ops/sample.py`. `table` stays at its address, `lists` may move."""

    def __init__(self, rows: int, device: torch.device, bring: Callable[..., None] = bring) -> None:
        self._host = np.zeros((rows, WIDTH), np.int32)
        self.table = torch.from_numpy(self._host).to(device)
        """On a CPU, the host's own memory."""
        self.lists = torch.zeros(0, dtype=torch.int32, device=device)
        self.features = self._host[:, Column.FEATURES]
        self._params: dict[int, SamplingParams] = {}
        self._lines = Staging(device, bring)
        self._words = Staging(device, bring)
        self._blocks: dict[int, Ints] = {}
        """The rows' contents of `lists`, for rows that have any."""
        self._end = 0
        """Offset of the free part of `lists`."""

    def narrow(self, rows: Ints, most: int) -> bool:
        """Whether the largest `most` logits decide all filters of these rows: so with top_k up to that, or with min_p alone."""
        lines = self._host[rows]
        top_k = lines[:, Column.TOP_K]
        few = np.where(top_k > 0, top_k <= most, lines.view(np.float32)[:, Column.TOP_P] >= 1)
        return bool((few | (lines[:, Column.FEATURES] & int(Feature.FILTER) == 0)).all())

    def prompt_len(self, row: int) -> int:
        return int(self._host[row, Column.PROMPT])

    def logprobs(self, row: int) -> int:
        """Number of top log probabilities that the row asks for per token."""
        return self._params[row].logprobs or 0

    def named(self, rows: Ints) -> Ints:
        """[L, w] the tokens whose log probabilities the rows ask for by id, filled up with -1; w is 0 where none does so."""
        lists = [self._params[row].logprob_token_ids or () for row in rows.tolist()]
        ids = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int32)
        for line, known in zip(ids, lists, strict=True):
            line[:len(known)] = known
        return ids

    def prompt_logprobs(self, row: int) -> int:
        """Number of top log probabilities that the row asks for per prompt token."""
        return self._params[row].prompt_logprobs or 0

    def leave(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._params.pop(row, None)
            self._blocks.pop(row, None)

    def enter(self, enters: list[Enter]) -> None:
        """Uploads the parameters of all entering rows in one copy, and their lists in another."""
        if not enters:
            return
        changed = {enter.row for enter in enters}
        blocks: dict[int, Ints] = {}
        for enter in enters:
            self._params[enter.row] = enter.params
            self._blocks.pop(enter.row, None)
            _describe(enter, self._host[enter.row])
            if self.features[enter.row] & (Feature.EDIT | Feature.ALLOWED):
                blocks[enter.row] = _block(enter, self._host[enter.row])
        if blocks:
            changed.update(self._place(blocks))
        if self.table.is_cuda:
            rows = np.fromiter(changed, np.int32, len(changed))
            host = self._lines.host(len(rows) * (1 + WIDTH))
            host[:len(rows)] = rows
            host[len(rows):len(rows) * (1 + WIDTH)] = self._host[rows].ravel()
            self._lines.send(len(rows) * (1 + WIDTH))
            there = self._lines.device(len(rows) * (1 + WIDTH))
            self.table[there[:len(rows)].long()] = there[len(rows):].view(-1, WIDTH)

    def _place(self, blocks: dict[int, Ints]) -> Iterable[int]:
        """Appends blocks to `lists`; without room, moves all to lists of twice the size. Returns the rows placed."""
        self._blocks |= blocks
        if self._end + sum(map(len, blocks.values())) > len(self.lists):
            blocks = self._blocks
            size = 2 * sum(map(len, blocks.values()))
            self.lists, self._end = torch.zeros(size, dtype=torch.int32, device=self.lists.device), 0
        size, first = sum(map(len, blocks.values())), self._end
        host = self._words.host(size)
        host[:size] = np.concatenate(list(blocks.values()))
        self._words.send(size)
        self.lists[first:first + size] = self._words.device(size)
        for row, block in blocks.items():
            line = self._host[row]
            line[Column.ALLOWED] = self._end
            line[Column.EDITS] = self._end + line[Column.ALLOWED_WORDS]
            self._end += len(block)
        return blocks.keys()


def _describe(enter: Enter, line: Ints) -> None:
    """Fills a row of the table, except the offsets of its lists."""
    params = enter.params
    features = Feature.NOTHING
    if not params.greedy:
        features |= Feature.RANDOM
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            features |= Feature.FILTER
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        features |= Feature.PENALTY
    if params.logit_bias or params.bad_words_token_ids or (params.min_tokens and enter.banned_until):
        features |= Feature.EDIT
    if params.allowed_token_ids:
        features |= Feature.ALLOWED
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    line[:] = 0
    line[Column.FEATURES] = int(features)
    line[Column.PROMPT] = enter.prompt_len
    line[Column.SEED_KEY] = seed_key(enter.seed)
    line[Column.TOP_K] = min(max(0, params.top_k), _EVER)
    real = line.view(np.float32)
    real[Column.INVERSE_TEMPERATURE] = 1.0 if params.greedy else 1.0 / params.temperature
    real[Column.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
    real[Column.TOP_P] = params.top_p
    real[Column.PRESENCE] = params.presence_penalty
    real[Column.FREQUENCY] = params.frequency_penalty
    real[Column.REPETITION] = params.repetition_penalty


def _block(enter: Enter, line: Ints) -> Ints:
    """Returns a row's contents of `lists`: the bitmask of allowed tokens, then its edits, then the edits' token suffixes."""
    params = enter.params
    allowed = np.zeros(0, np.int32)
    if params.allowed_token_ids:
        ids = np.array(params.allowed_token_ids)
        bits = np.zeros((int(ids.max()) // 32 + 1) * 32, np.uint8)
        bits[ids] = 1
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    words = params.bad_words_token_ids or []
    banned = enter.banned_until if params.min_tokens else []
    bias = params.logit_bias or {}
    edits = np.zeros((len(bias) + len(banned) + len(words), EDIT_WIDTH), np.int32)
    edits[:, Edit.TOKEN] = [*bias, *banned, *(word[-1] for word in words)]
    edits.view(np.float32)[:, Edit.VALUE] = [*bias.values(), *[-math.inf] * (len(banned) + len(words))]
    edits[:, Edit.UNTIL] = [_EVER] * len(bias) + [params.min_tokens] * len(banned) + [_EVER] * len(words)
    length = np.array([len(word) - 1 for word in words], np.int32)
    after = edits[len(bias) + len(banned):]
    after[:, Edit.LENGTH] = length
    after[:, Edit.SUFFIX] = edits.size + np.cumsum(length) - length
    line[Column.ALLOWED_WORDS], line[Column.EDIT_COUNT] = len(allowed), len(edits)
    return np.concatenate((allowed, edits.ravel(), np.array([t for word in words for t in word[:-1]], np.int32)))
