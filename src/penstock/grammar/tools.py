"""Compiles the structure of an answer (`core/structure.py`) to one Lark grammar."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core.errors import RequestError
from penstock.core.structure import Either, Json, Lark, Literal, Node, Quoted, Regex, Repeat, Sequence, Text, Triggered, Until
from penstock.grammar.formats import KNOWN, schema_of
from penstock.grammar.lark import check_productive, with_schemas
from penstock.grammar.order import with_orders
from penstock.grammar.patterns import alternatives, translate
from penstock.grammar.quoting import quoted
from penstock.grammar.schema import OPTIONS, enforceable

_ANY = "(?s:.*)"


def lark_of(node: Node, special: Mapping[str, int]) -> str:
    """Returns the grammar of `node`. `special` maps the texts of the special tokens to ids; if it is empty, all text is
    plain. Raises RequestError for a schema or grammar in `node` that cannot be enforced."""
    writer = _Writer(special)
    start = writer.write(node)
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


def lark_text(text: str) -> str:
    """Validates a user's grammar, in Lark or GBNF, and returns it in Lark. Raises RequestError if it is neither."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:  # noqa: BLE001 (the converter raises plain Exception)
        raise RequestError(f"the grammar is neither Lark nor GBNF (EBNF): {error}") from None
    lark = with_schemas(lark, lambda schema: {**with_orders(enforceable(schema)), "x-guidance": OPTIONS})
    check_productive(lark)
    return lark


def regex_text(pattern: str) -> str:
    """Returns a regex between slashes, on one line. Drops the anchors at its ends: a terminal matches as a whole anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    out, escaped = [], False
    for character in pattern:
        out.append({"/": "/" if escaped else "\\/", "\n": "n" if escaped else "\\n"}.get(character, character))
        escaped = character == "\\" and not escaped
    return f"/(?:{''.join(out)})/"


def matching(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the regexes that a text valid under a schema's string keywords must match. RequestError for unknown formats."""
    found: list[str] = []
    if "format" in schema:
        meaning = schema_of(schema["format"])
        if meaning is None:
            raise RequestError(f"the format {schema['format']!r} is not known; known are {', '.join(KNOWN)}. Use pattern")
        found += matching(meaning)
    if "pattern" in schema:
        found.append("|".join(_unanchored(one) for one in alternatives(translate(schema["pattern"]))))
    if "enum" in schema:
        found.append("|".join(map(_escaped, schema["enum"])))
    if schema.keys() & {"minLength", "maxLength"}:
        found.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    return tuple(f"(?:{regex_text(one)[1:-1]})" for one in found)


def _unanchored(pattern: str) -> str:
    """Returns a whole-text pattern for a pattern that may match anywhere."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[1 if begin else 0:-1 if end else None]
    return f"{'' if begin else _ANY}(?:{inner}){'' if end else _ANY}"


class _Writer:
    """Collects rules. `write` returns the name or expression of a node."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None

    def write(self, node: Node) -> str:
        if isinstance(node, Literal):
            return self._literal(node.text)
        if isinstance(node, Json):
            return self._rule(f"%json {json.dumps({**with_orders(enforceable(node.schema)), 'x-guidance': OPTIONS})}")
        if isinstance(node, Regex):
            return self._terminal(regex_text(node.pattern))
        if isinstance(node, Lark):
            return self._rule(f"%lark {{\n{lark_text(node.grammar)}\n}}")
        if isinstance(node, Quoted):
            # The schema is checked as the user gave it, so that errors point into it.
            return self._rule(f'"\\"" %lark {{\n{quoted(lark_text(node.grammar))}\n}} "\\""')
        if isinstance(node, Until):
            return self._free_of({node.stop} - self._special.keys())
        if isinstance(node, Text):
            raise AssertionError("a Literal that begins with its stop must follow a Text")
        if isinstance(node, Sequence):
            return self._sequence(node.parts)
        if isinstance(node, Either):
            return self._rule(" | ".join(self.write(part) for part in node.parts))
        if isinstance(node, Repeat):
            return self._repeat(node)
        return self._triggered(node)

    def _rule(self, body: str, attributes: str = "", letter: str = "r") -> str:
        name = f"{letter}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        return self._rule(body, letter="T")

    def _literal(self, text: str) -> str:
        parts: list[str] = []
        at = 0
        for found in self._split.finditer(text) if self._split else ():
            parts += [_quoted(text[at:found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part) or '""'

    def _free_of(self, plain: Iterable[str], unlike: Iterable[str] = ()) -> str:
        """Returns a rule for text without any of `plain`, spelled out, that no regex of `unlike` matches (^: at its start)."""
        never = [*(_ANY + _escaped(stop) for stop in plain),
                 *((_ANY if not pattern.startswith("^") else "") + regex_text(pattern)[1:-1] for pattern in unlike)]
        return self._terminal(" & ".join([f"/{_ANY}/", *(f"~/{one}{_ANY}/" for one in never)]))

    def _upto(self, stop: str, patterns: tuple[str, ...] = (), unlike: tuple[str, ...] = ()) -> str:
        """Returns a rule for text that matches the patterns and none of `unlike`, up to and including the first `stop`."""
        found = self._split.match(stop) if self._split else None
        here = [f"~/{_ANY}{_escaped(stop)}{_ANY}/"] if (patterns or unlike) and found is None else []
        here += [f"~{regex_text(one)}" for one in unlike]
        text = self._terminal(" & ".join([*(f"/{pattern}/" for pattern in patterns or (_ANY,)), *here]))
        if found is not None:
            return f"{text} {self._literal(stop)}"
        return self._rule(f"{text} {_quoted(stop)}", "[lazy]")

    def _sequence(self, parts: tuple[Node, ...]) -> str:
        out, stop = [], ""
        for part, following in zip(parts, (*parts[1:], None), strict=True):
            if isinstance(part, Until | Text) and isinstance(following, Literal) and following.text.startswith(part.stop):
                out.append(self._upto(part.stop, matching(part.schema), part.unlike) if isinstance(part, Text) else
                           self._upto(part.stop))
                stop = part.stop
                continue
            out.append(self.write(Literal(part.text.removeprefix(stop)) if stop and isinstance(part, Literal) else part))
            stop = ""
        return self._rule(" ".join(out) or '""')

    def _repeat(self, node: Repeat) -> str:
        if node.most == 0:
            return '""'
        part = self.write(node.part)
        more = f"{self._literal(node.separator)} {part}" if node.separator else part
        most = None if node.most is None else node.most - 1
        some = f"{part} {_times(more, max(0, node.least - 1), most)}"
        return self._rule(some if node.least else f'({some}) | ""')

    def _triggered(self, node: Triggered) -> str:
        if node.last:
            return self._ending(node)
        tags = [self._rule(f"{self._upto(trigger)} {self.write(body)}") for trigger, body in node.tags]
        calls = self._rule(" | ".join(tags))
        tail = self._free_of(trigger for trigger, _ in node.tags if trigger not in self._special)
        return self._rule(f"{_times(calls, node.least, node.most)} {tail}")

    def _ending(self, node: Triggered) -> str:
        """Returns a rule for text with a tag at its end. No trigger may be spelled out: parsers take that for the token."""
        triggers = tuple(trigger for trigger, _ in node.tags)
        text, before = self._free_of((*triggers, *node.never), node.unlike), self._free_of(node.never, node.unlike)
        markers = [self._literal(marker) for marker in node.special if marker in self._special]
        begin = f"({text} ({' | '.join(markers)}))* " if markers else ""
        found = [text]
        for trigger, body in node.tags:
            spelled = not (self._split and self._split.match(trigger))
            opening = self._rule(f"{before} {_quoted(trigger)}", "[lazy]") if spelled else f"{text} {self._literal(trigger)}"
            found.append(f"{opening} {self.write(body)}")
        free = f"{begin}({' | '.join(found)})"
        return self._rule(free if node.start is None else f"{self.write(node.start)} | {self._rule(free)}")


def _times(expression: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if most is None:
        return f"({expression})*" if not least else f"({expression}){{{least},}}"
    return f"({expression}){{{least},{most}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """Returns a text as a regex between slashes."""
    return "".join(c if c.isalnum() or c in " _<>=\"'" else f"\\x{{{ord(c):x}}}" for c in text)
