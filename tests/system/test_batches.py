"""OpenAI's files and batches with canary: by the official client, and through kill -9 in the midst of a batch."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.served import NAME, Served, error_of, served

WORDS = ("dog", "cat", "sun", "red", "sea", "tree")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served("canary", "--max-model-len", "512", "--api-key", "one,two") as server:
        server.http.headers["authorization"] = "Bearer one"
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0)


def lines(count: int, url: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"line {place}", "method": "POST", "url": url, "body": {
        "messages": [{"role": "user", "content": f"Repeat: {WORDS[place % len(WORDS)]} {place}"}], "temperature": 0,
        "max_tokens": 20, **body}} for place in range(count)]


def stored(client: openai.OpenAI, found: list[dict[str, Any]]) -> str:
    data = "\n".join(map(json.dumps, found)).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch").id


def begin(client: openai.OpenAI, found: list[dict[str, Any]], endpoint: str = "/v1/chat/completions",
          window: str = "24h") -> Any:
    return client.batches.create(input_file_id=stored(client, found), endpoint=endpoint, completion_window=window)


def ended(client: openai.OpenAI, batch: Any, seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while (found := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def answers(client: openai.OpenAI, name: str | None) -> dict[str, dict[str, Any]]:
    """Lines of a file by custom_id, each of which is there once."""
    if name is None:
        return {}
    found = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def test_files(client: openai.OpenAI, server: Served) -> None:
    content = b'{"a": 1}\r\n--x\r\nnot the end\n'
    made = client.files.create(file=("a.jsonl", io.BytesIO(content)), purpose="user_data")
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(content), "a.jsonl", "user_data", "file")
    assert client.files.content(made.id).content == content and client.files.retrieve(made.id).id == made.id
    assert made.id in [file.id for file in client.files.list()]
    assert made.id not in [file.id for file in client.files.list(purpose="batch")]
    for _ in range(2):
        client.files.create(file=("b.jsonl", io.BytesIO(b"{}")), purpose="evals")
    assert [file.id for file in client.files.list(purpose="user_data", limit=1)] == [made.id], "newer ones fill the first page"
    other = openai.OpenAI(base_url=server.url + "/v1", api_key="two", max_retries=0)
    for wrong in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            wrong(made.id)
    assert list(other.files.list()) == []
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    short = client.files.create(file=("b", io.BytesIO(b"x")), purpose="batch", expires_after={"anchor": "created_at",
                                                                                              "seconds": 3600})
    assert short.expires_at is not None and abs(short.expires_at - time.time() - 3600) < 60
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("b", io.BytesIO(b"x")), purpose="party")  # type: ignore[arg-type]
    plain = server.http.post("/v1/files", content=b"abc", headers={"content-type": "text/plain"})
    assert plain.status_code == 415 and error_of(plain)["code"] == "unsupported_media_type"


def test_a_batch_answers_as_the_endpoint_does(client: openai.OpenAI) -> None:
    asked = lines(12)
    asked[5]["body"]["colour"] = "red"
    batch = begin(client, asked)
    assert batch.object == "batch" and batch.status == "validating" and batch.expires_at - batch.created_at == 86400
    found = ended(client, batch)
    assert found.status == "completed" and found.completed_at >= found.in_progress_at >= found.created_at
    assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (12, 11, 1)
    good, bad = answers(client, found.output_file_id), answers(client, found.error_file_id)
    assert bad.keys() == {"line 5"} and bad["line 5"]["response"]["status_code"] == 400
    assert "colour" in bad["line 5"]["response"]["body"]["error"]["message"]
    for line in asked:
        if line["custom_id"] != "line 5":
            said = client.chat.completions.create(model=NAME, **line["body"]).choices[0].message.content
            answer = good[line["custom_id"]]
            assert answer["error"] is None and answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["choices"][0]["message"]["content"] == said
    assert list(good) == [line["custom_id"] for line in asked if line["custom_id"] != "line 5"], "in the order of the input"
    assert found.id in [one.id for one in client.batches.list()]


def test_embeddings(client: openai.OpenAI) -> None:
    asked = [{"custom_id": word, "method": "POST", "url": "/v1/embeddings", "body": {"input": word}} for word in WORDS]
    found = answers(client, ended(client, begin(client, asked, "/v1/embeddings")).output_file_id)
    wanted = client.embeddings.create(model=NAME, input="sea", encoding_format="float").data[0].embedding
    assert found["sea"]["response"]["body"]["data"][0]["embedding"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("change, code", [
    (lambda found: found[1].update(custom_id="line 0"), "duplicate_custom_id"),
    (lambda found: found[1].pop("custom_id"), "missing_custom_id"),
    (lambda found: found[1].update(url="/v1/completions"), "invalid_url"),
    (lambda found: found[1]["body"].update(stream=True), "invalid_body"),
    (lambda found: found[1].update(method="GET"), "invalid_method"),
])
def test_a_faulty_line_fails_the_batch_before_anything_runs(client: openai.OpenAI, change: Any, code: str) -> None:
    asked = lines(3)
    change(asked)
    found = ended(client, begin(client, asked))
    assert found.status == "failed" and [(error.code, error.line) for error in found.errors.data] == [(code, 2)]


def test_refusals(client: openai.OpenAI, server: Served) -> None:
    name = stored(client, lines(1))
    for body in ({"endpoint": "/v1/files"}, {"completion_window": "soon"}, {"colour": 1}):
        answer = server.post("/v1/batches", **{"input_file_id": name, "endpoint": "/v1/completions", **body})
        assert answer.status_code == 400, answer.text
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint="/v1/chat/completions", completion_window="24h")


def test_cancel_and_expiry(client: openai.OpenAI, server: Served) -> None:
    endless = lines(200, max_tokens=400, ignore_eos=True)
    batch = begin(client, endless)
    until = time.monotonic() + 30
    while client.batches.retrieve(batch.id).status != "in_progress":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    found = ended(client, batch)
    good, bad = answers(client, found.output_file_id), answers(client, found.error_file_id)
    assert found.status == "cancelled" and found.cancelled_at and len(good) + len(bad) == 200 and not good.keys() & bad.keys()
    assert {line["error"]["code"] for line in bad.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="already"):
        client.batches.cancel(batch.id)
    found = ended(client, begin(client, endless, window="1s"))
    good, bad = answers(client, found.output_file_id), answers(client, found.error_file_id)
    assert found.status == "expired" and len(good) + len(bad) == 200
    assert {line["error"]["code"] for line in bad.values()} == {"batch_expired"}
    assert server.settle()["penstock:requests_live"] == 0


def test_others_come_first(client: openai.OpenAI, server: Served) -> None:
    batch = begin(client, lines(300, max_tokens=100, ignore_eos=True))
    time.sleep(1.0)
    began = time.monotonic()
    said = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Repeat: dog"}], max_tokens=4)
    assert said.choices and client.batches.retrieve(batch.id).status == "in_progress", "the answer came before the batch's end"
    assert time.monotonic() - began < 20
    client.batches.cancel(batch.id)
    ended(client, batch)


def killed(folder: Path, kills: int, seed: int) -> None:
    """A batch through `kills` ends by SIGKILL of both processes at random times: every line is answered exactly once."""
    draw, asked = random.Random(seed), lines(60)
    flags = ("--max-model-len", "512", "--store", str(folder), "--max-num-seqs", "8")
    batch: Any = None
    for _ in range(kills):
        server = Served("canary", *flags)
        try:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            batch = batch or begin(client, asked)
            time.sleep(draw.uniform(0, 0.6))
            if draw.random() < 0.3:
                os.kill(server.engine_pid, signal.SIGKILL)
            server.process.kill()
            server.process.wait()
        finally:
            server.stop()
    with served("canary", *flags) as last:
        client = openai.OpenAI(base_url=last.url + "/v1", api_key="none", max_retries=0)
        found = ended(client, batch)
        assert found.status == "completed" and found.request_counts.completed == len(asked)
        good = answers(client, found.output_file_id)
        assert list(good) == [line["custom_id"] for line in asked] and found.error_file_id is None
        line = draw.choice(asked)
        said = client.chat.completions.create(model=NAME, **line["body"]).choices[0].message.content
        assert good[line["custom_id"]]["response"]["body"]["choices"][0]["message"]["content"] == said


def test_a_batch_survives_kill_9(tmp_path: Path) -> None:
    killed(tmp_path, 2, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_survives_50_kills(tmp_path: Path, seed: int) -> None:
    killed(tmp_path, 10, seed)


@pytest.mark.exhaustive
def test_a_stopped_server_leaves_its_batch_to_the_next(tmp_path: Path) -> None:
    flags = ("--max-model-len", "512", "--store", str(tmp_path), "--max-num-seqs", "4")
    with served("canary", *flags) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        batch = begin(client, lines(40, max_tokens=100, ignore_eos=True))
        time.sleep(0.5)
        server.signal()
        began = time.monotonic()
        assert server.ended() == 0 and time.monotonic() - began < 10, "a batch does not hold up a shutdown"
    with served("canary", *flags) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert len(answers(client, ended(client, batch).output_file_id)) == 40
