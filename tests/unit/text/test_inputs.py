"""From what a user asks for to a request: prompts, defaults, limits, and the refusal of what cannot be honoured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError, RequestError
from penstock.core.request import EngineInfo, Request
from penstock.core.sampling import SamplingParams
from penstock.dialects.choice import choose
from penstock.engine.inputs import Inputs
from penstock.text import ChatTemplate
from tests.unit.text import real

LENGTH = 64


def info(vocab_size: int = 512) -> EngineInfo:
    return EngineInfo("model", "Llama", vocab_size, LENGTH, 8, 64, 16, 1024, 64, "float32", "cpu", 0, 0, 0)


def make(config: dict[str, Any] | None = None, **more: Any) -> Inputs:
    template = ChatTemplate({"default": "<s>{{ messages[0].content }}"}, {})
    return Inputs(real.load("models/stories260k"), template, info(), config, **more)


ANY = SamplingParams(max_tokens=4)


@pytest.mark.parametrize("prompt", [
    "Once upon", {"prompt": "Once upon"}, [1, 403, 407], (1, 403, 407), np.array([1, 403, 407]),
    {"prompt_token_ids": [1, 403, 407]}, {"prompt": "other", "prompt_token_ids": [1, 403, 407]}])
def test_forms_of_a_prompt(prompt: Any) -> None:
    request = make().request("r", prompt, ANY, priority=3, salt="s")
    assert (request.id, request.prompt_ids, request.priority, request.salt) == ("r", [1, 403, 407], 3, "s")
    assert request.params.seed is not None
    assert request.arrival > 0


def test_special_tokens_and_the_empty_prompt() -> None:
    assert make().request("r", "Once", ANY, add_special_tokens=False).prompt_ids == [403]
    assert make().request("r", "", ANY, add_special_tokens=False).prompt_ids == [1], "bos stands for nothing"
    nameless = Inputs(real.load("tokenizers/qwen2.5"), None, info(200_000))
    with pytest.raises(RequestError, match="the prompt is empty"):
        nameless.request("r", "", ANY)
    assert make().request("r", {"prompt": "Once", "cache_salt": "mine"}, ANY).salt == "mine"


@pytest.mark.parametrize(("prompt", "said"), [
    ([], "no tokens"), ([1, 512], "token 512.*0 to 511"), ([1, -1], "token -1"), ([1, "2"], "must be a text"),
    ([1.0], "must be a text"), ([True], "must be a text"), (3, "must be a text"), (None, "must be a text"),
    ({}, "needs prompt"),
    ({"prompt": "a", "multi_modal_data": {}}, "may not have multi_modal_data"), ("a \ud800", "lone surrogate"),
    ([1] * LENGTH, "64 tokens.*at most 63"), ([1] * (LENGTH + 9), "73 tokens"), ({"prompt": 3}, "must be a text")])
def test_prompts_that_are_refused(prompt: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        make().request("r", prompt, ANY)
    assert caught.value.status == 400
    assert caught.value.param in ("prompt", "multi_modal_data")


def test_the_output_fits_the_context() -> None:
    prompt = [1] * 50
    assert make().request("r", prompt, SamplingParams(max_tokens=14)).params.max_tokens == 14
    assert make().request("r", prompt, SamplingParams(max_tokens=None)).params.max_tokens == 14
    assert make({"max_new_tokens": 5}).request("r", prompt, SamplingParams(max_tokens=None)).params.max_tokens == 5
    said = r"max_tokens is 15 .*50 tokens, together 65.*64 tokens; lower max_tokens to at most 14"
    with pytest.raises(RequestError, match=said) as caught:
        make().request("r", prompt, SamplingParams(max_tokens=15))
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens"):
        make().request("r", prompt, SamplingParams(max_tokens=None, min_tokens=15))


def test_keeping_a_part_of_a_long_prompt() -> None:
    ids = [1, *range(3, 203)]
    assert make().request("r", ids, ANY, keep=3).prompt_ids == [200, 201, 202]
    assert make().request("r", ids, ANY, keep=3, side="right").prompt_ids == [1, 3, 4]
    assert len(make().request("r", ids, ANY, keep=-1).prompt_ids) == LENGTH - 4
    for wrong in (0, -2, LENGTH + 1):
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            make().request("r", ids, ANY, keep=wrong)


def test_defaults_come_from_generation_config() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 7,
              "do_sample": True, "pad_token_id": 0}
    params = make(config).default_params()
    assert params == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=7)
    assert make(config).request("r", "a").params.replace(seed=None) == params
    said = SamplingParams(temperature=0.0, max_tokens=3)
    assert make(config).request("r", "a", said).params.replace(seed=None) == said, "explicit parameters are taken as they are"
    assert make().default_params() == SamplingParams()


def test_ends_of_sequence() -> None:
    assert make().request("r", "a", ANY).eos_ids == [2]
    assert make({"eos_token_id": 7}).request("r", "a", ANY).eos_ids == [7]
    assert make({"eos_token_id": [7, 8, 7]}).request("r", "a", ANY).eos_ids == [7, 8]
    assert make({"eos_token_id": 7}, eos_ids=[4, 5]).request("r", "a", ANY).eos_ids == [4, 5]


def test_drawn_seeds_can_be_repeated() -> None:
    one, two, other = make(seed=3), make(seed=3), make(seed=4)
    seeds = [one.request("r", "a", ANY).params.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [two.request("r", "a", ANY).params.seed for _ in range(3)]
    assert seeds[0] != other.request("r", "a", ANY).params.seed
    assert make().request("r", "a", SamplingParams(seed=5)).params.seed == 5


def test_bad_words_become_token_sequences() -> None:
    tokenizer, request = real.load("models/stories260k"), make().request("r", "a", SamplingParams(bad_words=["girl"]))
    sequences = request.params.bad_words_token_ids or []
    texts = {b"".join(map(tokenizer.token_bytes, sequence)) for sequence in sequences}
    assert {b"girl", b" girl"} <= texts
    assert all(text.strip() == b"girl" for text in texts)
    qwen = real.load("tokenizers/qwen2.5")
    params = SamplingParams(bad_words=["hello", " hello"], bad_words_token_ids=[[5, 6]])
    found = Inputs(qwen, None, info(200_000)).request("r", "a", params).params.bad_words_token_ids
    assert found == [[5, 6], qwen.encode("hello"), qwen.encode(" hello")]


def test_without_tokenizer_there_are_only_ids() -> None:
    inputs = Inputs(None, None, info())
    request = inputs.request("r", [5, 6], ANY)
    assert isinstance(request, Request)
    assert request.eos_ids == []
    for prompt, params, said in (("text", ANY, "no tokenizer"), ([5], SamplingParams(stop="x"), "stop strings"),
                                 ([5], SamplingParams(bad_words=["x"]), "bad_words")):
        with pytest.raises(RequestError, match=said):
            inputs.request("r", prompt, params)
    with pytest.raises(RequestError, match="no tokenizer"):
        inputs.render([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="detokenize is false"):
        make().request("r", "a", SamplingParams(stop=["x"], detokenize=False))


@pytest.mark.parametrize(("params", "param"), [
    (SamplingParams(temperature=-1), "temperature"),
    (SamplingParams(temperature="hot"), "sampling_params"),  # type: ignore[arg-type]
    (SamplingParams(stop=[3]), "sampling_params"),  # type: ignore[list-item]
    (SamplingParams(max_tokens=2.5), "sampling_params"),  # type: ignore[arg-type]
    (SamplingParams(logit_bias={600: 1.0}), "logit_bias"), (SamplingParams(stop_token_ids=[512]), "stop_token_ids"),
    (SamplingParams(allowed_token_ids=[-1]), "allowed_token_ids"),
    ({"temperature": 0}, "sampling_params"), (SamplingParams(n=0), "n")])
def test_parameters_that_are_refused(params: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make().request("r", "a", params)
    assert caught.value.param == param


def test_the_callers_parameters_stay_as_they_are() -> None:
    params = SamplingParams(max_tokens=None, bad_words=["girl"])
    make().request("r", "a", params)
    assert params == SamplingParams(max_tokens=None, bad_words=["girl"])


def test_chat_templates_of_a_call() -> None:
    messages = [{"role": "user", "content": "Once"}]
    assert make().render(messages) == "<s>Once"
    assert make().render(messages, chat_template="[{{ messages[0].content }}]") == "[Once]"


STRICT = [{"type": "function", "function": {"name": "look", "strict": True}}]


def test_models_without_a_dialect_cannot_be_held() -> None:
    tokenizer = real.load("models/stories260k")
    assert Inputs(tokenizer, None, info(), dialect=choose((), "llama3_json")).calling(STRICT, must=False)
    with pytest.raises(RequestError, match="no known way of writing tool calls"):
        Inputs(tokenizer, None, info()).calling(STRICT, must=False)
    with pytest.raises(ConfigError, match="constrain_tools is auto, but"):
        Inputs(tokenizer, None, info(), dialect=choose((), "none"), constrain_tools=True)


def test_which_tools_are_held() -> None:
    tokenizer, hermes = real.load("models/stories260k"), choose((), "hermes")
    plain = [{"type": "function", "function": {"name": "look"}}]
    asked, always = (Inputs(tokenizer, None, info(), dialect=hermes, constrain_tools=each) for each in (False, True))
    assert asked.holds(STRICT) and not asked.holds(plain) and always.holds(plain) and not always.holds([])
