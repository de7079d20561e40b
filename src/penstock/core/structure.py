"""The structure of an answer as data, as tool-call dialects and structural tags define it. `grammar/` compiles it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """This text. Special tokens that are spelled out in it mean the tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value that is valid under a schema."""

    schema: Any


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """A text of a grammar, in Lark or GBNF, from its rule `start` or `root`."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Quoted:
    """A text of a Lark grammar as a JSON string, with its quotation marks."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text as it is that is valid under a schema's enum, pattern, format, minLength and maxLength, and in which `stop` does
    not occur. A Literal that begins with `stop` must follow in the same Sequence."""

    schema: Any
    stop: str
    unlike: tuple[str, ...] = ()
    """Regexes, of which none may match the whole text."""


@dataclass(frozen=True, slots=True)
class Until:
    """Any text in which `stop` does not occur. A Literal that begins with `stop` must follow in the same Sequence."""

    stop: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """All parts, one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part `least` to `most` times (None: any number), `separator` between."""

    part: Node
    separator: str = ""
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Triggered:
    """Any text, in which each trigger must be followed by its node: (trigger, what follows the trigger). From `least` to `most`
    of them."""

    tags: tuple[tuple[str, Node], ...]
    least: int = 0
    most: int | None = None
    never: tuple[str, ...] = ()
    """Texts that must not occur before a trigger, nor in an answer without one."""
    special: tuple[str, ...] = ()
    """Markers that may occur there even where they are special tokens, which are no text."""
    last: bool = False
    """The answer ends behind the first tag; `least` is then 0 and `most` 1."""
    start: Node | None = None
    """With `last`: in place of text, the answer may be this from its very start."""
    unlike: tuple[str, ...] = ()
    """With `last`: regexes, of which none may match in the text."""


Node = Literal | Json | Regex | Lark | Quoted | Text | Until | Sequence | Either | Repeat | Triggered
