"""Each real chat template: a call that it renders is read back in the dialect that is chosen from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.dialects.choice import choose
from penstock.dialects.parser import Parser
from penstock.text import ChatTemplate
from tests.data import DATA

FOLDER = Path(DATA) / "templates" if DATA else Path("missing")
TEMPLATES = sorted([*FOLDER.glob("current/*.jinja"), *FOLDER.glob("tools/*.jinja")])
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "City"}}, "required": ["city"]}}}
USER = {"role": "user", "content": "What is the weather in Lima?"}
CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Lima"}'}}]}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "19 degrees"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_a_template_renders_is_read(path: Path) -> None:
    source = path.read_text()
    template = ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""})
    choice = choose([source])
    if "tool_calls" not in source:
        pytest.skip("the template renders no tool calls")
    try:
        template.render([USER, CALL, RESULT], [TOOL])
        opening = template.render([USER], [TOOL])
        whole = template.render([USER, CALL], [TOOL], add_generation_prompt=False)
        if "get_weather" not in whole[len(template.render([USER], [TOOL], add_generation_prompt=False)):]:
            # DeepSeek R1's shows calls of messages without content alone.
            whole = template.render([USER, CALL | {"content": None}], [TOOL], add_generation_prompt=False)
    except RequestError as error:
        pytest.skip(f"the template refuses: {error}")
    cut = next((place for place, (one, two) in enumerate(zip(opening, whole, strict=False)) if one != two), len(opening))
    if whole.rfind("<", 0, cut) > whole.rfind(">", 0, cut):
        cut = whole.rfind("<", 0, cut)  # the two go on with different markers
    said = whole[cut:]
    parser = Parser(choice.dialect, [TOOL], prompt=choice.dialect.lead)
    parser.push(said)
    parser.finish()
    found = [(call.name, json.loads(call.arguments)) for call in parser.message().calls]
    assert found == [("get_weather", {"city": "Lima"})], (choice.dialect.name, said, found)
