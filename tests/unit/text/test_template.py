"""Chat templates: every real one renders as transformers renders it or says why not, and the sources and errors."""

from __future__ import annotations

import json
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, ModelError, RequestError
from penstock.text import ChatTemplate
from tests.data import DATA
from tests.unit.text import real

FOLDER = DATA / "templates"
CURRENT, TOOLS = sorted(FOLDER.glob("current/*.jinja")), sorted(FOLDER.glob("tools/*.jinja"))
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather in a \"place\" <now>", "parameters": {
        "type": "object", "required": ["city"], "properties": {"city": {"type": "string", "description": "A city"}}}}}

REASONS = {
    "MiroThinker.jinja": "'tool' is undefined",
    "fireworks-ai-llama-3-firefunction-v2.jinja": "'functions' is undefined",
    "google-gemma-2-2b-it.jinja": "System role not supported",
    "template_vlm2vec.jinja": "only embed one message",
    "tool_chat_template_granite_20b_fc.jinja": "Unexpected combination of role and message content",
}
"""Templates that cannot write this conversation, and what they say."""

OURS_ALONE = {"Kimi-K2-Instruct.jinja", "Kimi-K2-Thinking.jinja", "llama-cpp-deepseek-r1.jinja"}
"""Templates that transformers does not run: they let a list grow, or write an iterator as JSON."""


def conversation(arguments: Any, beside: Any = "Let me look.") -> list[dict[str, Any]]:
    """`beside` is the content of the message that has the tool call."""
    call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "content": beside, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "{\"degrees\": 3}"},
            {"role": "assistant", "content": "3 degrees."}, {"role": "user", "content": "Thanks <b>& bye</b>"}]


class Noon(datetime):
    """A clock that has stopped."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Noon:
        return cls(2026, 2, 3, 12, 0, 0, tzinfo=tz)


def load(path: Path) -> ChatTemplate:
    return ChatTemplate.load(path.parent, str(path), SPECIALS)


@pytest.mark.skipif(not CURRENT, reason="test data templates is not here; set PENSTOCK_TEST_DATA to the folder that has it")
@pytest.mark.parametrize("path", CURRENT + TOOLS, ids=lambda path: path.stem)
def test_a_conversation_with_tools_as_transformers_writes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    # Some templates write the time, to the second.
    monkeypatch.setattr("penstock.text.template.datetime", Noon)
    monkeypatch.setattr(rendering, "datetime", Noon)
    template = load(path)
    if path.name in REASONS:
        with pytest.raises(RequestError, match=REASONS[path.name]) as caught:
            template.render(conversation('{"city": "Zürich"}'), [WEATHER])
        assert caught.value.param == "messages"
        return
    text = template.render(conversation('{"city": "Zürich"}'), [WEATHER])
    assert "Thanks <b>& bye</b>" in text
    if path.name in OURS_ALONE:
        assert "get_weather" in text and "Zürich" in text
        return
    # Some templates take arguments as an object, some as JSON text; transformers leaves the choice to its caller.
    same = []
    for arguments in ({"city": "Zürich"}, '{"city": "Zürich"}'):
        try:
            same.append(rendering.render_jinja_template([conversation(arguments)], [WEATHER], chat_template=path.read_text(),
                                                        add_generation_prompt=True, **SPECIALS)[0][0])
        except Exception:
            continue
    assert text in same
    if "get_weather" in text:
        assert "{'city': 'Z" not in text, "arguments as Python writes them"
        assert '\\"city\\"' not in text, "arguments quoted twice"


@pytest.mark.skipif(not CURRENT, reason="test data templates is not here; set PENSTOCK_TEST_DATA to the folder that has it")
@pytest.mark.parametrize("path", CURRENT + TOOLS, ids=lambda path: path.stem)
def test_a_tool_call_beside_no_content_as_transformers_writes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """null is null where transformers renders that without the word None, and the empty string elsewhere."""
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr("penstock.text.template.datetime", Noon)
    monkeypatch.setattr(rendering, "datetime", Noon)
    template, source = load(path), path.read_text()

    def theirs(messages: list[dict[str, Any]]) -> str:
        try:
            return str(rendering.render_jinja_template([messages], [WEATHER], chat_template=source,
                                                       add_generation_prompt=True, **SPECIALS)[0][0])
        except Exception:
            return ""

    for first in (0, 1):  # with and without the system message, which some templates refuse
        given = conversation('{"city": "Zürich"}', None)[first:]
        absent = [{key: value for key, value in message.items() if value is not None} for message in given]
        try:
            text = template.render(given, [WEATHER])
        except RequestError:
            text = ""
        else:
            assert text == template.render(absent, [WEATHER]), "a content that is absent is null"
        if path.name in OURS_ALONE:
            assert "Zürich" in text
            continue
        arguments: list[Any] = [{"city": "Zürich"}, '{"city": "Zürich"}']
        null = [found for value in arguments if (found := theirs(conversation(value, None)[first:]))]
        empty = [found for value in arguments if (found := theirs(conversation(value, "")[first:]))]
        plain = [found for found in null if "None" not in found and "null" not in found]
        assert text in (plain or empty or [""])


@pytest.mark.skipif(not CURRENT, reason="test data templates is not here; set PENSTOCK_TEST_DATA to the folder that has it")
@pytest.mark.parametrize("path", [path for path in CURRENT if path.name not in REASONS], ids=lambda path: path.stem)
def test_lists_of_text_parts_are_text(path: Path) -> None:
    template = load(path)
    plain = [{"role": "user", "content": "What is this?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}]}]
    # Templates for tool use cannot do without tools.
    tools = [WEATHER] if "tool_use" in path.name else None
    assert template.render(parts, tools) == template.render(plain, tools)


def test_the_parts_of_a_content_are_joined_by_lines_where_a_string_is_wanted() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content + '!' }}"}, {})
    assert template.render([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
                           ) == "a\nb!"


def test_a_template_that_wants_parts_gets_parts() -> None:
    template = ChatTemplate({"default": "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"}, {})
    assert template.render([{"role": "user", "content": "a"}]) == "[a]"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "[a][b]"


CHATML = ("{{ bos_token }}{% for message in messages %}\n    {%- if loop.index0 > 99 %}{% break %}{% endif %}\n"
          "<|{{ message.role }}|>"
          "{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}\n{% endfor %}\n"
          "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def test_extensions_variables_and_prompts() -> None:
    template = ChatTemplate({"default": CHATML}, SPECIALS)
    hello = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    assert template.render(hello) == "<s><|user|>hi</s>\n<|assistant|>Well</s>\n<|assistant|>"
    assert template.render(hello, add_generation_prompt=False) == "<s><|user|>hi</s>\n<|assistant|>Well</s>\n"
    assert template.render(hello, bos_token="") == "<|user|>hi</s>\n<|assistant|>Well</s>\n<|assistant|>"
    told = template.render(hello, add_generation_prompt=False, continue_final_message=True)
    assert told == "<s><|user|>hi</s>\n<|assistant|>Well"
    now = ChatTemplate({"default": "{{ strftime_now('%Y') | int > 2000 }} {{ {'ü': '<&>'} | tojson }} {{ mood }}"}, {})
    assert now.render(hello, mood=["x"]) == 'True {"ü": "<&>"} [\'x\']'


@pytest.mark.parametrize(("source", "expected"), [
    ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[a][b "),
    ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[a][b"),
    ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}", "[a][b ")])
def test_continuing_the_final_message(source: str, expected: str) -> None:
    template = ChatTemplate({"default": source}, {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_what_cannot_be_continued() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RequestError, match="Cannot set both `continue_final_message` and `add_generation_prompt` to True"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(RequestError, match="does not show the final message"):
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="needs a final message with content"):
        template.render([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)


def model(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    return folder


def test_where_templates_are_found(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "hi"}]
    assert ChatTemplate.load(model(tmp_path, chat_template="config {{ bos_token }}")).render(user) == "config <s>"
    sources = {"default": "plain", "tool_use": "tools", "rag": "rag"}
    named = [{"name": name, "template": source} for name, source in sources.items()]
    template = ChatTemplate.load(model(tmp_path, chat_template=named))
    assert list(template.sources) == ["default", "tool_use", "rag"]
    assert template.render(user) == "plain"
    assert template.render(user, [WEATHER]) == "tools"
    assert template.render(user, []) == "plain"
    assert template.using("rag").render(user, [WEATHER]) == "rag"
    assert ChatTemplate.load(tmp_path, "rag").render(user, [WEATHER]) == "rag"
    (tmp_path / "chat_template.jinja").write_text("file")
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "sum.jinja").write_text("sum")
    template = ChatTemplate.load(tmp_path)
    assert template.render(user) == "file"
    assert template.using("sum").render(user) == "sum"
    (tmp_path / "mine.jinja").write_text("mine {{ bos_token }}")
    assert ChatTemplate.load(tmp_path, str(tmp_path / "mine.jinja")).render(user) == "mine <s>"
    assert ChatTemplate.load(tmp_path, "inline {{ bos_token }}").render(user) == "inline <s>"
    with pytest.raises(ConfigError, match=r"'absent' is neither a file.*the model's own are default, tool_use, rag, sum"):
        ChatTemplate.load(tmp_path, "absent")


def test_several_templates_without_default_or_none(tmp_path: Path) -> None:
    named = [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]
    user = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="several chat templates"):
        ChatTemplate.load(model(tmp_path, chat_template=named)).render(user)
    assert ChatTemplate.load(model(tmp_path, chat_template=named[:1])).render(user) == "A"
    template = ChatTemplate.load(model(tmp_path))
    assert not template.sources
    with pytest.raises(RequestError, match=r"/v1/completions.*--chat-template") as caught:
        template.render(user)
    assert caught.value.code == "no_chat_template"


def test_broken_templates_name_the_line(tmp_path: Path) -> None:
    broken = "ok\n{% for x in messages %}\n{{ x }\n{% endfor %}"
    with pytest.raises(ModelError, match="line 3"):
        ChatTemplate.load(model(tmp_path, chat_template=broken))
    (tmp_path / "bad.jinja").write_text(broken)
    with pytest.raises(ConfigError, match=r"bad.jinja is broken: line 3"):
        ChatTemplate.load(model(tmp_path), str(tmp_path / "bad.jinja"))
    with pytest.raises(RequestError, match="chat_template is broken: line 3"):
        ChatTemplate({}, {}).using(broken)


@pytest.mark.parametrize(("source", "said"), [
    ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
    ("{{ functions.first }}", "'functions' is undefined"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ messages.clear() }}", "SecurityError"), ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError")])
def test_a_template_that_fails_is_the_requests_failure(source: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "hi"}])
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_a_template_cannot_change_what_it_is_given() -> None:
    tools, messages = [{"list": [1]}], [{"role": "user", "content": "hi"}]
    source = "{% set _ = tools[0].list.append(2) %}{% set _ = messages.append(3) %}{{ tools[0].list }}"
    template = ChatTemplate({"default": source}, {})
    assert template.render(messages, tools) == "[1, 2]"
    assert (tools, messages) == ([{"list": [1]}], [{"role": "user", "content": "hi"}])


def test_a_template_sees_plain_data_only() -> None:
    class Sharp:
        def cut(self) -> str:
            return "ouch"

    with pytest.raises(RequestError, match="object of type Sharp"):
        ChatTemplate({"default": "{{ knife.cut() }}"}, {}).render([{"role": "user", "content": "hi"}], knife=Sharp())
    with pytest.raises(RequestError, match="may not set chat_template"):
        ChatTemplate({"default": ""}, {}).render([{"role": "user", "content": "hi"}], chat_template="x")


@pytest.mark.parametrize(("messages", "said"), [
    ("hi", "must be a list"), ([], "is empty"), (["hi"], r"messages\[0\] must be an object"),
    ([{"content": "hi"}], "needs a role"),
    ([{"role": "user", "content": 3}], "string or a list of parts"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     r"content\[0\] is of type 'image_url'.*text only"),
    ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
    ([{"role": "user", "content": [{"type": "hologram", "text": "x"}]}], "'hologram'"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "each of tool_calls"),
    ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list")])
def test_what_is_no_conversation(messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        ChatTemplate({"default": "{{ messages }}"}, {}).render(messages)
    assert caught.value.param == "messages"


def test_messages_are_brought_into_the_templates_shape() -> None:
    show = ChatTemplate({"default": "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"}, {})
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    told = [json.loads(line) for line in show.render([
        {"role": "developer", "content": "x", "name": None},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": None},
        {"role": "assistant", "tool_calls": [call]}]).splitlines()]
    assert told[0] == {"role": "system", "content": "x"}
    assert told[1] == {"role": "assistant", "content": "", "reasoning": "hm", "thinking": "hm", "reasoning_content": "hm"}
    assert told[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    text = ChatTemplate({"default": "{% for m in messages if m.tool_calls %}{{ m.role + m.tool_calls[0].function.arguments }}"
                                    "{% endfor %}"}, {})
    assert text.render([{"role": "assistant", "tool_calls": [call]}]) == 'assistant{"a": 1}'
    spoilt = {"function": {"name": "f", "arguments": '{"a": '}}
    whole = ChatTemplate({"default": "{{ messages }}"}, {})
    assert '\'{"a": \'' in whole.render([{"role": "assistant", "tool_calls": [spoilt]}])


def test_developer_is_kept_where_the_template_knows_it() -> None:
    template = ChatTemplate({"default": "{{ messages[0].role }}{# developer #}"}, {})
    assert template.render([{"role": "developer", "content": "x"}]) == "developer"


@pytest.mark.parametrize("name", ["tokenizers/qwen2.5", "tokenizers/qwen3", "tokenizers/llama-3.1"])
def test_whole_folders_as_apply_chat_template(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = real.folder(name)
    ours, theirs = ChatTemplate.load(folder), transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    messages = conversation('{"city": "Zürich"}')
    expected = theirs.apply_chat_template(conversation({"city": "Zürich"}), tools=[WEATHER], add_generation_prompt=True,
                                          tokenize=False)
    assert ours.render(messages, [WEATHER]) == expected
    for written in (None, ""):
        silent = theirs.apply_chat_template(conversation({"city": "Zürich"}, ""), tools=[WEATHER], add_generation_prompt=True,
                                            tokenize=False)
        assert ours.render(conversation('{"city": "Zürich"}', written), [WEATHER]) == silent
    ids = theirs.apply_chat_template(conversation({"city": "Zürich"}), add_generation_prompt=True, return_dict=False)
    assert real.load(name).encode(ours.render(messages), add_special_tokens=False) == list(ids)
