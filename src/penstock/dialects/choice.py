"""Selects a model's dialect by name or from its chat template."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.dialects.description import THINK, Dialect, Reasoning
from penstock.dialects.known import DIALECTS

PLAIN = Dialect("none")
"""The dialect without calls and reasoning: everything is content."""


class Choice(msgspec.Struct, frozen=True):
    dialect: Dialect
    why: str
    """The reason for the dialect of tool calls."""
    why_reasoning: str


def by_name(name: str) -> Dialect:
    """Returns the dialect of that name, or of vLLM's name for its tool calls. Raises ConfigError with the possible names."""
    return _named("tool_call_parser", name, {known: dialect for dialect in DIALECTS.values()
                                             for known in (dialect.name, *dialect.aliases)})


def reasoning_by_name(name: str) -> Dialect:
    """Returns the dialect whose reasoning has that name. Raises ConfigError with the possible names."""
    return _named("reasoning_parser", name, {known: dialect for dialect in reversed(DIALECTS.values())
                                             if dialect.reasoning or dialect.harmony or dialect.reasoning_names
                                             for known in (dialect.name, *dialect.reasoning_names)})


def _named(option: str, name: str, known: Mapping[str, Dialect]) -> Dialect:
    if name not in known:
        raise ConfigError(f"{option} is {name!r}; possible are auto, none, {', '.join(sorted(known))}")
    return known[name]


def choose(templates: Mapping[str, str] | Iterable[str], tool_call_parser: str | None = None,
           reasoning_parser: str | None = None) -> Choice:
    """Returns the dialect of a model with these chat templates, or of the name given. ConfigError for an unknown name."""
    text = "\n".join(templates.values() if isinstance(templates, Mapping) else templates)
    if tool_call_parser not in (None, "auto", "none"):
        calls, why = by_name(str(tool_call_parser)), "named by tool_call_parser"
    else:
        calls, why = (PLAIN, "switched off by tool_call_parser") if tool_call_parser == "none" else _found(text)
    if reasoning_parser not in (None, "auto", "none"):
        other = reasoning_by_name(str(reasoning_parser))
        if other.harmony:
            return Choice(other, why if calls is other else "harmony has its own", "named by reasoning_parser")
        return Choice(calls.reasoning_by(other.reasoning, other.hidden), why, "named by reasoning_parser")
    if reasoning_parser == "none":
        return Choice(replace(calls, reasoning=None), why, "switched off by reasoning_parser")
    reasoning = calls.reasoning
    if calls.harmony:
        return Choice(calls, why, "harmony's analysis channel")
    for found in (reasoning, *(each.reasoning for each in DIALECTS.values())):
        if found is not None and (any(end in text for end in found.end) or (found is reasoning and tool_call_parser)):
            return Choice(calls.reasoning_by(found), why, f"the chat template or the dialect has {found.end[0]}")
    # A template may not mention reasoning. If the prompt is known, markers that never occur are harmless.
    fallback: Reasoning | None = reasoning if reasoning is not None else (THINK if text else None)
    return Choice(calls.reasoning_by(fallback), why, "no sign of reasoning in the chat template; an answer that begins with "
                  f"{fallback.start[0]} is still told apart" if fallback else "there is no chat template")


def _found(text: str) -> tuple[Dialect, str]:
    best, sign = PLAIN, tuple[str, ...]()
    for dialect in DIALECTS.values():
        for signs in dialect.signs:
            if all(each in text for each in signs) and (best is PLAIN or dialect.rank > best.rank):
                best, sign = dialect, signs
    if best is PLAIN:
        return PLAIN, "the chat template shows no known way of writing tool calls"
    return best, f"the chat template has {' and '.join(map(repr, sign))}"
