"""Parameters without meaning are refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams

BAD: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -3),
    ("repetition_penalty", 0), ("repetition_penalty", math.inf), ("temperature", -0.1), ("temperature", math.nan), ("top_p", 0),
    ("top_p", 1.01), ("top_k", -2), ("min_p", -0.1), ("min_p", 1.5), ("seed", 2**63), ("max_tokens", 0), ("min_tokens", -1),
    ("min_tokens", 17), ("logprobs", -2), ("logprobs", 2**20 + 1), ("prompt_logprobs", -2), ("stop", [""]),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: math.nan}), ("allowed_token_ids", []), ("bad_words", [""]), ("spaces_between_special_tokens", False),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value}).check()
    assert caught.value.param == name and name in caught.value.message


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused(name: str) -> None:
    value: Any = {100: 1.0} if name == "logit_bias" else [100]
    params = SamplingParams(**{name: value})
    params.check()
    params.check_vocabulary(101)
    with pytest.raises(RequestError) as caught:
        params.check_vocabulary(100)
    assert caught.value.param == name


def test_defaults_are_meaningful_and_cross_the_wire() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: -1.5}, seed=7)
    params.check()
    request = Request("a", [1, 2], params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
