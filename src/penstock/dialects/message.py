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


def message_of(events: Iterable[Event], malformed: bool = False) -> Message:
    """Returns the message that the events build."""
    message, calls = Message(malformed=malformed), dict[int, Call]()
    content: list[str] = []
    reasoning: list[str] = []
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallBegins(index, name_id, name):
                calls[index], arguments[index] = Call(name_id, name), []
            case Arguments(index, text):
                arguments[index].append(text)
            case CallFails(index):
                del calls[index]
            case CallEnds():
                pass
    for index, call in calls.items():
        call.arguments = "".join(arguments[index])
    message.content, message.reasoning, message.calls = "".join(content), "".join(reasoning), list(calls.values())
    return message
