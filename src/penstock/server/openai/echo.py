"""`echo`: the prompt as text, and the text offset of each token of the prompt and of the answer that follows it."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.request import Request
from penstock.text import Detokenizer, Tokenizer


class Echo(NamedTuple):
    """An echoed prompt. A character that its last bytes leave incomplete is shown by the answer that completes it."""

    text: str
    offsets: list[int]
    """For each token of the prompt, the index in `text` at which its own text begins."""


class Offsets:
    """Computes text offsets of a token sequence, beginning at `start`."""

    def __init__(self, detokenizer: Detokenizer | None, start: int = 0) -> None:
        """Without a detokenizer there is no text, and all offsets are `start`."""
        self._detokenizer = detokenizer
        self._certain = start

    def of(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens. Hidden tokens and incomplete characters have no length."""
        return [self.next(token)[0] for token in ids]

    def next(self, token: int) -> tuple[int, str]:
        """(offset of the next token, text that it makes final)."""
        if self._detokenizer is None:
            return self._certain, ""
        begin = self._certain + len(self._detokenizer.held())
        text = self._detokenizer.push((token,))
        self._certain += len(text)
        return begin, text

    def rest(self, final: bool) -> str:
        """The text held back after the last token: complete characters; if `final`, incomplete ones too, as U+FFFD."""
        if self._detokenizer is None:
            return ""
        return self._detokenizer.flush() if final else self._detokenizer.held()


def echo(tokenizer: Tokenizer | None, prompt: str | Sequence[int], request: Request, add_special_tokens: bool,
         truncated: bool, final: bool) -> Echo:
    """Echoes `prompt`, from which `request` was made.

    A text is returned as it was sent, ids are decoded. Special tokens added to a text are hidden; those among ids are shown
    unless the request skips them. `truncated`: the prompt may have lost tokens at its front. `final`: no answer follows."""
    ids = request.prompt_ids
    if tokenizer is None:
        return Echo("", [0] * len(ids))
    if not isinstance(prompt, str):
        return _shown(tokenizer, ids, range(len(ids)), request.params.skip_special_tokens, final)
    whole = tokenizer.encode(prompt, add_special_tokens) if truncated else ids
    own = _own(tokenizer, whole, prompt, add_special_tokens)
    cut = max(0, len(whole) - len(ids))
    found = _shown(tokenizer, ids, range(max(0, own.start - cut), max(0, own.stop - cut)), False, final)
    return found if cut else Echo(prompt, [min(offset, len(prompt)) for offset in found.offsets])


def _own(tokenizer: Tokenizer, ids: Sequence[int], prompt: str, add_special_tokens: bool) -> range:
    """The range of tokens that encode the text itself, without the special tokens added around it."""
    if not prompt:
        return range(len(ids), len(ids))
    added = tokenizer.encode("", add_special_tokens)
    before = next((place for place, token in enumerate(added) if ids[place:place + 1] != [token]), len(added))
    return range(before, len(ids) - (len(added) - before))


def _shown(tokenizer: Tokenizer, ids: Sequence[int], own: range, skip_special_tokens: bool, final: bool) -> Echo:
    """Decodes the tokens at the positions `own`; offsets are for all tokens."""
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
