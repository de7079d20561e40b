"""A parser's output: events, which arrive while an answer grows, and the message that they build."""

from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True):
    text: str


class ReasoningText(msgspec.Struct, frozen=True):
    text: str


class CallBegins(msgspec.Struct, frozen=True):
    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


class CallEnds(msgspec.Struct, frozen=True):
    index: int


class CallFails(msgspec.Struct, frozen=True):
    """A begun call is malformed. It is discarded, and its text follows as content."""

    index: int


Event = Content | ReasoningText | CallBegins | Arguments | CallEnds | CallFails


class Call(msgspec.Struct):
    id: str
    name: str
    arguments: str = ""


class Message(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []
    malformed: bool = False
    """A malformed call occurred; its text is part of the content."""


class Built:
    """The message of a growing answer. It keeps texts, not events: thousands of objects slow every garbage collection down."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def content(self, text: str) -> None:
        self._content.append(text)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
                case CallBegins(index, name_id, name):
                    self._calls[index] = name_id, name, []
                case Arguments(index, text):
                    self._calls[index][2].append(text)
                case CallFails(index):
                    del self._calls[index]
                case CallEnds():
                    pass

    def message(self, malformed: bool = False) -> Message:
        calls = [Call(name_id, name, "".join(arguments)) for name_id, name, arguments in self._calls.values()]
        return Message("".join(self._content), "".join(self._reasoning), calls, malformed)
