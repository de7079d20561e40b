"""Requests in the forms that known clients send them, on canary: accepted, and what cannot be honoured is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.served import Served, error_of, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"temperature": 0, "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
AS_JSON = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", "--trust-request-chat-template") as server:
        yield server


def accepted(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, **{**SHORT, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# -- messages


def shown(server: Served, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the template sees them."""
    tokens = server.post("/tokenize", messages=messages, chat_template=AS_JSON, add_generation_prompt=False).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    return [json.loads(line) for line in text.splitlines()]


LITELLM = {"role": "assistant", "content": "It is 19 degrees.", "id": "msg_1", "tool_calls": None, "function_call": None,
           "annotations": [], "provider_specific_fields": {"citations": None, "refusal": "no"},
           "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
           "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "xyz"}]}


def test_unknown_message_fields_reach_the_template(server: Served) -> None:
    told = shown(server, [{"role": "user", "content": "Hello"}, LITELLM])[1]
    assert told == {key: value for key, value in LITELLM.items() if key not in ("tool_calls", "function_call")}
    accepted(server, CHAT, messages=[*HELLO, LITELLM, *HELLO])


def test_roles_and_parts(server: Served) -> None:
    parts = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    told = shown(server, [{"role": "critic", "content": parts}, {"role": "user", "content": parts, "name": "Ann"}])
    assert [message["role"] for message in told] == ["critic", "user"]
    assert "input_text" in json.dumps(told[0]["content"]) and told[1]["name"] == "Ann"
    accepted(server, CHAT, messages=[{"role": "user", "content": parts}])


def test_functions_of_the_older_api(server: Served) -> None:
    """Answers to a function_call become answers to a tool call, where a template knows only those."""
    older = [{"role": "user", "content": "Lima?"},
             {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{}"}},
             {"role": "function", "name": "get_weather", "content": "19"}]
    told = shown(server, older)
    assert told[1]["tool_calls"][0]["function"]["name"] == "get_weather" and "function_call" not in told[1]
    assert told[2]["tool_call_id"] == told[1]["tool_calls"][0]["id"]
    newer = [older[0], {"role": "assistant", "content": "", "tool_calls": told[1]["tool_calls"]},
             {**told[2], "role": "tool"}]
    count = [server.post("/tokenize", messages=messages, tools=[TOOL]).json()["tokens"] for messages in (older, newer)]
    assert count[0] == count[1]


def test_tool_calls_as_clients_repeat_them(server: Served) -> None:
    for call in ({"id": "a", "function": {"name": "f", "arguments": "{}"}, "index": 0}, {"function": {"name": "f"}},
                 {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"city": "Lima"}}}):
        accepted(server, CHAT, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]},
                                         {"role": "tool", "tool_call_id": "a", "content": "19"}], tools=[TOOL])


# -- fields with a value that asks for nothing


@pytest.mark.parametrize("fields", [
    {"tools": [TOOL], "parallel_tool_calls": False}, {"parallel_tool_calls": False}, {"tool_choice": "none"},
    {"tools": [], "functions": [], "function_call": "none"}, {"truncate_prompt_tokens": -1}, {"model": ""},
    {"max_tokens": 4, "max_completion_tokens": 4}, {"logprobs": False, "top_logprobs": 0},
    {"spaces_between_special_tokens": False},
    {"spaces_between_special_tokens": True}, {"modalities": ["text"]}, {"response_format": {"type": "text"}}],
    ids=lambda fields: "-".join(fields))
def test_chat_fields_that_ask_for_nothing(server: Served, fields: dict[str, Any]) -> None:
    plain = accepted(server, CHAT, messages=HELLO, **({"tools": fields["tools"]} if fields.get("tools") else {}))
    assert accepted(server, CHAT, messages=HELLO, **fields)["choices"] == plain["choices"]


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"best_of": 1}, {"n": 2, "best_of": 2}, {"truncate_prompt_tokens": -1},
                                    {"model": ""}, {"echo": False}, {"prompt_logprobs": None}],
                         ids=lambda fields: "-".join(fields))
def test_completion_fields_that_ask_for_nothing(server: Served, fields: dict[str, Any]) -> None:
    plain = accepted(server, COMPLETIONS, prompt="Once")["choices"][0]
    assert accepted(server, COMPLETIONS, prompt="Once", **fields)["choices"][0] == plain


def test_style_that_a_template_ignores_is_named(server: Served) -> None:
    body = {"messages": HELLO, **SHORT, "reasoning_effort": "high", "verbosity": "low"}
    answer = server.post(CHAT, **body)
    assert answer.status_code == 200 and answer.headers["x-penstock-ignored"] == "reasoning_effort, verbosity"
    assert "x-penstock-ignored" not in server.post(CHAT, messages=HELLO, **SHORT).headers
    # No effort at all is a switch of templates that have one, unless the request sets it itself.
    for more, shown in (({}, "False"), ({"chat_template_kwargs": {"enable_thinking": True}}, "True")):
        off = {"messages": HELLO, "chat_template": "{{ enable_thinking }}", "reasoning_effort": "none", **more}
        told = server.post("/tokenize", **off).json()
        assert server.post("/detokenize", tokens=told["tokens"]).json()["prompt"] == shown
        assert "x-penstock-ignored" not in server.post(CHAT, **off, **SHORT).headers
    told = server.post("/tokenize", messages=HELLO, chat_template="{{ reasoning_effort }}", reasoning_effort="high").json()
    assert server.post("/detokenize", tokens=told["tokens"]).json()["prompt"] == "high"


# -- fields that are unknown

HARMLESS = {"session_id": "s", "chat_id": "c", "keep_alive": "5m", "detokenize": True, "rid": "r", "stream_interval": 4,
            "tags": ["a"], "litellm_metadata": {"a": {"b": 1}}}


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Once"})],
                         ids=["chat", "completions"])
def test_harmless_fields_are_accepted_and_named(server: Served, path: str, body: dict[str, Any]) -> None:
    plain = server.post(path, **body, **SHORT, logit_bias={"5": -1.5})
    answer = server.post(path, **body, **SHORT, **HARMLESS, logit_bias={"5": -1.5})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]
    assert sorted(answer.headers["x-penstock-ignored"].split(", ")) == sorted(HARMLESS)
    refused = server.post(path, **body, **SHORT, **HARMLESS, temprature=0.5)
    assert refused.status_code == 400 and error_of(refused)["param"] == "temprature"
    wrong = server.post(path, **{**body, **SHORT, **HARMLESS, "max_tokens": "many"})
    assert wrong.status_code == 400 and error_of(wrong)["param"] == "max_tokens"
    nested = server.post(path, **body, **SHORT, stream=True, stream_options={"session_id": 1})
    assert nested.status_code == 400 and error_of(nested)["param"] == "stream_options.session_id"


def test_unknown_fields_only_warn_if_wanted() -> None:
    with served("canary", "--unknown-fields", "warn") as lenient:
        answer = lenient.post(CHAT, messages=HELLO, **SHORT, temprature=0.5, top_a=1, user_id="u", stream=True,
                              stream_options={"include_usage": True, "more": [1]},
                              cache_retention=[{"upto": 1}, {"upto": 2, "x.y": {}}], **{"ü,x": 1})
        assert answer.status_code == 200, answer.text
        assert set(answer.headers["x-penstock-ignored"].split(", ")) == {
            "temprature", "top_a", "user_id", "stream_options.more", "cache_retention[1].x.y", "%C3%BC%2Cx"}
        spans = [{"upto": 1, **{f"field{i}": i for i in range(20)}}]
        assert lenient.post(COMPLETIONS, prompt="a", **SHORT, cache_retention=spans).status_code == 400
        assert lenient.post(COMPLETIONS, prompt=1, top_a=1).status_code == 400
        assert "'top_a', which is ignored" in lenient.log and "user_id" not in lenient.log
        assert lenient.log.count("'temprature'") == 1


# -- fields of the answer


def test_fields_of_the_answer(server: Served) -> None:
    chat, text = accepted(server, CHAT, messages=HELLO), accepted(server, COMPLETIONS, prompt="Once")
    assert chat["service_tier"] is text["service_tier"] is None
    for usage in chat["usage"], text["usage"]:
        assert usage["prompt_tokens_details"].keys() == {"cached_tokens", "audio_tokens", "cached_tokens_by_tier"}
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0,
                                                      "rejected_prediction_tokens": 0}
    assert chat["prompt_logprobs"] is text["choices"][0]["prompt_logprobs"] is None
    assert chat["system_fingerprint"] == text["system_fingerprint"] and chat["system_fingerprint"].startswith("fp_")
    assert accepted(server, CHAT, messages=HELLO, service_tier="auto")["service_tier"] == "default"
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Once"})):
        events = server.post(path, **body, **SHORT, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        assert {chunk["system_fingerprint"] for chunk in chunks} == {chat["system_fingerprint"]}


def test_what_stays_refused(server: Served) -> None:
    for path, field, body in ((CHAT, "tool_choice", {"messages": HELLO, "tool_choice": "auto"}),
                              (COMPLETIONS, "best_of", {"prompt": "a", "best_of": 3, "n": 2}),
                              (COMPLETIONS, "suffix", {"prompt": "a", "suffix": "b"}),
                              (CHAT, "stream_options", {"messages": HELLO, "stream_options": {"include_usage": None}}),
                              (COMPLETIONS, "stream_options", {"prompt": "a", "stream_options": {}}),
                              (CHAT, "functions", {"messages": HELLO, "functions": [{"name": "f"}]})):
        answer = server.post(path, **body)
        assert answer.status_code == 400 and error_of(answer)["param"] == field, answer.text
