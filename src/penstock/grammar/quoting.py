"""Rewrites a Lark grammar of texts to the grammar of these texts inside a JSON string: every terminal has its quotation
marks, backslashes and line breaks escaped. The result is exact, except that it excludes control characters without a short
escape."""

import json
import re
from collections.abc import Callable
from re import _constants as op  # type: ignore[attr-defined]  # not in the stubs; sre_parse, its old name, is deprecated
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from penstock.core.errors import RequestError
from penstock.grammar.lark import spans

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
    "ESCAPED_STRING": r'/"(?:[^"\\]|\\.)*"/',
}
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
