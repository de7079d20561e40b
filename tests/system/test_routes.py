"""Routes as clients, proxies and people reach them: slashes, prefixes, CORS, /docs, the schema, sockets and certificates."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.schema import ServerOptions
from penstock.engine.async_llm import AsyncLLM
from penstock.server.app import Application
from tests.system.served import NAME, Served, error_of, served

PAGE = "http://page.example"
KEY = {"Authorization": "Bearer secret"}
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", "--api-key", "secret", "--allowed-origins", PAGE, "--root-path", "/llm", "--max-logprobs", "30",
                "--return-tokens-as-token-ids", "--override-generation-config", '{"temperature": 0, "max_new_tokens": 5}',
                "--trust-remote-code", "--generation-config", "vllm") as server:
        server.http.headers.update(KEY)
        yield server


def test_refusals_carry_cors_headers(server: Served) -> None:
    """A browser shows a page nothing of an answer that lacks them, not even that the key is wrong."""
    for path, more, status in (("/v1/models", {"Authorization": "Bearer wrong"}, 401), ("/v1/nowhere", {}, 404),
                               ("/v1/completions", {}, 405), ("/v1/models", {}, 200)):
        answer = server.http.get(path, headers={"Origin": PAGE, **more})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE, path
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    broken = server.http.post("/v1/completions", content=b"{", headers={"Origin": PAGE, "Content-Type": "application/json"})
    assert broken.status_code == 400 and broken.headers["access-control-allow-origin"] == PAGE
    asked = server.http.options("/v1/completions", headers={
        "Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers={"Origin": "http://evil"}).headers


def test_slashes_and_prefixes(server: Served) -> None:
    for path in ("/v1/models", "/v1/models/", "/llm/v1/models", "/llm/v1/models/", f"/v1/models/{NAME}/"):
        assert server.http.get(path).status_code == 200, path
        assert server.http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401, path
    assert server.http.post("/v1/completions/", json={"prompt": "a", **SHORT}).status_code == 200
    assert server.http.get("/llmv1/models").status_code == 404
    assert server.http.get("/llm/health/", headers={"Authorization": ""}).status_code == 200
    document = server.http.get("/llm/openapi.json").json()
    assert document["servers"] == [{"url": "/llm"}]


def test_the_page_for_people_needs_no_network(server: Served) -> None:
    answer = server.http.get("/docs")
    page = answer.text
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "src=" not in page and "<script" not in page and "http://" not in page and "https://" not in page
    for told in ("/v1/chat/completions", "max_completion_tokens", "needs a key", "href=openapi.json", 'id="Message"'):
        assert told in page
    assert len(page) < 300_000


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema without and with keys."""
    return tuple(Application(AsyncLLM("canary"), ServerOptions(**options)).document  # type: ignore[return-value]
                 for options in ({}, {"api_key": ["k"]}))


def test_the_schema() -> None:
    openly, keyed = documents()
    assert "securitySchemes" not in openly["components"]
    names: set[str] = set()
    for path, methods in openly["paths"].items():
        for method, described in methods.items():
            assert "security" not in described
            assert ("security" in keyed["paths"][path][method]) is (path not in ("/health", "/ready", "/ping"))
            names.add(described["operationId"])
            for content in described["responses"]["200"]["content"].values():
                assert content["schema"], path
    assert len(names) == sum(map(len, openly["paths"].values())), "a client's method names are unique"
    text = json.dumps(openly)
    for name in {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in openly["components"]["schemas"]
    for name, schema in openly["components"]["schemas"].items():
        assert schema.get("title", name) == name, "generators name classes by titles"
    assert '"type": "array"}' not in text, "lists of anything say so: generators of clients stop there"
    body = {path: openly["paths"][path]["post"]["requestBody"]["content"] for path in ("/invocations", "/v1/files")}
    kinds = body["/invocations"]["application/json"]["schema"]["anyOf"]
    assert [kind["$ref"].rpartition("/")[2] for kind in kinds] == [
        "ChatRequest", "CompletionRequest", "EmbeddingRequest", "ClassifyRequest", "RerankRequest", "ScoreRequest"]
    form = openly["components"]["schemas"][body["/v1/files"]["multipart/form-data"]["schema"]["$ref"].rpartition("/")[2]]
    assert form["required"] == ["file", "purpose"] and form["properties"]["file"]["format"] == "binary"
    answer = openly["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert answer["application/json"]["schema"]["$ref"].endswith("/ChatCompletion")
    event, failed = answer["text/event-stream"]["schema"]["anyOf"]
    assert event["$ref"].endswith("/Chunk") and failed["$ref"].endswith("/Error"), "a stream may end with an error"
    binary = {path for path, methods in openly["paths"].items() for one in methods.values()
              if "application/octet-stream" in one["responses"]["200"]["content"]}
    assert binary == {"/v1/embeddings", "/pooling", "/v1/pooling", "/invocations", "/v1/files/{file}/content"}
    assert "application/x-ndjson" in openly["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" in openly["paths"]["/v1/responses/{response}"]["get"]["responses"]["200"]["content"]
    sources = openly["paths"]["/kv_event_sources"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert sources["type"] == "array" and sources["items"]["type"] == "object"
    assert "post" in openly["paths"]["/ping"] and "/v1/tokenize" in openly["paths"] and "/invocations" in openly["paths"]


def test_invocations(server: Served) -> None:
    for body, path in (({"messages": HELLO}, "/v1/chat/completions"), ({"prompt": "Once"}, "/v1/completions")):
        same = server.post(path, **body, **SHORT).json()
        answer = server.post("/invocations", **body, **SHORT).json()
        assert (answer["object"], answer["choices"]) == (same["object"], same["choices"])
        streamed = server.post("/invocations", **body, **SHORT, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream") and streamed.text.endswith("data: [DONE]\n\n")
    for body, path in (({"input": "a"}, "/v1/embeddings"), ({"query": "a", "documents": ["b", "c"]}, "/rerank"),
                       ({"queries": "a", "documents": ["b", "c"]}, "/score")):
        same, answer = (server.post(place, **body).json() for place in (path, "/invocations"))
        assert answer.keys() == same.keys() and all(answer.get(name) == same.get(name) for name in ("data", "results"))
    for body in ({"colour": "a"}, {}, {"messages": 1}):
        assert server.post("/invocations", **body).status_code == 400
    assert error_of(server.post("/invocations", colour="a"))["param"] == "messages"


def test_tokenizer_routes(server: Served) -> None:
    tokens = server.post("/v1/tokenize", prompt="Hello").json()
    assert tokens == server.post("/tokenize", prompt="Hello").json()
    assert server.post("/v1/detokenize", tokens=tokens["tokens"]).json()["prompt"] == "Hello"
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] and "messages" in info["chat_template"] and isinstance(info["tokenizer_class"], str)


def test_defaults_that_the_operator_gives(server: Served) -> None:
    first, second = (server.complete(prompt="Once", logprobs=30, max_tokens=8) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"], "temperature 0 is the default"
    found = first["choices"][0]["logprobs"]
    assert len(found["top_logprobs"][0]) == 30 and all(name.startswith("token_id:") for name in found["tokens"])
    named = server.complete(prompt="Once", logprobs=1, return_tokens_as_token_ids=False, max_tokens=8)
    assert not any(name.startswith("token_id:") for name in named["choices"][0]["logprobs"]["tokens"])
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Repeat: a b c d e f g h"}]).json()
    assert chat["usage"]["completion_tokens"] <= 5, "max_new_tokens is the default of max_tokens"
    for path, field, body in (("/v1/completions", "logprobs", {"prompt": "a", "logprobs": 31}),
                              ("/v1/chat/completions", "top_logprobs",
                               {"messages": HELLO, "logprobs": True, "top_logprobs": 31})):
        refused = server.post(path, **body)
        assert refused.status_code == 400 and error_of(refused)["param"] == field
        assert f"{field} is 31; at most 30 are possible (--max-logprobs)" in error_of(refused)["message"]


def reach(server: Served, client: httpx.Client) -> dict[str, Any]:
    until = time.monotonic() + 60
    while "ready at" not in server.log and time.monotonic() < until:
        assert server.process.poll() is None, server.log
        time.sleep(0.05)
    answer = client.post("/v1/completions", json={"prompt": "Once", **SHORT})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    with served("canary", "--uds", str(path), wait=False) as server, \
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://penstock", timeout=30) as client:
        assert reach(server, client)["choices"][0]["text"]
        assert "ready at http+unix://" in server.log
        server.process.terminate()
        assert server.ended() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed, which makes the certificate")
def test_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate),
                    "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)
    context = ssl.create_default_context(cafile=str(certificate))
    with served("canary", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), wait=False) as server:
        until = time.monotonic() + 60
        while "ready at https://" not in server.log and time.monotonic() < until:
            assert server.process.poll() is None, server.log
            time.sleep(0.05)
        url = server.log.partition("ready at ")[2].split()[0]
        with httpx.Client(base_url=url, verify=context, timeout=30) as client:
            assert reach(server, client)["choices"][0]["text"]
    for flags, said in ((("--ssl-certfile", str(tmp_path / "none")), "No such file"),
                        (("--ssl-keyfile", str(key)), "certificate")):
        with served("canary", *flags, wait=False) as refused:
            assert refused.ended(30) != 0 and said in refused.log and "Traceback" not in refused.log
