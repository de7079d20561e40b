"""The official cohere SDK: rerank, by its second API."""

from __future__ import annotations

import os

import cohere

MODEL = os.environ["PENSTOCK_MODEL"]
client = cohere.ClientV2(api_key="none", base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"))


def test_rerank() -> None:
    found = client.rerank(model=MODEL, query="a dog", documents=["the sea", "a cat", "a puppy"], top_n=2)
    assert len(found.results) == 2 and found.results[0].relevance_score >= found.results[1].relevance_score
    assert {one.index for one in found.results} < {0, 1, 2}
