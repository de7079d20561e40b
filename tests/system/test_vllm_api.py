"""vLLM's own routes on a trained model: tokens in and out, aborting by name, metrics under its names, refusals by name."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.data import MODELS, need
from tests.system.served import TEMPLATE, Served, error_of, served

pytestmark = pytest.mark.xdist_group("stories")

NAMES = ("vllm:num_requests_waiting_by_reason", "vllm:engine_sleep_state", "vllm:spec_decode_num_draft_tokens_total",
         "vllm:spec_decode_num_accepted_tokens_total", "vllm:lora_requests_info", "vllm:kv_cache_usage_perc",
         "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket", "vllm:cache_config_info")


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4, "temperature": 0}


def chat(server: Served, **body: Any) -> dict[str, Any]:
    """A chat that must succeed."""
    answer = server.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared(need(MODELS / "stories260k"), "--chat-template", TEMPLATE)


def test_tokens_in_and_out(server: Served) -> None:
    ids = server.post("/tokenize", prompt="Once upon a time").json()["tokens"]
    wanted = server.complete(prompt=ids, temperature=0, max_tokens=12, return_token_ids=True)["choices"][0]["token_ids"]
    sampling = {"temperature": 0, "max_tokens": 12, "detokenize": False}
    found = server.post("/inference/v1/generate", token_ids=ids, sampling_params=sampling, request_id="mine").json()
    assert found["request_id"] == "mine" and found["usage"]["completion_tokens"] == 12
    assert found["choices"] == [{"index": 0, "token_ids": wanted, "finish_reason": "length", "stop_reason": None,
                                 "logprobs": None}]
    text = server.post("/inference/v1/generate", token_ids=ids, sampling_params=sampling, stream=True,
                       stream_options={"include_usage": True}).text
    *events, last = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    parts = [json.loads(event) for event in events]
    assert last == "[DONE]" and parts[-1]["usage"]["completion_tokens"] == 12
    assert [token for part in parts for choice in part["choices"] for token in choice["token_ids"]] == wanted
    many = server.post("/inference/v1/generate", token_ids=ids, sampling_params={**sampling, "n": 2, "logprobs": 1}).json()
    assert [choice["token_ids"] for choice in many["choices"]] == [wanted] * 2
    assert len(many["choices"][0]["logprobs"]["content"]) == 12
    short = server.post("/inference/v1/generate", token_ids=ids).json()
    assert short["usage"]["completion_tokens"] > 16, "up to the context's end, as in a chat"
    scored = server.post("/inference/v1/generate", token_ids=ids, sampling_params={**sampling, "logprobs": 0}).json()
    assert all(len(entry["top_logprobs"]) == 1 for entry in scored["choices"][0]["logprobs"]["content"])
    prompt = server.post("/inference/v1/generate", token_ids=ids, sampling_params={**sampling, "prompt_logprobs": 1}).json()
    assert len(prompt["prompt_logprobs"]) == len(ids) and prompt["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("body, param", [
    ({"token_ids": []}, "token_ids"), ({"token_ids": [1], "sampling_params": {"colour": 1}}, "sampling_params"),
    ({"token_ids": [1], "sampling_params": {"stop": ["a"], "detokenize": False}}, "sampling_params"),
    ({"token_ids": [10**6]}, "prompt"), ({"token_ids": [1], "features": {}}, "features"),
    ({"token_ids": [1], "sampling_params": {"model": "stories"}}, "sampling_params"),
    ({"token_ids": [1], "sampling_params": {"echo": True}}, "sampling_params"),
])
def test_refused_generations(server: Served, body: dict[str, Any], param: str) -> None:
    assert (error_of(server.post("/inference/v1/generate", **body))["param"] or "").startswith(param)


def test_several_conversations(server: Served) -> None:
    """Each is answered as alone, with scores, ids and schemas, and the tokens of all are counted."""
    chats = [[{"role": "user", "content": text}] for text in ("Once", "The end of the day", "Lily")]
    asked = {**CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    found = server.post("/v1/chat/completions/batch", **{**asked, "messages": chats}).json()
    alone = [chat(server, **{**asked, "messages": messages}) for messages in chats]
    for index, (choice, one) in enumerate(zip(found["choices"], alone, strict=True)):
        assert choice == {**one["choices"][0], "index": index}
    for field in ("prompt_tokens", "completion_tokens"):
        assert found["usage"][field] == sum(one["usage"][field] for one in alone)
    twice = server.post("/v1/chat/completions/batch", **{**asked, "messages": chats, "n": 2}).json()["choices"]
    assert [choice["message"] for choice in twice] == [one["message"] for one in found["choices"] for _ in range(2)]
    said: dict[int, str] = {}
    streamed = server.post("/v1/chat/completions/batch", **{**asked, "messages": chats, "stream": True}).text
    for line in streamed.split("\n\n")[:-2]:
        for part in json.loads(line.removeprefix("data: "))["choices"]:
            said[part["index"]] = said.get(part["index"], "") + part["delta"].get("content", "")
    assert said == {choice["index"]: choice["message"]["content"] for choice in found["choices"]}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    held = server.post("/v1/chat/completions/batch", messages=chats, response_format=schema).json()["choices"]
    assert len(held) == 3 and all(json.loads(choice["message"]["content"]) in ("yes", "no") for choice in held)


def test_log_probabilities_of_named_tokens(server: Served) -> None:
    """Every kind of answer reports the tokens of logprob_token_ids, each once, with the log-softmax of transformers."""
    ids, named = server.post("/tokenize", prompt="Once upon a time").json()["tokens"], [300, 7, 300, 41]
    model = AutoModelForCausalLM.from_pretrained(need(MODELS / "stories260k"), dtype=torch.float32)
    asked = {"prompt": ids, "temperature": 0, "max_tokens": 3, "logprob_token_ids": named, "return_tokens_as_token_ids": True,
             "return_token_ids": True}
    whole = server.complete(**asked, logprobs=5)["choices"][0]
    exact = model(torch.tensor([ids + whole["token_ids"]])).logits[0, len(ids) - 1:].log_softmax(-1)
    tops = whole["logprobs"]["top_logprobs"]
    for place, (token, top) in enumerate(zip(whole["token_ids"], tops, strict=True)):
        assert {int(name.removeprefix("token_id:")) for name in top} == {token, 300, 7, 41}
        for name, value in top.items():
            assert value == pytest.approx(exact[place, int(name.removeprefix("token_id:"))].item(), abs=2e-2)
    events = server.post("/v1/completions", **asked, logprobs=0, n=2, stream=True).text.split("\n\n")[:-2]
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    for choice in (json.loads(event.removeprefix("data: "))["choices"][0] for event in events):
        streamed[choice["index"]] += choice["logprobs"]["top_logprobs"]
    assert streamed == {0: tops, 1: tops}
    body = {**CHAT, **{name: value for name, value in asked.items() if name != "prompt"}, "logprobs": True}
    alone = chat(server, **body, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [[entry["token"] for entry in line["top_logprobs"]] for line in alone] == [
        ["token_id:300", "token_id:7", "token_id:41"]] * 3
    both = server.post("/v1/chat/completions/batch", **{**body, "messages": [CHAT["messages"]] * 2}).json()["choices"]
    assert [one["logprobs"]["content"] for one in both] == [alone] * 2
    made = server.post("/inference/v1/generate", token_ids=ids, sampling_params={
        "temperature": 0, "max_tokens": 3, "logprob_token_ids": named}).json()["choices"][0]
    assert [[entry["logprob"] for entry in line["top_logprobs"]] for line in made["logprobs"]["content"]] == [
        [top[f"token_id:{token}"] for token in (300, 7, 41)] for top in tops]
    echoed = server.complete(**asked, logprobs=1, echo=True)["choices"][0]["logprobs"]["top_logprobs"]
    assert echoed[len(ids):] == tops and all(len(top) <= 2 for top in echoed[1:len(ids)]), "of a prompt, the most likely ones"


def test_log_probabilities_of_the_whole_vocabulary(server: Served) -> None:
    """-1 where --max-logprobs allows it: every token once, the most likely first, and together they are certain."""
    body = {**CHAT, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1, "return_tokens_as_token_ids": True}
    refused = server.post("/v1/chat/completions", **body)
    assert refused.status_code == 400 and "is 512; at most 20 are possible (--max-logprobs)" in error_of(refused)["message"]
    with served(need(MODELS / "stories260k"), "--max-model-len", "512", "--chat-template", TEMPLATE, "--max-logprobs", "-1",
                "--max-request-scores", "1000") as whole:
        found = chat(whole, **body)
        for line in found["choices"][0]["logprobs"]["content"]:
            values = [entry["logprob"] for entry in line["top_logprobs"]]
            assert len({entry["token"] for entry in line["top_logprobs"]}) == 512 and values == sorted(values, reverse=True)
            assert sum(map(math.exp, values)) == pytest.approx(1, abs=1e-3)
        prompt = found["prompt_logprobs"][1:]
        assert prompt and all({entry["rank"] for entry in line.values()} == {*range(1, 513)} for line in prompt)
        several = whole.post("/v1/chat/completions", **{**body, "n": 2})
        assert several.status_code == 400 and "--max-request-scores" in error_of(several)["message"]
        text = whole.complete(prompt="Once", echo=True, logprobs=-1, max_tokens=2, return_tokens_as_token_ids=True)
        assert all(len(top) == 512 for top in text["choices"][0]["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize("body, words", [
    ({"logprob_token_ids": []}, "logprob_token_ids"), ({"logprob_token_ids": [5], "logprobs": None}, "logprob_token_ids"),
    ({"logprob_token_ids": list(range(21))}, "number of logprob_token_ids is 21; at most 20"),
    ({"logprob_token_ids": list(range(300_000))}, "logprob_token_ids"), ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [10**6]}, "logprob_token_ids names token 1000000"),
    ({"logprob_token_ids": "5"}, "logprob_token_ids"),
    ({"logprob_token_ids": [5], "use_beam_search": True}, "logprob_token_ids"),
    ({"logprob_token_ids": [5], "echo": True, "max_tokens": 0}, "logprob_token_ids"),
    ({"logprob_token_ids": list(range(20)), "prompt": ["a"] * 1000}, "16384"),
])
def test_refused_names_of_tokens(server: Served, body: dict[str, Any], words: str) -> None:
    answer = server.post("/v1/completions", **{"prompt": "Once", "max_tokens": 2, "logprobs": 1, **body})
    assert answer.status_code == 400 and words in error_of(answer)["message"], answer.text


@pytest.mark.parametrize("body, param", [
    ({"messages": []}, "messages"), ({"messages": CHAT["messages"]}, "messages[0]"),
    ({"messages": [[{"content": "a"}]]}, "messages"), ({"prompt_logprobs": 1}, "prompt_logprobs"), ({"colour": 1}, "colour"),
    ({"messages": [CHAT["messages"]] * 3000, "logprobs": True, "top_logprobs": 20}, "logprobs"),
    ({"messages": [CHAT["messages"]] * 5000}, "messages"),
    ({"messages": [CHAT["messages"], [{"role": "user", "content": "a " * 5000}]]}, "messages"),
])
def test_refused_batches(server: Served, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/chat/completions/batch", **{**CHAT, "messages": [CHAT["messages"]], **body})
    assert answer.status_code == 400 and (error_of(answer)["param"] or "").startswith(param), answer.text


def test_a_begun_answer_is_echoed(server: Served) -> None:
    """`echo` tells what the assistant had said already, and nothing of what others said."""
    begun = [*CHAT["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Lily had"}]}]
    asked = {**CHAT, "messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    rest = chat(server, **asked)["choices"][0]["message"]["content"]
    assert chat(server, **asked, echo=True)["choices"][0]["message"]["content"] == "Lily had" + rest
    lines = server.post("/v1/chat/completions", **asked, echo=True, stream=True).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for line in lines[:-2]]
    assert parts[0] == "Lily had" and "".join(parts) == "Lily had" + rest
    batch = server.post("/v1/chat/completions/batch", **{**asked, "messages": [begun, begun]}, echo=True).json()["choices"]
    assert [choice["message"]["content"] for choice in batch] == ["Lily had" + rest] * 2
    plain = chat(server, **CHAT)["choices"][0]["message"]["content"]
    assert chat(server, **CHAT, echo=True)["choices"][0]["message"]["content"] == plain


def test_attributes_that_vllms_clients_read(server: Served) -> None:
    """Null where nobody asked: a client that reads them must not fail."""
    text, chat = server.complete(prompt=[5, 6, 7], max_tokens=3), server.post("/v1/chat/completions", **CHAT).json()
    assert {name: text["choices"][0][name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")} == dict.fromkeys(
        ("token_ids", "prompt_token_ids", "prompt_logprobs"))
    assert text["kv_transfer_params"] is chat["kv_transfer_params"] is chat["prompt_token_ids"] is None
    message = chat["choices"][0]["message"]
    assert {message[name] for name in ("reasoning", "annotations", "audio", "function_call", "refusal")} == {None}
    assert "tool_calls" not in message and chat["choices"][0]["token_ids"] is None
    same = server.post("/invocations", **CHAT).json()
    assert same.keys() == chat.keys() and same["choices"] == chat["choices"]


def test_either_end_of_a_prompt_may_be_cut(server: Served) -> None:
    asked = {"max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True}
    for side, kept in (("left", [8, 9, 10]), ("right", [5, 6, 7])):
        found = server.complete(prompt=[*range(5, 11)], truncation_side=side, **asked)
        assert found["choices"][0]["prompt_token_ids"] == kept
    echoed = server.complete(prompt="Once upon a time there", echo=True, truncation_side="right", **asked)["choices"][0]
    begun = server.post("/detokenize", tokens=echoed["prompt_token_ids"][1:]).json()["prompt"].strip()
    assert begun and "Once upon".startswith(begun) and begun in echoed["text"] and "there" not in echoed["text"]
    whole = server.post("/v1/embeddings", input=[5, 6, 7]).json()["data"][0]["embedding"]
    cut = server.post("/v1/embeddings", input=[*range(5, 11)], truncate_prompt_tokens=3, truncation_side="right").json()
    assert cut["data"][0]["embedding"] == whole and cut["usage"]["prompt_tokens"] == 3


def test_abort(server: Served) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(server.url + "/v1/completions", timeout=60, headers={"x-request-id": "long"}, json={
            "prompt": "Once", "max_tokens": 480, "ignore_eos": True, "n": 64}))

    thread = threading.Thread(target=ask)
    thread.start()
    until = time.monotonic() + 10
    while not (found := server.post("/abort_requests", request_ids=["cmpl-long", "other"]).json()["aborted"]):
        assert time.monotonic() < until
        time.sleep(0.01)
    thread.join()
    assert found == ["cmpl-long"] and answers[0].status_code == 400 and error_of(answers[0])["code"] == "aborted"
    assert server.settle()["penstock:requests_live"] == 0


def test_refused_routes(server: Served) -> None:
    answer = server.post("/collective_rpc")
    assert answer.status_code == 501 and "/collective_rpc" in error_of(answer)["message"]
    for path in ("/start_profile", "/stop_profile"):
        answer = server.post(path)
        assert answer.status_code == 400 and "--torch-profiler-dir" in error_of(answer)["message"]
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("more", [
    (), pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.exhaustive)])
def test_profiles(more: tuple[str, ...], tmp_path: Path) -> None:
    """A trace with rows of each rank has the operations of the steps between, and no others."""
    with served("canary", "--torch-profiler-dir", str(tmp_path / "traces"), "--max-model-len", "64", *more) as server:
        answer = server.post("/stop_profile")
        assert answer.status_code == 400 and "/start_profile" in error_of(answer)["message"]
        operations: list[int] = []
        for tokens in (1, 9):
            assert server.post("/start_profile").json() == {"success": True}
            assert server.post("/v1/completions", prompt="Once", max_tokens=tokens, ignore_eos=True).status_code == 200
            paths = server.post("/stop_profile").json()["traces"]
            assert len(paths) == 1 and [str(path) for path in (tmp_path / "traces").iterdir()].count(paths[0]) == 1
            events = json.loads(Path(paths[0]).read_text())["traceEvents"]
            times = defaultdict[int, list[float]](list)
            for event in events:
                if event["name"].startswith("aten::"):
                    times[event["pid"]].append(event["ts"])
            labels = {event["args"]["labels"]: event["pid"] for event in events if event["name"] == "process_labels"}
            ranks = [labels[name] for name in (["rank 0", "rank 1"] if more else ["CPU"])]
            assert {*ranks} == {*times} and max(map(min, times.values())) < min(map(max, times.values())), "one time line"
            operations += [len(times[rank]) for rank in ranks]
        half = len(operations) // 2
        assert all(0 < 2 * few < many for few, many in zip(operations[:half], operations[half:], strict=True)), operations
        assert server.post("/v1/completions", prompt="Once", max_tokens=2).status_code == 200
        assert len([*(tmp_path / "traces").iterdir()]) == 2 * len(paths)


def test_metrics_have_vllms_names(server: Served) -> None:
    text = server.http.get("/metrics").text
    for name in NAMES:
        assert f"\n{name}{{" in text, name
    assert 'kv_cache_size_tokens="' in text and 'kv_cache_max_concurrency="' in text
    assert 'reason="capacity"' in text and 'reason="deferred"' in text and 'sleep_state="awake"' in text
