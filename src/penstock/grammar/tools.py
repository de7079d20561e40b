"""Compiles the structure of an answer (`core/structure.py`) to one Lark grammar.

A grammar of texts is rewritten to that of these texts inside a JSON string: every terminal has its quotation marks, backslashes
and line breaks escaped. The result is exact, except that it excludes control characters without a short escape."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from re import _constants as op, _parser as parser  # type: ignore[attr-defined]  # sre_parse, their old name, is deprecated
from typing import Any

from penstock.core.errors import RequestError
from penstock.core.structure import Either, Json, Lark, Literal, Node, Quoted, Regex, Repeat, Sequence, Text, Triggered, Until
from penstock.grammar.formats import KNOWN, schema_of
from penstock.grammar.lark import check_productive, spans, with_schemas
from penstock.grammar.order import with_orders
from penstock.grammar.patterns import alternatives, translate
from penstock.grammar.schema import OPTIONS, enforceable

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_PLAIN = r'[^"\\\x00-\x1f]'
"""A character that needs no escape in a JSON string."""
_COMMON = {
    "DIGIT": "/[0-9]/", "HEXDIGIT": "/[a-fA-F0-9]/", "INT": "/[0-9]+/", "SIGNED_INT": "/[+-]?[0-9]+/", "LETTER": "/[A-Za-z]/",
    "LCASE_LETTER": "/[a-z]/", "UCASE_LETTER": "/[A-Z]/", "WORD": "/[A-Za-z]+/", "CNAME": "/[_A-Za-z][_A-Za-z0-9]*/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/",
    "FLOAT": r"/(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/",
    "NUMBER": r"/[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)/",
    "WS_INLINE": r"/[ \t]+/", "WS": r"/[ \t\f\r\n]+/", "CR": r"/\r/", "LF": r"/\n/", "NEWLINE": r"/(?:\r?\n)+/",
    "ESCAPED_STRING": r'/"(?:[^"\\]|\\.)*"/'}
"""Terminals of Lark's library `common`."""


def quoted(grammar: str) -> str:
    """Returns the grammar of the escaped texts, without quotation marks. RequestError for syntax without such a form."""
    out: list[str] = []
    terms = [(kind, grammar[begin:end]) for kind, begin, end in spans(grammar)]
    at = 0
    while at < len(terms):
        kind, text = terms[at]
        if kind == "string" and [one[1] for one in terms[at + 1:at + 3]] == [".", "."] and at + 3 < len(terms):
            first, last = (_unquoted(one[1]) for one in (terms[at], terms[at + 3]))
            out.append(_regex(f"[{re.escape(first)}-{re.escape(last)}]", ""))
            at += 4
            continue
        if kind == "string":
            out.append(_string(text))
        elif kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            out.append(_regex(body.replace("\\/", "/"), flags))
        elif kind == "other":
            out.append(_directive(text))
        elif kind in ("json", "lark", "special") or text == "~":
            raise RequestError(f"{text} is not possible in the grammar of a tool whose text is written as a JSON string")
        else:
            out.append(text)
        at += 1
    return "".join(out)


def _directive(line: str) -> str:
    word, _, rest = line.partition(" ")
    if word == "%ignore":
        return f"%ignore {quoted(rest)}"
    found = re.fullmatch(r"common\.([A-Z_]+)\s*(?:->\s*([A-Z_0-9]+))?\s*", rest)
    if word == "%import" and found and found[1] in _COMMON:
        return quoted(f"{found[2] or found[1]}: {_COMMON[found[1]]}")
    raise RequestError(f"{line.strip()!r} is not possible in the grammar of a tool; %ignore and %import common.NAME are, with "
                       f"{', '.join(_COMMON)}")


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text.removesuffix("i")))
    except ValueError:
        raise RequestError(f"the string {text} of the grammar has an escape that JSON does not know") from None


def _string(text: str) -> str:
    plain = _unquoted(text)
    escaped = json.dumps(plain, ensure_ascii=False)[1:-1]
    if text.endswith("i") and escaped != plain:
        raise RequestError(f"the string {text} of the grammar cannot ignore case; write it as a regex")
    return json.dumps(escaped, ensure_ascii=False) + "i" * text.endswith("i")


def _regex(pattern: str, flags: str) -> str:
    wanted = {"i": re.IGNORECASE, "s": re.DOTALL, "x": re.VERBOSE, "u": 0}
    try:
        found = parser.parse(pattern, sum(wanted[flag] for flag in flags))
        body = _Escaped().sequence(found, found.state.flags)
    except (re.error, KeyError) as error:
        raise RequestError(f"the regex {pattern!r} of the grammar cannot be escaped: {error}") from None
    return "/" + body.replace("/", "\\/") + "/"


class _Escaped:
    """Writes a parsed regex in Rust's syntax with its characters escaped as in JSON. KeyError for syntax without that form."""

    def sequence(self, parts: Any, flags: int) -> str:
        return "".join(self._part(kind, value, flags) for kind, value in parts)

    def _part(self, kind: Any, value: Any, flags: int) -> str:
        if kind is op.LITERAL and not flags & re.IGNORECASE:
            if value < 32 and chr(value) not in _ESCAPES:
                raise KeyError(f"the control character U+{value:04X} is not possible in a string")
            return re.escape(_ESCAPES.get(chr(value), chr(value)))
        if kind in (op.LITERAL, op.NOT_LITERAL):
            return self._characters([(op.LITERAL, value)], kind is op.NOT_LITERAL, flags)
        if kind is op.ANY:
            return self._characters([] if flags & re.DOTALL else [(op.LITERAL, 10)], True, flags)
        if kind is op.IN:
            negated = value[0][0] is op.NEGATE
            return self._characters(value[negated:], negated, flags)
        if kind is op.BRANCH:
            return "(?:" + "|".join(self.sequence(branch, flags) for branch in value[1]) + ")"
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            return f"(?:{self.sequence(inner, (flags | added) & ~removed)})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            return f"(?:{self.sequence(inner, flags)}){{{least},{'' if most is op.MAXREPEAT else most}}}"
        raise KeyError(f"{kind} is not possible")

    def _characters(self, members: list[Any], negated: bool, flags: int) -> str:
        """Returns the pattern of one character of a class: the character itself, or one of the escapes."""
        escapes = [re.escape(escape) for special, escape in _ESCAPES.items() if _is_member(special, members) != negated]
        named = "".join(_member(kind, value) for kind, value in members)
        # An empty class is invalid syntax; [^] matches everything.
        wanted = (f"[^{named}]" if negated else f"[{named}]") if named else r"[\s\S]"
        plain = f"(?{'i' if flags & re.IGNORECASE else ''}:[{wanted}&&{_PLAIN}])"
        return "(?:" + "|".join([plain, *escapes]) + ")" if escapes else plain


_CATEGORIES: dict[Any, tuple[str, Callable[[str], bool]]] = {
    op.CATEGORY_DIGIT: (r"\d", str.isdigit), op.CATEGORY_NOT_DIGIT: (r"\D", lambda character: not character.isdigit()),
    op.CATEGORY_SPACE: (r"\s", str.isspace), op.CATEGORY_NOT_SPACE: (r"\S", lambda character: not character.isspace()),
    op.CATEGORY_WORD: (r"\w", str.isalnum), op.CATEGORY_NOT_WORD: (r"\W", lambda character: not character.isalnum())}
"""The spelling of a category, and whether a character that has an escape is in it."""


def _member(kind: Any, value: Any) -> str:
    if kind is op.CATEGORY:
        return _CATEGORIES[value][0]
    first, last = (value, value) if kind is op.LITERAL else value
    return f"\\x{{{first:x}}}" + (f"-\\x{{{last:x}}}" if last != first else "")


def _is_member(character: str, members: list[Any]) -> bool:
    """Returns whether a class contains one of the characters that have escapes."""
    return any(_CATEGORIES[value][1](character) if kind is op.CATEGORY else
               value == ord(character) if kind is op.LITERAL else value[0] <= ord(character) <= value[1]
               for kind, value in members)


_ANY = "(?s:.*)"


def lark_of(node: Node, special: Mapping[str, int]) -> str:
    """Returns the grammar of `node`. `special` maps the texts of the special tokens to ids; if it is empty, all text is
    plain. Raises RequestError for a schema or grammar in `node` that cannot be enforced."""
    writer = _Writer(special)
    return "\n".join([f"start: {writer.write(node)}", *writer.rules]) + "\n"


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
            return self._rule(regex_text(node.pattern), letter="T")
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
        return self._repeat(node) if isinstance(node, Repeat) else self._triggered(node)

    def _rule(self, body: str, attributes: str = "", letter: str = "r") -> str:
        name = f"{letter}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

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
        return self._rule(" & ".join([f"/{_ANY}/", *(f"~/{one}{_ANY}/" for one in never)]), letter="T")

    def _upto(self, stop: str, patterns: tuple[str, ...] = (), unlike: tuple[str, ...] = ()) -> str:
        """Returns a rule for text that matches the patterns and none of `unlike`, up to and including the first `stop`."""
        found = self._split.match(stop) if self._split else None
        here = [f"~/{_ANY}{_escaped(stop)}{_ANY}/"] if (patterns or unlike) and found is None else []
        here += [f"~{regex_text(one)}" for one in unlike]
        text = self._rule(" & ".join([*(f"/{pattern}/" for pattern in patterns or (_ANY,)), *here]), letter="T")
        return f"{text} {self._literal(stop)}" if found is not None else self._rule(f"{text} {_quoted(stop)}", "[lazy]")

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
        calls = self._rule(" | ".join([self._rule(f"{self._upto(trigger)} {self.write(body)}") for trigger, body in node.tags]))
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
