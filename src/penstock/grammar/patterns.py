"""Translates regular expressions of JSON Schema (ECMA-262, unicode mode) to llguidance's (Rust's regex crate).

A few characters differ in meaning and would accept strings that the schema forbids. llguidance refuses unknown syntax."""

import re

_SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACE}
_DOT = r"[^\n\r\u2028\u2029]"
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def translate(pattern: str) -> str:
    """Returns a pattern in Rust's syntax that matches the same strings."""
    pattern = _SURROGATES.sub(lambda found: _rust_escape(0x10000 + ((int(found[1], 16) - 0xD800) << 10)
                                                         + int(found[2], 16) - 0xDC00), pattern)
    out, at = [], 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\" and at + 1 < len(pattern):
            found, at = _escape(pattern, at, inside=False)
        elif character == "[":
            found, at = _class(pattern, at)
        else:
            found, at = _DOT if character == "." else character, at + 1
        out.append(found)
    return "".join(out)


def alternatives(pattern: str) -> list[str]:
    """Splits a pattern at the bars that are outside all groups and classes."""
    found, depth, inside, at = [""], 0, False, 0
    while at < len(pattern):
        piece = pattern[at:at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(piece)
        if inside:
            inside = piece != "]"
        elif piece == "[":
            inside = True
        elif piece in ("(", ")"):
            depth += 1 if piece == "(" else -1
        elif piece == "|" and not depth:
            found.append("")
            continue
        found[-1] += piece
    return found


def _escape(pattern: str, at: int, inside: bool) -> tuple[str, int]:
    """Returns the translated escape at `at`, and its end."""
    letter, behind = pattern[at + 1], pattern[at + 2:at + 3]
    if letter == "c" and behind.isascii() and behind.isalpha():
        return _rust_escape(ord(behind) % 32), at + 3
    found = "/" if letter == "/" else pattern[at:at + 2]
    if letter.lower() in _CLASSES:
        members = _CLASSES[letter.lower()]
        found = f"[^{members}]" if letter.isupper() else members if inside else f"[{members}]"
    elif letter == "b" and inside:
        found = r"\x08"
    elif letter == "0" and not behind.isdigit():
        found = r"\x00"
    return found, at + 2


def _rust_escape(code: int) -> str:
    return f"\\u{{{code:x}}}"


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Returns the translated class at `at`, and its end. In ECMA-262 brackets and doubled operators mean nothing there."""
    out, at = ["["], at + 1
    if pattern[at:at + 1] == "^":
        out.append("^")
        at += 1
    if pattern[at:at + 1] == "]":
        # [] matches nothing and [^] everything.
        return ("[\\s\\S]" if len(out) == 2 else "[^\\s\\S]"), at + 1
    while at < len(pattern) and pattern[at] != "]":
        character = pattern[at]
        if character == "\\" and at + 1 < len(pattern):
            found, at = _escape(pattern, at, inside=True)
        elif character in "[&~" or (character == "-" and pattern[at - 1] == "-"):
            found, at = "\\" + character, at + 1
        else:
            found, at = character, at + 1
        out.append(found)
    return "".join(out) + "]", at + 1
