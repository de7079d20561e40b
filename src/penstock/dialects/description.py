"""The description of a dialect: how a model writes its reasoning and its tool calls. Data only: `parser.py` reads by it,
`writing.py` writes by it, and each file in `known/` holds one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around reasoning in an answer. A marker may have several spellings; the first is the one written."""

    start: tuple[str, ...]
    end: tuple[str, ...]
    implicit: bool = False
    """An answer of which the prompt is not known begins with reasoning, without a start marker."""
    call_ends: bool = False
    """A call that begins within reasoning ends it."""


THINK = Reasoning(("<think>",), ("</think>",), call_ends=True)
THINK_OPEN = Reasoning(("<think>",), ("</think>",), implicit=True, call_ends=True)


@dataclass(frozen=True, slots=True)
class Json:
    """A call is a JSON object with a name and arguments; several may stand in a list or one after the other."""

    names: tuple[str, ...] = ("name", "tool_name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    keyed: bool = False
    """The object's only key is the name, its value the arguments."""
    needs_arguments: bool = False
    """An object without arguments is no call."""


@dataclass(frozen=True, slots=True)
class Named:
    """A call is a name, a separator, and the arguments as one object."""

    before: tuple[str, ...] = ()
    """May stand before the name."""
    between: tuple[str, ...] = ()
    """Ends the name. Without any of them, the brace that opens the arguments ends it."""
    id_between: str = ""
    """Separates the name from an id of the call."""
    id_is_name: bool = False
    """The id of the call is what is written as its name, as `functions.name:0` of Kimi K2."""
    quote: str = ""
    """The marker around strings, in place of the quotation mark; keys are then bare."""


@dataclass(frozen=True, slots=True)
class Tags:
    """A call is a name and tagged parameters, whose values are plain text typed by the tool's schema."""

    name: tuple[str, str]
    """Text before and after the name. An empty text after it means the end of the line or the next marker."""
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    """Closes the call within its block."""
    trim: bool = True
    """One line break at each end of a value does not belong to it."""
    typed: str = ""
    """Separates the key from a flag that says whether the value is a string, as DeepSeek V3.2 writes it."""
    untyped: str = "string"
    """Type of a value without schema: string, or json if it is valid JSON."""


@dataclass(frozen=True, slots=True)
class Python:
    """Calls are written as in Python: name(key=value, ...), in a list or on lines."""


Form = Json | Named | Tags | Python


@dataclass(frozen=True, slots=True)
class Block:
    """A place in an answer where calls stand: after `begin`, to `end`."""

    begin: str
    form: Form
    end: str = ""
    """"" if the calls end by themselves."""
    inner: tuple[str, ...] = ()
    """Markers around and between calls inside the block."""
    keep: bool = False
    """`begin` is a part of the call itself."""
    first: bool = False
    """Only at the start of an answer."""
    bare: bool = False
    """`begin` is no marker: what turns out to be no call of a known tool is plain text."""


@dataclass(frozen=True, slots=True)
class Written:
    """Template of a call, with the placeholders {name}, {arguments}, {id} and {index}."""

    call: str
    head: str = ""
    separator: str = ""
    tail: str = ""
    parameter: str = ""
    """For forms whose arguments are written one by one: {key}, {value} and, as `typed` wants it, {string}."""
    joiner: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect."""

    name: str
    blocks: tuple[Block, ...] = ()
    written: Written | None = None
    reasoning: Reasoning | None = None
    hidden: tuple[str, ...] = ()
    """Markers that are left out of content."""
    ids: str = "call"
    """The ids of calls: call (call_ and 24 characters), mistral (9 letters and digits)."""
    harmony: bool = False
    """Channels of gpt-oss instead of blocks."""
    parallel: bool = True
    """Whether one answer can have several calls."""
    aliases: tuple[str, ...] = ()
    """Other names of its tool calls, those of vLLM's --tool-call-parser."""
    reasoning_names: tuple[str, ...] = ()
    """Names of its reasoning, those of vLLM's --reasoning-parser."""
    signs: tuple[tuple[str, ...], ...] = ()
    """A chat template that has all of one of these texts is written for this dialect."""
    rank: int = 0
    """Among dialects whose signs a template has, the highest is chosen."""

    def markers(self) -> tuple[str, ...]:
        """Every text that may be a special token of the vocabulary, and must come out of detokenization."""
        found: list[str] = [*self.hidden]
        for reasoning in (self.reasoning,) if self.reasoning else ():
            found += [*reasoning.start, *reasoning.end]
        for block in self.blocks:
            found += [block.begin, block.end, *block.inner]
            form = block.form
            if isinstance(form, Named):
                found += [*form.before, *form.between, form.id_between, form.quote]
            elif isinstance(form, Tags):
                found += [*form.name, *form.key, *form.value, form.end]
        if self.harmony:
            found += HARMONY
        return tuple(dict.fromkeys(marker for marker in found if marker))

    def reasoning_by(self, reasoning: Reasoning | None, hidden: tuple[str, ...] = ()) -> Dialect:
        """Returns a copy with other reasoning markers."""
        return replace(self, reasoning=reasoning, hidden=tuple(dict.fromkeys((*self.hidden, *hidden))))


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
