"""The official client, synchronous and not, streaming and not, over every endpoint and parameter, on a trained model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.data import MODELS, need
from tests.system.served import NAME, PATIENT, TEMPLATE, Served

pytestmark = pytest.mark.xdist_group("stories")

PROMPT = "Once upon a time, there was"
GREEDY = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared(need(MODELS / "stories260k"), "--chat-template", TEMPLATE)


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def text(client: openai.OpenAI) -> str:
    return client.completions.create(**GREEDY).choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "penstock"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4")
    assert NAME in str(error.value)


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY)
    choice = answer.choices[0]
    assert answer.object == "text_completion" and answer.model == NAME and answer.id.startswith("cmpl-")
    assert choice.text.startswith(" a little") and choice.finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, answer.usage.prompt_tokens + 24)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("kind", ["text", "list", "ids", "lists of ids"])
def test_prompts(server: Served, client: openai.OpenAI, text: str, kind: str) -> None:
    ids = server.post("/tokenize", prompt=PROMPT).json()["tokens"]
    prompt = {"text": PROMPT, "list": [PROMPT, "The"], "ids": ids, "lists of ids": [ids, ids[:2], ids]}[kind]
    answer = client.completions.create(**{**GREEDY, "prompt": prompt})
    assert [choice.index for choice in answer.choices] == list(range(len(prompt) if "list" in kind else 1))
    assert answer.choices[0].text == text
    if kind == "lists of ids":
        assert answer.choices[2].text == text != answer.choices[1].text


def test_completion_stream(client: openai.OpenAI, text: str) -> None:
    chunks = list(client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24


def test_continuous_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.completions.create(**GREEDY, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 24 and counts[0] < 24
    chat = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "stream": True}
    told = [chunk.usage.completion_tokens for chunk in client.chat.completions.create(**chat, n=2, stream_options=options)
            if not chunk.choices or chunk.choices[0].delta.role]
    assert told[0] == 0 and told[1] <= 6 and told[-1] == 12, "what was sent with the role is not counted yet"
    for said in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        assert all(chunk.usage is None for chunk in client.chat.completions.create(**chat, stream_options=said))
        assert all(chunk.usage is None for chunk in client.completions.create(**GREEDY, stream=True, stream_options=said))


def test_a_prompt_counts_once_whatever_n_is(server: Served) -> None:
    def told() -> list[float]:
        found: dict[str, float] = {}
        for line in server.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return [found[f"vllm:{name}_total"] for name in ("prompt_tokens", "prefix_cache_queries", "prompt_tokens_by_source",
                                                         "prompt_tokens_cached", "prompt_tokens_cached_by_source")]

    server.settle()
    for cached in (0, 5):
        before = told()
        answer = server.complete(prompt=[201, 77, 88, 99, 111, 122], n=8, max_tokens=3)
        assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 24
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        server.settle()
        assert [now - then for now, then in zip(told(), before, strict=True)] == [6, 6, 6, cached, cached]


def test_stream_of_many(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The dog", "One day"]
    whole = client.completions.create(**{**GREEDY, "prompt": prompts}, n=2, seed=3)
    parts = [""] * 6
    for chunk in client.completions.create(**{**GREEDY, "prompt": prompts}, n=2, seed=3, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [choice.text for choice in whole.choices]
    assert len({*parts}) == 3


def test_echo_and_logprobs(client: openai.OpenAI, text: str) -> None:
    answer = client.completions.create(**GREEDY, echo=True, logprobs=3)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == PROMPT + text
    assert len(found.tokens) == answer.usage.total_tokens == len(found.token_logprobs) == len(found.text_offset)
    assert found.token_logprobs[0] is None and all(value <= 0 for value in found.token_logprobs[1:])
    place = found.tokens.index(",")
    assert choice.text[found.text_offset[place]] == ","
    greedy = answer.usage.prompt_tokens
    for token, value, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[greedy:]:
        assert top[token] == value == max(top.values()) and len(top) == 3
    streamed = [chunk.choices[0] for chunk in client.completions.create(**GREEDY, echo=True, logprobs=3, stream=True)]
    assert "".join(part.text for part in streamed) == choice.text
    assert [token for part in streamed for token in part.logprobs.tokens] == found.tokens
    assert [at for part in streamed for at in part.logprobs.text_offset] == found.text_offset


def test_echo_shows_the_tokens_that_were_computed(server: Served, text: str) -> None:
    """Special tokens among ids, prompts that are truncated, and ids that end inside a character; streamed and not."""
    ids = server.post("/tokenize", prompt=PROMPT + " 🅰").json()["tokens"]
    for prompt, more, begin in ((ids, {"skip_special_tokens": False}, "<s>"), (ids, {}, PROMPT), (ids[:-2], {}, PROMPT),
                                (PROMPT, {"truncate_prompt_tokens": 3}, ""), ("<s>" + PROMPT, {}, "<s>Once")):
        body = {**GREEDY, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 4, **more}
        choice = server.complete(**body)["choices"][0]
        plain = server.complete(**{**body, "echo": False})["choices"][0]
        assert choice["text"].startswith(begin) and choice["text"].endswith(plain["text"])
        shown = choice["text"][:len(choice["text"]) - len(plain["text"])]
        assert "\ufffd" not in shown
        if "truncate_prompt_tokens" in more:
            assert shown and shown != PROMPT and PROMPT.endswith(shown.strip())
        elif isinstance(prompt, str):
            assert shown == prompt
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] < len(choice["text"])
        assert offsets[-4:] == [len(shown) + offset for offset in plain["logprobs"]["text_offset"]]
        events = [json.loads(line[6:])["choices"][0] for line in server.post("/v1/completions", **body, stream=True)
                  .text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["text"] for event in events) == choice["text"]
        assert [at for event in events for at in event["logprobs"]["text_offset"]] == offsets


def test_score_a_prompt(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, echo=True, logprobs=0)
    answer = client.completions.create(**{**GREEDY, "max_tokens": 0}, echo=True, logprobs=0)
    assert answer.choices[0].text == PROMPT and answer.usage.completion_tokens == 0
    assert answer.choices[0].logprobs.token_logprobs == whole.choices[0].logprobs.token_logprobs[:answer.usage.prompt_tokens]


def test_prompt_logprobs(server: Served) -> None:
    answer = server.complete(**GREEDY, prompt_logprobs=2, return_token_ids=True)
    choice = answer["choices"][0]
    ids, lines = choice["prompt_token_ids"], choice["prompt_logprobs"]
    assert len(ids) == len(lines) and lines[0] is None
    assert all(str(token) in line and set(line[str(token)]) == {"logprob", "rank", "decoded_token"}
               for token, line in zip(ids[1:], lines[1:], strict=True))


def test_chat(client: openai.OpenAI, text: str) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_completion_tokens": 12}
    answer = client.chat.completions.create(**body)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.finish_reason == "length" and answer.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 12
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    same = client.chat.completions.create(model=NAME, messages=parts, temperature=0, max_tokens=12)
    assert same.choices[0].message.content == choice.message.content


def test_chat_logprobs(client: openai.OpenAI) -> None:
    arguments = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 8,
                 "logprobs": True, "top_logprobs": 4}
    choice = client.chat.completions.create(**arguments).choices[0]
    content = choice.logprobs.content
    assert len(content) == 8 and all(len(entry.top_logprobs) == 4 for entry in content)
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    assert all(entry.token == entry.top_logprobs[0].token for entry in content)
    streamed = [entry for chunk in client.chat.completions.create(**arguments, stream=True)
                for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    plain = client.chat.completions.create(**{**arguments, "top_logprobs": None}).choices[0].logprobs.content
    assert plain[0].top_logprobs == []


def test_chat_template_arguments(client: openai.OpenAI, server: Served) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": PROMPT}]

    def count(**more: object) -> int:
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1, **more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    plain = count()
    assert count(tools=[tool]) > plain == count(tools=[tool], tool_choice="none")
    assert count(tools=[tool], tool_choice="auto") > plain > count(add_generation_prompt=False)
    assert count(add_generation_prompt=False, continue_final_message=True) < plain
    assert server.post("/tokenize", messages=messages).json()["count"] == plain


def test_token_ids(server: Served, text: str) -> None:
    answer = server.complete(**GREEDY, return_token_ids=True)["choices"][0]
    assert server.post("/detokenize", tokens=answer["token_ids"]).json()["prompt"] == text.lstrip()
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", **chat).json()
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"] and len(whole["choices"][0]["token_ids"]) == 6
    events = [json.loads(line[6:]) for line in server.post("/v1/chat/completions", **chat, stream=True).text.split("\n\n")
              if line.startswith("data: {")]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for line in events for token in line["choices"][0].get("token_ids", [])] == whole["choices"][0]["token_ids"]


def test_tokenize(server: Served) -> None:
    found = server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["tokens"][0] == 1
    assert found["max_model_len"] == 512
    bare = server.post("/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert bare == found["tokens"][1:]
    assert server.post("/detokenize", tokens=bare).json() == {"prompt": PROMPT}


SAMPLING = [
    {"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_p": 0.5, "seed": 7}, {"temperature": 1.5, "top_k": 3, "seed": 7},
    {"temperature": 1.0, "min_p": 0.3, "seed": 7}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.3}, {"logit_bias": {"432": -100}}, {"stop": ["girl", "dog"]},
    {"stop": " little", "include_stop_str_in_output": True}, {"stop_token_ids": [395]}, {"ignore_eos": True, "min_tokens": 24},
    {"allowed_token_ids": [400, 401, 402]}, {"bad_words": ["little"]},
    {"skip_special_tokens": False}, {"priority": 3, "cache_salt": "mine"}, {"truncate_prompt_tokens": 3},
    {"return_tokens_as_token_ids": True, "logprobs": 1}, {"n": 3, "seed": 1, "temperature": 1.0},
    {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
     "prompt_cache_key": "k"},
]


@pytest.mark.parametrize("fields", SAMPLING, ids=lambda fields: next(iter(fields)))
def test_parameters_stream_as_they_answer(server: Served, text: str, fields: dict) -> None:
    """Every parameter: honoured where its effect is certain, and the same streamed as whole."""
    body = {**GREEDY, **fields}
    answer = server.complete(**body)
    choices = answer["choices"]
    streamed = [""] * len(choices)
    for line in server.post("/v1/completions", **body, stream=True).text.split("\n\n"):
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            streamed[choice["index"]] += choice["text"]
    assert streamed == [choice["text"] for choice in choices]
    first = choices[0]
    if "stop" in fields:
        assert first["finish_reason"] == "stop" and first["stop_reason"] in fields["stop"]
        assert first["text"].endswith(" little") if "include_stop_str_in_output" in fields else "girl" not in first["text"]
    elif "stop_token_ids" in fields:
        assert (first["finish_reason"], first["stop_reason"]) == ("stop", 395)
    elif "bad_words" in fields:
        assert "little" not in first["text"]
    elif "logit_bias" in fields:
        assert "," not in first["text"] or first["text"] != text
    elif "n" in fields:
        assert len({choice["text"] for choice in choices}) == 3
    elif "truncate_prompt_tokens" in fields:
        assert answer["usage"]["prompt_tokens"] == 3
    elif "return_tokens_as_token_ids" in fields:
        assert all(token.startswith("token_id:") for token in first["logprobs"]["tokens"])
    elif not {"temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids"} & set(fields):
        assert first["text"] == text


def test_async_client(server: Served, text: str) -> None:
    """32 streams at once, each as if it were alone."""

    async def one(client: openai.AsyncOpenAI) -> str:
        return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**GREEDY, stream=True)])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", default_headers=PATIENT) as client:
            return await asyncio.gather(*(one(client) for _ in range(32)))

    assert set(asyncio.run(all_of_them())) == {text}


def test_refusals_through_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(**{**GREEDY, "model": "other"})
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**{**GREEDY, "prompt": [1] * 600})
    assert error.value.code == "context_length_exceeded" and "512" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**GREEDY, suffix="end")
    assert error.value.param == "suffix"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_saves_steps_and_changes_nothing(server: Served, client: openai.OpenAI, temperature: float) -> None:
    def steps() -> float:
        return float(re.findall(r"^penstock:steps_total\S* (\S+)$", server.http.get("/metrics").text, re.MULTILINE)[0])

    def ask(**more: Any) -> tuple[str, float, Any]:
        before = steps()
        answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "A story"}], max_tokens=60,
                                                temperature=temperature, seed=1, **more)
        return answer.choices[0].message.content or "", steps() - before, answer.usage.completion_tokens_details

    plain, needed, _ = ask()
    words = plain.split(" ")
    changed = " ".join([*words[:5], "or", "not", *words[8:]])
    for predicted in (plain, changed, [{"type": "text", "text": plain}], "Something else", ""):
        said, taken, details = ask(prediction={"type": "content", "content": predicted})
        assert said == plain
        if predicted not in ("", "Something else"):
            assert taken < 0.8 * needed and details.accepted_prediction_tokens > 15, (predicted, taken, needed)
    with pytest.raises(openai.BadRequestError, match="prediction is only possible for one answer"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], n=2,
                                       prediction={"type": "content", "content": "x"})
