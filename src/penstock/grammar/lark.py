"""Parses users' Lark grammars far enough to check the schemas embedded in them and to find rules that never end."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from penstock.core.errors import RequestError

_TOKEN = re.compile(
    r'(?P<skip>[ \t]+|//[^\n]*)|(?P<newline>\n)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)'
    r"|(?P<json>%json)|(?P<lark>%lark)|(?P<other>%[a-z]+[^\n]*)|(?P<special><[^<>\s]+>)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<mark>[^\s])")
_HEAD = re.compile(r"[ \t]*[?!]?([A-Za-z_][A-Za-z0-9_]*)(?:\.-?\d+)?[ \t]*(?:\[[^\n]*?\])?[ \t]*:(?!:)")

Term = tuple[str, str]
"""(kind, text) of a token."""


def with_schemas(text: str, change: Callable[[Any], Any]) -> str:
    """Returns the grammar with `change` applied to each schema after %json. Raises RequestError if a schema is not JSON."""
    out, at = [], 0
    for kind, begin, end in spans(text):
        if kind == "json":
            schema, behind = _decode(text, end)
            out += [text[at:begin], "%json ", json.dumps(change(schema))]
            at = behind
    return "".join(out) + text[at:]


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Returns (the value at `at`, perhaps behind white space, and its end)."""
    try:
        return json.JSONDecoder().raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
    except ValueError as error:
        raise RequestError(f"the schema behind %json is not JSON: {error}") from None


def spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, begin, end) of the tokens, without embedded JSON."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            at += 1
            continue
        kind = str(found.lastgroup)
        yield kind, found.start(), found.end()
        at = found.end()
        if kind == "json":
            at = _decode(text, at)[1]


def check_productive(text: str) -> None:
    """Raises RequestError if the rule `start` derives no finite text, as in `start: "a" start`. Unknown syntax passes."""
    if "%lark" in text:
        return
    rules = _rules(text)
    good: set[str] = set()
    while True:
        more = {name for name, body in rules.items() if name not in good and _Reader(body, good, rules.keys()).alternatives()}
        if not more:
            break
        good |= more
    if "start" in rules and "start" not in good:
        raise RequestError("every text of the grammar is infinitely long, because the rule start always leads back to itself; "
                           "give it an alternative that ends")


def _rules(text: str) -> dict[str, list[Term]]:
    heads = [found for line in re.finditer(r"^.*$", text, re.MULTILINE) if (found := _HEAD.match(text, line.start()))]
    rules = {}
    for found, following in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        body = text[found.end():following]
        rules[found[1]] = [(kind, body[begin:end]) for kind, begin, end in spans(body)
                           if kind not in ("skip", "newline", "other")]
    return rules


class _Reader:
    """Decides whether a rule's body can end, given the rules that can."""

    def __init__(self, terms: list[Term], good: set[str], names: Any) -> None:
        self._terms = terms
        self._good = good
        self._names = names
        self._at = 0

    def alternatives(self) -> bool:
        """Parses alternatives up to a closing bracket or the end. Returns whether one of them can end."""
        ends = self._sequence()
        while self._peek() == "|":
            self._at += 1
            ends |= self._sequence()
        return ends

    def _sequence(self) -> bool:
        ends = True
        while (mark := self._peek()) is not None and mark not in ("|", ")", "]"):
            ends &= self._item()
        return ends

    def _item(self) -> bool:
        kind, text = self._terms[self._at]
        self._at += 1
        ends = text not in self._names or text in self._good if kind == "name" else True
        if text in ("(", "["):
            ends = self.alternatives() or text == "["
            self._at += 1
        while self._peek() in ("?", "*", "+", "{", "~"):
            mark = self._peek()
            self._at += 1
            if mark == "{" or mark == "~":
                low = self._terms[self._at][1] if self._at < len(self._terms) else ""
                ends |= low in ("0", ",") or low.startswith("0")
                while mark == "{" and self._peek() not in ("}", None):
                    self._at += 1
                self._at += 1
            else:
                ends |= mark in ("?", "*")
        return ends

    def _peek(self) -> str | None:
        if self._at >= len(self._terms):
            return None
        kind, text = self._terms[self._at]
        return text if kind == "mark" else ""
