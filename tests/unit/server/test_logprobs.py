"""Shapes of log probabilities: the chosen token is not repeated among the most likely ones."""

from __future__ import annotations

import json

import msgspec

from penstock.core.request import TokenLogprobs
from penstock.server.openai.answers import LEAST, Namer, chat_content, completion_logprobs, prompt_entries

NAMES = Namer(None, as_ids=True)


def chat(*lines: TokenLogprobs) -> list[dict]:
    return json.loads(msgspec.json.encode(chat_content(list(lines), NAMES)))


def test_top_logprobs_of_chat() -> None:
    """The first of a line is the chosen token; what follows are the most likely ones, the chosen among them or not."""
    likely, unlikely = chat(TokenLogprobs([7, 7, 3], [-0.1, -0.1, -2.0], [1, 1, 2]),
                            TokenLogprobs([9, 7, 3], [-5.0, -0.1, float("-inf")], [8, 1, 2]))
    assert (likely["token"], likely["logprob"]) == ("token_id:7", -0.1)
    assert [entry["token"] for entry in likely["top_logprobs"]] == ["token_id:7", "token_id:3"]
    assert (unlikely["token"], unlikely["logprob"]) == ("token_id:9", -5.0)
    assert [(entry["token"], entry["logprob"]) for entry in unlikely["top_logprobs"]] == [("token_id:7", -0.1),
                                                                                         ("token_id:3", LEAST)]
    assert chat(TokenLogprobs([7], [-0.1], [1]))[0]["top_logprobs"] == []


def test_top_logprobs_of_completions_have_the_chosen_token() -> None:
    found = json.loads(msgspec.json.encode(completion_logprobs(
        [1, 9], [0, 0], [None, TokenLogprobs([9, 7, 3], [-5.0, -0.1, -2.0], [8, 1, 2])], NAMES)))
    assert found["token_logprobs"] == [None, -5.0]
    assert found["top_logprobs"] == [None, {"token_id:9": -5.0, "token_id:7": -0.1, "token_id:3": -2.0}]


def test_prompt_logprobs() -> None:
    found = json.loads(msgspec.json.encode(prompt_entries([TokenLogprobs([9, 7], [-5.0, -0.1], [8, 1])], NAMES)))
    assert found == [None, {"9": {"logprob": -5.0, "rank": 8, "decoded_token": "token_id:9"},
                            "7": {"logprob": -0.1, "rank": 1, "decoded_token": "token_id:7"}}]
