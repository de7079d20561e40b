"""The structure of an answer as data, as tool-call dialects and structural tags define it. `grammar/` compiles it."""

from typing import Any

import msgspec


class Literal(msgspec.Struct, frozen=True):
    """This text. Special tokens that are spelled out in it mean the tokens."""

    text: str


class Json(msgspec.Struct, frozen=True):
    """A JSON value that is valid under a schema."""

    schema: Any


class Regex(msgspec.Struct, frozen=True):
    """A text that matches as a whole."""

    pattern: str


class Lark(msgspec.Struct, frozen=True):
    """A text of a grammar, in Lark or GBNF, from its rule `start` or `root`."""

    grammar: str


class Quoted(msgspec.Struct, frozen=True):
    """A text of a Lark grammar as a JSON string, with its quotation marks."""

    grammar: str


class Text(msgspec.Struct, frozen=True):
    """A text as it is that is valid under a schema's enum, pattern, format, minLength and maxLength, and in which `stop` does
    not occur. A Literal that begins with `stop` must follow in the same Sequence."""

    schema: Any
    stop: str
    unlike: tuple[str, ...] = ()
    """Regexes, of which none may match the whole text."""


class Until(msgspec.Struct, frozen=True):
    """Any text in which `stop` does not occur. A Literal that begins with `stop` must follow in the same Sequence."""

    stop: str


class Sequence(msgspec.Struct, frozen=True):
    """All parts, one after the other."""

    parts: "tuple[Node, ...]"


class Either(msgspec.Struct, frozen=True):
    parts: "tuple[Node, ...]"


class Repeat(msgspec.Struct, frozen=True):
    """The part `least` to `most` times (None: any number), `separator` between."""

    part: "Node"
    separator: str = ""
    least: int = 0
    most: int | None = None


class Triggered(msgspec.Struct, frozen=True):
    """Any text with `least` to `most` triggers, each followed by its node: (trigger, what follows the trigger)."""

    tags: "tuple[tuple[str, Node], ...]"
    least: int = 0
    most: int | None = None
    never: tuple[str, ...] = ()
    """Texts that must not occur before a trigger, nor in an answer without one."""
    special: tuple[str, ...] = ()
    """Markers that may occur there even where they are special tokens, which are no text."""
    last: bool = False
    """The answer ends behind the first tag; `least` is then 0 and `most` 1."""
    start: "Node | None" = None
    """With `last`: in place of text, the answer may be this from its very start."""
    unlike: tuple[str, ...] = ()
    """With `last`: regexes, of which none may match in the text."""


Node = Literal | Json | Regex | Lark | Quoted | Text | Until | Sequence | Either | Repeat | Triggered
