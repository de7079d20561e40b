"""Drafts: a fake drafter on the device and tokens that the host expects, checked in the step that exists. Outputs stay equal.

No drafter is part of the product yet. These show the seam: a policy in the scheduler says how many, somebody in the
worker writes them, and neither knows of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.schema import EngineOptions
from penstock.core.plan import StepPlan, Want
from penstock.core.request import Request, Sequence, TokenLogprobs, Update
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from penstock.scheduler.drafting import DraftPolicy
from penstock.worker.drafting import Drafting
from tests.data import MODELS, need
from tests.system.test_masks import Alternating

PROMPTS = [[1, 5, 9], [1, 300, 20, 31, 7], [1, 44], [1, *range(30, 90)], [1], [1, 403, 407, 261]]


class Fixed(DraftPolicy):
    """Asks for as many drafts each time."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.drafted = self.accepted = 0

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: int) -> None:
        assert 0 <= kept <= tokens >= rows


class Constant:
    """Proposes one token, whatever came before."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, drafting: Drafting) -> None:
        for row, length, count in zip(drafting.row.tolist(), drafting.length.tolist(), drafting.count.tolist(), strict=True):
            drafting.rows.tokens[row, length:length + count] = self.token


class Oracle:
    """Knows what comes: whole outputs by prompt. Some drafts are wrong on purpose, by position."""

    def __init__(self, outputs: list[list[int]], wrong: int) -> None:
        self.texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
        self.wrong = wrong

    def propose(self, drafting: Drafting) -> None:
        tokens = drafting.rows.tokens
        for row, length, count in zip(drafting.row.tolist(), drafting.length.tolist(), drafting.count.tolist(), strict=True):
            known = tokens[row, :length].tolist()
            text = next((text for text in self.texts if text[:length] == known), [])
            for position in range(length, length + count):
                right = text[position] if position < len(text) else 7
                tokens[row, position] = right if position % self.wrong else 5


@contextmanager
def opened(model: str = "stories260k", **options: Any) -> Iterator[Engine]:
    engine = Engine(EngineOptions(**{"model": str(need(MODELS / model)), "threads": 1, "max_num_seqs": 8, "device": "cpu",
                                     "max_num_batched_tokens": 64, "max_model_len": 128, **options}))
    try:
        yield engine
    finally:
        engine.close()


def run(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS, tag: str = "") -> list[list[Update]]:
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"{tag}{i}", prompt, params))
    found: list[list[Update]] = [[] for _ in range(len(prompts) * params.n)]
    while engine.busy:
        for update in engine.turn():
            found[int(update.request_id[len(tag):]) * params.n + update.index].append(update)
        engine.scheduler.check()
    assert engine.stats().pages_used == 0
    return found


def tokens(found: list[list[Update]]) -> list[list[int]]:
    return [[token for update in updates for token in update.token_ids] for updates in found]


def scores(found: list[list[Update]]) -> list[list[TokenLogprobs]]:
    return [[line for update in updates for line in update.logprobs or ()] for updates in found]


def draft(engine: Engine, drafter: Constant | Oracle, count: int) -> Fixed:
    policy = engine.scheduler.drafts.policy = Fixed(count)
    engine.rank.worker.drafter = drafter
    return policy


GREEDY = SamplingParams(temperature=0, max_tokens=40, seed=0, ignore_eos=True)


def test_a_drafter_that_proposes_constants_changes_nothing() -> None:
    with opened() as engine:
        plain = tokens(run(engine, GREEDY))
        frequent = max(set(chain(*plain)), key=list(chain(*plain)).count)
        steps = engine.stats().steps
        policy = draft(engine, Constant(frequent), 3)
        engine.reset_prefix_cache()
        assert tokens(run(engine, GREEDY, tag="again")) == plain
        stats = engine.stats()
        assert policy.drafted == stats.drafted_tokens > 300 and policy.accepted == stats.accepted_tokens > 5
        assert stats.steps - steps < steps, "accepted drafts save steps"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("options", "asked"), [
    ({}, {}),
    ({"block_size": 4, "max_num_batched_tokens": 24}, {}),
    ({"block_size": 8, "max_model_len": 104, "kv_cache_memory_bytes": 20 * 8 * 1280}, {}),
    ({}, {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 5}),
    ({}, {"logprobs": 2, "prompt_logprobs": 1}),
    ({}, {"n": 2, "temperature": 1.0}),
    ({}, {"stop_token_ids": [403, 432], "min_tokens": 12}),
    ({"kernels": {"*": "reference"}}, {"max_tokens": 1}),
], ids=str)
def test_right_and_wrong_drafts_on_every_route(depth: int, options: dict[str, Any], asked: dict[str, Any]) -> None:
    params = GREEDY.replace(**asked)
    with opened(depth=depth, **options) as engine:
        plain = run(engine, params)
        engine.reset_prefix_cache()
        first = tokens(plain)[::params.n]
        policy = draft(engine, Oracle(first, wrong=5), 4)
        found = run(engine, params, tag="again")
        assert ("kv_cache_memory_bytes" not in options) or engine.stats().preemptions > 2
    assert tokens(found) == tokens(plain)
    assert [updates[-1].finish_reason for updates in found] == [updates[-1].finish_reason for updates in plain]
    for one, other in zip(chain(*scores(found)), chain(*scores(plain)), strict=True):
        assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    if params.max_tokens == 1:
        assert not policy.drafted
    else:
        assert 0 < policy.accepted < policy.drafted
        assert max(len(update.token_ids) for updates in found for update in updates) > 2


def test_what_the_host_expects_is_checked_like_any_draft() -> None:
    """Forced tokens of grammars take this way. A wrong expectation costs time alone, and so does one that is late. There are
    never more of them in a step than rows that it has to spare."""
    with opened(max_num_seqs=64) as engine:
        plain = tokens(run(engine, GREEDY))
        engine.reset_prefix_cache()
        for i, prompt in enumerate(PROMPTS):
            engine.submit(Request(f"x{i}", prompt, GREEDY))
        for sequence in engine.scheduler.live:
            right = plain[int(sequence.request.id[1:])]
            expected = right[:20] if sequence.request.id != "x2" else [5] * 20
            engine.scheduler.drafts.expect(sequence, len(sequence.tokens), expected)
        found: dict[str, list[int]] = {}
        while engine.busy:
            for update in engine.turn():
                found.setdefault(update.request_id, []).extend(update.token_ids)
            engine.scheduler.check()
        assert [found[f"x{i}"] for i in range(len(PROMPTS))] == plain
        stats = engine.stats()
        assert 80 <= stats.accepted_tokens < stats.drafted_tokens <= 120


def test_expected_tokens_take_no_more_rows_than_a_step_has_to_spare() -> None:
    with opened(max_num_seqs=len(PROMPTS) + 3) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.submit(Request(f"x{i}", prompt, GREEDY))
        while engine.scheduler.waiting:
            engine.turn()
        for sequence in engine.scheduler.live:
            engine.scheduler.drafts.expect(sequence, len(sequence.tokens) + 2, [5] * 20)
        most = 0
        while engine.busy:
            engine.turn()
            most = max(most, *(sum(step.drafts.values()) for step in engine.scheduler.in_flight), 0)
        assert most == 3


def test_masked_rows_check_what_is_expected_under_masks() -> None:
    with opened() as engine:
        masker = engine.scheduler.masker = Alternating()
        engine.submit(Request("m", PROMPTS[1], GREEDY))
        plain = []
        while engine.busy:
            plain += [token for update in engine.turn() for token in update.token_ids]
        engine.reset_prefix_cache()
        lines, steps = masker.lines, engine.stats().steps
        engine.submit(Request("m", PROMPTS[1], GREEDY))
        found: list[int] = []
        while engine.busy:
            for sequence in engine.scheduler.live:
                at = len(sequence.tokens) - sequence.prompt_len
                engine.scheduler.drafts.expect(sequence, len(sequence.tokens), plain[at:at + 6])
            found += [token for update in engine.turn() for token in update.token_ids]
        assert found == plain
        assert engine.stats().accepted_tokens > 15 and engine.stats().steps - steps < 30
        assert masker.lines - lines == 40, "every checked position has a mask of its own"


def test_hidden_states_are_reported_where_they_are_wanted() -> None:
    with opened(max_num_seqs=2) as engine:
        worker, model = engine.rank.worker, engine.rank.worker.model
        seen: list[torch.Tensor] = []
        forward = model.forward
        model.forward = lambda step: seen.append(forward(step)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        engine.submit(Request("a", PROMPTS[3], GREEDY))
        plan = engine.scheduler.plan(0.0)
        assert isinstance(plan, StepPlan)
        plan.wants = plan.wants | np.int32(Want.HIDDEN)
        result = worker.run(plan)
        assert result.hidden is not None and result.hidden.values.shape == (61, model.spec.width)
        assert torch.equal(torch.from_numpy(result.hidden.values), seen[-1].float()) and not result.hidden.segments.any()
        engine.scheduler.apply(result, 0.0)
        engine.abort(["a"])
