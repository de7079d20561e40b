"""Incremental detokenization: the joined results of all pushes equal the text of all tokens decoded at once.

Incomplete UTF-8 characters are held back, so every part of a stream is valid text; bytes outside any character become U+FFFD.
`Tokenizer.decode` uses the same code with one push. Vocabularies (`fast.py`, `spm.py`) give the text of a token."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

REPLACEMENT = "\ufffd"

LONGEST_RUN = 32
"""The most bytes of a run of byte tokens that are held back; see `WholeRun`."""

PENDING = 3
"""The most bytes, and so tokens, of an incomplete UTF-8 character."""

Piece = TypeVar("Piece")


class Pieces(dict[int, Piece], Generic[Piece]):
    """The text or bytes of each token, computed on first use."""

    def __init__(self, piece_of: Callable[[int], Piece], size: int, empty: Piece, hidden: frozenset[int]) -> None:
        """`piece_of` knows ids from 0 to `size` - 1. `hidden` tokens (special tokens to skip) map to `empty`."""
        super().__init__()
        self._piece_of = piece_of
        self._size = size
        self._empty = empty
        self._hidden = hidden

    def __missing__(self, token: int) -> Piece:
        if not 0 <= token < self._size:
            return self._empty
        piece = self._empty if token in self._hidden else self._piece_of(token)
        self[token] = piece
        return piece


class ByteLevel:
    """For byte-level BPE vocabularies (GPT-2's kind), in which every token is a byte string."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Pieces[bytes], after: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.push(after[-PENDING:])

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens add and that no later token can change. Ids outside the vocabulary have no text."""
        pieces = self._pieces
        return self._decode(b"".join([pieces[token] for token in ids]))

    def held(self) -> str:
        """Complete characters that are still held back, because later tokens may change them."""
        return ""

    def flush(self) -> str:
        """The text still held back, at the end of the sequence. Resets the detokenizer."""
        return self._decode(b"", True)


class WholeRun:
    """Decodes a run of neighbouring byte tokens by the rule of the tokenizers library: one that is not valid UTF-8 as a whole
    is one U+FFFD for each of its bytes. `EachCharacter` differs only on such runs.

    So characters are final only when the run ends. Two rules bound the delay: a run that is known to be invalid is passed on at
    once, and after LONGEST_RUN bytes the complete characters so far count as a run of their own."""

    __slots__ = ("_broken", "_held")

    def __init__(self) -> None:
        self._held = bytearray()
        self._broken = False

    def add(self, byte: int) -> str:
        if self._broken:
            return REPLACEMENT
        held = self._held
        held.append(byte)
        try:
            held.decode()
            complete = len(held)
        except UnicodeDecodeError as error:
            # Only an "unexpected end" can become valid with later bytes.
            if error.reason != "unexpected end of data":
                self._broken = True
                text = REPLACEMENT * len(held)
                held.clear()
                return text
            complete = error.start
        if len(held) < LONGEST_RUN:
            return ""
        text = held[:complete].decode()
        del held[:complete]
        return text

    def held(self) -> str:
        """The run's complete characters that were not returned yet."""
        # The held bytes are a valid prefix: only the last character can be incomplete.
        return self._held.decode("utf-8", "ignore")

    def end(self) -> str:
        """Ends the run: a token with text follows, or the end."""
        self._broken = False
        held = self._held
        if not held:
            return ""
        try:
            text = held.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(held)
        held.clear()
        return text


class EachCharacter:
    """The rule of the sentencepiece library: characters of a run stand for themselves, every other byte is one U+FFFD."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, byte: int) -> str:
        self._held.append(byte)
        return self._take(False)

    def held(self) -> str:
        return ""

    def end(self) -> str:
        return self._take(True) if self._held else ""

    def _take(self, last: bool) -> str:
        held, text = self._held, ""
        while held:
            try:
                text += held.decode()
                held.clear()
            except UnicodeDecodeError as error:
                text += held[:error.start].decode()
                del held[:error.start]
                if error.reason == "unexpected end of data" and not last:
                    break
                text += REPLACEMENT
                del held[0]
        return text


class ByteFallback:
    """For vocabularies of text pieces, with a token for each byte where no piece fits (sentencepiece's kind).

    A piece is its text, or an int for a byte token. `leading` spaces are cut from the front of the whole text, as such
    vocabularies add one there; `cut_bytes` says whether a space written as a byte token counts. If the tokens `after` which
    these come have text, then this is not the front."""

    __slots__ = ("_cut_bytes", "_leading", "_left", "_pieces", "_run")

    def __init__(self, pieces: Pieces[str | int], run: WholeRun | EachCharacter, leading: int, cut_bytes: bool,
                 after: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._run = run
        self._leading = leading
        self._left = leading
        self._cut_bytes = cut_bytes
        for token in after:
            if not self._left:
                break
            self.push((token,))
        run.end()
        for byte in _unfinished([pieces[token] for token in after[-PENDING:]]):
            run.add(byte)

    def push(self, ids: Iterable[int]) -> str:
        pieces, run = self._pieces, self._run
        text = ""
        for token in ids:
            piece = pieces[token]
            if isinstance(piece, int):
                part = run.add(piece)
                if not self._cut_bytes:
                    self._left = 0
            elif piece:
                part = run.end() + piece
            else:
                continue
            text += self._cut(part) if self._left else part
        return text

    def held(self) -> str:
        text = self._run.held()
        return text[min(len(text) - len(text.lstrip(" ")), self._left):]

    def flush(self) -> str:
        text = self._cut(self._run.end())
        self._left = self._leading
        return text

    def _cut(self, text: str) -> str:
        """`text` without the leading spaces still to be cut."""
        if not text:
            return text
        spaces = min(len(text) - len(text.lstrip(" ")), self._left)
        self._left = self._left - spaces if spaces == len(text) else 0
        return text[spaces:]


Detokenizer = ByteLevel | ByteFallback
"""Text of one growing sequence of tokens."""


def _unfinished(pieces: Sequence[str | int]) -> bytes:
    """The bytes at the end that begin a character and do not complete it."""
    found = b""
    for piece in reversed(pieces):
        if not isinstance(piece, int):
            break
        found = bytes([piece]) + found
        try:
            found.decode()
            return b""
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return found
    return b""
