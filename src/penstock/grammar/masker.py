"""Computes the token masks of a step's constrained rows, and the tokens that a grammar forces.

Each constrained sequence has a `GrammarState` in the engine: its matcher's position, whether the model is still thinking, and
the forced tokens. A state is advanced when a mask is requested, because all earlier steps are known by then."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence as List
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.core.masking import MaskedSegment
from penstock.core.plan import Ints, Masks
from penstock.core.request import Request, Sequence
from penstock.grammar.compiling import Compiler, parallel

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_FREE = -1
"""A mask word that allows all 32 tokens."""
_FEW = 24
"""Forced text is looked for only where a mask allows at most so many tokens: the prefixes of one text are few."""


class GrammarState:
    __slots__ = ("at", "begin", "budget", "end", "forced", "json", "lane", "least", "matcher", "since", "stops", "thinking")

    def __init__(self, sequence: Sequence, matcher: "LLMatcher | None", lane: int) -> None:
        params = sequence.request.params
        self.matcher = matcher
        self.lane = lane
        """As from `Compiler.matcher`."""
        self.at = sequence.prompt_len
        """Number of the sequence's tokens that the state has processed."""
        self.forced: list[int] = []
        """The tokens that must come next. The matcher has consumed them, except the tokens that end thinking."""
        self.end = params.reasoning_end_ids or []
        """The tokens that end thinking."""
        self.begin = params.reasoning_start_ids or []
        """The tokens that begin thinking, while it may still begin. A constrained answer supports only one such token."""
        self.thinking = bool(self.end) and not self.begin
        if matcher is not None and len(self.begin) > 1:
            self.begin = []
        self.since = sequence.prompt_len
        """Position at which thinking began."""
        self.budget = params.max_thinking_tokens
        self.least = sequence.prompt_len + params.min_tokens
        """Minimum length of the sequence, in tokens, before it may end."""
        self.stops = sorted(sequence.stops)
        grammar = params.grammar or ""
        self.json = grammar.startswith("{") or "%json" in grammar
        """Whether numbers of JSON may occur."""


_Row = tuple[int, MaskedSegment, GrammarState]
"""The first line of a segment, the segment, and its sequence's state."""
_Asked = tuple["LLMatcher", int, list[int]]
"""A matcher, the line of the mask at its position, and the drafts behind, each of which has a line too."""


class Masker:
    """The masker of one engine. Implements `core/masking.py::Masker`."""

    def __init__(self, compiler: Compiler, vocab_size: int, propose: Callable[[Sequence, int, list[int]], None] | None = None,
                 spare: Callable[[], int] = lambda: 1 << 30, room: Callable[[int, int], Ints] | None = None) -> None:
        """`propose(sequence, at, tokens)` receives forced tokens from `at` on; `spare()` says how many a step can check;
        `room(lines, words)` returns int32 memory [lines, words] for a step's masks."""
        self.masked = self.forced = 0
        """Masks made, and tokens that the grammar determined, since the engine started."""
        self.seconds = 0.0
        """Time spent in `masks`."""
        self._compiler = compiler
        self._words = -(-vocab_size // 32)
        self._propose = propose
        self._spare = spare
        self._room = room or (lambda lines, words: np.empty((lines, words), np.int32))
        self._parallel = parallel()

    def wants(self, request: Request) -> bool:
        """Returns whether the request's tokens are chosen under a mask."""
        return request.params.grammar is not None or request.params.max_thinking_tokens is not None

    def masks(self, segments: List[MaskedSegment]) -> Masks:
        """Returns one mask for each token that the segments choose, in their order."""
        began = time.perf_counter()
        rows: list[_Row] = []
        lines = 0
        for segment in segments:
            if not segment.sequence.done:
                state = segment.sequence.constraint
                if not isinstance(state, GrammarState):
                    state = GrammarState(segment.sequence, *self._compiler.matcher(segment.sequence.request))
                    segment.sequence.constraint = state
                rows.append((lines, segment, state))
            lines += 1 + len(segment.drafts)
        if self._parallel:
            # Each of llguidance's threads takes neighbours, which then wait for one lock alone.
            rows.sort(key=lambda row: row[2].lane)
        moved = self._advance(rows)
        todo = [(state.matcher, first, segment.drafts) for first, segment, state in rows
                if state.matcher is not None and not state.thinking and not state.forced]
        bits = self._room(lines, self._words)
        if len(todo) < lines:
            # Where matchers fill every line there is nothing else to write first.
            bits.fill(_FREE)
        if len(todo) < len(rows):
            for row in rows:
                todo += self._behind(*row, bits)
        self._fill(todo, bits)
        self._find_forced(moved, bits)
        self._compiler.numbers.bound(_numbered(rows), bits)
        for first, segment, state in rows:
            if state.forced:
                _force(segment.drafts, state.forced, bits[first:])
            if len(segment.sequence.tokens) < state.least:
                _hold_back(segment, state, bits, first)
            if state.begin and state.matcher is not None:
                _allow(bits[first], state.begin[0])
        self.masked += lines
        self.seconds += time.perf_counter() - began
        return Masks(bits)

    def _behind(self, first: int, segment: MaskedSegment, state: GrammarState, bits: Ints) -> list[_Asked]:
        """The masks that a matcher must compute behind forced tokens or behind the end of thinking, if it is asked at all."""
        since = state.since if state.thinking else _begun(state, segment)
        if since is not None:
            behind = _end_of_thinking(state, segment, since)
            self._think(state, segment, since, bits[first:], behind)
            if state.matcher is not None and not state.forced:
                # An answer that ends while the model thinks would not satisfy the constraint.
                _exclude(bits[first:first + (len(segment.drafts) + 1 if behind is None else behind)], state.stops)
        else:
            sure = len(state.forced)
            behind = sure if sure and segment.drafts[:sure] == state.forced else None
        return [] if behind is None or state.matcher is None else [(state.matcher, first + behind, segment.drafts[behind:])]

    def _advance(self, rows: list[_Row]) -> list[_Row]:
        """Processes the tokens chosen since the last call. Returns the rows where forced text has become possible."""
        one: list[tuple[LLMatcher, int]] = []
        moved = []
        for row in rows:
            sequence, state = row[1].sequence, row[2]
            new = sequence.tokens[state.at:]
            fresh = bool(new) or state.at == sequence.prompt_len
            state.at += len(new)
            if new and (state.begin or state.thinking or state.forced):
                new = self._unconstrained(sequence, state, new)
            if state.matcher is None or state.thinking:
                continue
            if len(new) == 1:
                one.append((state.matcher, new[0]))
            elif new:
                state.matcher.consume_tokens(new)
            if fresh and not state.forced and not state.begin:
                moved.append(row)
        if len(one) > 2 and self._parallel:
            self._pool.consume_token_par(one)
        else:
            for matcher, token in one:
                matcher.consume_token(token)
        return moved

    def _unconstrained(self, sequence: Sequence, state: GrammarState, new: list[int]) -> list[int]:
        """Takes the tokens that the matcher must not consume off `new`: those of thinking, and those that it has consumed."""
        if state.begin:
            new = self._watch(sequence, state, new)
        forced, state.forced = len(state.forced), state.forced[len(new):]
        return self._skip_thinking(sequence, state, new) if state.thinking else new[forced:]

    def _find_forced(self, moved: list[_Row], bits: Ints) -> None:
        """Finds the tokens that must come next. Asking a matcher costs more than computing its mask, so this asks only
        matchers whose mask suggests forced text, and only while the step has room for forced tokens."""
        spare = self._spare()
        if not moved or spare <= 0:
            return
        wide = bits.view(np.uint32 if self._words % 2 else np.uint64)
        # A part of the words tells nearly all masks that allow many tokens.
        few = np.flatnonzero(_allow_few(wide[:, :wide.shape[1] // 16 + 1]))
        forcing = set(few[_allow_few(wide[few])].tolist())
        for first, segment, state in moved:
            if spare <= 0:
                break
            if first not in forcing or state.matcher is None:
                continue
            state.forced = forced = state.matcher.compute_ff_tokens()
            if not forced:
                continue
            state.matcher.consume_tokens(forced)
            self.forced += len(forced)
            spare -= len(forced) - 1
            if len(forced) > 1 and self._propose is not None:
                self._propose(segment.sequence, len(segment.sequence.tokens) + 1, forced[1:])

    def _watch(self, sequence: Sequence, state: GrammarState, new: list[int]) -> list[int]:
        """Looks for the beginning of thinking: anywhere, or before a constrained answer. Returns the `new` tokens after it."""
        begin, tokens = state.begin, sequence.tokens
        first = last = sequence.prompt_len
        if state.matcher is None:
            first, last = max(first, len(tokens) - len(new) - len(begin)), len(tokens) - len(begin)
        for at in range(first, last + 1):
            if tokens[at:at + len(begin)] == begin:
                state.begin, state.thinking, state.since = [], True, at + len(begin)
                return tokens[state.since:]
        if state.matcher is not None:
            state.begin = []
        return new

    def _skip_thinking(self, sequence: Sequence, state: GrammarState, new: list[int]) -> list[int]:
        """Leaves the thinking state if the `new` tokens contain its end. Returns the tokens after that end."""
        end = state.end
        for at in range(len(sequence.tokens) - len(new) + 1, len(sequence.tokens) + 1):
            if at - len(end) >= state.since and sequence.tokens[at - len(end):at] == end:
                state.thinking, state.forced = False, []
                return sequence.tokens[at:]
        return []

    def _think(self, state: GrammarState, segment: MaskedSegment, since: int, bits: Ints, behind: int | None) -> None:
        """Leaves thinking unconstrained up to its budget, then forces its end. `since`: the position at which it began, perhaps
        within drafts. `behind`: as `_end_of_thinking`."""
        if state.budget is None or state.forced:
            return
        sequence = segment.sequence
        left = since + state.budget - len(sequence.tokens)
        if left <= 0:
            # Its first tokens may have been forced within drafts.
            given = sequence.tokens[since + state.budget:]
            state.forced = list(state.end[len(given):] if state.end[:len(given)] == given else state.end)
            if len(state.forced) > 1 and self._propose is not None:
                self._propose(sequence, len(sequence.tokens) + 1, state.forced[1:])
        elif left <= len(segment.drafts) and (behind or left + 1) > left:
            # Drafts extend beyond the budget, and do not end the thinking before.
            _force(segment.drafts[left:], state.end, bits[left:])

    def _fill(self, todo: list[_Asked], bits: Ints) -> None:
        if not todo:
            return
        pointer, width, lines = bits.ctypes.data, bits.shape[1] * 4, len(bits)
        plain = [(matcher, line) for matcher, line, drafts in todo if not drafts]
        if len(plain) > 2 and self._parallel:
            self._pool.unsafe_compute_mask_ptr(plain, pointer, width, lines)
        else:
            for matcher, line in plain:
                matcher.unsafe_compute_mask_ptr(pointer + line * width, width)
        if len(plain) < len(todo):
            self._pool.unsafe_compute_mask_ptr_with_draft_token([one for one in todo if one[2]], pointer, width, lines)
        for matcher, line, _ in todo:
            if matcher.is_error():
                # The state is too complex for a mask: no token is allowed, and the request ends with an error.
                bits[line] = 0

    @functools.cached_property
    def _pool(self) -> "LLExecutor":
        """llguidance's threads. This thread alone is faster for few matchers."""
        from llguidance import LLExecutor

        return LLExecutor()


def _allow_few(words: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each line of words of masks, whether they allow few tokens."""
    few: npt.NDArray[np.bool_] = np.bitwise_count(words).sum(1, dtype=np.uint32) <= _FEW
    return few


def _numbered(rows: list[_Row]) -> Iterator[tuple[int, list[int], int]]:
    """The lines of answers in which numbers of JSON may occur, as for `Numbers.bound`."""
    for first, segment, state in rows:
        if state.json and not state.thinking:
            known, start = segment.sequence.tokens, segment.sequence.prompt_len
            yield first, known, start
            for line in range(1, 1 + len(segment.drafts)):
                yield first + line, [*known, *segment.drafts[:line]], start


def _force(drafts: List[int], tokens: List[int], bits: Ints) -> None:
    """Forces tokens in the masks of drafts' places, and of the one behind them."""
    for line, token in enumerate(tokens[:1 + len(drafts)]):
        _only(bits[line], token)
        if drafts[line:line + 1] != [token]:
            # Drafts after a rejected draft are never kept.
            break


def _only(words: Ints, token: int) -> None:
    words[:] = 0
    words.view(np.uint32)[token // 32] = 1 << token % 32


def _allow(words: Ints, token: int) -> None:
    words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def _exclude(words: Ints, tokens: List[int]) -> None:
    for token in tokens:
        words.view(np.uint32)[..., token // 32] &= ~np.uint32(1 << token % 32)


def _begun(state: GrammarState, segment: MaskedSegment) -> int | None:
    """Returns the position at which thinking begins within the segment's drafts; None if it does not, or may not there."""
    if not state.begin or state.matcher is not None:
        return None
    tokens, count = [*segment.sequence.tokens, *segment.drafts], len(state.begin)
    first = max(segment.sequence.prompt_len, len(segment.sequence.tokens) - count + 1)
    return next((at + count for at in range(first, len(tokens) - count + 1) if tokens[at:at + count] == state.begin), None)


def _end_of_thinking(state: GrammarState, segment: MaskedSegment, since: int) -> int | None:
    """Returns the number of the segment's drafts up to the end of thinking; None if they do not end it."""
    known, count = segment.sequence.tokens, len(state.end)
    tokens = [*known[len(known) - count + 1:], *segment.drafts]
    return next((drafts for drafts in range(max(1, since - len(known) + count), len(segment.drafts) + 1)
                 if tokens[drafts - 1:drafts - 1 + count] == state.end), None)


def _hold_back(segment: MaskedSegment, state: GrammarState, bits: Ints, first: int) -> None:
    """Enforces min_tokens: an answer that could end must continue if the grammar allows it."""
    for line in range(first, first + min(state.least - len(segment.sequence.tokens), 1 + len(segment.drafts))):
        held = bits[line].copy()
        _exclude(held, state.stops)
        if held.any():
            bits[line] = held
