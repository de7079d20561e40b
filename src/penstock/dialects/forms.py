"""Parses one call in each form, from its start to its end, and reports the parts. The markers are in the descriptions.

Harmony, the format of gpt-oss, has messages with a channel and a recipient instead of blocks within one text: `channels`."""

import json
import re
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from penstock.dialects.description import HARMONY, Block, Form, Json, Named, Python, Tags
from penstock.dialects.reader import Emit, MalformedError, Reader, Wait, escaped
from penstock.dialects.schemas import Tools, as_json, elements, read_value

if TYPE_CHECKING:
    from penstock.dialects.parser import Parser

LISTED = (Json, Python)
"""Forms whose calls may be written as a list."""

_AFTER_NAME = " \t\r\n<[{("


def starts(form: Form, reader: Reader) -> Generator[None, None, bool]:
    """Whether a call starts at the current position."""
    char = yield from reader.peek()
    match form:
        case Json():
            return char == "{"
        case Tags(name=(before, _)) if before:
            return (yield from reader.begins((before,))) is not None
        case Named(before=before, header=(header, _)) if before and (yield from reader.begins((header, *before))):
            return True
    return char.isalpha() or char == "_"


def alone(block: Block) -> bool:
    """Whether each call stands behind a begin marker of its own: nothing else tells its name from text."""
    return not block.end and isinstance(block.form, Named) and not block.form.before


def read(form: Form, reader: Reader, sink: "Parser", tools: Tools, ends: tuple[str, ...]) -> Wait:
    """Parses one call. `ends` are the markers that may follow it. Raises MalformedError if the text is not a call."""
    match form:
        case Json():
            yield from _Object(form, reader, sink).read()
        case Named():
            yield from _named(form, reader, sink, tools, ends)
        case Tags():
            yield from _tags(form, reader, sink, tools, ends)
        case Python():
            yield from _python(reader, sink, tools)
    sink.end()
    reader.cut()


class _Object:
    """A call written as a JSON object, with name and arguments in either order."""

    def __init__(self, form: Json, reader: Reader, sink: "Parser") -> None:
        self.form, self.reader, self.sink = form, reader, sink
        self.name = self.id = ""
        self.begun = False
        self.early: str | None = None
        """Arguments that precede the name."""

    def read(self) -> Wait:
        yield from self._fields()
        if not self.name:
            raise MalformedError("a call without name")
        if not self.begun:
            if self.early is None and self.form.needs_arguments:
                raise MalformedError("a call without arguments")
            self._begin()
            self.sink.arguments("{}" if self.early is None else self.early)

    def _fields(self) -> Wait:
        reader, count = self.reader, 0
        reader.at += 1
        while True:
            yield from reader.space()
            char = yield from reader.peek()
            if char == "}":
                reader.at += 1
                return
            if count:
                if char != ",":
                    raise MalformedError("no comma")
                reader.at += 1
                yield from reader.space()
            count += 1
            key = yield from self._text()
            yield from reader.space()
            if (yield from reader.take((":",))) is None:
                raise MalformedError("no colon")
            yield from reader.space()
            yield from self._field(key)

    def _field(self, key: str) -> Wait:
        reader, form = self.reader, self.form
        char = yield from reader.peek()
        if form.keyed and not self.name:
            self.name = key
            yield from self._arguments()
        elif key in form.names and char and char in "\"'":
            if self.name:
                raise MalformedError("two names")
            self.name = yield from self._text()
        elif key in form.arguments:
            yield from self._arguments()
        elif key == "function" and char == "{":
            yield from self._fields()
        else:
            said = yield from reader.text_of(reader.value)
            if key in ("id", "tool_call_id") and said.startswith('"'):
                self.id = json.loads(said)

    def _text(self) -> Generator[None, None, str]:
        if (yield from self.reader.peek()) not in ('"', "'"):
            raise MalformedError("no string")
        return str(json.loads((yield from self.reader.text_of(self.reader.string))))

    def _begin(self) -> None:
        self.begun = True
        self.sink.begin(self.name, self.id)

    def _arguments(self) -> Wait:
        reader = self.reader
        if self.begun or self.early is not None:
            raise MalformedError("arguments twice")
        is_object = (yield from reader.peek()) == "{"
        if is_object and self.name:
            self._begin()
            yield from reader.value(self.sink.arguments)
            return
        found: str | None = yield from reader.text_of(reader.value)
        if not is_object:
            # Some models write the arguments as a string of JSON, or as null if there are none.
            value = json.loads(found or "")
            found = "{}" if value in (None, "") else read_value(value) if isinstance(value, str) else None
            if found is None or not found.startswith("{"):
                raise MalformedError("the arguments are no object")
        self.early = found


def _named(form: Named, reader: Reader, sink: "Parser", tools: Tools, ends: tuple[str, ...]) -> Wait:
    if form.header[0] and (yield from reader.take(form.header[:1])):
        yield from reader.until(form.header[1:])
        yield from reader.space()
    if form.before:
        yield from reader.take(form.before)
    name, stop = yield from reader.until((*form.between, *((form.id_between,) if form.id_between else ()), "{", *ends))
    call_id = ""
    if stop and stop == form.id_between:
        call_id, stop = yield from reader.until((*form.between, "{", *ends))
    name = name.strip()
    if form.id_is_name:
        call_id, name = name, name.removeprefix("functions.").rsplit(":", 1)[0]
    if not name or any(char in name for char in '\n\t"{}[]'):
        raise MalformedError("no name")
    if stop is None or stop == "{" or stop in ends:
        reader.at -= len(stop or "")
    yield from reader.space()
    char = yield from reader.peek()
    if form.id_is_name and name.isdigit() and char == "{":
        # An id without a name, as Kimi K2 may write: the arguments tell the function.
        said = yield from reader.text_of(reader.value)
        sink.begin(tools.taking(json.loads(said)), call_id)
        sink.arguments(said)
    else:
        sink.begin(name, call_id.strip())
        if char == "{":
            yield from reader.value(sink.arguments, form.quote)
        elif char and not (yield from reader.begins(ends)):
            raise MalformedError("the arguments are no object")
        else:
            sink.arguments("{}")


def _tags(form: Tags, reader: Reader, sink: "Parser", tools: Tools, ends: tuple[str, ...]) -> Wait:
    before, after = form.name
    if before:
        yield from reader.take((before,))
    closing = tuple(dict.fromkeys((*((form.end,) if form.end else ()), *ends)))
    name, stop = yield from reader.until((after, *closing) if after else ("\n", form.key[0], *closing))
    name = name.strip().strip("\"'")
    if (stop is None and after) or not name or any(char in name for char in "\n<>{}\""):
        raise MalformedError("no name")
    if (not after and stop and stop != "\n") or stop in closing:
        reader.at -= len(stop or "")
    if form.rest:
        yield from reader.until((form.rest,))
    sink.begin(name)
    count, whole = 0, ""
    while True:
        yield from reader.space()
        found = yield from reader.begins((form.key[0], *closing))
        if found == form.key[0]:
            reader.at += len(found)
            key, types = yield from _key(form, reader, tools, name)
            said = (", " if count else "{") + json.dumps(key, ensure_ascii=False) + ": "
            value = partial(_value, form, reader, tools, (name, key), types, closing)
            if count or not tools.wraps(name, key):
                sink.arguments(said)
                yield from value(sink.arguments)
            else:
                inner = yield from reader.text_of(value)
                yield from reader.space()
                alone = (yield from reader.begins((form.key[0], *closing))) != form.key[0]
                whole = tools.unwrapped(name, inner) if alone else ""
                sink.arguments(whole or said + inner)
            count += 1
            continue
        # A text that ends here may have been truncated before another parameter.
        if found is None:
            raise MalformedError("no parameter")
        if found == form.end:
            reader.at += len(found)
        break
    sink.arguments("" if whole else "}" if count else "{}")


def _key(form: Tags, reader: Reader, tools: Tools, tool: str) -> Generator[None, None, tuple[str, frozenset[str]]]:
    """Parses the rest of a parameter's opening tag. Returns its name and the JSON types that its value may have."""
    types = None
    key, stop = yield from reader.until((form.typed or form.key[1],))
    if stop is None:
        raise MalformedError("a parameter's name does not end")
    if form.typed:
        flag, stop = yield from reader.until((form.key[1],))
        types = frozenset({"string"}) if flag.strip("\"' ") in ("true", "string") else frozenset[str]()
    key = key.strip().strip("\"'")
    known = tools.types(tool, key)
    if types is None:
        types = known or frozenset({"string"} if form.untyped == "string" else ())
    elif types and known and "string" not in known:
        # The model has flagged as a string what the schema says is none.
        types = known
    return key, types


def _value(form: Tags, reader: Reader, tools: Tools, place: tuple[str, str], types: frozenset[str], closing: tuple[str, ...],
           emit: Emit) -> Wait:
    """Parses the value of one parameter of a tool, `place`, behind its key."""
    if form.value[0]:
        yield from reader.space()
        if (yield from reader.take((form.value[0],))) is None:
            raise MalformedError("a parameter without value")
    if form.trim:
        yield from reader.take(("\r\n", "\n"))
    # A model may omit the closing tag; the next parameter or the end of the call then ends the value.
    open_ends = () if form.nested else tuple("\n" + marker for marker in (form.key[0], *closing))
    end = form.value[1].replace("{key}", place[1])
    literal = yield from reader.take(form.literal[:1])
    end = form.literal[1] + end if literal else end
    trimmed = ("\r\n" + end, "\n" + end) if form.trim and not literal else ()
    text = types == {"string"}
    if text:
        emit('"')
    value, stop = yield from reader.until((*trimmed, end, *open_ends), (lambda piece: emit(escaped(piece))) if text else None)
    if stop is None:
        raise MalformedError("a parameter does not end")
    if stop in open_ends:
        reader.at -= len(stop) - 1
    if text:
        emit('"')
    elif form.nested:
        emit(json.dumps(tools.shaped(*place, elements(value, form.nested)), ensure_ascii=False))
    else:
        emit(as_json(value, types))


def _python(reader: Reader, sink: "Parser", tools: Tools) -> Wait:
    name, stop = yield from reader.word(_AFTER_NAME)
    if stop != "(" or not name or not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
        raise MalformedError("no call")
    reader.at += 1
    count = 0
    while True:
        yield from reader.space()
        if (yield from reader.take((")",))):
            break
        if count and (yield from reader.take((",",))) is None:
            raise MalformedError("no comma")
        yield from reader.space()
        if (yield from reader.peek()) == ")":
            continue
        key, stop = yield from reader.word("=,()[]{}\"'\n")
        if stop != "=" or not key.isidentifier():
            raise MalformedError("an argument without name")
        reader.at += 1
        if not count:
            sink.begin(name)
        sink.arguments((", " if count else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        count += 1
        yield from reader.space()
        text, first = tools.types(name, key) == {"string"}, (yield from reader.peek())
        if first.isalpha() or (text and first.isdigit()):
            sink.arguments(as_json((yield from _unquoted(reader)), frozenset({"string"} if first.isdigit() else ())))
        else:
            yield from reader.value(sink.arguments, depth=1)
    if not count:
        sink.begin(name)
    sink.arguments("}" if count else "{}")


def _unquoted(reader: Reader) -> Generator[None, None, str]:
    """A text without quotation marks, as some templates write them: up to the next argument or the end of the call."""
    start = reader.at
    while True:
        _, stop = yield from reader.word(",)\n")
        if stop not in (",", ")"):
            raise MalformedError("a text does not end")
        here = reader.at
        reader.at += 1
        key, after = ("", "=") if stop == ")" else (yield from reader.word("=,()[]{}\"'\n"))
        if stop == ")" or (after == "=" and key.isidentifier()):
            reader.at = here
            return reader.text[start:here].strip()
        reader.at = here + 1


_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def channels(machine: "Parser") -> Wait:
    """Parses an answer that starts after `<|start|>assistant` or at its channel."""
    reader = machine.reader
    header = yield from reader.take(("<|start|>", "<|channel|>"))
    if header is None and (yield from reader.begins((" to=", "to="))):
        # The rest of a header: ` to=functions.f<|channel|>...`.
        header = "<|start|>"
    if header is None:
        # An answer without any header is plain text.
        _, header = yield from reader.until(HARMONY, machine.content, final=True)
    while header is not None:
        machine.structure()
        if header in ("<|start|>", "<|channel|>"):
            text, stop = yield from reader.until(("<|message|>",))
            if stop is None:
                break
            header = yield from _body(machine, header + text)
        else:
            _, header = yield from reader.until(HARMONY, machine.content, final=True)
        reader.cut()
    machine.close()


def _body(machine: "Parser", header: str) -> Generator[None, None, str | None]:
    """Parses one message's body. Returns the marker that ended it."""
    reader = machine.reader
    channel = header.rpartition("<|channel|>")[2].split()[:1] if "<|channel|>" in header else ["final"]
    recipient = _RECIPIENT.search(header)
    if recipient and (recipient[1].startswith("functions.") or recipient[1] in machine.tools.names):
        return (yield from _message_call(machine, recipient[1].removeprefix("functions.")))
    say = machine.think if channel == ["analysis"] or recipient else machine.content
    _, marker = yield from reader.until(_ENDS, say, final=True)
    return marker


def _message_call(machine: "Parser", name: str) -> Generator[None, None, str | None]:
    reader = machine.reader
    reader.cut()
    try:
        machine.begin(name)
        yield from reader.space()
        if (yield from reader.begins(_ENDS)) or not (yield from reader.peek()):
            machine.arguments("{}")
        elif (yield from reader.peek()) != "{":
            raise MalformedError("the arguments are no object")
        else:
            yield from reader.value(machine.arguments)
        yield from reader.space()
        if (yield from reader.peek()) and not (yield from reader.begins(_ENDS)):
            raise MalformedError("text behind the arguments")
        machine.end()
        _, marker = yield from reader.until(_ENDS)
    except MalformedError:
        machine.fail()
        reader.at = 0
        _, marker = yield from reader.until(_ENDS, machine.content, final=True)
    return marker
