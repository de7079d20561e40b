"""The description of a dialect: how a model writes its reasoning and its tool calls.

Pure data: `parser.py` parses by it and `writing.py` writes by it. `known.py` holds them."""

import msgspec
from msgspec.structs import replace


class Reasoning(msgspec.Struct, frozen=True):
    """The markers around reasoning in an answer. A marker may have several spellings; the first is used for writing."""

    start: tuple[str, ...]
    end: tuple[str, ...]
    implicit: bool = False
    """If the prompt is unknown, an answer begins with reasoning, without a start marker."""
    call_ends: bool = False
    """A call that begins inside reasoning ends the reasoning."""


THINK = Reasoning(("<think>",), ("</think>",), call_ends=True)
THINK_OPEN = Reasoning(("<think>",), ("</think>",), implicit=True, call_ends=True)


class Json(msgspec.Struct, frozen=True):
    """A call is a JSON object with a name and arguments. Several objects may form a list or follow one another."""

    names: tuple[str, ...] = ("name", "tool_name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    keyed: bool = False
    """The object's only key is the function's name and its value the arguments."""
    needs_arguments: bool = False
    """An object without arguments is not a call."""


class Named(msgspec.Struct, frozen=True):
    """A call is a name, a separator, and the arguments as one object."""

    before: tuple[str, ...] = ()
    """Optional texts before the name."""
    between: tuple[str, ...] = ()
    """Texts that end the name. If there are none, the brace that opens the arguments ends it."""
    id_between: str = ""
    """Separates the name from the call's id."""
    id_is_name: bool = False
    """The text written as the name is the call's id, such as Kimi K2's `functions.name:0`."""
    quote: str = ""
    """The marker around strings, in place of the quotation mark. Keys are then unquoted."""
    header: tuple[str, str] = ("", "")
    """Markers around a text before the name that is no part of the call."""


class Tags(msgspec.Struct, frozen=True):
    """A call is a name and tagged parameters. Their values are plain text, typed by the tool's schema."""

    name: tuple[str, str]
    """Texts before and after the name. An empty second text stands for the end of the line or the next marker."""
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    """Closes the call inside its block."""
    trim: bool = True
    """Strip one line break at each end of a value."""
    typed: str = ""
    """Separates the key from a flag that says whether the value is a string (true), as in DeepSeek V3.2, or its type."""
    untyped: str = "string"
    """Type of a value without a schema: string, or json if the value is valid JSON."""
    literal: tuple[str, str] = ("", "")
    """Optional marks around the text of a value."""
    rest: str = ""
    """Ends a text behind the name that means nothing."""
    nested: str = ""
    """Stands before every tag. Tags are named by their keys, {key} in the second text of `value`, and elements in a value
    make an object, or a list if each is called item."""


class Python(msgspec.Struct, frozen=True):
    """Calls are Python calls, name(key=value, ...), in a list or on separate lines."""


Form = Json | Named | Tags | Python


class Block(msgspec.Struct, frozen=True):
    """A region of an answer that holds calls, from `begin` to `end`."""

    begin: str
    form: Form
    end: str = ""
    """The end marker; "" if the calls end by themselves."""
    inner: tuple[str, ...] = ()
    """Markers around and between the calls."""
    keep: bool = False
    """`begin` is part of the call itself."""
    first: bool = False
    """The block occurs only at the start of an answer."""
    bare: bool = False
    """`begin` may also be plain text: if no call of a known tool follows, it is content."""


class Written(msgspec.Struct, frozen=True):
    """The template that writes a call, with the placeholders {name}, {arguments}, {id} and {index}."""

    call: str
    head: str = ""
    separator: str = ""
    tail: str = ""
    parameter: str = ""
    """The template of one parameter, for forms that write parameters one by one: {key}, {value} and, with `typed`, {string}."""
    joiner: str = ""


class Dialect(msgspec.Struct, frozen=True):
    name: str
    blocks: tuple[Block, ...] = ()
    written: Written | None = None
    reasoning: Reasoning | None = None
    hidden: tuple[str, ...] = ()
    """Markers that are removed from content."""
    header: str = ""
    """A marker that is removed with all text up to the next marker."""
    ids: str = "call"
    """Style of generated ids: call (call_ and 24 characters) or mistral (9 letters and digits)."""
    harmony: bool = False
    """Answers consist of gpt-oss's channels instead of blocks."""
    parallel: bool = True
    """One answer may have several calls."""
    aliases: tuple[str, ...] = ()
    """Other names of its tool calls: those of vLLM's --tool-call-parser."""
    reasoning_names: tuple[str, ...] = ()
    """Other names of its reasoning: those of vLLM's --reasoning-parser."""
    signs: tuple[tuple[str, ...], ...] = ()
    """Groups of texts. A chat template that contains all texts of a group uses this dialect."""
    lead: str = ""
    """The text of the answer that the prompt may already end with."""
    rank: int = 0
    """Precedence among the dialects whose signs a template contains; the highest wins."""
    citing: tuple[tuple[str, str], ...] = ()
    """First and last marker of citations, which are removed from content and reasoning with the text between them."""

    trims: bool = False
    """White space before a call is no content."""

    def markers(self) -> tuple[str, ...]:
        """Returns every text that may be a special token and must survive detokenization."""
        found: list[str] = [*self.hidden, self.header, *(marker for marker, _ in self.citing)]
        for reasoning in (self.reasoning,) if self.reasoning else ():
            found += [*reasoning.start, *reasoning.end]
        for block in self.blocks:
            found += [block.begin, block.end, *block.inner]
            form = block.form
            if isinstance(form, Named):
                found += [*form.before, *form.between, form.id_between, form.quote, *form.header]
            elif isinstance(form, Tags):
                found += [*form.name, *form.key, *form.value, form.end, form.rest, form.nested]
        if self.harmony:
            found += HARMONY
        return tuple(dict.fromkeys(marker for marker in found if marker))

    def reasoning_by(self, reasoning: Reasoning | None, hidden: tuple[str, ...] = ()) -> "Dialect":
        return replace(self, reasoning=reasoning, hidden=tuple(dict.fromkeys((*self.hidden, *hidden))))


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
