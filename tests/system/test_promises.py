"""Classes, deadlines, ledgers, limits of keys, and the model of step time, by HTTP; and simulation by what a server says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from penstock.core import service
from penstock.core.errors import ConfigError, RequestError
from penstock.core.request import PHASES
from penstock.core.sampling import SamplingParams
from penstock.core.steptime import TERMS
from penstock.engine.llm import LLM
from penstock.server import keys
from tests.system.served import Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PARTS = {*PHASES, "draft", "detokenize", "sent"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("promises")
    classes = folder / "classes.json"
    classes.write_text('{"agents": {"ttft": 5, "tpot": 0.5, "weight": 5}, "strict": {"ttft": 0.01}}')
    made = {"plain": keys.make("a"), "flex": keys.make("b", tier="batch"),
            "few": keys.make("c", requests_per_minute=3, tokens_per_minute=1000),
            "tokens": keys.make("d", tokens_per_minute=20)}
    keys.write(folder / "keys.jsonl", [key for _, key in made.values()])
    return {"classes": str(classes), "file": str(folder / "keys.jsonl"), **{name: secret for name, (secret, _) in made.items()}}


@pytest.fixture(scope="module")
def server(secrets: dict[str, Any]) -> Iterator[Served]:
    with served("canary", "--max-model-len", "1024", "--keys-file", secrets["file"], "--classes", secrets["classes"],
                "--max-num-seqs", "2", "--log-format", "json") as server:
        server.http.headers["authorization"] = f"Bearer {secrets['plain']}"
        yield server


def ask(server: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return server.http.post(TEXT, json={"prompt": "Hi", "max_tokens": 4, **body}, headers=headers or {})


def test_a_request_names_its_class(server: Served, secrets: dict[str, Any]) -> None:
    flex = {"authorization": f"Bearer {secrets['flex']}"}
    for body, headers, expected in (
            ({"service_tier": "auto"}, {}, "default"), ({"service_tier": "priority"}, {}, "priority"),
            ({"service_tier": "interactive"}, {}, "priority"), ({"service_tier": "agents"}, {}, "agents"),
            ({"service_tier": "auto"}, {"x-penstock-class": "agents"}, "agents"), ({"service_tier": "auto"}, flex, "flex"),
            ({"service_tier": "default"}, flex, "default"), ({}, {"x-penstock-class": "batch"}, None)):
        answer = ask(server, headers, **body)
        assert answer.status_code == 200 and answer.json()["service_tier"] == expected, (body, headers, answer.text)
    refused = ask(server, service_tier="golden")
    assert refused.status_code == 400 and "there is no class 'golden'; possible: auto, default" in refused.text


def test_a_deadline_ends_a_request_at_once(server: Served) -> None:
    began = time.monotonic()
    expired = ask(server, {"x-penstock-deadline": "0.2"}, max_tokens=1000, ignore_eos=True)
    assert expired.status_code == 504 and "its deadline has passed" in expired.text and time.monotonic() - began < 20
    assert ask(server, {"x-penstock-deadline": "60"}).status_code == 200
    for header, value in (("x-penstock-deadline", "soon"), ("x-penstock-deadline", "-1"), ("x-penstock-wait", "maybe")):
        refused = ask(server, {header: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == header


def test_a_promise_that_cannot_be_kept_is_refused_and_can_be_waived(server: Served) -> None:
    with httpx.Client(base_url=server.url, headers=server.http.headers, timeout=60) as client:
        body = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "stream": True}
        ahead = {"x-penstock-class": "strict", "x-penstock-wait": "true"}
        streams = [client.stream("POST", TEXT, json=body, headers=ahead) for _ in range(12)]
        opened = [stream.__enter__() for stream in streams]
        try:
            time.sleep(0.1)
            began = time.monotonic()
            refused = ask(server, {"x-penstock-class": "strict"})
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "overloaded", refused.text
            assert int(refused.headers["retry-after"]) >= 1 and time.monotonic() - began < 5
        finally:
            for stream in streams:
                stream.__exit__(None, None, None)
        assert all(answer.status_code == 200 for answer in opened)
    assert ask(server, {"x-penstock-class": "strict", "x-penstock-wait": "true"}).status_code == 200


def checked(ledger: dict[str, float]) -> None:
    assert set(ledger) >= PARTS | {"total"} and min(ledger.values()) >= 0
    assert sum(ledger[name] for name in PARTS) == pytest.approx(ledger["total"], rel=0.01, abs=1e-3)


def test_a_ledger_accounts_for_all_of_the_time(server: Served) -> None:
    for route, body in ((TEXT, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})):
        for extra in ({}, {"n": 2}, {"stop": ["e"]}, {"stream": True}, {"structured_outputs": {"regex": "[a-z]{20}"}}):
            answer = server.http.post(route, json={**body, "max_tokens": 30, "include_ledger": True, **extra})
            assert answer.status_code == 200, answer.text
            if "stream" in extra:
                events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                found = json.loads(events[-1])["ledger"]
            else:
                found = answer.json()["ledger"]
            checked(found)
            assert found["prefill"] > 0
    assert "ledger" not in ask(server).json()
    name = "ledger-of-this-one"
    assert ask(server, {"x-request-id": name}, max_tokens=50).status_code == 200
    until = time.monotonic() + 5
    while not (lines := [line for line in server.log.splitlines() if name in line]):
        assert time.monotonic() < until
        time.sleep(0.05)
    said = json.loads(lines[-1])
    checked(said["ledger"])
    assert said["ledger"]["total"] + said["ledger"]["received"] == pytest.approx(said["seconds"], rel=0.01, abs=1e-3)


def test_limits_of_a_key_are_in_openais_headers(server: Served, secrets: dict[str, Any]) -> None:
    few = {"authorization": f"Bearer {secrets['few']}"}
    first = ask(server, few)
    assert first.headers["x-ratelimit-limit-requests"] == "3" and first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000" and first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert int(ask(server, few).headers["x-ratelimit-remaining-tokens"]) < 1000
    assert ask(server, few).status_code == 200
    refused = ask(server, few)
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 20 and refused.headers["x-ratelimit-remaining-requests"] == "0"
    tokens = {"authorization": f"Bearer {secrets['tokens']}"}
    assert ask(server, tokens, prompt="a b c d e f g h", max_tokens=40, ignore_eos=True).status_code == 200
    refused = ask(server, tokens)
    assert refused.status_code == 429 and "20 tokens a minute" in refused.text and int(refused.headers["retry-after"]) > 30


def test_a_server_says_what_its_steps_cost_and_a_trace_is_simulated_by_it(
        server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server)
    cost = server.http.get("/step_time")
    assert cost.status_code == 200 and set(cost.json()["weights"]) == set(TERMS)
    (tmp_path / "cost.json").write_text(cost.text)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({
        "timestamp": 10 * i, "input_length": 100, "output_length": 5, "hash_ids": [0], "tenant": f"t{i % 3}",
        **({"class": "interactive"} if i % 2 else {})}) for i in range(20)))
    assert main(["simulate", str(trace), "--model-cost", str(tmp_path / "cost.json"), "--replicas", "2", "--json",
                 "--svg", str(tmp_path / "a.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 20 and found["hit_rate"] > 0.5 and set(found["classes"]) == {"interactive", "standard"}
    assert len(found["utilisation"]) == 2 and "<svg" in (tmp_path / "a.svg").read_text()
    assert main(["plan", str(trace), "--model-cost", str(tmp_path / "cost.json"), "--slo", "ttft=20,tpot=5"]) == 0
    assert capsys.readouterr().out.startswith("1 replicas keep ttft=20,tpot=5")
    assert main(["plan", str(trace), "--model-cost", str(tmp_path / "cost.json"), "--slo", "ttft=1e-7", "--most", "2"]) == 1


def test_offline_requests_have_classes_too() -> None:
    with LLM("canary", max_model_len=256, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=4, temperature=0)
        plain = llm.generate(["Hi", "Hello"], params, use_tqdm=False)
        found = llm.generate(["Hi", "Hello"], params, use_tqdm=False, service_tier=["flex", "interactive"])
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
        with pytest.raises(RequestError, match="there is no class 'golden'"):
            llm.generate("Hi", params, use_tqdm=False, service_tier="golden")


@pytest.mark.parametrize(("text", "says"), [
    ("[]", "has no classes"), ('{"auto": {}}', "cannot be called 'auto'"), ('{"x": {"ttft": 0}}', "must be above 0"),
    ('{"x": {"speed": 1}}', "unknown field")])
def test_a_file_of_classes_that_cannot_be_used_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        service.read(str(tmp_path / "classes.json"))
    with pytest.raises(ConfigError, match="cannot read the classes"):
        service.read(str(tmp_path / "nothing.json"))
