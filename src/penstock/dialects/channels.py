"""Parses harmony, the format of gpt-oss: messages with a channel and a recipient instead of blocks within one text."""

import re
from collections.abc import Generator
from typing import TYPE_CHECKING

from penstock.dialects.description import HARMONY
from penstock.dialects.reader import MalformedError, Wait

if TYPE_CHECKING:
    from penstock.dialects.parser import Parser

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
        return (yield from _call(machine, recipient[1].removeprefix("functions.")))
    say = machine.think if channel == ["analysis"] or recipient else machine.content
    _, marker = yield from reader.until(_ENDS, say, final=True)
    return marker


def _call(machine: "Parser", name: str) -> Generator[None, None, str | None]:
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
