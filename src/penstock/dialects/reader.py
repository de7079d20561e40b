"""Reads a growing text. The methods of a reader are generators that yield where they need more text, so a form is parsed as
if all text were present, and the boundaries of the pieces have no effect."""

import ast
import json
import re
from collections.abc import Callable, Generator, Sequence

Wait = Generator[None, None, None]
Emit = Callable[[str], None]

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPES = {**{c: f"\\{c}" for c in '"\\/bfnrt'}, "'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000"}
_PLAIN = re.compile(r'[^"\'\\\x00-\x1f]+')
_DEEPEST = 200
SPACE = " \t\r\n"


class MalformedError(Exception):
    """The text does not have the form that it began with."""


class Reader:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.passing: tuple[re.Pattern[str] | None, Emit] | None = None
        """While parsing waits in text that it only passes on: the beginnings of its markers, and to whom."""

    def passed_to(self, text: str) -> Emit | None:
        """To whom the parser would pass a piece on, and do nothing else. None where it has to be resumed."""
        if self.passing is None or not text or (self.passing[0] and self.passing[0].search(text)):
            return None
        return self.passing[1]

    def cut(self) -> None:
        self.text, self.at = self.text[self.at:], 0

    def peek(self) -> Generator[None, None, str]:
        """Returns the next character; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Wait:
        while (yield from self.peek()) in tuple(SPACE):
            self.at += 1

    def begins(self, options: Sequence[str]) -> Generator[None, None, str | None]:
        """Returns the longest option that the text continues with; None if there is none. Consumes nothing."""
        while True:
            rest = self.text[self.at:]
            found = max((option for option in options if option and rest.startswith(option)), key=len, default=None)
            if self.ended or not any(len(option) > len(found or "") and option.startswith(rest) for option in options):
                return found
            yield

    def take(self, options: Sequence[str]) -> Generator[None, None, str | None]:
        """Like `begins`, and consumes the option."""
        found = yield from self.begins(options)
        self.at += len(found or "")
        return found

    def until(self, markers: Sequence[str], emit: Emit | None = None,
              final: bool = False) -> Generator[None, None, tuple[str, str | None]]:
        """(text before the first marker, that marker, of several at a place the longest), both consumed; None at the end of all
        text. `emit` gets the text as it arrives, and "" is returned; `final`: it is not kept, as parsing never goes back."""
        said: list[str] = []
        beginnings = re.compile(f"[{re.escape(''.join({marker[0] for marker in markers}))}]") if markers else None
        while True:
            if emit and not self.ended and not (beginnings and beginnings.search(self.text, self.at)):
                # Most pieces of an answer have nothing that could begin a marker.
                piece, self.at = self.text[self.at:], len(self.text)
                if piece:
                    emit(piece)
                if final:
                    self.text, self.at, self.passing = "", 0, (beginnings, emit)
                yield
                self.passing = None
                continue
            place, marker, safe = first(self.text, self.at, markers, self.ended)
            piece = self.text[self.at:place if marker is not None else safe]
            if piece:
                (emit or said.append)(piece)
                self.at += len(piece)
            if marker is not None:
                self.at += len(marker)
                return "".join(said), marker
            if self.ended:
                return "".join(said), None
            yield

    def value(self, emit: Emit, quote: str = "", depth: int = 0) -> Wait:
        """Parses one value in JSON's or Python's notation and emits it as JSON. With `quote`, these markers delimit strings,
        and keys and words may be unquoted. Raises MalformedError for other text."""
        if depth > _DEEPEST:
            raise MalformedError("nested too deeply")
        yield from self.space()
        char = yield from self.peek()
        if quote and (yield from self.take((quote,))):
            yield from self._quoted(emit, quote)
        elif char in ("{", "[", "("):
            yield from self._container(emit, quote, depth)
        elif char and char in "\"'":
            yield from self.string(emit, depth == 1)
        else:
            yield from self._word(emit, quote)

    def text_of(self, part: Callable[[Emit], Wait]) -> Generator[None, None, str]:
        """Returns all that parsing a part (`value`, `string`) emits."""
        said: list[str] = []
        yield from part(said.append)
        return "".join(said)

    def _container(self, emit: Emit, quote: str, depth: int) -> Wait:
        opening = self.text[self.at]
        closing, is_object = {"{": "}", "[": "]", "(": ")"}[opening], opening == "{"
        self.at += 1
        count = 0
        while True:
            yield from self.space()
            char = yield from self.peek()
            if char == closing:
                self.at += 1
                emit(("{}" if is_object else "[]")[bool(count):])
                return
            if count:
                # FunctionGemma omits some commas, so they are optional in a quoted notation.
                if (yield from self.take((",",))) is None and not quote:
                    raise MalformedError("no comma")
                yield from self.space()
                if (yield from self.peek()) == closing:
                    continue
            count += 1
            if is_object:
                key = yield from self._key(quote)
                yield from self.space()
                is_object = (yield from self.take((":",))) is not None
                if not is_object:
                    if count > 1 or not depth or char != "'":
                        raise MalformedError("no colon")
                    # A set of Python's becomes a list.
                    emit("[" + key)
                    continue
                emit(("{" if count == 1 else ", ") + key + ": ")
            else:
                emit("[" if count == 1 else ", ")
            start = self.at
            yield from self.value(emit, quote, depth + 1)
            if self.at == start and not is_object:
                raise MalformedError("no value")

    def _key(self, quote: str) -> Generator[None, None, str]:
        if quote and (yield from self.take((quote,))):
            return (yield from self.text_of(lambda emit: self._quoted(emit, quote)))
        if (yield from self.peek()) in ('"', "'"):
            return (yield from self.text_of(self.string))
        name, _ = (yield from self.word(":,{}[]")) if quote else ("", "")
        if not name:
            raise MalformedError("no key")
        return json.dumps(name, ensure_ascii=False)

    def _quoted(self, emit: Emit, quote: str) -> Wait:
        emit('"')
        _, marker = yield from self.until((quote,), lambda text: emit(escaped(text)))
        if marker is None:
            raise MalformedError("a string does not end")
        emit('"')

    def string(self, emit: Emit, last: bool = False) -> Wait:
        """Parses a string between ', " or three of them and emits it as JSON. `last`: a parenthesis behind it ends the call."""
        mark = self.text[self.at]
        triple = (yield from self.begins((mark * 3, mark * 2, mark))) == mark * 3
        closing = mark * 3 if triple else mark
        self.at += len(closing)
        emit('"')
        while True:
            char = yield from self.peek()
            if not char:
                raise MalformedError("a string does not end")
            if char == mark and (yield from (self.begins((closing,)) if triple else self._closes(mark, last))):
                self.at += len(closing)
                emit('"')
                return
            if char == "\\":
                yield from self._escape(emit)
            elif plain := _PLAIN.match(self.text, self.at):
                self.at = plain.end()
                emit(plain.group())
            else:
                self.at += 1
                emit(escaped(char))

    def _closes(self, mark: str, last: bool) -> Generator[None, None, bool]:
        """Whether the mark here ends its string. Shell commands between single marks may have such marks unescaped."""
        if mark == '"':
            return True
        here, self.at = self.at, self.at + 1
        yield from self.space()
        char = yield from self.peek()
        if last and char == ")":
            self.at += 1
            char = "," if (yield from self.peek()) in ("", *",; \n]<") else " "
        self.at = here
        return not char or char in ",:)]}"

    def _escape(self, emit: Emit) -> Wait:
        self.at += 1
        char = yield from self.peek()
        if not char:
            raise MalformedError("a string does not end")
        self.at += 1
        digits = {"x": 2, "u": 4, "U": 8}.get(char)
        if digits is None:
            # As in Python, an unknown escape stands for the backslash and the character.
            emit(_ESCAPES[char] if char in _ESCAPES else "\\\\" + escaped(char))
            return
        while len(self.text) - self.at < digits and not self.ended:
            yield
        code = self.text[self.at:self.at + digits]
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", code) or int(code, 16) > 0x10FFFF:
            emit("\\\\" + char)
            return
        self.at += digits
        emit(f"\\u{code}" if digits == 4 else json.dumps(chr(int(code, 16)))[1:-1])

    def word(self, ends: str) -> Generator[None, None, tuple[str, str]]:
        """Returns (the text up to one of these characters or the end, stripped, the character, which is not consumed)."""
        start = self.at
        while (char := (yield from self.peek())) and char not in ends:
            self.at += 1
        return self.text[start:self.at].strip(), char

    def _word(self, emit: Emit, quote: str) -> Wait:
        word, _ = yield from self.word(",]})" + ("" if quote else "[{(:;\n\t <"))
        found = literal(word)
        if found is None:
            if not quote:
                raise MalformedError(f"{word!r} is no value")
            found = json.dumps(word, ensure_ascii=False)
        emit(found)


def first(text: str, at: int, markers: Sequence[str], ended: bool) -> tuple[int, str | None, int]:
    """Returns (place, marker) of the first certain marker from `at` on, or (-1, None), and up to where none can begin."""
    safe, best, found = len(text), len(text) + 1, None
    for marker in markers:
        place = text.find(marker, at, best + len(marker))
        if 0 <= place < best or (place == best and len(marker) > len(found or "")):
            best, found = place, marker
    if not ended:
        for marker in markers:
            start = text.find(marker[0], max(at, len(text) - len(marker) + 1))
            while 0 <= start < safe:
                if marker.startswith(text[start:]):
                    safe = start
                else:
                    start = text.find(marker[0], start + 1)
    # A longer marker may still become complete at this place or before it.
    if found is not None and (ended or safe > best):
        return best, found, best
    return -1, None, min(safe, best)


def literal(word: str) -> str | None:
    """Returns a number or word of JSON or Python as JSON; None if it is neither."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    if re.fullmatch(r"[-+]?0[0-9]+", word):
        return str(int(word))
    if len(word) < 100 and re.match(r"[-+.0-9]", word):
        try:
            number = ast.literal_eval(word.lstrip("+"))
        except (ValueError, SyntaxError):
            return None
        if isinstance(number, int | float) and number == number and abs(number) != float("inf"):
            return json.dumps(number)
    return None


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
