"""Constrained answers through the engine: they obey, whatever else is asked for, and disturb nobody."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import RequestError
from penstock.core.request import Request, Update
from penstock.core.sampling import StructuredOutputsParams
from penstock.engine.outputs import RequestOutput
from penstock.grammar.compiling import Compiler
from penstock.grammar.definition import define

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0,
                                                                                           "maximum": 120},
                                           "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3}},
          "required": ["name", "age"], "additionalProperties": False}
COMPACT = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
PHONE = StructuredOutputsParams(regex="[0-9]{3}-[0-9]{4}")
PROMPT = "Tell me about Bob."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512) as found:
        yield found


def _ask(llm: LLM, asked: StructuredOutputsParams | None = COMPACT, prompts: list[str] | None = None,
         **params: Any) -> list[RequestOutput]:
    given = SamplingParams(**{"temperature": 0, "max_tokens": 120, "seed": 5, "structured_outputs": asked, **params})
    return llm.generate(prompts or [PROMPT], given, use_tqdm=False)


def _texts(outputs: list[RequestOutput]) -> list[str]:
    return [one.text for output in outputs for one in output.outputs]


@pytest.mark.parametrize("params", [
    {}, {"temperature": 1.5}, {"n": 3, "temperature": 1.0}, {"repetition_penalty": 1.5, "presence_penalty": 1.0}, {"top_p": 0.5,
     "temperature": 1.0}, {"logit_bias": {5: 20.0}}, {"ignore_eos": True}, {"min_tokens": 40}, {"logprobs": 2},
    {"top_k": 3, "temperature": 2.0}, {"prompt_logprobs": 1},
], ids=str)
def test_answers_obey_whatever_else_is_asked(llm: LLM, params: dict[str, Any]) -> None:
    for output in _ask(llm, **params):
        for one in output.outputs:
            assert one.finish_reason == "stop"
            person = json.loads(one.text)
            assert person.keys() <= {"name", "age", "tags"} and len(person["name"]) <= 12 and 0 <= person["age"] <= 120
            assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)


def test_every_kind(llm: LLM) -> None:
    kinds = [(PHONE, r"[0-9]{3}-[0-9]{4}"), (StructuredOutputsParams(choice=["red", "green"]), "red|green"),
             (StructuredOutputsParams(grammar='root ::= "x" [0-9] "y"'), "x[0-9]y"),
             (StructuredOutputsParams(grammar='start: "(" WORD ")"\nWORD: /[a-z]{2}/'), r"\([a-z]{2}\)")]
    for asked, pattern in kinds:
        for text in _texts(_ask(llm, asked, temperature=1.0, n=4)):
            assert re.fullmatch(pattern, text), (pattern, text)


def test_seeds_repeat_and_neighbours_do_not_matter(llm: LLM) -> None:
    alone = _texts(_ask(llm, temperature=1.0, n=2))
    mixed = llm.generate([PROMPT, "Once upon a time", PROMPT], [
        SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=120, structured_outputs=COMPACT),
        SamplingParams(temperature=0, max_tokens=30), SamplingParams(temperature=1.0, seed=9, max_tokens=30,
                                                                    structured_outputs=PHONE)], use_tqdm=False)
    assert _texts(mixed[:1]) == alone
    [free] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert mixed[1].outputs[0].token_ids == free.outputs[0].token_ids


def test_too_few_tokens_end_with_length_and_stop_strings_still_stop(llm: LLM) -> None:
    [short] = _ask(llm, max_tokens=4)
    assert short.outputs[0].finish_reason == "length"
    [stopped] = _ask(llm, PHONE, stop=["-"])
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "-")
    assert re.fullmatch("[0-9]{3}", stopped.outputs[0].text)


def test_min_tokens_holds_an_answer_back_only_where_it_can_go_on(llm: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{1,30}")
    [long] = _ask(llm, digits, min_tokens=20)
    assert len(long.outputs[0].token_ids) >= 20 and re.fullmatch("[0-9]{1,30}", long.outputs[0].text)
    [phone] = _ask(llm, PHONE, min_tokens=50)
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", phone.outputs[0].text)


def test_refusals(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"#/properties/a/contains") as caught:
        _ask(llm, StructuredOutputsParams(json={"properties": {"a": {"contains": {}}}}))
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="structured_outputs cannot be honoured together with beam search"):
        _ask(llm, beam_width=2, n=2)
    with pytest.raises(RequestError, match="exactly one of"):
        _ask(llm, StructuredOutputsParams())
    with pytest.raises(RequestError, match="max_thinking_tokens"):
        _ask(llm, None, max_thinking_tokens=3)


def test_a_prompt_that_excludes_everything_fails_alone(llm: LLM) -> None:
    """The grammar and allowed_token_ids have no token in common."""
    other = llm.get_tokenizer().encode("x")[-1:]
    outputs = llm.generate([PROMPT, PROMPT], [
        SamplingParams(temperature=0, max_tokens=9, structured_outputs=PHONE, allowed_token_ids=other),
        SamplingParams(temperature=0, max_tokens=9, structured_outputs=PHONE)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "stop"]
    assert "excluded" in (outputs[0].outputs[0].error or "")


def test_the_constraint_begins_after_thinking(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    free = _ask(llm, None, ["Once upon a time"], max_tokens=20, ignore_eos=True)[0].outputs[0].token_ids
    end = free[9:10]
    [found] = _ask(llm, PHONE, ["Once upon a time"], reasoning_end_ids=end)
    ids = found.outputs[0].token_ids
    at = ids.index(end[0]) + 1
    assert ids[:at] == free[:at]
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", tokenizer.decode(ids[at:]))


@pytest.mark.parametrize("asked", [None, PHONE], ids=["free", "phone"])
def test_thinking_has_a_budget(llm: LLM, asked: StructuredOutputsParams | None) -> None:
    tokenizer = llm.get_tokenizer()
    end = tokenizer.encode("</ end ~ of # it>", add_special_tokens=False)
    assert len(end) > 1
    free = _ask(llm, None, max_tokens=8)[0].outputs[0].token_ids
    [found] = _ask(llm, asked, reasoning_end_ids=end, max_thinking_tokens=7, max_tokens=60)
    ids = found.outputs[0].token_ids
    assert ids[:7] == free[:7] and ids[7:7 + len(end)] == end
    if asked is not None:
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", tokenizer.decode(ids[7 + len(end):]))


def test_a_constrained_answer_does_not_end_within_its_thinking(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    [end], ends = tokenizer.encode("</think>", add_special_tokens=False), llm.inputs.eos_ids
    [found] = _ask(llm, PHONE, reasoning_end_ids=[end], max_tokens=60, logit_bias={**dict.fromkeys(ends, 100.0), end: 50.0})
    ids = found.outputs[0].token_ids
    assert ids[0] == end and re.fullmatch("[0-9]{3}-[0-9]{4}", tokenizer.decode(ids[1:]))


def test_forced_text_does_not_end_an_answer_that_must_go_on(llm: LLM) -> None:
    """The place behind forced tokens is chosen in the step that verifies them, and is held back by min_tokens as any other."""
    asked = StructuredOutputsParams(regex="the (red|old) fox (ran|sat) home(, and then it slept)*")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, min_tokens=12, structured_outputs=asked, n=4)
        for text in ("Who ran home?", "Repeat after me: the red fox ran home", "What is 2 + 2?"):
            for found in llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)[0].outputs:
                assert len(found.token_ids) >= 12, found.text


@pytest.mark.parametrize("route", [{}, {"depth": 1}], ids=str)
def test_thinking_that_the_model_begins(route: dict[str, Any]) -> None:
    """The budget counts from the model's own marker, wherever that is; a constrained answer may begin with it."""
    with LLM(threads=1, max_model_len=256, **route) as llm:
        tokenizer = llm.get_tokenizer()
        end = tokenizer.encode("</ end ~ of # it>", add_special_tokens=False)
        free = _ask(llm, None, max_tokens=20, ignore_eos=True)[0].outputs[0].token_ids
        at = next(at for at in range(3, 12) if free[at] not in free[:at])
        thinking: dict[str, Any] = {"reasoning_end_ids": end, "max_thinking_tokens": 4, "max_tokens": 60}
        [found] = _ask(llm, None, reasoning_start_ids=free[at:at + 1], **thinking)
        ids = found.outputs[0].token_ids
        assert ids[:at + 5] == free[:at + 5] and ids[at + 5:at + 5 + len(end)] == end
        [marker] = tokenizer.encode("<think>", add_special_tokens=False)
        for bias, thinks in (-100.0, False), (100.0, True):
            [found] = _ask(llm, PHONE, reasoning_start_ids=[marker], logit_bias={marker: bias}, **thinking)
            ids = found.outputs[0].token_ids
            assert (ids[0] == marker) == thinks and (ids[5:5 + len(end)] == end) == thinks
            assert re.fullmatch("[0-9]{3}-[0-9]{4}", tokenizer.decode(ids[5 + len(end) if thinks else 0:]))


def test_compiling_delays_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one grammar takes long to compile, others are served; a request that is aborted meanwhile ends at once."""
    compile_ = Compiler._compile

    def slow(self: Compiler, grammar: str, eos_ids: tuple[int, ...]) -> Any:
        time.sleep(0.5)
        return compile_(self, grammar, eos_ids)

    monkeypatch.setattr(Compiler, "_compile", slow)
    engine, inputs = llm.engine, llm.inputs
    asked = StructuredOutputsParams(regex="[a-f]{5}")
    for name in ("slow", "gone"):
        engine.submit(inputs.request(name, PROMPT, SamplingParams(temperature=0, max_tokens=20, structured_outputs=asked)))
    engine.submit(inputs.request("free", PROMPT, SamplingParams(temperature=0, max_tokens=20)))
    assert engine.stats().grammars_waiting == 2
    engine.abort(["gone"])
    ended: dict[str, Update] = {}
    while engine.busy:
        for update in engine.turn():
            if update.finish_reason:
                ended[update.request_id] = update
    assert list(ended)[-1] == "slow" and {name: update.finish_reason for name, update in ended.items()} == {
        "gone": "abort", "free": "length", "slow": "stop"}
    assert engine.stats().grammars_waiting == 0


def test_a_grammar_that_cannot_be_compiled_fails_that_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Compiler, grammar: str, eos_ids: tuple[int, ...]) -> Any:
        raise RequestError("too large", code="unsupported_schema")

    monkeypatch.setattr(Compiler, "_compile", fails)
    outputs = llm.generate([PROMPT, PROMPT], [
        SamplingParams(max_tokens=5, n=2, structured_outputs=StructuredOutputsParams(regex="[g-k]{5}")),
        SamplingParams(max_tokens=5)], use_tqdm=False)
    assert [(one.finish_reason, one.error) for one in outputs[0].outputs] == [("error", "too large")] * 2
    assert outputs[1].outputs[0].finish_reason in ("stop", "length")


def test_compiled_grammars_are_kept(llm: LLM) -> None:
    before = llm.engine.stats().grammars_compiled
    asked = StructuredOutputsParams(regex="[x-z]{3}")
    _ask(llm, asked)
    _ask(llm, asked, ["Hello", "Bye"])
    stats = llm.engine.stats()
    assert stats.grammars_compiled == before + 1 and stats.grammars_cached >= 2 and stats.forced_tokens > 0


def test_the_distribution_is_the_models_own_restricted() -> None:
    """Chi-square of one choice among tokens: the probabilities are the free ones over their sum."""
    count = 2000
    seen: Counter[str] = Counter()
    logprob: dict[str, float] = {}
    params = [SamplingParams(n=100, temperature=1.0, max_tokens=3, seed=1 + 1000 * seed, logprobs=0,
                             structured_outputs=StructuredOutputsParams(regex="[0-9]")) for seed in range(count // 100)]
    with LLM(threads=1, max_num_seqs=100, max_model_len=64) as llm:
        outputs = llm.generate(["The number is "] * len(params), params, use_tqdm=False)
    for output in outputs:
        for one in output.outputs:
            assert one.logprobs is not None
            seen[one.text] += 1
            logprob[one.text] = one.logprobs[0][one.token_ids[0]].logprob
    weights = {text: 2.718281828459045 ** value for text, value in logprob.items()}
    total = sum(weights.values())
    expected = {text: count * weight / total for text, weight in weights.items() if count * weight / total >= 5}
    chi = sum((seen[text] - want) ** 2 / want for text, want in expected.items())
    # 99.9 % quantiles for 3 to 9 degrees of freedom are 16 to 28.
    assert len(expected) >= 3 and chi < 28, (chi, seen, expected)


def test_skip_tokenizer_init_is_refused(tmp_path: Path) -> None:
    with (LLM(threads=1, skip_tokenizer_init=True, max_model_len=64) as bare,
          pytest.raises(RequestError, match="no tokenizer")):
        bare.generate([[1, 2]], SamplingParams(max_tokens=2, structured_outputs=PHONE, detokenize=False), use_tqdm=False)


ROUTES: list[dict[str, Any]] = [{"depth": 1}, {"depth": 2, "max_num_batched_tokens": 16, "max_num_seqs": 4},
                                {"depth": 2, "block_size": 8, "kv_cache_memory_bytes": 530_000}]


def test_answers_are_the_same_whatever_the_route() -> None:
    """Depth, chunks, page size and preemption, with forced runs, at temperature 0 and above."""
    asked = [COMPACT, PHONE, StructuredOutputsParams(json=PERSON), None]
    prompts = [f"{PROMPT} Number {i}. " * (1 + i % 8) for i in range(12)]
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=60, structured_outputs=asked[i % 4])
              for i in range(12)]
    found, preempted = [], 0
    for route in ROUTES:
        with LLM(threads=1, max_model_len=256, **route) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            preempted += llm.engine.stats().preemptions
    assert found[0] == found[1] == found[2]
    assert preempted, "the third route has room for all: give it less"


def test_numbers_stay_within_a_double(llm: LLM) -> None:
    """A model that wants an exponent, and nines."""
    nine, exponent = (llm.get_tokenizer().encode(text, add_special_tokens=False)[-1] for text in ("19", "1e"))
    for schema in ({"type": "number"}, {"type": "array", "items": {}, "minItems": 1}):
        asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        text, = _texts(_ask(llm, asked, logit_bias={nine: 60.0, exponent: 90.0}, max_tokens=30))
        assert set(text.strip("[]").split(",")[:-1] or [text]) == {"9e99"}, text


def test_rows_of_one_grammar_come_from_several_matchers(llm: LLM) -> None:
    """A copy shares a lock with its original, so a grammar that many rows follow is compiled again. Answers stay the same."""
    asked = StructuredOutputsParams(json={**PERSON, "title": "lanes"}, disable_any_whitespace=True)
    prompts = [f"{number} people" for number in range(24)]
    expected = _texts(_ask(llm, asked, prompts, temperature=1.0))
    constraints = llm.engine.constraints
    constraints._compiler._lanes, constraints.masker._parallel = 4, True
    try:
        compiled = constraints._compiler.compiled
        for _ in range(2):
            assert _texts(_ask(llm, asked, prompts, temperature=1.0)) == expected
        assert constraints._compiler.compiled == compiled + 3
        assert {constraints._compiler.matcher(Request("a", [1], SamplingParams(grammar=define(asked)),
                                                      list(llm.inputs.eos_ids)))[1] for _ in range(8)} == {0, 1, 2, 3}
    finally:
        constraints._compiler._lanes, constraints.masker._parallel = 1, False
