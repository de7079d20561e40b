"""The worker's tables of running sequences: their tokens, block tables and sampling parameters.

A row is an index into every table here. Tokens live on the device, so a step can be planned before the last one's are known.
The host decides pages and parameters, keeps them in arrays, and copies changes over, by pinned staging buffers on a GPU."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import MOST_DEPTH, Enter, Ints, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.ops.noise import seed_key
from penstock.ops.sample_table import EDIT_WIDTH, WIDTH, Column, Edit, Feature
from penstock.ops.step import bring
from penstock.worker.sharing import Sharing

_EVER = 2**31 - 1


class Parameters:
    """`table` [rows, WIDTH] and `lists` [N] are inputs of `ops/sample.py`. `table` stays at its address, `lists` may move."""

    def __init__(self, rows: int, device: torch.device, bring: Callable[..., None] = bring) -> None:
        self._host = np.zeros((rows, WIDTH), np.int32)
        self.table = torch.from_numpy(self._host).to(device)
        """On a CPU, the host's own memory."""
        self.lists = torch.zeros(0, dtype=torch.int32, device=device)
        self.features = self._host[:, Column.FEATURES]
        self.params: dict[int, SamplingParams] = {}
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

    def named(self, rows: Ints) -> Ints:
        """[L, w] the tokens whose log probabilities the rows ask for by id, filled up with -1; w is 0 where none does so."""
        lists = [self.params[row].logprob_token_ids or () for row in rows.tolist()]
        ids = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int32)
        for line, known in zip(ids, lists, strict=True):
            line[:len(known)] = known
        return ids

    def leave(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.params.pop(row, None)
            self._blocks.pop(row, None)

    def enter(self, enters: list[Enter]) -> None:
        """Uploads the parameters of all entering rows in one copy, and their lists in another."""
        if not enters:
            return
        changed = {enter.row for enter in enters}
        blocks: dict[int, Ints] = {}
        for enter in enters:
            self.params[enter.row] = enter.params
            self._blocks.pop(enter.row, None)
            _describe(enter, self._host[enter.row])
            if self.features[enter.row] & (Feature.EDIT | Feature.ALLOWED):
                blocks[enter.row] = _block(enter, self._host[enter.row])
        if blocks:
            changed.update(self._place(blocks))
        if self.table.is_cuda:
            rows = np.fromiter(changed, np.int32, len(changed))
            there = self._lines.carry([rows, self._host[rows].ravel()])
            self.table[there[:len(rows)].long()] = there[len(rows):].view(-1, WIDTH)

    def _place(self, blocks: dict[int, Ints]) -> Iterable[int]:
        """Appends blocks to `lists`; without room, moves all to lists of twice the size. Returns the rows placed."""
        self._blocks |= blocks
        if self._end + sum(map(len, blocks.values())) > len(self.lists):
            blocks = self._blocks
            size = 2 * sum(map(len, blocks.values()))
            self.lists, self._end = torch.zeros(size, dtype=torch.int32, device=self.lists.device), 0
        words = self._words.carry(list(blocks.values()))
        self.lists[self._end:self._end + len(words)] = words
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


_SLOTS = MOST_DEPTH + 1
"""Host buffers per device buffer: more than the plans that can be in flight."""


class Staging:
    """One device buffer of int32, refilled each step from one of several host buffers: the last one may still be read."""

    def __init__(self, device: torch.device, bring: Callable[..., None] = bring) -> None:
        """`bring`: as in ops/step.py."""
        self._bring = bring
        self._device = device
        self._there = torch.empty(0, dtype=torch.int32, device=device)
        self._slots: deque[_Slot] = deque()

    def reserve(self, size: int) -> None:
        """Makes the buffer at least `size` elements long. It moves, so captured graphs must come later."""
        if size <= len(self._there):
            return
        self._there = torch.empty(size, dtype=torch.int32, device=self._device)
        count = 1 if self._device.type == "cpu" else _SLOTS
        self._slots = deque(_Slot(size, self._there) for _ in range(count))

    def host(self, size: int) -> npt.NDArray[np.int32]:
        """Returns the array to fill before `send`, with room for `size` elements."""
        if size > len(self._there):
            self.reserve(max(size, 2 * len(self._there)))
        self._slots.rotate(-1)
        slot = self._slots[0]
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot.array

    def send(self, size: int) -> None:
        """Enqueues a copy of the first `size` elements on the current stream."""
        slot = self._slots[0]
        if slot.copied is None:
            return
        self._bring(slot.memory[:size], self._there[:size])
        slot.copied.record()

    def device(self, size: int) -> torch.Tensor:
        """The first `size` elements on the device, at the same address until `reserve` has to grow them."""
        return self._there[:size]

    def carry(self, parts: Sequence[npt.ArrayLike]) -> torch.Tensor:
        """Uploads integers, one part behind the other, in one copy. Returns them on the device."""
        found = np.concatenate(parts)
        if len(found):
            self.host(len(found))[:len(found)] = found
            self.send(len(found))
        return self.device(len(found))


class _Slot:
    def __init__(self, size: int, there: torch.Tensor) -> None:
        cuda = there.is_cuda
        self.memory = torch.empty(size, dtype=there.dtype, pin_memory=True) if cuda else there
        self.array: npt.NDArray[np.int32] = self.memory.numpy()
        self.copied = torch.cuda.Event() if cuda else None


class Outbox:
    """Pinned host memory that GPU kernels write to directly. A copy would queue behind the saves of pages, because a GPU runs
    the copies of one direction in order, and all later steps would wait for it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        """size: maximum elements per step. Memory is reused after as many steps as can be in flight."""
        self.memory = torch.empty((MOST_DEPTH + 2) * size, dtype=dtype, pin_memory=True)
        self._at = 0

    def take(self, size: int) -> torch.Tensor:
        """Reserves `size` elements; returns a view of `memory`."""
        if self._at + size > len(self.memory):
            self._at = 0
        self._at += size
        return self.memory[self._at - size:self._at]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueues a copy to pinned host memory, valid once the device has run it; on a CPU returns the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class Arriving:
    """A tensor on its way to the host, which may be waited for before the rest of the step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._there = to_host(tensor)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def numpy(self) -> npt.NDArray[np.int32]:
        """Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        found: npt.NDArray[np.int32] = self._there.numpy()
        return found


def upload(array: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Enqueues a copy of an array that may be freed or changed at once; on a CPU returns a tensor of its memory."""
    tensor = torch.from_numpy(array)
    # Pinned memory returns to torch's pool only after the copy from it has run.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Rows:
    """Tables for `max_num_seqs` rows of up to `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int, page: int, groups: int, device: torch.device,
                 watched: int | None = None, bring: Callable[..., None] = bring) -> None:
        """`watched`: the cache group whose block table is searched for shared prefixes. `bring`: as in ops/step.py."""
        self.device, self.bring = device, bring
        self.tokens = torch.zeros((max_num_seqs, max_model_len), dtype=torch.int32, device=device)
        """[row, position]; positions at and beyond the row's length hold drafts, or anything."""
        self.length = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        """[row] known tokens, kept only for rows with drafts, whose length the host learns late; others' starts are exact."""
        self.before = torch.zeros_like(self.length)
        """[row] `length` at the beginning of the step, for a draft head that follows it."""
        self.tables = [np.zeros((max_num_seqs, -(-max_model_len // page)), np.int32) for _ in range(groups)]
        """Host block tables, one per cache group: [row, page index] -> page id. Entries behind a sliding window are stale."""
        self.device_tables = [torch.from_numpy(table).to(device) for table in self.tables]
        """Device block tables; on a CPU they share memory with `tables`."""
        self.sharing = Sharing(self.tables[watched], page) if watched is not None else None
        self._watched = watched
        self._known = Staging(device, bring)
        self._edits = Staging(device, bring)
        self.parameters = Parameters(max_num_seqs, device, bring)
        self.late = deque[Callable[[], object]]()
        """The rest of a launch: `StepBuilder.fill` settles the first, which writes drafts, and the worker the others."""
        self.labels: dict[int, list[int]] = {}
        """The logits that pooled rows report, as `Enter.labels`."""

    def settle(self) -> None:
        """Does the first of what is late."""
        if self.late:
            self.late.popleft()()

    def apply(self, plan: StepPlan) -> None:
        """Applies the row part of a plan: rows leave and enter, drafts are written, block tables are edited."""
        self.parameters.leave(plan.leave)
        self.parameters.enter(plan.enter)
        self.labels.update((enter.row, enter.labels) for enter in plan.enter)
        self._take_tokens(plan.enter)
        for row, position, tokens in plan.proposals:
            self.tokens[row, position:position + len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        self._take_edits(plan.edits)
        if self.sharing is not None and self._watched is not None:
            self.sharing.forget([*plan.leave, *(enter.row for enter in plan.enter)])
            self.sharing.edited(plan.edits[self._watched])

    def _take_tokens(self, enters: list[Enter]) -> None:
        """Uploads the known tokens of all entering rows in one copy."""
        if not enters:
            return
        there = self._known.carry([enter.tokens for enter in enters])
        for enter, known in zip(enters, there.split([len(enter.tokens) for enter in enters]), strict=True):
            self.tokens[enter.row, :len(known)] = known

    def _take_edits(self, edits: list[Ints]) -> None:
        size = sum(map(len, edits))
        if not size:
            return
        for table, lines in zip(self.tables, edits, strict=True):
            table[lines[:, 0], lines[:, 1]] = lines[:, 2]
        if self.device.type == "cpu":
            return
        # Upload the host table's current value instead of the edit's, so that the last of two edits of one entry wins.
        where = [lines[:, 0] * table.shape[1] + lines[:, 1] for table, lines in zip(self.tables, edits, strict=True)]
        now = [table[lines[:, 0], lines[:, 1]] for table, lines in zip(self.tables, edits, strict=True)]
        places, pages = self._edits.carry([*where, *now]).view(2, size)
        sizes = [len(lines) for lines in edits]
        for there, place, page in zip(self.device_tables, places.long().split(sizes), pages.split(sizes), strict=True):
            there.view(-1).scatter_(0, place, page)
