"""Cache retention requests: from the user's spans and breakpoints to spans of a request's positions.

A request gives spans (`core/request.py::Span`), or marks on messages, parts of their content, tools or a whole prompt, in
Anthropic's format: {"type": "ephemeral", "ttl": "5m"}. A mark covers what precedes it. The cache decides what is kept."""

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from penstock.core.errors import RequestError
from penstock.core.request import MARKED_PRIORITY, PINNED, PROMPT, WHOLE, Span
from penstock.text import Tokenizer

DEFAULT_TTL = "5m"
"""Anthropic's default time to live."""

MAX_SECONDS = 7 * 86400.0
"""The longest time to live that a mark may ask for."""

MAX_SPANS = 16
"""The most spans and marks of one request."""

_TTL = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Side = Literal["left", "right"]
"""The end at which a prompt that is too long loses tokens."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class Breakpoint(NamedTuple):
    """The first `at` characters of a prompt's text should stay in the cache."""

    at: int
    priority: int
    seconds: float


class Marked(NamedTuple):
    """A prompt as text, and the breakpoints up to which it should stay cached."""

    text: str
    marks: tuple[Breakpoint, ...] = ()


def seconds_of(ttl: str, param: str) -> float:
    """A time to live such as 5m, 1h, 90s or 2d, in seconds. RequestError naming `param`."""
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    seconds = float(found[1]) * _UNIT[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise RequestError(f"{param} is {ttl!r}; possible are times like 5m, 1h, 90s or 2d, at most {MAX_SECONDS / 86400:.0f}d",
                           param=param)
    return seconds


def read_mark(value: Any, param: str) -> tuple[int, float]:
    """(priority, seconds) of a cache_control object. RequestError naming `param` if it is none."""
    if not isinstance(value, Mapping) or value.get("type") != "ephemeral" or set(value) - {"type", "ttl", "priority"}:
        raise RequestError(f'{param} must be {{"type": "ephemeral"}}, if wanted with a ttl ("5m", "1h") and a priority (0 to '
                           f"{PINNED}), got {value!r}", param=param)
    ttl, priority = value.get("ttl"), value.get("priority")
    priority = MARKED_PRIORITY if priority is None else priority
    _check_priority(priority, f"{param}.priority")
    return priority, seconds_of(DEFAULT_TTL if ttl is None else ttl, f"{param}.ttl")


def check_spans(spans: Sequence[Span]) -> None:
    """RequestError for an invalid span."""
    if len(spans) > MAX_SPANS:
        raise RequestError(f"{len(spans)} spans should be retained; at most {MAX_SPANS} are possible in one request",
                           param="retention")
    for span in spans:
        if not isinstance(span, Span):
            raise RequestError(f"retention takes Spans, got {type(span).__name__}", param="retention")
        if type(span.upto) is not int or not PROMPT <= span.upto <= WHOLE:
            raise RequestError(f"a retained span must reach up to a position, or PROMPT (0) for all of the prompt; got "
                               f"upto={span.upto!r}", param="retention")
        _check_priority(span.priority, "retention.priority")
        if not span.seconds > 0 or math.isnan(span.seconds):
            raise RequestError(f"a retained span must live for more than 0 seconds, got {span.seconds!r}", param="retention")


def resolve_spans(spans: Sequence[Span], count: int, cut: int) -> list[Span]:
    """The spans of a prompt that lost `cut` tokens at its front and has `count` tokens left, ordered by their ends."""
    settled = []
    for span in spans:
        upto = count if span.upto == PROMPT else span.upto if span.upto == WHOLE else span.upto - cut
        if upto > 0:
            settled.append(Span(upto, span.priority, span.seconds))
    return sorted(settled, key=lambda span: span.upto)


def _check_priority(priority: Any, param: str) -> None:
    if type(priority) is not int or not 0 <= priority <= PINNED:
        raise RequestError(f"{param} is {priority!r}; possible are 0 (goes first) to {PINNED} (goes last)", param=param)


def spans_of(prompt: Marked, ids: Sequence[int], tokenizer: Tokenizer, add_special_tokens: bool) -> list[Span]:
    """Converts a text's marks to spans of its tokens. A token that extends over a mark is excluded from the span."""
    spans = []
    for mark in prompt.marks:
        same = _agreement(tokenizer.encode(prompt.text[:mark.at], add_special_tokens), ids)
        if same:
            spans.append(Span(same, mark.priority, mark.seconds))
    return spans


def _agreement(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common prefix of two texts or lists."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


# -- marks in conversations


class _Place(NamedTuple):
    """A mark, its place, and the placeholder word that stands for it while the conversation is rendered."""

    name: str
    word: str
    priority: int
    seconds: float


def written(render: Callable[[Messages, Tools], str], messages: Messages, tools: Tools) -> Marked:
    """Renders a conversation with `render`, and finds the marks (cache_control) of its messages, their parts and its tools.

    The template must not see marks, and decides where contents appear: so the conversation is rendered as it is and with a
    random word at each mark, which is where its word appears. RequestError for an invalid mark, or one that is not rendered."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        # `render` says what is wrong with it.
        return Marked(render(messages, tools))
    worded, places = _with_words(messages)
    # Before anything is rendered: each mark costs a rendering or a search.
    count = len(places) + sum(tool.get("cache_control") is not None for tool in tools or ())
    if count > MAX_SPANS:
        raise RequestError(f"there are {count} marks (cache_control); at most {MAX_SPANS} are possible in one request",
                           param="cache_control")
    plain, wanted = [_without(message) for message in messages], []
    clean_tools = None if tools is None else [_bare(tool) for tool in tools]
    text = render(plain, clean_tools)
    if places:
        shown = render(worded, clean_tools)
        for place in places:
            end = shown.find(place.word)
            if end < 0:
                raise RequestError(f"{place.name} marks something that the chat template does not show; move the mark",
                                   param="cache_control")
            before = shown[:end]
            for other in places:
                before = before.replace(other.word, "")
            wanted.append(Breakpoint(_agreement(before, text), place.priority, place.seconds))
    for count, tool in enumerate(tools or (), 1):
        if tool.get("cache_control") is not None:
            # The text up to the end of a tool is the common prefix of two renderings with different next tools.
            another = {**_bare(tool), "function": {**tool["function"], "name": "x" + secrets.token_hex(8)}}
            shown = render(plain, [*(clean_tools or ())[:count], another])
            mark = read_mark(tool["cache_control"], f"tools[{count - 1}].cache_control")
            wanted.append(Breakpoint(_agreement(shown, text), *mark))
    return Marked(text, tuple(wanted))


def _bare(thing: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in thing.items() if key != "cache_control"}


def _without(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_bare(part) if isinstance(part, Mapping) else part for part in content]
        return {**_bare(message), "content": content}
    return _bare(message)


def _with_words(messages: Messages) -> tuple[list[Mapping[str, Any]], list[_Place]]:
    """The messages with a unique word at the end of each marked content, and the marks that the words stand for."""
    places: list[_Place] = []

    def word(mark: Any, name: str) -> str:
        if mark is None:
            return ""
        places.append(_Place(name, "mark" + secrets.token_hex(12), *read_mark(mark, name)))
        return places[-1].word

    worded: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            # `render` says what is wrong with it.
            worded.append(message)
            continue
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_append(part, word(part.get("cache_control"), f"messages[{i}].content[{j}].cache_control"))
                       if isinstance(part, Mapping) else part for j, part in enumerate(content)]
        end = word(message.get("cache_control"), f"messages[{i}].cache_control")
        if end and isinstance(content, str):
            content += end
        elif end and content:
            content = [*content[:-1], _append(content[-1], end)]
        worded.append({**_bare(message), "content": content})
    return worded, places


def _append(part: Any, word: str) -> Any:
    if isinstance(part, str):
        return part + word
    return {key: value + word if word and key != "type" and isinstance(value, str) else value
            for key, value in _bare(part).items()}
