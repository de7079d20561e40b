"""Parses the text of an answer, in pieces of any size, into reasoning, content and tool calls.

One machine parses every dialect from its description. It is written as if the whole text were present and suspends where text
is missing, so the result cannot depend on the pieces."""

import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.dialects import forms
from penstock.dialects.description import Block, Dialect, Json
from penstock.dialects.message import Arguments, Built, CallBegins, CallEnds, CallFails, Content, Event, Message, ReasoningText
from penstock.dialects.reader import SPACE, MalformedError, Reader, Wait
from penstock.dialects.schemas import Tools

_ALPHABET = string.ascii_letters + string.digits


class Parser:
    def __init__(self, dialect: Dialect, tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: str | None = None,
                 calls: bool = True, reasoning: bool = True, new_id: Callable[[str], str] | None = None) -> None:
        """`tools` are the request's; None if unknown. `prompt` is the text that the answer continues; it shows whether
        reasoning is open or closed. Without `calls` (no tools, or tool_choice none) calls are plain text; without
        `reasoning` so is reasoning. `new_id` makes an id in the dialect's style."""
        self.dialect = dialect
        self.malformed = False
        self.reader = Reader()
        self.tools = Tools(tools)
        self._events: list[Event] = []
        self._built = Built()
        self._blocks = dialect.blocks if calls else ()
        self._reasoning = dialect.reasoning if reasoning else None
        self._citing = dict(dialect.citing)
        self._opened = opened(dialect, prompt)
        self._new_id = new_id or _new_id
        self._count = 0
        """Number of calls begun, failed ones included: an index is never reused."""
        self._call: int | None = None
        self._bare = False
        self._good = 0
        """Number of complete calls in the current block."""
        self._strays: set[str] = set()
        """End markers of blocks that ended without them."""
        self._held = ""
        """White space that becomes content only if more content follows."""
        self._spoken = False
        """The current run of content has text."""
        self._structured = False
        """Something other than content occurred."""
        self._work = forms.channels(self) if dialect.harmony else self._answer()
        self._done = False
        if dialect.lead and prompt is not None and prompt.endswith(dialect.lead):
            self.push(dialect.lead)

    # -- the interface of callers

    def push(self, text: str) -> list[Event]:
        """Returns the events that are certain after this text."""
        if emit := self.reader.passed_to(text):
            emit(text)
            return self._taken()
        self.reader.text += text
        return self._run()

    def is_content(self, text: str) -> bool:
        """Whether a piece is content and nothing else, as most are. Then it has been taken, without an event."""
        if not self._spoken or self.dialect.trims or self.reader.passed_to(text) != self.content:
            return False
        self._built.content(text)
        return True

    def finish(self) -> list[Event]:
        self.reader.ended = True
        return self._run()

    def message(self) -> Message:
        return self._built.message(self.malformed)

    def _run(self) -> list[Event]:
        if not self._done:
            try:
                next(self._work)
            except StopIteration:
                self._done = True
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = _joined(self._events) if len(self._events) > 1 else self._events, []
        self._built.add(events)
        return events

    # -- the parts of a call, which forms report

    def begin(self, name: str, call_id: str = "") -> None:
        """A call of this function begins. Raises MalformedError if there cannot be such a call."""
        if not name or (self._bare and not self.tools.knows(name)):
            raise MalformedError("no such tool")
        self._call = self._count
        self._count += 1
        self._events.append(CallBegins(self._call, call_id or self._new_id(self.dialect.ids), name))

    def arguments(self, text: str) -> None:
        """More of its arguments, as JSON text."""
        if text and self._call is not None:
            self._events.append(Arguments(self._call, text))

    def end(self) -> None:
        if self._call is not None:
            self._events.append(CallEnds(self._call))
        self._call = None

    def fail(self) -> None:
        """Marks the answer as malformed and fails the open call, if there is one."""
        self.malformed = True
        if self._call is not None:
            self._events.append(CallFails(self._call))
            self._call = None

    # -- text

    def structure(self) -> None:
        """Marks the start or end of something other than content; white space next to it is dropped."""
        self._structured, self._spoken, self._held = True, False, ""

    def content(self, text: str) -> None:
        """Emits content, without white space before its first text."""
        if not self._spoken:
            text = self._held + text
            if not text.strip(SPACE):
                self._held = text
                return
            self._spoken, self._held = True, ""
        if self.dialect.trims:
            text = self._hold(text)
        if text:
            self._events.append(Content(text))

    def think(self, text: str) -> None:
        """Emits reasoning, without line breaks around it."""
        if text := self._hold(text if self._spoken else text.lstrip(SPACE)):
            self._spoken = True
            self._events.append(ReasoningText(text))

    def _hold(self, text: str) -> str:
        """Returns the held space and the text, and holds the space at its end."""
        text = self._held + text
        kept = text.rstrip(SPACE)
        self._held = text[len(kept):]
        return kept

    def close(self) -> None:
        if self._held and not self._structured:
            self._events.append(Content(self._held))

    # -- an answer of reasoning, content and blocks of calls

    def _answer(self) -> Wait:
        reader, reasoning = self.reader, self._reasoning
        if reasoning is not None:
            opening = self._opened
            if opening is None:
                yield from self._blank()
                opening = reasoning.implicit or (yield from reader.begins(reasoning.start)) is not None
            if opening:
                yield from self._thought()
        yield from self._contents()
        self.close()

    def _blank(self) -> Wait:
        start = self.reader.at
        yield from self.reader.space()
        self._held += self.reader.text[start:self.reader.at]

    def _thought(self) -> Wait:
        """Parses reasoning from its start marker, which may be consumed, to its end."""
        reasoning, reader = self._reasoning, self.reader
        assert reasoning is not None
        self.structure()
        yield from reader.space()
        yield from reader.take(reasoning.start)
        calls = tuple(block.begin for block in self._blocks if not block.bare) if reasoning.call_ends else ()
        while True:
            _, marker = yield from reader.until((*reasoning.end, *calls, *self._citing), self.think, final=True)
            if marker not in self._citing:
                break
            yield from self._citation(marker, self.think)
        if marker in calls:
            reader.at -= len(marker)
        self.structure()
        if marker is not None and marker not in calls:
            yield from reader.space()
        reader.cut()

    def _contents(self) -> Wait:
        reader, reasoning = self.reader, self._reasoning
        starts, strays = (reasoning.start, reasoning.end) if reasoning else ((), ())
        header = self.dialect.header
        hidden = (*self.dialect.hidden, *self._citing, *strays, *((header,) if header else ()))
        spill: tuple[str, ...] = ()
        resumed: Block | None = None
        """The block of a malformed call: its next call may start here."""
        start = True
        while True:
            usable = [block for block in self._blocks if start or not block.first]
            thinks = starts if not self._spoken else ()
            markers = dict.fromkeys((*(block.begin for block in usable), *hidden, *thinks, *spill, *self._strays,
                                     *((resumed.begin,) if resumed else ())))
            if start or thinks:
                # Some markers are recognised only at the start.
                yield from self._blank()
                marker = yield from reader.take(tuple(markers))
                if marker is None:
                    start, char = False, (yield from reader.peek())
                    if not char:
                        return
                    reader.at += 1
                    self.content(char)
                    continue
            else:
                _, marker = yield from reader.until(tuple(markers), self.content, final=True)
                if marker is None:
                    return
            if marker in spill:
                self.content(marker)
                spill, resumed = (), None
            elif resumed is not None and marker == resumed.begin:
                if not (yield from self._block([resumed], marker)):
                    spill, resumed = (), None
            elif marker in self._strays:
                self._strays.discard(marker)
            elif marker in thinks:
                reader.at -= len(marker)
                yield from self._thought()
            elif marker in self._citing:
                yield from self._citation(marker, self.content)
            elif marker in hidden:
                if marker == header:
                    _, stop = yield from reader.until(tuple(markers))
                    reader.at -= len(stop or "")
                if marker in (*strays, header):
                    self.structure()
            else:
                tried = [block for block in usable if block.begin == marker]
                failed = yield from self._block(tried, marker)
                spill = (tried[-1].end,) if failed and tried[-1].end else ()
                resumed = _resumed(tried[-1]) if spill else None
                start = False
            reader.cut()

    def _citation(self, marker: str, emit: Callable[[str], None]) -> Wait:
        """Skips a citation behind its first marker; one that does not end is text."""
        if last := self._citing[marker]:
            said, stop = yield from self.reader.until((last, "\n"))
            if stop != last:
                emit(marker + said + (stop or ""))

    def _block(self, tried: list[Block], marker: str) -> Generator[None, None, bool]:
        """Parses the calls after a begin marker, with the first of the blocks that fits. Returns True if there are none: the
        marker is then content, and parsing continues after it, or after the last good call."""
        reader, before = self.reader, self._count
        reader.at -= len(marker)
        # Complete calls are consumed, so after a failure the reader holds only text that is no call.
        reader.cut()
        for block in tried:
            reader.at = 0 if block.keep else len(marker)
            self._bare, self._good = block.bare, 0
            try:
                yield from self._calls(block)
            except MalformedError:
                if self._good or self._count > before:
                    break
            else:
                return False
        if self._good or self._count > before or not tried[-1].bare:
            self.fail()
        reader.at = 0
        if not self._good:
            reader.at = len(marker)
            self.content(marker)
        return True

    def _calls(self, block: Block) -> Wait:
        """Parses the calls of a block and its end. Raises MalformedError if there is no call, or a malformed one."""
        reader, form = self.reader, block.form
        between = (*block.inner, *((",", ";", "[", "]") if isinstance(form, forms.LISTED) else ()))
        ends = tuple(marker for marker in (block.end, *block.inner) if marker)
        kept, empty = block.keep, False
        if not kept and not block.bare:
            yield from reader.space()
            while (yield from reader.take((block.begin,))):
                # A model may begin its calls twice.
                yield from reader.space()
        while True:
            behind = reader.at
            while not kept:
                yield from reader.space()
                if (yield from reader.begins((*between, *ends))) in (None, block.end):
                    break
                taken = yield from reader.take(between)
                # An empty list says that there are no calls.
                empty = taken == "]" and not block.bare
                if taken == "]" and not block.end:
                    break
            kept = False
            if block.end and (yield from reader.take((block.end,))):
                if not self._good and not empty:
                    raise MalformedError("no calls")
                if block.end.startswith("<"):
                    # A model may end its calls twice.
                    self._strays.add(block.end)
                break
            if (self._good and forms.alone(block)) or not (yield from forms.starts(form, reader)):
                if not self._good and not empty:
                    raise MalformedError("no call")
                # The calls ended without an end marker. The following text keeps its leading space.
                if block.end and (yield from reader.peek()):
                    self._strays.add(block.end)
                if (yield from reader.peek()) and not reader.text[behind:reader.at].strip(SPACE):
                    reader.at = behind
                break
            good, self._structured = self._good, True
            yield from forms.read(form, reader, self, self.tools, ends)
            self._good = good + 1
        self.structure()
        reader.cut()


def _resumed(block: Block) -> Block:
    """Returns the block that begins at its next call; text that names no known tool is no call."""
    begin = block.inner[0] if block.inner and not isinstance(block.form, Json) else '{"name"'
    return replace(block, begin=begin, keep=isinstance(block.form, Json), bare=True, first=False)


def opened(dialect: Dialect, prompt: str | None) -> bool | None:
    """Returns whether the end of a prompt has opened reasoning, which an answer opens otherwise. None for no prompt."""
    reasoning = dialect.reasoning
    if prompt is None or reasoning is None:
        return None
    tail = prompt[-200:].rstrip()
    return any(tail.endswith(marker.rstrip()) for marker in reasoning.start)


def _new_id(kind: str) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(9)) if kind == "mistral" else "call_" + secrets.token_hex(12)


def _joined(events: list[Event]) -> list[Event]:
    """Merges adjacent texts of one kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content | ReasoningText | Arguments) and last == replace(event, text=getattr(last, "text", "")):
            found[-1] = replace(event, text=last.text + event.text)
        else:
            found.append(event)
    return found
