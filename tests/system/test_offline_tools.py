"""Parsed messages of the offline API, with canary."""

import json

from penstock import LLM, SamplingParams
from penstock.canary import calling


def test_chat_returns_parsed_messages() -> None:
    tool = next(tool.schema() for tool in calling.TOOLS if tool.name == "get_weather")
    greedy = SamplingParams(temperature=0, max_tokens=64)
    with LLM("canary", max_model_len=1024) as llm:
        [found] = llm.chat([{"role": "user", "content": "What is the weather in Lima?"}], greedy,
                           tools=[tool], use_tqdm=False)
        held = {**tool, "function": {**tool["function"], "strict": True, "parameters": {
            "type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}}}
        [strict] = llm.chat([{"role": "user", "content": "What is the weather in Lima?"}], greedy, tools=[held], use_tqdm=False)
        [plain] = llm.chat([{"role": "user", "content": "Repeat: dog"}], greedy, use_tqdm=False)
    message = found.outputs[0].message
    assert message is not None and not message.content and not message.malformed
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("get_weather", {"city": "Lima"})]
    assert strict.outputs[0].message is not None
    assert json.loads(strict.outputs[0].message.calls[0].arguments)["town"] in ("Rome", "Oslo")
    assert plain.outputs[0].message is not None and plain.outputs[0].message.content == plain.outputs[0].text
