"""Speculative decoding: drafters change the number of steps, and nothing else."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.canary import suite
from penstock.cli.main import main
from penstock.config.schema import EngineOptions
from penstock.config.speculation import Speculation, speculation
from penstock.core.errors import ConfigError
from penstock.core.plan import StepPlan
from penstock.core.request import EngineStats, Request, Sequence
from penstock.core.steptime import StepTime
from penstock.engine.engine import Engine
from penstock.layers.decoder import Decoder
from penstock.scheduler.drafting import Adaptive
from penstock.worker.drafters.ahead import Ahead
from penstock.worker.drafters.head import Head
from penstock.worker.drafters.suffix import Suffix
from penstock.worker.drafting import Drafter, Drafting, Host, LoadedDrafter
from penstock.worker.dummy import dummy_round
from tests.data import MODELS, need
from tests.sampling import sampled

ASSETS = Path(__file__).parents[1] / "assets"
DRAFT, EAGLE, LATENT = (str(ASSETS / f"canary-{name}") for name in ("draft", "eagle", "mla"))
ITEMS = [item for skill in ("repeat", "json", "recall") for item in suite.prompts(skill, 3)]
FIXED = {"draft_policy": "fixed", "num_speculative_tokens": 4}


@contextmanager
def opened(**options: Any) -> Iterator[LLM]:
    llm = LLM(model="canary", max_model_len=1024, threads=1, **options)
    try:
        yield llm
    finally:
        llm.close()


def answered(llm: LLM, *asked: dict[str, Any]) -> list[list[Any]]:
    """The answers to ITEMS for each of the parameters asked for, all in one batch."""
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 60, "seed": 7, **one}) for one in asked for _ in ITEMS]
    found = llm.chat([item.messages for item in ITEMS] * len(asked), params, use_tqdm=False)
    said = [[(output.token_ids, output.text, output.finish_reason) for output in one.outputs] for one in found]
    return [list(itertools.chain(*said[first:first + len(ITEMS)])) for first in range(0, len(said), len(ITEMS))]


def answers(llm: LLM, **asked: Any) -> tuple[list[Any], EngineStats]:
    return answered(llm, asked)[0], llm.engine.stats()


class Plain:
    """An engine without drafts, which is asked once for what several tests compare theirs with."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._said: dict[str, tuple[list[list[Any]], int]] = {}

    def answered(self, *asked: dict[str, Any]) -> list[list[Any]]:
        return self._asked(asked)[0]

    def answers(self, **asked: Any) -> list[Any]:
        return self.answered(asked)[0]

    def steps(self, *asked: dict[str, Any]) -> int:
        return self._asked(asked)[1]

    def _asked(self, asked: tuple[dict[str, Any], ...]) -> tuple[list[list[Any]], int]:
        if (key := repr(asked)) not in self._said:
            before = self.llm.engine.stats().steps
            found = answered(self.llm, *asked)
            self._said[key] = found, self.llm.engine.stats().steps - before
        return self._said[key]

    @cached_property
    def constrained(self) -> list[Any]:
        return constrained(self.llm)


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    with opened() as llm:
        yield Plain(llm)


ASKED: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "n": 2}, {"repetition_penalty": 1.3}, {"stop": ["e"]},
    {"max_tokens": 3}, {"min_tokens": 9, "logit_bias": {5: 2.0}},
]


@pytest.mark.parametrize("options", [
    {"speculate": "ngram", **FIXED}, {"speculate": "suffix", **FIXED}, {"speculative_model": DRAFT, **FIXED},
    {"speculative_model": DRAFT}, {"speculative_model": EAGLE, **FIXED}, {"speculate": "lookahead", **FIXED}],
                         ids=["ngram", "suffix", "model", "adaptive", "eagle3", "lookahead"])
def test_answers_are_equal_and_steps_are_fewer(options: dict[str, Any], plain: Plain) -> None:
    with opened(**options) as drafting:
        steps = 0
        for asked in ASKED:
            found, after = answers(drafting, **asked)
            assert found == plain.answers(**asked), asked
            steps += plain.steps(asked)
        assert after.accepted_tokens > 20 and sum(after.accepted_by_place) == after.accepted_tokens
        assert after.accepted_by_place == sorted(after.accepted_by_place, reverse=True)
        assert after.drafts * 5 >= after.drafted_tokens > after.accepted_tokens and after.steps < steps


def test_drafts_made_ahead_are_those_made_in_turn_and_mostly_there() -> None:
    """More sequences than rows, so that rows change hands; outcomes of greedy and of drawn tokens."""
    config, few = {"model": DRAFT, **FIXED}, {"max_num_seqs": 5}
    with (opened(**few) as plain, opened(**few, speculative_config=config) as in_turn,
          opened(**few, speculative_config={**config, "ahead": 6, "device": "cpu"}) as ahead):
        for asked in ASKED:
            (one, expected), (found, stats) = answers(in_turn, **asked), answers(ahead, **asked)
            assert found == one == answers(plain, **asked)[0], asked
            assert (stats.accepted_tokens, stats.drafted_tokens) == (expected.accepted_tokens, expected.drafted_tokens), asked
        assert stats.ahead_tries > 200 and stats.ahead_hits > 0.75 * stats.ahead_tries
        assert constrained(ahead) == constrained(plain)


def test_drafts_made_ahead_do_not_depend_on_how_soon_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that divide a model draft the same, also behind prompts that the draft model reads in several passes."""
    config, submit = {"model": DRAFT, **FIXED, "ahead": 2, "device": "cpu"}, Ahead._submit
    prompts = [[1, *range(40, 240)], [1, *range(60, 130)]]
    params = SamplingParams(temperature=0, max_tokens=24, seed=1, ignore_eos=True)

    def late(self: Ahead, work: Any, given: Any) -> Any:
        time.sleep(0.2 * (work.__name__ == "_read"))
        return submit(self, work, given)

    found = []
    for submits in (submit, late):
        monkeypatch.setattr(Ahead, "_submit", submits)
        with opened(max_num_seqs=5, max_num_batched_tokens=24, dtype="float32", speculative_config=config) as llm:
            said = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
            stats = llm.engine.stats()
            found.append((said, stats.accepted_tokens, stats.ahead_tries, stats.ahead_hits))
    assert found[0] == found[1] and found[0][2] > 5


def test_drafts_made_ahead_go_on_behind_a_rest_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model first reads what was chosen meanwhile, here more than a step's tokens."""
    asked, ask, tries = 0, Ahead._ask, list[int]()

    def rests(self: Ahead, drafting: Drafting) -> None:
        nonlocal asked
        asked += 1
        if not 3 <= asked < 43:
            ask(self, drafting)
        tries.append(self._loaded.counted[1])

    monkeypatch.setattr(Ahead, "_ask", rests)
    with opened(max_num_seqs=2, max_num_batched_tokens=24,
                speculative_config={"model": DRAFT, **FIXED, "ahead": 2, "device": "cpu"}) as llm:
        llm.generate([[1, *range(40, 52)]], SamplingParams(temperature=0, max_tokens=160, ignore_eos=True), use_tqdm=False)
    assert asked > 60 and tries[-1] > tries[42] + 10


@pytest.mark.parametrize("config", [{"model": DRAFT}, {"model": EAGLE}, {"model": DRAFT, "ahead": 2, "device": "cpu"}], ids=str)
def test_a_rank_that_is_kept_drafts_again(config: dict[str, Any]) -> None:
    """As after the loss of another rank: its worker ends and another begins, its weights stay."""
    with opened(speculative_config={**config, **FIXED}) as llm:
        found = []
        for _ in range(2):
            said, stats = answers(llm)
            found.append((said, stats.drafts, stats.accepted_tokens))
            llm.engine.executor.close()
            llm.engine.rank.leave("")  # type: ignore[union-attr]
            llm.engine = Engine(llm.engine.options, rank=llm.engine.rank)
        assert found[0] == found[1] and found[0][2] > 100


@pytest.mark.parametrize(("other", "message"), [
    ({"device": None}, "belong together"), ({"ahead": 65}, "1 to 64"), ({"speculative_eagle_topk": 2}, "drafts chains"),
    ({"rejection_sample_method": "block"}, "strict or synthetic"), ({"model": EAGLE}, "drafts as eagle3"),
    ({"device": "cuda:9"}, "cuda:9")], ids=str)
def test_ahead_is_refused_by_name(other: dict[str, Any], message: str) -> None:
    config = {"model": DRAFT, "ahead": True, "device": "cpu", **other}
    with pytest.raises(ConfigError, match=message), opened(speculative_config=config):
        pass


def test_the_first_layers_draft_without_entries_of_their_own(plain: Plain) -> None:
    """All layers but the last are right often enough that their cache entries must be right."""
    config = {"method": "layer_skip", "draft_layers": 7, **FIXED}
    with opened(speculative_config=config) as drafting:
        for asked in ({}, {"temperature": 0.8, "n": 2}):
            found = answers(drafting, **asked)
            assert found[0] == plain.answers(**asked)
        stats = found[1]
    assert stats.accepted_tokens > 0.4 * stats.drafts
    with pytest.raises(ConfigError, match="has 8 layers; possible are 1 to 7"), opened(
            speculative_config={"method": "layer_skip", "draft_layers": 8}):
        pass


def _masked(folder: str, out: Path) -> str:
    """A draft model or head that says of itself that it drafts all tokens in one pass."""
    shutil.copytree(folder, out)
    (out / "config.json").write_text(json.dumps({**json.loads((out / "config.json").read_text()), "pard_token": 4}))
    return str(out)


@pytest.mark.parametrize("draft", [DRAFT, EAGLE], ids=["pard", "p-eagle"])
def test_all_tokens_in_one_pass(draft: str, plain: Plain, tmp_path: Path) -> None:
    """Neither was trained for it, so that only the first token of a draft is right: as often as without."""
    first, expected = [], [plain.answers(**asked) for asked in ({}, {"temperature": 0.9})]
    for folder in (draft, _masked(draft, tmp_path / "masked")):
        with opened(speculative_model=folder, **FIXED) as llm:
            assert [answers(llm, **asked)[0] for asked in ({}, {"temperature": 0.9})] == expected
            stats = llm.engine.stats()
            first.append((stats.accepted_by_place[0] / stats.drafts, stats.steps))
    assert first[1][0] > 0.8 * first[0][0] and first[1][1] > first[0][1]


def test_a_draft_model_with_another_tokenizer_drafts_tokens_that_both_have() -> None:
    """Models of the same stories, with vocabularies of 512 tokens and of 361 or 105, nearly characters: drafts are never right,
    as each token is read as the last of its characters."""
    params = [SamplingParams(temperature=temperature, seed=2, max_tokens=80, ignore_eos=True) for temperature in (0.0, 0.7)]
    prompts = ["Once upon a time", "The dog was"]
    expected = None
    for draft in (None, "babyllama-tok361", "babyllama-tok105"):
        folder = None if draft is None else str(need(MODELS / draft))
        with LLM(str(need(MODELS / "stories260k")), max_model_len=128, threads=1, speculative_model=folder,
                 draft_policy="fixed", num_speculative_tokens=3) as llm:
            found = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
            stats = llm.engine.stats()
        expected = expected or found
        assert found == expected and (draft is None or stats.drafts > 100), draft


def test_a_draft_model_with_the_same_tokens_in_another_order_is_as_often_right(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path / "other")
    spelled = json.loads((tmp_path / "other/tokenizer.json").read_text())
    kept = {token["id"] for token in spelled["added_tokens"]}
    free = [token for token in spelled["model"]["vocab"].values() if token not in kept]
    moved = dict(zip(free, reversed(free), strict=True))
    spelled["model"]["vocab"] = {name: moved.get(token, token) for name, token in spelled["model"]["vocab"].items()}
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(spelled))
    tensors = load_file(tmp_path / "other/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][[moved.get(token, token) for token in range(len(tensors[name]))]].contiguous()
    save_file(tensors, tmp_path / "other/model.safetensors")
    found = []
    for draft in (DRAFT, str(tmp_path / "other")):
        with opened(speculative_model=draft, **FIXED) as llm:
            said, stats = answers(llm)
            found.append((said, stats.accepted_tokens / stats.drafts))
    assert found[0][0] == found[1][0] and found[1][1] == pytest.approx(found[0][1], rel=0.02)


def test_the_draft_model_of_canary_is_right_as_often_as_its_card_says() -> None:
    """3.77 tokens a step at 4 drafts by the card, over all skills; these three are its best."""
    with opened(speculative_model=DRAFT, **FIXED) as llm:
        _, stats = answers(llm)
    assert stats.accepted_tokens / stats.drafts > 2.5


@pytest.mark.parametrize("draft", [DRAFT, EAGLE], ids=["model", "eagle3"])
def test_log_probabilities_end_with_the_answer(draft: str, plain: Plain) -> None:
    """An answer of any length ends within drafts that the target would keep: with its first token, too."""
    with opened(speculative_model=draft, **FIXED) as drafting:
        for most in range(1, 8):
            params = SamplingParams(temperature=0, max_tokens=most, logprobs=1)
            for one, other in zip(*(llm.chat([item.messages for item in ITEMS], params, use_tqdm=False)
                                    for llm in (plain.llm, drafting)), strict=True):
                wanted, found = one.outputs[0], other.outputs[0]
                assert found.token_ids == wanted.token_ids and len(found.logprobs or ()) == len(found.token_ids), most
                assert found.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=0.05)


@pytest.mark.parametrize("draft", [DRAFT, EAGLE], ids=["model", "eagle3"])
def test_a_prefix_hit_has_the_drafters_entries_too(draft: str) -> None:
    with opened(speculative_model=draft, **FIXED) as llm:
        first, once = answers(llm)
        drafts, accepted = once.drafts, once.accepted_tokens
        again, twice = answers(llm)
        assert again == first and twice.cached_tokens > 100
        assert twice.accepted_tokens - accepted >= 0.95 * accepted and twice.drafts - drafts <= 1.05 * drafts


def test_suffixes_of_earlier_answers_draft_those_that_repeat_them_but_not_another_tenants() -> None:
    prompt = [{"role": "user", "content": "Tell me a story about a fox."}]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)

    def accepted(salt: str) -> int:
        before = llm.engine.stats().accepted_tokens
        outputs.append(llm.chat(prompt, params, use_tqdm=False, cache_salt=salt)[0].outputs[0].token_ids)
        return llm.engine.stats().accepted_tokens - before

    outputs: list[Any] = []
    with opened(speculate="suffix", **FIXED) as llm:
        first, again, other = accepted("one"), accepted("one"), accepted("other")
    assert again > 50 > first and other == first and outputs[0] == outputs[1] == outputs[2]


def test_places_vote_for_the_continuation() -> None:
    found = torch.tensor([[[5, 1], [6, 2], [6, 3], [6, 2]]])
    suffix = Suffix.__new__(Suffix)
    assert suffix._chosen(found, torch.tensor([[4, 4, 3, 3]])).tolist() == [[6, 2]]
    assert suffix._chosen(found, torch.tensor([[4, 3, 3, 3]])).tolist() == [[5, 1]]


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"},
                                           "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}
CONSTRAINTS: list[dict[str, Any]] = [{"regex": "[ab ]{6,40}"}, {"json": SCHEMA}, {"choice": ["the red fox", "the red hen"]}]


def constrained(llm: LLM) -> list[Any]:
    """Answers under masks, in one batch with answers without."""
    params = [SamplingParams(temperature=temperature, seed=5, max_tokens=50, structured_outputs=structured)
              for temperature in (0.0, 0.8) for structured in (*CONSTRAINTS, None)]
    prompts = [[{"role": "user", "content": "Repeat after me: ab ab red fox name age"}]] * len(params)
    return [(one.outputs[0].token_ids, one.outputs[0].text, one.outputs[0].finish_reason)
            for one in llm.chat(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("options", [{"speculate": "ngram"}, {"speculative_model": DRAFT}, {"speculative_model": EAGLE},
                                     {"speculative_model": DRAFT, "depth": 1}], ids=["ngram", "model", "eagle3", "depth 1"])
def test_constrained_answers_are_drafted_for_and_equal(options: dict[str, Any], plain: Plain) -> None:
    """There is a mask at every draft position; an answer alone in its batch has drafts of masked rows only."""
    with opened(**options, **FIXED) as drafting:
        assert constrained(drafting) == plain.constrained
        before, steps = drafting.engine.stats().accepted_tokens, drafting.engine.stats().steps
        alone = SamplingParams(temperature=0, max_tokens=50, structured_outputs={"regex": "(ab ){12}"})
        prompt = [{"role": "user", "content": "Repeat after me: ab ab ab ab"}]
        assert drafting.chat(prompt, alone, use_tqdm=False)[0].outputs[0].text == "ab " * 12
        stats = drafting.engine.stats()
        assert stats.accepted_tokens > before and stats.steps - steps < 20


@pytest.mark.parametrize("options", [
    pytest.param({"speculative_model": DRAFT, "num_speculative_tokens": 9}, marks=pytest.mark.exhaustive),
    {"speculative_config": {"model": DRAFT, "speculative_eagle_topk": 3, "speculative_num_steps": 3}}], ids=["chain", "tree"])
def test_budgets_of_thinking_end_within_drafts(options: dict[str, Any], plain: Plain) -> None:
    """Drafts beyond the budget, which its forced end or the model's own ends before; of one token and of two. In half of the
    answers thinking begins within drafts."""
    said = [tokens for tokens, _, _ in plain.answers(ignore_eos=True)]
    asked = [{"reasoning_end_ids": end, "max_thinking_tokens": budget, "ignore_eos": True, "max_tokens": 30, **begun}
             for end in ([300], [300, 301], said[0][3:4], said[0][3:5], said[-1][5:6]) for budget in (0, 2, 5, 8)
             for begun in ({}, {"reasoning_start_ids": said[-1][2:3]})]
    with opened(**options, draft_policy="fixed") as drafting:
        for one, found, expected in zip(asked, answered(drafting, *asked), plain.answered(*asked), strict=True):
            assert found == expected, one


def test_masks_of_ranks_in_processes_know_the_drafts() -> None:
    with opened(tensor_parallel_size=2) as plain, opened(speculate="ngram", tensor_parallel_size=2, **FIXED) as drafting:
        assert constrained(drafting) == constrained(plain)
        assert drafting.engine.stats().accepted_tokens > 0


def test_options_in_vllms_spelling() -> None:
    def asked(**config: Any) -> Speculation | None:
        return speculation(EngineOptions(speculative_config=config))

    assert speculation(EngineOptions()) is None
    assert asked(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2) == Speculation("ngram", None, 3, 2, 2)
    assert asked(model="x", draft_tensor_parallel_size=1) == Speculation("auto", "x", ranks=1)
    assert asked(model="x", num_speculative_tokens=7) == Speculation("auto", "x", 7)
    assert asked(method="deepseek_mtp", num_speculative_tokens=1) == Speculation("mtp", None, 1)
    assert asked(method="qwen3_next_mtp", num_speculative_tokens=2) == Speculation("mtp", None, 2)
    assert asked(method="ngram_gpu", rejection_sample_method="standard", use_heterogeneous_vocab=True) == Speculation("ngram")
    assert asked(method="eagle3", model="x") == Speculation("eagle3", "x")
    assert asked(model="[ngram]", prompt_lookup_min=6) == Speculation("ngram", longest=16, shortest=6)
    assert asked(model="[ngram]", prompt_lookup_min=20) == Speculation("ngram", longest=20, shortest=20)
    assert speculation(EngineOptions(speculate="auto")) == Speculation("auto")
    assert speculation(EngineOptions(speculative_model="x", draft_policy="fixed")) == Speculation("auto", "x", adaptive=False)
    for config, message in (({"method": "look"}, "possible are"),
                            ({"method": "ngram", "model": "x"}, "takes no draft model"),
                            ({"method": "draft_model"}, "needs the draft model"), ({"modell": "x"}, "similar is model"),
                            ({"method": "ngram", "num_speculative_tokens": 0}, "1 to 64"),
                            ({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}, "at most the second"),
                            ({"method": "eagle3", "model": "m", "prompt_lookup_max": 4}, "prompt_lookup_max=4, which eagle3"),
                            ({"method": "lookahead", "prompt_lookup_min": 4}, "prompt_lookup_min=4, which lookahead does not"),
                            ({"method": "ngram", "parallel_drafting": True}, "parallel_drafting=True, which ngram"),
                            ({"method": "mtp", "num_speculative_tokens": 3, "speculative_num_steps": 4}, "they are the same"),
                            ({"method": "mtp", "use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 0}, "1 to 128"),
                            ({"method": "ngram", "num_speculative_tokens": "x"}, "speculative_config"),
                            ({"model": "x", "draft_tensor_parallel_size": 3}, "possible are 1 and tensor_parallel_size, which"),
                            ({"method": "ngram", "draft_tensor_parallel_size": 2}, "has to be 1 for ngram"),
                            ({"model": "x", "draft_tensor_parallel_size": 2, "ahead": 4, "device": "cpu"}, "1 for ahead")):
        with pytest.raises(ConfigError, match=message):
            asked(**config)


@pytest.mark.parametrize(("options", "message"), [
    ({"speculative_model": str(ASSETS / "canary-window"), "max_model_len": 10 ** 5}, "max_model_len"),
    ({"speculative_model": "/nowhere/at/all"}, "nowhere"),
])
def test_drafters_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        LLM(**{"model": "canary", "threads": 1, **options})


@pytest.mark.parametrize("options", [{"speculate": "ngram"}, {"speculate": "suffix"}, {"speculate": "lookahead"},
                                     {"speculative_model": DRAFT}, {"speculative_model": EAGLE}], ids=str)
def test_rounds_of_the_warm_up_leave_nothing_behind(options: dict[str, Any]) -> None:
    """As a worker on a GPU runs them before its first request, so that nothing is compiled or loaded later."""
    with opened(**options, **FIXED) as plain, opened(**options, **FIXED) as warm:
        worker = warm.engine.rank.worker  # type: ignore[attr-defined]
        for rows in (1, 8):
            result = worker.run(dummy_round(rows, 3, len(worker.rows.tables)))
            assert len(result.kept) == rows and result.kept.min() >= 1
        (expected, before), (found, after) = answers(plain), answers(warm)
    assert found == expected and (after.drafts, after.accepted_by_place) == (before.drafts, before.accepted_by_place)


def test_imposed_acceptance_keeps_as_many_drafts_as_it_says() -> None:
    config = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.6,
              "num_speculative_tokens": 3, "draft_policy": "fixed"}
    with opened(speculative_config=config) as llm:
        answers(llm, ignore_eos=True, n=4, temperature=1.0)
        stats = llm.engine.stats()
    # 0.6 + 0.6 ** 2 + 0.6 ** 3 of each three, but for the ends of answers.
    assert stats.drafts > 300 and 1.0 < stats.accepted_tokens / stats.drafts < 1.3
    assert 0.5 < stats.accepted_by_place[0] / stats.drafts < 0.7


def test_relaxed_acceptance_is_for_thinking_alone() -> None:
    """Samples at a high temperature: the draft model's are seldom the target's, but among its best tokens."""
    messages = [item.messages for item in suite.prompts("recall", 4)]
    end = 5

    def drafted(llm: LLM, **params: Any) -> tuple[Any, float]:
        before = llm.engine.stats()
        drafts, accepted = before.drafts, before.accepted_tokens
        asked = SamplingParams(temperature=2.0, seed=3, max_tokens=40, ignore_eos=True, **params)
        found = [one.outputs[0].token_ids for one in llm.chat(messages, asked, use_tqdm=False)]
        after = llm.engine.stats()
        return found, (after.accepted_tokens - accepted) / (after.drafts - drafts)

    relaxed = {"method": "draft_model", "model": DRAFT, "use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 50,
               "relaxed_delta": 20.0, **FIXED}
    with opened(speculative_model=DRAFT, **FIXED) as strict, opened(speculative_config=relaxed) as loose:
        plain, kept = drafted(strict)
        thinking = {"reasoning_end_ids": [end]}
        assert drafted(strict, **thinking)[0] == plain == drafted(loose)[0]
        other, more = drafted(loose, **thinking)
        assert other != plain and more > 1.3 * kept
        # The answer's first token ends the thinking: all that follows is verified strictly.
        ended = {"reasoning_end_ids": [end], "logit_bias": {end: 100.0}}
        assert drafted(loose, **ended)[0] == drafted(strict, **ended)[0]
    with pytest.raises(ConfigError, match="changes answers"):
        speculation(EngineOptions(speculative_config={"method": "ngram", "relaxed_topk": 4}))


def test_the_bench_reports_the_gain_against_no_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "latency", "canary", "--batch-size", "2", "--input-len", "8", "--output-len", "12", "--num-iters", "1",
             "--num-iters-warmup", "0", "--threads", "1", "--max-model-len", "256", "--json"]
    config = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1.0,
              "num_speculative_tokens": 3, "draft_policy": "fixed"}
    assert main([*words, "--speculative-config", json.dumps(config)]) == 0
    found = json.loads(capsys.readouterr().out)
    told = found["speculation"]
    # Two requests of 12 tokens, the first of the prompt's step, then 4 a step: 2 * 3 verifications, of which the last is short.
    assert told["drafts"] == 6 and told["acceptance_rate"] == 1 and 3 < told["acceptance_length"] <= 4
    assert told["speedup"] == pytest.approx(told["seconds_off"] / found["avg_latency"])
    assert main(words) == 0 and "speculation" not in json.loads(capsys.readouterr().out)


class Constant(Drafter):
    """Drafts one token, whatever came before."""

    def propose(self, drafting: Drafting) -> None:
        for row, length, count in zip(drafting.row.tolist(), drafting.length.tolist(), drafting.count.tolist(), strict=True):
            drafting.rows.tokens[row, length:length + count] = 2


class Random(Drafter):
    """Drafts any tokens."""

    def propose(self, drafting: Drafting) -> None:
        for row, length, count in zip(drafting.row.tolist(), drafting.length.tolist(), drafting.count.tolist(), strict=True):
            drafting.rows.tokens[row, length:length + count] = torch.randint(4096, (count,), dtype=torch.int32)


class Echo(Drafter):
    """Drafts the last known token again and again."""

    def propose(self, drafting: Drafting) -> None:
        for row, length, count in zip(drafting.row.tolist(), drafting.length.tolist(), drafting.count.tolist(), strict=True):
            drafting.rows.tokens[row, length:length + count] = drafting.rows.tokens[row, length - 1]


class Idle(Drafter):
    """Writes nothing: what an earlier sequence left in the row is verified."""

    def propose(self, drafting: Drafting) -> None:
        """Nothing."""


class LoadedConstant(LoadedDrafter):
    drafter: type[Drafter] = Constant

    def __init__(self, asked: Speculation, target: Decoder) -> None:
        super().__init__()
        assert asked.tokens == 2 and target.spec.vocab_size == 4096

    def start(self, host: Host) -> Drafter:
        return self.drafter()


@pytest.mark.parametrize("drafter", [Constant, Random, *(pytest.param(one, marks=pytest.mark.exhaustive)
                                                         for one in (Echo, Idle))])
def test_a_drafter_of_an_installed_package_may_write_anything(drafter: type[Drafter], plain: Plain,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant is the end of the answer."""
    own = EntryPoints([EntryPoint("always-end", f"{__name__}:LoadedConstant", "penstock.drafters")])
    monkeypatch.setattr("penstock.config.speculation.entry_points", lambda group: own.select(group=group))
    monkeypatch.setattr(LoadedConstant, "drafter", drafter)
    config = {"method": "always-end", "num_speculative_tokens": 2, "draft_policy": "fixed"}
    with opened(speculative_config=config) as drafting:
        for asked in ({}, {"temperature": 0.9, "frequency_penalty": 0.5}):
            found, stats = answers(drafting, **asked)
            assert found == plain.answers(**asked) and stats.drafts > len(ITEMS)


@pytest.mark.parametrize(("filtered", "tokens", "rule"), [({"top_k": 20}, 4096, "strict"), ({"top_k": 20}, 4096, "block"), *(
    pytest.param(filtered, 1 << 16, rule, marks=pytest.mark.exhaustive) for rule in ("strict", "probabilistic", "block")
    for filtered in ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.02}))], ids=str)
def test_sampled_tokens_have_the_targets_distribution(filtered: dict[str, float], tokens: int, rule: str) -> None:
    """Two-sample chi-square between the third tokens of answers with drafts and of others, with other seeds, without. A million
    tokens for each filter are in tests/unit/worker/test_rejection.py."""
    prompt, each = "The", 64

    def counted(first: int, **options: Any) -> torch.Tensor:
        params = [SamplingParams(temperature=2.0, seed=first + each * turn, n=each, max_tokens=4, ignore_eos=True, **filtered)
                  for turn in range(tokens // 4 // each)]
        with LLM(str(need(MODELS / "stories260k")), max_model_len=64, threads=1, max_num_seqs=128, **options) as llm:
            found = llm.generate([prompt] * len(params), params, use_tqdm=False)
        third = torch.tensor([one.token_ids[2] for of in found for one in of.outputs])
        return torch.bincount(third, minlength=512).double()

    drafted = counted(0, speculative_config={"model": str(need(MODELS / "stories260k")), "draft_policy": "fixed",
                                             "num_speculative_tokens": 3, "rejection_sample_method": rule})
    plain = counted(1 << 30)
    seen = drafted + plain >= 10
    one, other = (torch.cat((side[seen], side[~seen].sum()[None])) for side in (drafted, plain))
    expected = (one + other) / 2
    filled = expected > 0
    square = ((one - expected)[filled] ** 2 / expected[filled]).sum().item() * 2
    freedom = int(filled.sum()) - 1
    assert freedom >= 10 and square < freedom + 5 * (2 * freedom) ** 0.5, (square, freedom)


@pytest.mark.parametrize("case", sampled(itertools.product(
    ["probabilistic", "block"], [{"model": DRAFT}, {"model": EAGLE}, {"method": "ngram"}]), 2), ids=str)
def test_rejection_changes_no_greedy_answer_and_repeats_itself(case: tuple[str, dict[str, str]], plain: Plain) -> None:
    rule, drafter = case
    config = {**drafter, "rejection_sample_method": rule, **FIXED}
    drawn: dict[str, Any] = {"temperature": 2.0, "top_k": 50, "n": 2}
    with opened(speculative_config=config) as drafting:
        for asked in ({}, {"repetition_penalty": 1.3}):
            assert answers(drafting, **asked)[0] == plain.answers(**asked)
        before = drafting.engine.stats().accepted_tokens
        found, stats = answers(drafting, **drawn)
        assert found == answers(drafting, **drawn)[0] != plain.answers(**drawn)
        assert stats.accepted_tokens > before
        # Log probabilities are of the tokens that the strict rule chooses.
        assert answers(drafting, logprobs=2, **drawn)[0] == plain.answers(logprobs=2, **drawn)
    with pytest.raises(ConfigError, match="possible are strict, probabilistic, block"):
        speculation(EngineOptions(speculative_config={"method": "ngram", "rejection_sample_method": "blocks"}))


STORIES = [[{"role": "user", "content": f"Tell me a story about a {word}"}] for word in ("fox", "boat")]


@pytest.mark.parametrize(("draft", "branches"), [(EAGLE, 4), pytest.param(DRAFT, 2, marks=pytest.mark.exhaustive)],
                         ids=["eagle3", "model"])
def test_trees_change_no_answer_and_keep_more(draft: str, branches: int, plain: Plain) -> None:
    """Texts that go on behind their end, where drafts are often wrong. Rows with penalties have chains in the same batch."""
    kept, said = [], []
    for topk, tokens in ((1, None), (branches, None), (branches, 15)):
        config = {"model": draft, "draft_policy": "fixed", "num_speculative_tokens": 4, "speculative_eagle_topk": topk,
                  "speculative_num_draft_tokens": tokens}
        params = [SamplingParams(temperature=temperature, max_tokens=80, seed=7, ignore_eos=True, repetition_penalty=penalty,
                                 logprobs=logprobs)
                  for temperature in (0.0, 2.0) for penalty in (1.0, 1.2) for logprobs in (None, 1)]
        with opened(speculative_config=config) as llm:
            said.append(told(llm, params))
            stats = llm.engine.stats()
            kept.append(stats.accepted_tokens / stats.drafts)
    said.append(told(plain.llm, params))
    assert said[0] == said[1] == said[2] == said[3] and kept[0] * 1.02 < kept[1], kept


def told(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    found = llm.chat([story for story in STORIES for _ in params], params * len(STORIES), use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]


def test_trees_with_everything_else(plain: Plain) -> None:
    config = {"model": EAGLE, "speculative_eagle_topk": 3, "num_speculative_tokens": 3, "draft_policy": "fixed"}
    with opened(speculative_config=config) as drafting:
        for asked in ASKED:
            assert answers(drafting, **asked)[0] == plain.answers(**asked), asked
        assert constrained(drafting) == plain.constrained
    for other, message in (({"method": "suffix", "model": None}, "several candidates"),
                           ({"rejection_sample_method": "block"}, "strict"), ({"num_speculative_tokens": 1}, "2 steps"),
                           ({"speculative_num_draft_tokens": 6}, "can have 7 to 22")):
        with pytest.raises(ConfigError, match=message), opened(speculative_config={**config, **other}):
            pass
    with pytest.raises(ConfigError, match="full attention"), LLM(LATENT, threads=1, max_model_len=256, speculative_config={
            "method": "mtp", "speculative_eagle_topk": 2}):
        pass


def test_a_shape_without_weights_drafts_for_another(tmp_path: Path) -> None:
    """As benchmarks have it: configs alone, and an imposed acceptance."""
    (tmp_path / "config.json").write_text((Path(DRAFT) / "config.json").read_text())
    config = {"model": str(tmp_path), "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1.0, **FIXED}
    with opened(load_format="dummy", speculative_config=config) as llm:
        stats = answers(llm, ignore_eos=True)[1]
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 100


def _sequence(acceptance: float | None = None) -> Sequence:
    sequence = Sequence(Request("x", [1, 2, 3, 4], SamplingParams()), 0, 0, 100)
    sequence.acceptance, sequence.row = acceptance, 3
    return sequence


def _times(slope: float) -> StepTime:
    """A model of step time in which each position costs so many seconds."""
    times = StepTime()
    times.slope = lambda _tokens: slope  # type: ignore[method-assign]
    return times


@dataclass
class Clock:
    """Runs a policy against a simulated device: by number of drafts, what fixed numbers give of the tokens a second without."""

    policy: Adaptive
    ahead: int = 2
    """Steps that are planned before the first has ended."""
    asked: list[int] = field(default_factory=list)
    """The number of drafts that the policy allowed in each step of the last run."""

    def run(self, rows: int, gains: list[float], steps: int, acceptance: float = 0.8) -> float:
        """The expected tokens a second, of those without drafts. A step behind a rest reads for a tenth of a step; step times
        vary by 2 %, and the policy hears of one in two hundred that it took three times as long."""
        rng, sequences = random.Random(rows), [_sequence() for _ in range(rows)]
        expected = [sum(acceptance ** place for place in range(drafts + 1)) for drafts in range(len(gains))]
        times = [tokens / gain for tokens, gain in zip(expected, gains, strict=True)]
        tokens = seconds = 0.0
        planned, self.asked = list[tuple[int, list[int]]](), []
        for _ in range(steps):
            drafting = self.policy.begin(rows)
            planned.append((drafting, [self.policy.count(one) if drafting else 0 for one in sequences]))
            if len(planned) < self.ahead:
                continue
            drafting, counts = planned.pop(0)
            self.asked.append(drafting)
            kept = rows
            for one, count in zip(sequences, counts, strict=True):
                right = next((place for place in range(count) if rng.random() >= acceptance), count)
                if count:
                    self.policy.learn(one, count, right)
                kept += right
            whole, part = divmod(sum(counts) / rows, 1)
            took = times[int(whole)] + part * (times[min(len(times) - 1, int(whole) + 1)] - times[int(whole)])
            took = 0.01 * (took + 0.1 * (drafting > 0 and not sum(counts))) * rng.uniform(0.98, 1.02)
            self.policy.stepped(rows, rows + sum(counts), kept, took * (3 if rng.random() < 0.005 else 1), drafting)
            tokens, seconds = tokens + sum(expected[count] for count in counts) / rows, seconds + took
        return 0.01 * tokens / seconds


LOADS = {1: [1, 1.5, 1.8, 2.0, 2.2], 8: [1, 1.5, 1.8, 2.0, 2.1], 32: [1, 1.3, 1.48, 1.5, 1.45],
         128: [1, 1.073, 1.02, 0.95, 0.88], 256: [1, 0.95, 0.85, 0.75, 0.7], 512: [1, 0.9, 0.8, 0.7, 0.6]}
"""By sequences, what fixed numbers of drafts give: as measured on an H200 (8B, EAGLE shape), and worse for 256 and 512."""


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_policy_finds_the_number_of_drafts_for_each_load(ahead: int) -> None:
    """Answers of 128 tokens, loads that come one after the other, and again in another order. None is slower than without
    drafts by more than two percent, the first time included."""
    clock, found = Clock(Adaptive(4, _times(1e-6)), ahead), {}
    for rows in (1, 8, 32, 128, 256, 512, 128, 32, 512, 1):
        gain = clock.run(rows, LOADS[rows], 128)
        assert gain >= 0.98, rows
        found[rows] = gain
    print(found)
    for rows, gains in LOADS.items():
        assert found[rows] > 0.95 * max(gains), (rows, found)
    clock.run(128, LOADS[128], 400)
    assert clock.asked[100:].count(1) > 280


@pytest.mark.parametrize("gains", [LOADS[1], LOADS[128], LOADS[256], [1, 0.9, 0.8, 1.1, 1.2], LOADS[512]])
def test_trials_cost_less_than_a_hundredth(gains: list[float]) -> None:
    clock = Clock(Adaptive(4, _times(1e-6)))
    clock.run(64, gains, 200)
    assert clock.run(64, gains, 3000) > 0.99 * max(gains)
    assert len(set(clock.asked)) > 1


@pytest.mark.parametrize("rows", [1, 32, 128, 256, 512])
@pytest.mark.parametrize("gains", [[1, 0.5, 0.5, 0.5, 0.5], [1, 0.9, 0.7, 0.6, 0.5], [1, 0.4, 0.5, 0.7, 0.5]], ids=str)
def test_drafts_that_halve_the_speed_cost_next_to_nothing_from_a_cold_start(rows: int, gains: list[float]) -> None:
    clock = Clock(Adaptive(4, _times(1e-6)))
    assert clock.run(rows, gains, 2000) > 0.98
    assert sum(drafts > 0 for drafts in clock.asked) < 20


def test_a_load_is_not_judged_by_one_far_from_it() -> None:
    """Behind one sequence, for which drafts pay twice, 128 and 512 begin without; what 128 showed speaks for 181."""
    clock, halved = Clock(Adaptive(4, _times(1e-6))), [1, 0.5, 0.5, 0.5, 0.5]
    assert clock.run(1, LOADS[1], 200) > 2
    for rows in (128, 512):
        assert clock.run(rows, halved, 500) > 0.98
        assert clock.asked[:2] == [0] * 2 and sum(drafts > 0 for drafts in clock.asked) < 10
    assert clock.run(181, halved, 500) > 0.99 and not any(clock.asked)


def test_steps_with_prompts_alone_leave_a_new_load_without_drafts() -> None:
    """None of them is measured: drafts are tried in at most one of a hundred steps."""
    policy = Adaptive(4, _times(1e-6))
    assert not any(policy.begin(128) for _ in range(1000))
    for _ in range(8):
        policy.begin(128)
        policy.stepped(128, 128, 128, 0.006, 0)
    assert sum(policy.begin(128) > 0 for _ in range(2000)) <= 20


def test_a_tree_is_drafted_as_a_whole_or_not_at_all() -> None:
    for gains, best in (([1, 2, 2, 2, 1.5], 4), ([1, 2, 2, 2, 0.8], 0)):
        clock = Clock(Adaptive(4, _times(1e-6), whole=True))
        clock.run(16, gains, 400)
        assert set(clock.asked) == {0, 4} and clock.asked[50:].count(best) > 320


def _counts(policy: Adaptive, sequence: Sequence) -> list[int]:
    """The numbers of drafts of a sequence in some steps, the most frequent first."""
    found: list[int] = []
    for _ in range(32):
        policy.begin(8)
        found.append(policy.count(sequence))
    return sorted(set(found), key=lambda count: -found.count(count))


@pytest.fixture
def drafting() -> Adaptive:
    """A policy that has five drafts at eight sequences, where a further position costs some tenth of a token."""
    policy = Adaptive(5, _times(1e-4))
    Clock(policy).run(8, [1, 1.5, 2, 2.5, 3, 4], 200, acceptance=0.9)
    return policy


def test_sequences_that_are_less_often_right_have_fewer_drafts(drafting: Adaptive) -> None:
    counts = [_counts(drafting, _sequence(one)) for one in (0.95, 0.5, 0.02)]
    assert counts == [[5], [1], [0, 1]], counts


@pytest.mark.parametrize(("chances", "count"), [
    ([0.9] * 5, 5), ([0.9, 0.5, 0.3, 0.9, 0.9], 2), ([0.01, 0.9], 0), ([0.9], 5), ([0.5], 1)])
def test_what_a_drafter_says_of_its_newest_drafts_decides_how_many_there_are(drafting: Adaptive, chances: list[float],
                                                                             count: int) -> None:
    sequence = _sequence(0.95)
    sequence.chances = chances
    assert _counts(drafting, sequence)[0] == count


def test_the_log_says_where_drafts_pay(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(Adaptive(4, _times(1e-6)))
    with caplog.at_level("INFO", "penstock"):
        clock.run(1, LOADS[1], 200)
        clock.run(256, LOADS[256], 200)
    found = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("speculation is on at about 1 sequences") for line in found), found
    assert any(line.startswith("speculation is off at about 256 sequences") for line in found), found


def test_the_drafter_reads_prompts_only_where_drafts_pay_or_nothing_is_known() -> None:
    clock = Clock(Adaptive(4, _times(1e-6)))
    assert clock.policy.reads_prompts
    for rows, gains, reads in ((128, LOADS[128], True), (256, LOADS[256], False), (512, [1, 0.7, 0.6, 0.5, 0.4], False),
                               (1, LOADS[1], True)):
        clock.run(rows, gains, 200)
        assert clock.policy.reads_prompts is reads, rows


def test_prompts_are_not_read_from_the_first_step_of_a_load_where_drafts_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a single sequence, for which drafts pay, was the last one before."""
    read, follow = list[int](), Head.follow

    def watched(self: Head, plan: StepPlan, *others: Any) -> None:
        read.append(int(plan.counts.sum()))
        follow(self, plan, *others)

    monkeypatch.setattr(Head, "follow", watched)
    prompts = [{"prompt_token_ids": list(range(5 + row, 65 + row))} for row in range(8)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with opened(max_num_seqs=8, speculative_config={"model": EAGLE, "num_speculative_tokens": 3}) as llm:
        policy = llm.engine.scheduler.drafts.policy
        assert isinstance(policy, Adaptive)
        for rows, gains in ((8, [1, 0.5, 0.5, 0.5]), (1, [1, 1.5, 1.8, 2.0])):
            Clock(policy).run(rows, gains, 200)
        llm.generate(prompts[:1], params, use_tqdm=False)
        assert read[0] == 60
        read.clear()
        llm.generate(prompts, params, use_tqdm=False)
        assert max(read, default=0) < 60


def test_the_policy_rests_where_no_draft_is_kept_and_begins_again_where_they_are() -> None:
    """Following alone costs an eighth of a step; a drafted token next to nothing."""
    clock, times = Clock(Adaptive(5, _times(1e-5))), [1, *(1.125 + 0.001 * drafts for drafts in range(1, 6))]
    wrong, right = ([tokens / time for tokens, time in zip(given, times, strict=True)] for given in ([1] * 6, range(1, 7)))
    clock.run(8, wrong, 400, acceptance=0.0)
    assert clock.asked.count(0) > 340
    clock.run(8, wrong, 2000, acceptance=0.0)
    assert clock.asked.count(0) > 1940 and 1 in clock.asked
    clock.run(8, right, 4000, acceptance=1.0)
    assert clock.asked[3000:].count(5) > 900
