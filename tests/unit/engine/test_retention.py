"""Marks and spans: a mark covers exactly what stands before it, in every real chat template, and nonsense is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.core.request import MARKED_PRIORITY, PROMPT, WHOLE, Span
from penstock.engine.retention import Breakpoint, Marked, check_spans, read_mark, resolve_spans, seconds_of, spans_of, written
from penstock.text import ChatTemplate
from tests.data import DATA
from tests.unit.text import real

TEMPLATES = sorted((DATA / "templates").glob("*/*.jinja"))
SHORT: dict[str, Any] = {"type": "ephemeral"}
LONG: dict[str, Any] = {"type": "ephemeral", "ttl": "1h", "priority": 90}
TOOLS = [{"type": "function", "function": {"name": name, "description": f"It does {name}.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "A city"}}}}} for name in ("find", "keep")]


def talk(system: Any = None, first: Any = None, last: Any = None) -> list[dict[str, Any]]:
    """A conversation with marks on whole messages."""
    texts = (("system", "Answer in verse.", system), ("user", "What is <this>?", first), ("assistant", "A pen. ", None),
             ("user", "And that?  ", last))
    return [{"role": role, "content": text, **({"cache_control": mark} if mark else {})} for role, text, mark in texts]


@pytest.mark.skipif(not TEMPLATES, reason="test data templates is not here; set PENSTOCK_TEST_DATA to the folder that has it")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_marks_lie_behind_what_they_mark(path: Path) -> None:
    """With every template the text is the one without marks, and a mark lies between its message and what follows."""
    template = ChatTemplate.load(path.parent, str(path), {"bos_token": "<s>", "eos_token": "</s>"})
    messages = talk(None, SHORT, LONG)
    try:
        plain = template.render(talk()[1:])
    except RequestError:
        pytest.skip("the template does not write plain conversations")
    marked = written(template.render, messages[1:], None)
    assert marked.text == plain
    first, last = marked.marks
    assert (first.priority, first.seconds, last.priority, last.seconds) == (MARKED_PRIORITY, 300.0, 90, 3600.0)
    assert plain[:first.at].endswith("What is <this>?") and "A pen." not in plain[:first.at]
    assert plain[:last.at].rstrip().endswith("And that?")


@pytest.mark.skipif(not TEMPLATES, reason="test data templates is not here; set PENSTOCK_TEST_DATA to the folder that has it")
def test_marks_on_tools() -> None:
    """Wherever the tools stand, a marked one is before its mark, and the next one is not."""
    checked = 0
    for path in TEMPLATES:
        template = ChatTemplate.load(path.parent, str(path), {"bos_token": "<s>", "eos_token": "</s>"})
        try:
            plain = template.render(talk(), TOOLS)
        except RequestError:
            continue
        if not -1 < plain.find("It does find.") < plain.find("It does keep."):
            continue
        for place, (here, beyond) in enumerate((("find", "keep"), ("keep", "\0"))):
            tools = [{**tool, "cache_control": SHORT} if i == place else tool for i, tool in enumerate(TOOLS)]
            marked = written(functools.partial(template.render), talk(), tools)
            assert marked.text == plain, path
            [mark] = marked.marks
            assert f"It does {here}." in plain[:mark.at] and f"It does {beyond}." not in plain[:mark.at], path
            checked += 1
    assert checked > 30


def parts_template(messages: Sequence[Any], tools: Any) -> str:
    return "".join(f"[{message['role']}]" + "".join(part["text"] for part in message["content"]) for message in messages)


def test_marks_on_parts_of_a_content() -> None:
    parts = [{"type": "text", "text": "A long book. ", "cache_control": LONG}, {"type": "text", "text": "A question."}]
    marked = written(parts_template, [{"role": "user", "content": parts}], None)
    assert marked.text == "[user]A long book. A question."
    assert [marked.text[:mark.at] for mark in marked.marks] == ["[user]A long book. "]
    whole = written(parts_template, [{"role": "user", "content": parts, "cache_control": SHORT}], None)
    assert [whole.text[:mark.at] for mark in whole.marks] == ["[user]A long book. ", whole.text]


def test_templates_never_see_marks() -> None:
    seen: list[Any] = []

    def template(messages: Any, tools: Any) -> str:
        seen.extend(messages + (tools or []))
        return " ".join(str(message) for message in messages)

    written(template, talk(), [{**TOOLS[0], "cache_control": None}])
    assert "cache_control" not in str(seen)


def test_a_mark_that_the_template_does_not_show_is_refused() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.cache_control marks something that the chat template"):
        written(lambda messages, tools: "nothing", talk(SHORT), None)


@pytest.mark.parametrize(("mark", "param"), [
    ({"type": "forever"}, "x"), ({}, "x"), ("ephemeral", "x"), ({**SHORT, "size": 1}, "x"), ({**SHORT, "ttl": "5 m"}, "x.ttl"),
    ({**SHORT, "ttl": "0m"}, "x.ttl"), ({**SHORT, "ttl": "8d"}, "x.ttl"), ({**SHORT, "ttl": 5}, "x.ttl"),
    ({**SHORT, "priority": 101}, "x.priority"), ({**SHORT, "priority": True}, "x.priority"),
])
def test_wrong_marks(mark: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_mark(mark, "x")
    assert caught.value.param == param and caught.value.status == 400


def test_times() -> None:
    assert [seconds_of(text, "ttl") for text in ("5m", "1h", "90s", "7d")] == [300, 3600, 90, 604800]


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "tokenizers/llama-3.1", "models/stories260k"])
def test_marks_as_spans_of_tokens(name: str) -> None:
    """Every token of a span is wholly before its mark, and at most the one on the border is left out."""
    tokenizer = real.load(name)
    text = "Once upon a time there was an internationalisation 12345 of naïve cafés.\n\n  And then?"
    ids = tokenizer.encode(text, True)
    for at in range(len(text) + 1):
        spans = spans_of(Marked(text, (Breakpoint(at, 50, 60.0),)), ids, tokenizer, True)
        upto = spans[0].upto if spans else 0
        assert text.startswith(tokenizer.decode(ids[:upto]).rstrip("\ufffd").lstrip())
        assert len(tokenizer.decode(ids[:upto])) <= at + 1
        alone = len(tokenizer.encode(text[:at], True))
        assert alone - 4 <= upto <= alone
    [whole] = spans_of(Marked(text, (Breakpoint(len(text), 50, 60.0),)), ids, tokenizer, True)
    assert whole == Span(len(ids), 50, 60.0)


def test_spans_are_checked_and_settled() -> None:
    check_spans([Span(), Span(WHOLE, 100, math.inf)])
    for wrong in (Span(-1), Span(2**31), Span(3, 101), Span(3, 5, 0.0), Span(3, 5, math.nan), "x"):
        with pytest.raises(RequestError):
            check_spans([wrong])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="at most 16"):
        check_spans([Span()] * 17)
    assert resolve_spans([Span(WHOLE), Span(), Span(30, 5), Span(12)], 20, 12) == [Span(18, 5), Span(20), Span(WHOLE)]
    assert PROMPT == 0
