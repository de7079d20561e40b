"""`echo`: a prompt as text, and where in the text each token begins, for the prompt and for the answer that continues it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.request import Request
from penstock.text import Detokenizer, Tokenizer


class Echo(NamedTuple):
    """A prompt as it is shown before its answer. Answers continue it: bytes that end inside a character are theirs to show."""

    text: str
    offsets: list[int]
    """For each token of the request's prompt, the character of `text` at which what it adds begins."""


class Offsets:
    """Where the text of each token begins, in a text of which `start` characters precede the first one."""

    def __init__(self, detokenizer: Detokenizer | None, start: int = 0) -> None:
        """Without a detokenizer there is no text, and all begin at `start`."""
        self._detokenizer = detokenizer
        self._certain = start

    def of(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens. A token that is not shown, or is a part of a character, adds nothing."""
        return [self.next(token)[0] for token in ids]

    def next(self, token: int) -> tuple[int, str]:
        """(offset, text that has become certain) of the next token."""
        if self._detokenizer is None:
            return self._certain, ""
        begin = self._certain + len(self._detokenizer.held())
        text = self._detokenizer.push((token,))
        self._certain += len(text)
        return begin, text

    def rest(self, final: bool) -> str:
        """What is held back after the last token: complete characters, and if nothing can follow, the others as U+FFFD."""
        if self._detokenizer is None:
            return ""
        return self._detokenizer.flush() if final else self._detokenizer.held()


def echo(tokenizer: Tokenizer | None, prompt: str | Sequence[int], request: Request, add_special_tokens: bool,
         truncated: bool, final: bool) -> Echo:
    """How the prompt of `request`, made from `prompt`, is shown.

    A text is shown as it was sent, ids as their text. Special tokens that the tokenizer added to a text are not shown; those
    that are among ids are if the request does not skip special tokens. `truncated`: tokens may have been cut off at the front,
    and then what is left is shown. `final`: no answer will follow.
    """
    ids = request.prompt_ids
    if tokenizer is None:
        return Echo("", [0] * len(ids))
    if not isinstance(prompt, str):
        return _shown(tokenizer, ids, range(len(ids)), request.params.skip_special_tokens, final)
    whole = tokenizer.encode(prompt, add_special_tokens) if truncated else ids
    own = _own(tokenizer, whole, prompt, add_special_tokens)
    cut = max(0, len(whole) - len(ids))
    found = _shown(tokenizer, ids, range(max(0, own.start - cut), max(0, own.stop - cut)), False, final)
    if cut:
        return found
    return Echo(prompt, [min(offset, len(prompt)) for offset in found.offsets])


def _own(tokenizer: Tokenizer, ids: Sequence[int], prompt: str, add_special_tokens: bool) -> range:
    """Which of a text's tokens stand for the text itself, and were not added before or behind it."""
    if not prompt:
        return range(len(ids), len(ids))
    added = tokenizer.encode("", add_special_tokens)
    before = next((place for place, token in enumerate(added) if ids[place:place + 1] != [token]), len(added))
    return range(before, len(ids) - (len(added) - before))


def _shown(tokenizer: Tokenizer, ids: Sequence[int], own: range, skip_special_tokens: bool, final: bool) -> Echo:
    """The text of the tokens at the places `own`, and offsets of all."""
    offsets, parts, places = Offsets(tokenizer.detokenizer(skip_special_tokens)), [], []
    begin = 0
    for place, token in enumerate(ids):
        if place in own:
            begin, text = offsets.next(token)
            parts.append(text)
            places.append(begin)
        else:
            places.append(begin if place < own.start else sum(map(len, parts)))
    return Echo("".join(parts) + offsets.rest(final), places)
