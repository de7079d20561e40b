"""A parser's output: events, which arrive while an answer grows, and the message that they build."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    index: int


@dataclass(frozen=True, slots=True)
class CallFails:
    """A begun call is malformed. It is discarded, and its text follows as content."""

    index: int


Event = Content | ReasoningText | CallBegins | Arguments | CallEnds | CallFails


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """An assistant's message."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    malformed: bool = False
    """A malformed call occurred; its text is part of the content."""


class Building:
    """The message of a growing answer. Texts are kept in place of events: objects by the thousand slow down every garbage
    collection of the process."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

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
        """Returns the message so far."""
        calls = [Call(name_id, name, "".join(arguments)) for name_id, name, arguments in self._calls.values()]
        return Message("".join(self._content), "".join(self._reasoning), calls, malformed)
