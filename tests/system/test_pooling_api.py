"""The pooling routes on a trained model, with OpenAI's client and by plain HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import torch

from penstock.server.pooling.packing import packed
from tests.data import MODELS, need
from tests.system.served import NAME, TEMPLATE, Served, error_of, served

TEXTS = ["Once upon a time, there was a little girl.", "The sea is blue.", "Lily saw a cat."]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(need(MODELS / "stories260k"), "--max-model-len", "128", "--chat-template", TEMPLATE) as server:
        yield server


def vectors(server: Served, **body: object) -> np.ndarray:
    answer = server.post("/v1/embeddings", **body)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)


def test_openai_client(server: Served) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    # The client asks for base64 unless told otherwise.
    packed = client.embeddings.create(model=NAME, input=TEXTS)
    plain = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1, 2] and packed.object == "list" and packed.model == NAME
    for one, two in zip(packed.data, plain.data, strict=True):
        np.testing.assert_allclose(one.embedding, two.embedding, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(one.embedding), 1, atol=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 20
    short = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=16).data[0].embedding
    wanted = np.array(plain.data[0].embedding[:16])
    np.testing.assert_allclose(short, wanted / np.linalg.norm(wanted), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="embeddings have 64"):
        client.embeddings.create(model=NAME, input="A", dimensions=65)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="A")


def test_texts_and_ids_are_the_same(server: Served) -> None:
    ids = [server.post("/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    wanted = vectors(server, input=TEXTS)
    np.testing.assert_allclose(vectors(server, input=ids), wanted, atol=1e-5)
    np.testing.assert_allclose(vectors(server, input=ids[1])[0], wanted[1], atol=1e-5)
    np.testing.assert_allclose(vectors(server, input=TEXTS[2])[0], wanted[2], atol=1e-5)
    [raw] = server.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw["embedding"]), "<f4"), wanted[0], atol=1e-5)


KINDS = {"float32": (torch.float32, np.uint32), "float16": (torch.float16, np.uint16), "bfloat16": (torch.bfloat16, np.uint16),
         "fp8_e4m3": (torch.float8_e4m3fn, np.uint8), "fp8_e5m2": (torch.float8_e5m2, np.uint8)}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_vectors_as_bytes(server: Served, path: str, dtype: str, endianness: str) -> None:
    """As torch rounds them, in a text, in a body with its places, and in a body alone."""
    wanted = vectors(server, input=TEXTS)
    kind, bits = KINDS[dtype]
    codes = torch.from_numpy(wanted).to(kind).view(torch.uint8).numpy().view(bits)
    lines = [line.tobytes() for line in (codes.byteswap() if endianness == "big" else codes)]
    how = {"input": TEXTS, "embed_dtype": dtype, "endianness": endianness}
    texts = server.post(path, **how, encoding_format="base64").json()["data"]
    assert [base64.b64decode(one["embedding" if "v1" in path else "data"]) for one in texts] == lines
    answer = server.post(path, **how, encoding_format="bytes")
    told = json.loads(answer.headers["metadata"])
    assert answer.headers["content-type"] == "application/octet-stream" and told["usage"]["prompt_tokens"] > 20
    assert [answer.content[place["start"]:place["end"]] for place in told["data"]] == lines
    assert {(place["embed_dtype"], place["endianness"], *place["shape"]) for place in told["data"]} == {(dtype, endianness, 64)}
    bare = server.post(path, **how, encoding_format="bytes_only")
    assert bare.content == b"".join(lines) and "metadata" not in bare.headers


def test_eight_bit_numbers_are_rounded_as_torch_does() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(0, scale, 10_000) for scale in (1e-6, 1e-3, 0.1, 10)])
    for name in ("fp8_e4m3", "fp8_e5m2"):
        grid = torch.arange(128, dtype=torch.uint8).view(KINDS[name][0]).float().numpy()
        grid = grid[np.isfinite(grid)]
        tried = np.concatenate([values, grid, -grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
        codes = torch.from_numpy(tried).to(KINDS[name][0]).view(torch.uint8).numpy().tobytes()
        assert packed(tried, name, "little") == codes, name
        assert packed(np.float32([1e9]), name, "big") == packed(grid[-1:], name, "little")


def test_pooling(server: Served) -> None:
    tokens = server.post("/tokenize", prompt=TEXTS[1]).json()["count"]
    [each] = server.post("/pooling", input=TEXTS[1], task="token_embed", normalize=False).json()["data"]
    assert each["object"] == "pooling" and np.array(each["data"]).shape == (tokens, 64)
    [last] = server.post("/v1/pooling", input=TEXTS[1]).json()["data"]
    there = np.array(each["data"])[-1]
    np.testing.assert_allclose(last["data"], there / np.linalg.norm(there), atol=1e-5)
    assert "no head of labels" in error_of(server.post("/classify", input="A"))["message"]


def test_scores(server: Served) -> None:
    unit = vectors(server, input=TEXTS)
    answer = server.post("/score", text_1=TEXTS[0], text_2=TEXTS).json()
    assert [one["object"] for one in answer["data"]] == ["score"] * 3
    np.testing.assert_allclose([one["score"] for one in answer["data"]], unit @ unit[0], atol=1e-5)
    same = server.post("/v1/score", queries=TEXTS, documents=TEXTS).json()["data"]
    np.testing.assert_allclose([one["score"] for one in same], 1, atol=1e-5)
    assert error_of(server.post("/score", text_1=TEXTS[:2], text_2=TEXTS))["param"] == "text_1"
    assert error_of(server.post("/score", text_1="A"))["param"] == "text_2"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(server: Served, path: str) -> None:
    unit = vectors(server, input=TEXTS)
    scores = unit @ unit[1]
    order = np.argsort(-scores).tolist()
    found = server.post(path, model=NAME, query=TEXTS[1], documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]).json()
    assert [one["index"] for one in found["results"]] == order and order[0] == 1
    np.testing.assert_allclose([one["relevance_score"] for one in found["results"]], scores[order], atol=1e-5)
    assert found["results"][0]["document"] == {"text": TEXTS[1]} and found["usage"]["total_tokens"] > 0
    best = server.post(path, query=TEXTS[1], documents=TEXTS, top_n=1, return_documents=False).json()["results"]
    assert len(best) == 1 and best[0]["index"] == 1 and "document" not in best[0]


def test_a_conversation_is_one_text(server: Served) -> None:
    talk = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
    for opening, end in ((None, ""), (True, " Then")):
        text = TEXTS[0] + TEXTS[1] + end
        wanted = vectors(server, input=text, add_special_tokens=False)
        np.testing.assert_allclose(vectors(server, messages=talk, add_generation_prompt=opening), wanted, atol=1e-5)
    pooled = server.post("/pooling", messages=talk).json()["data"][0]["data"]
    np.testing.assert_allclose(pooled, vectors(server, messages=talk)[0], atol=1e-5)
    raw = vectors(server, input=TEXTS[0], use_activation=False)[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(raw / np.linalg.norm(raw), vectors(server, input=TEXTS[0])[0], atol=1e-5)
    for wrong in ({}, {"input": "a", "messages": talk}):
        assert error_of(server.post("/v1/embeddings", **wrong))["param"] == "input"
    assert error_of(server.post("/v1/embeddings", messages=[{"content": "a"}]))["param"] == "messages[0].role"


def test_documents_are_cut(server: Served) -> None:
    asked = {"query": TEXTS[1], "documents": [TEXTS[0] * 3, TEXTS[2]]}
    whole, cut = server.post("/rerank", **asked).json(), server.post("/rerank", **asked, max_tokens_per_doc=4).json()
    assert cut["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    assert {one["document"]["text"] for one in cut["results"]} == set(asked["documents"])
    for names in (("data_1", "data_2"), ("queries", "items")):
        found = server.post("/score", **dict(zip(names, (TEXTS[1], TEXTS), strict=True))).json()["data"]
        np.testing.assert_allclose(found[1]["score"], 1, atol=1e-5)


def test_refusals(server: Served) -> None:
    long = "once upon a time " * 100
    assert error_of(server.post("/v1/embeddings", input=long))["code"] == "context_length_exceeded"
    cut = vectors(server, input=long, truncate_prompt_tokens=20)
    ids = server.post("/tokenize", prompt=long).json()["tokens"]
    np.testing.assert_allclose(cut[0], vectors(server, input=ids[:20])[0], atol=1e-5)
    # The tokens that the tokenizer puts before a text stay.
    cut = vectors(server, input=long, truncate_prompt_tokens=20, truncation_side="left")
    np.testing.assert_allclose(cut[0], vectors(server, input=[ids[0], *ids[-19:]])[0], atol=1e-5)
    for fields in ({"text_1": "a", "queries": "b", "text_2": "c"}, {"text_1": "a", "items": "b", "text_2": "c"}):
        assert "names of the same field" in error_of(server.post("/score", **fields))["message"]
    assert error_of(server.post("/v1/embeddings", input=[]))["param"] == "input"
    assert error_of(server.post("/v1/embeddings", input=["a", 1]))["param"] == "input"
    assert error_of(server.post("/v1/embeddings", input=[10**6]))["code"] == "invalid_value"
    assert error_of(server.post("/v1/embeddings", input="a", encoding_format="int8"))["param"] == "encoding_format"
    assert error_of(server.post("/v1/embeddings", input="a", colour="red"))["code"] == "unknown_parameter"
    assert error_of(server.post("/pooling", input="a", embed_dtype="float16"))["param"] == "embed_dtype"
    assert error_of(server.post("/pooling", input="a", endianness="big"))["param"] == "endianness"
    assert error_of(server.post("/pooling", input="a", endianness="x", encoding_format="bytes"))["param"] == "endianness"
    many = server.post("/pooling", input=["a"] * 257, encoding_format="bytes")
    assert "send bytes_only" in error_of(many)["message"]
    assert "no head of labels" in error_of(server.post("/pooling", input="A", task="token_classify"))["message"]
    assert server.settle()["penstock:requests_live"] == 0
