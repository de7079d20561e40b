"""Beam search: the beams that transformers finds, on trained models in float32; and how it behaves as a request."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.checkpoint import resolve_folder
from penstock.core.errors import RequestError
from penstock.core.request import Request, TokenLogprobs, Update
from penstock.engine.beam import BeamSearch, BeamSearches
from tests.data import MODELS, need
from tests.system.served import error_of, served

START = "Once upon a time"
SETTINGS = [(width, penalty, early) for width in (2, 5) for penalty in (1.0, 0.0, -0.5, 2.0)
            for early in (False, True, "never")]
"""Widths, length penalties and ways of stopping."""

Answers = list[tuple[float, list[int]]]
"""Scores and tokens."""


def folder_of(name: str) -> Path:
    return resolve_folder(name, None) if name == "canary" else need(MODELS / name)


@functools.lru_cache
def transformers_model(name: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()


def their_beams(name: str, ids: list[int], stops: list[int], width: int, length: int, penalty: float,
                early: bool | str) -> tuple[list[list[int]], list[float]]:
    """(the answers' tokens, their scores), by transformers."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        found = transformers_model(name).generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), num_beams=width,
            num_return_sequences=width, max_new_tokens=length, length_penalty=penalty, early_stopping=early, do_sample=False,
            eos_token_id=stops, pad_token_id=stops[0], return_dict_in_generate=True, output_scores=True)
    answers = []
    for row in found.sequences.tolist():
        row = row[len(ids):]
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        answers.append(row[:end])
    return answers, found.sequences_scores.tolist()


@pytest.fixture(scope="module", params=["stories260k", "babyllama-tok105", "canary"])
def llm(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    with LLM(str(folder_of(request.param)), dtype="float32", max_num_seqs=16, threads=1) as made:
        yield request.param, made


def ends_of(name: str, llm: LLM) -> list[int]:
    """Tokens that end an answer: the model's own, and for stories the full stop, so that answers end at many lengths."""
    full_stop = llm.get_tokenizer().encode(".", add_special_tokens=False)[-1]
    return [*llm.inputs.eos_ids, full_stop]


def test_the_beams_of_transformers(llm: tuple[str, LLM]) -> None:
    """Tokens, order and scores, over widths, length penalties and ways of stopping."""
    name, engine = llm
    length, stops = 14, ends_of(name, engine)
    settings = SETTINGS if name == "stories260k" else SETTINGS[::4]
    prompts = [engine.get_tokenizer().encode(text) for text in (START, "Lily saw a big red ball in the park. She")]
    wanted = [SamplingParams(temperature=0, beam_width=width, n=width, max_tokens=length, length_penalty=penalty, logprobs=0,
                             early_stopping=early, stop_token_ids=stops) for width, penalty, early in settings]
    # All at once: searches in one batch do not disturb each other.
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts for _ in wanted], wanted * len(prompts),
                              use_tqdm=False)
    ended = set()
    for output, params in zip(outputs, wanted * len(prompts), strict=True):
        theirs, scores = their_beams(name, output.prompt_token_ids, stops, params.beam_width, length, params.length_penalty,
                                     params.early_stopping)
        assert [one.token_ids for one in output.outputs] == theirs, params
        mine = [(one.cumulative_logprob or 0) / len(one.token_ids) ** params.length_penalty for one in output.outputs]
        assert mine == pytest.approx(scores, abs=1e-4)
        ended |= {(one.finish_reason, len(one.token_ids)) for one in output.outputs}
    assert {"stop", "length"} == {reason for reason, _ in ended}, "answers should end in both ways"


def test_vllm_shapes(llm: tuple[str, LLM]) -> None:
    name, engine = llm
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    [found] = engine.beam_search([START], params)
    theirs, _ = their_beams(name, engine.get_tokenizer().encode(START), engine.inputs.eos_ids, 3, 8, 1.0, False)
    prompt = engine.get_tokenizer().encode(START)
    for one, tokens in zip(found.sequences, theirs, strict=True):
        cut = tokens[:-1] if one.finish_reason == "stop" else tokens
        assert one.tokens == [*prompt, *cut]
        assert one.text == engine.get_tokenizer().decode(one.tokens)
        assert one.cum_logprob == pytest.approx(sum(line[token].logprob for line, token in
                                                    zip(one.logprobs, tokens, strict=True)))
    best = [one.cum_logprob / max(1, len(one.logprobs)) for one in found.sequences]
    assert best == sorted(best, reverse=True)
    [few] = engine.beam_search(START, BeamSearchParams(beam_width=3, max_tokens=8, n=1))
    assert [one.tokens for one in few.sequences] == [found.sequences[0].tokens]


def test_one_beam_is_greedy(llm: tuple[str, LLM]) -> None:
    _, engine = llm
    greedy = engine.generate(START, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0]
    beam = engine.generate(START, SamplingParams(temperature=0, max_tokens=20, beam_width=1), use_tqdm=False)[0].outputs[0]
    assert (beam.token_ids, beam.text, beam.finish_reason) == (greedy.token_ids, greedy.text, greedy.finish_reason)


@pytest.mark.parametrize("width", [1, 4])
def test_no_beam_ends_before_min_tokens(llm: tuple[str, LLM], width: int) -> None:
    _, engine = llm
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = engine.generate(START, greedy, use_tqdm=False)[0].outputs[0].token_ids
    place = next(place for place, token in enumerate(tokens) if place >= 2 and token not in tokens[:place])
    for least in range(place + 3):
        beams = greedy.replace(beam_width=width, n=width, min_tokens=least, stop_token_ids=[tokens[place]])
        found = engine.generate(START, beams, use_tqdm=False)[0].outputs
        ended = [len(one.token_ids) for one in found if one.finish_reason == "stop"]
        assert all(length > least for length in ended)
        assert all(tokens[place] not in one.token_ids[:least] for one in found)
        if width == 1:
            alone = engine.generate(START, beams.replace(beam_width=0), use_tqdm=False)[0].outputs[0]
            assert found[0].token_ids == alone.token_ids and (place + 1 in ended) is (least <= place)


def test_a_search_counts_as_one_request() -> None:
    """Its rounds are not counted, each computes one position a beam, and a full queue does not end it."""
    with LLM(str(folder_of("stories260k")), dtype="float32", threads=1, max_num_seqs=2, max_num_queued_reqs=3) as llm:
        ids = llm.get_tokenizer().encode(START * 8)
        for expected in (0, len(ids) - 1):
            before = msgspec.structs.replace(llm.stats())
            params = SamplingParams(temperature=0, beam_width=6, n=2, max_tokens=10, ignore_eos=True)
            [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            assert [one.finish_reason for one in output.outputs] == ["length"] * 2 and output.num_cached_tokens == expected
            after = llm.stats()
            assert after.prompt_tokens - before.prompt_tokens == len(ids)
            assert after.cached_tokens - before.cached_tokens == expected
            # 1 + 9 * 6 positions, two rows at a time.
            assert after.steps - before.steps <= 1 + 9 * 3 + 3


def test_the_same_beams_with_little_room_and_without_the_cache() -> None:
    rng = random.Random(1)
    prompts = [{"prompt_token_ids": [1, *rng.choices(range(3, 512), k=rng.randrange(20, 150))]} for _ in range(8)]
    params = SamplingParams(temperature=0, beam_width=5, n=5, max_tokens=24, ignore_eos=True, length_penalty=0.5)
    found, evicted = [], []
    for options in ({}, {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 10}, {"enable_prefix_caching": False}):
        with LLM(str(folder_of("stories260k")), dtype="float32", threads=1, max_model_len=256, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([[one.token_ids for one in output.outputs] for output in outputs])
            evicted.append(llm.stats().tiers[0].evicted_pages)
            llm.engine.scheduler.check()
    assert found[0] == found[1] == found[2]
    assert evicted[0] == 0 < evicted[1]


def test_nothing_is_left_behind(llm: tuple[str, LLM]) -> None:
    _, engine = llm
    engine.generate([START] * 3, SamplingParams(beam_width=4, n=2, max_tokens=6), use_tqdm=False)
    request = engine.inputs.request("given-up", START, SamplingParams(beam_width=4, max_tokens=30))
    engine.engine.submit(request)
    for _ in range(4):
        assert engine.engine.turn() == []
    engine.engine.abort(["given-up"])
    news = []
    while engine.engine.busy:
        news += engine.engine.turn()
    assert [(update.request_id, update.finish_reason) for update in news] == [("given-up", "abort")]
    assert not engine.engine.beams.busy
    engine.engine.scheduler.check()


def test_what_can_never_run_is_refused_at_once(llm: tuple[str, LLM]) -> None:
    _, engine = llm
    params = SamplingParams(beam_width=2, max_tokens=10**6, seed=0)
    with pytest.raises(RequestError, match="max_tokens"):
        engine.engine.submit(Request("long", [5] * 20, params))
    engine.engine.submit(Request("twice", [5] * 20, params.replace(max_tokens=4)))
    with pytest.raises(RequestError, match="unique"):
        engine.engine.submit(Request("twice", [5] * 20, params.replace(max_tokens=4)))
    wide = params.replace(beam_width=64, stop_token_ids=list(range(3, 90)), max_tokens=4)
    if engine.info.vocab_size < 64 + 87:
        with pytest.raises(RequestError, match="beam_width"):
            engine.engine.submit(Request("wide", [5] * 20, wide))
    while engine.engine.busy:
        engine.engine.turn()


def test_a_search_that_cannot_go_on_ends_alone() -> None:
    added: list[Request] = []

    def add(request: Request) -> None:
        if len(added) == 3:
            raise RequestError("no room")
        added.append(request)

    searches = BeamSearches(add, lambda ids: None)
    searches.start(Request("r1", [5, 6], SamplingParams(beam_width=4, max_tokens=3, seed=0)), 100)
    line = TokenLogprobs([7, 7, 8, 9, 10], [-1.0, -1.0, -2.0, -3.0, -4.0], [1, 1, 2, 3, 4])
    [news] = searches.through([Update(added[0].id, 0, [7], "length", logprobs=[line])])
    assert (news.request_id, news.finish_reason, news.error) == ("r1", "error", "no room")
    assert not searches.busy


@pytest.mark.parametrize("wrong", [{"n": 3}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"stop": ["x"]},
                                   {"presence_penalty": 1.0}, {"prompt_logprobs": 1}, {"logit_bias": {1: 1.0}},
                                   {"length_penalty": float("nan")}, {"early_stopping": "soon"}, {"beam_width": 65}])
def test_refusals_name_the_parameter(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"beam_width": 2, "temperature": 0.0, **wrong}).check()
    assert caught.value.param == next(iter(wrong))


# -- against every beginning there is


def brute_force(table: list[list[list[float]]], width: int, length: int, penalty: float, stops: set[int]) -> Answers:
    """Every answer over a model whose next token depends on the place and the last token, by score."""
    answers: Answers = []

    def follow(tokens: list[int], logprob: float) -> None:
        if tokens and (tokens[-1] in stops or len(tokens) == length):
            answers.append((logprob / len(tokens) ** penalty, tokens))
            return
        for token, more in enumerate(table[len(tokens)][tokens[-1] if tokens else 0]):
            follow([*tokens, token], logprob + more)

    follow([], 0.0)
    return sorted(answers, key=lambda answer: -answer[0])[:width]


def test_wide_beams_find_the_best_there_is() -> None:
    """With a beam as wide as all beginnings together nothing is lost, so the best answers of all are found."""
    rng = random.Random(3)
    for _ in range(20):
        size, length, penalty = 4, 3, rng.choice((0.0, 1.0))
        table = [[[-rng.expovariate(1.0) for _ in range(size)] for _ in range(size)] for _ in range(length)]
        params = SamplingParams(temperature=0, beam_width=64, max_tokens=length, length_penalty=penalty, early_stopping="never")
        search = BeamSearch(params, {3})
        while search.open:
            lines = []
            for beam in search.open:
                row = table[len(beam.tokens)][beam.tokens[-1] if beam.tokens else 0]
                order = sorted(range(size), key=lambda token: -row[token])
                lines.append(TokenLogprobs([order[0], *order], [row[order[0]], *(row[t] for t in order)], [1, 1, 2, 3, 4]))
            search.advance(lines)
        best = brute_force(table, 5, length, penalty, {3})
        assert [found.beginning.tokens for found in search.found[:5]] == [tokens for _, tokens in best]


# -- over HTTP


def test_http() -> None:
    name = "stories260k"
    with served(need(MODELS / name), "--dtype", "float32", "--threads", "1") as server:
        ids = server.post("/tokenize", prompt=START).json()["tokens"]
        theirs, _ = their_beams(name, ids, [2], 4, 10, 0.5, True)
        body = {"prompt": START, "use_beam_search": True, "n": 4, "max_tokens": 10, "length_penalty": 0.5,
                "early_stopping": True, "return_token_ids": True}
        answer = server.complete(**body)
        assert [choice["token_ids"] for choice in answer["choices"]] == theirs
        assert answer["usage"]["completion_tokens"] == sum(map(len, theirs))
        narrow = server.complete(**{**body, "n": 2, "beam_width": 4})
        assert [choice["token_ids"] for choice in narrow["choices"]] == theirs[:2]
        for wrong, param in (({"top_p": 0.5}, "top_p"), ({"beam_width": 2}, "n"),
                             ({"use_beam_search": False}, "length_penalty")):
            refused = server.post("/v1/completions", **{**body, **wrong})
            assert refused.status_code == 400 and error_of(refused)["param"] == param
