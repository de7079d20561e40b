"""Sampling: each parameter against a plain computation for one row, independence of neighbours, and the distribution drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.plan import NOT_FINITE, Enter, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.ops import noise
from penstock.ops.sample import SampleOps
from penstock.worker.rows import Rows
from penstock.worker.sampler import Lines, Sampler

V = 61


def _rows(tokens: list[list[int]], prompts: list[int], params: list[SamplingParams], seeds: list[int] | None = None,
          banned: list[int] | None = None) -> Rows:
    rows = Rows(len(tokens) + 1, 64, 16, 1, torch.device("cpu"))
    rows.tokens.fill_(7)
    enter = [Enter(i, t, p, s, (seeds or [0] * len(tokens))[i], banned or [])
             for i, (t, p, s) in enumerate(zip(tokens, prompts, params, strict=True))]
    rows.apply(StepPlan(0, enter, [], [np.zeros((0, 3), np.int32)]))
    return rows


def _sample(logits: torch.Tensor, rows: Rows, tokens: list[list[int]], which: list[int] | None = None) -> list[int]:
    which = list(range(len(tokens))) if which is None else which
    position = np.array([len(tokens[i]) for i in which], np.int64)
    row, places = np.array(which, np.int32), position.astype(np.int32)
    lines = Lines(np.arange(len(which)), row, places, torch.from_numpy(row), torch.from_numpy(places))
    return Sampler(SampleOps(), rows).launch(logits[which].clone(), lines).tokens().tolist()


def _frequencies(params: SamplingParams, logits: torch.Tensor, tokens: list[int], prompt: int) -> torch.Tensor:
    """How often each token is drawn over many seeds."""
    counts = torch.zeros(V)
    block, draws = 500, 4000
    for start in range(0, draws, block):
        rows = _rows([tokens] * block, [prompt] * block, [params] * block, list(range(start, start + block)))
        picks = _sample(logits.expand(block, V), rows, [tokens] * block)
        counts += torch.bincount(torch.tensor(picks), minlength=V)
    return counts / draws


def _plain(params: SamplingParams, logits: torch.Tensor, tokens: list[int], prompt: int) -> torch.Tensor:
    """The distribution that the parameters describe, written out for one row in float64."""
    x = logits.double().clone()
    if params.allowed_token_ids:
        x = torch.full_like(x, -math.inf).index_copy(0, torch.tensor(params.allowed_token_ids), x[params.allowed_token_ids])
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(tokens[prompt:]):
        x[token] -= params.presence_penalty + params.frequency_penalty * tokens[prompt:].count(token)
    p = (x / params.temperature).softmax(-1)
    p[p < params.min_p * p.max()] = 0
    order = p.argsort(descending=True)
    if params.top_k > 0:
        p[order[params.top_k:]] = 0
    p /= p.sum()
    total = 0.0
    for token in order.tolist():
        if total >= params.top_p:
            p[token] = 0
        total += float(p[token])
    return p / p.sum()


CASES: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.05}, {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.02}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.6}, {"repetition_penalty": 0.7, "frequency_penalty": -0.5}, {"logit_bias": {3: 4.0, 9: -100.0}},
    {"allowed_token_ids": [2, 4, 8, 16]}, {"allowed_token_ids": [2, 4, 8], "top_p": 0.9, "logit_bias": {2: 2.0}},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_distribution_is_the_one_described(case: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(V) * 1.5
    tokens, prompt = [5, 9, 9, 30, 31, 31, 31, 3], 4
    params = SamplingParams(**{"temperature": 1.0, **case})
    want = _plain(params, logits, tokens, prompt)
    got = _frequencies(params, logits, tokens, prompt)
    assert (got[want == 0] == 0).all(), "a token that is excluded was drawn"
    # Pearson's chi-square over the tokens that are expected at least five times, at about five standard deviations.
    likely = want * 4000 >= 5
    chi = float((4000 * (got[likely] - want[likely]) ** 2 / want[likely]).sum())
    freedom = max(1, int(likely.sum()) - 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5, (chi, freedom)


def test_neighbours_do_not_matter() -> None:
    """Each row alone gives what it gives among others of every kind."""
    torch.manual_seed(2)
    params = [SamplingParams(**{"temperature": 0.9, **case}) for case in CASES] + [SamplingParams(temperature=0)]
    tokens = [torch.randint(0, V, (int(n),)).tolist() for n in torch.randint(2, 40, (len(params),))]
    prompts = [max(1, len(t) // 2) for t in tokens]
    logits = torch.randn(len(params), V) * 2
    rows = _rows(tokens, prompts, params, list(range(50, 50 + len(params))))
    together = _sample(logits, rows, tokens)
    assert together == [_sample(logits, rows, tokens, [i])[0] for i in range(len(params))]
    backwards = list(range(len(params)))[::-1]
    assert _sample(logits, rows, tokens, backwards) == together[::-1]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, V)
    logits[0, [7, 20]] = 3.0
    assert _sample(logits, _rows([[1]], [1], [SamplingParams(temperature=0)]), [[1]]) == [7]


def test_seed_and_position_decide() -> None:
    logits = torch.randn(1, V)
    params = SamplingParams()

    def draw(seed: int, known: int) -> int:
        tokens = [[1] * known]
        return _sample(logits, _rows(tokens, [1], [params], [seed]), tokens)[0]

    assert draw(1, 3) == draw(1, 3)
    assert len({draw(seed, 3) for seed in range(40)}) > 5
    assert len({draw(1, known) for known in range(1, 40)}) > 5
    assert draw(2**64 - 1, 3) == draw(2**64 - 1, 3)


def test_min_tokens_and_bad_words() -> None:
    logits = torch.zeros(1, V)
    logits[0, 2], logits[0, 11] = 9.0, 5.0
    params = SamplingParams(temperature=0, min_tokens=3)
    for known, want in ((4, 11), (6, 11), (7, 2)):
        tokens = [[1] * known]
        assert _sample(logits, _rows(tokens, [4], [params], banned=[2]), tokens) == [want]
    params = SamplingParams(temperature=0, bad_words_token_ids=[[2], [5, 6, 11]])
    for tokens, want in (([1, 5, 6], 0), ([1, 5, 5], 11), ([1, 6], 11)):
        got = _sample(logits, _rows([tokens], [1], [params]), [tokens])[0]
        assert got == want
    assert _sample(logits, _rows([[1, 5, 6]], [3], [params]), [[1, 5, 6]]) == [11], "the prompt is not part of a bad word"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_row_alone(value: float) -> None:
    logits = torch.randn(3, V)
    logits[1, 17] = value
    params = [SamplingParams(temperature=t) for t in (0, 1, 0)]
    tokens = [[1], [1], [1]]
    picks = _sample(logits, _rows(tokens, [1] * 3, params), tokens)
    assert picks[1] == NOT_FINITE and picks[0] >= 0 and picks[2] >= 0


def test_nothing_left_to_choose_fails_the_row() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[4], bad_words_token_ids=[[4]])
    assert _sample(torch.randn(1, V), _rows([[1]], [1], [params]), [[1]]) == [NOT_FINITE]


def test_noise_is_uniform_and_uncorrelated() -> None:
    seeds = np.arange(64, dtype=np.uint64)
    of_seeds = torch.tensor([noise.seed_key(int(seed)) for seed in seeds], dtype=torch.int32)
    key = noise.keys(of_seeds.repeat_interleave(64), torch.arange(64, dtype=torch.int32).repeat(64))
    assert len(key.unique()) > 4090, "keys collide"
    uniform = torch.exp(-noise.exponential(key[:, None], torch.arange(256, dtype=torch.int32)[None]))
    assert uniform.min() > 0 and uniform.max() < 1
    assert abs(float(uniform.mean()) - 0.5) < 0.001 and abs(float(uniform.var()) - 1 / 12) < 0.001
    for axis, grid in ((1, uniform), (0, uniform)):
        a, b = (grid[:, :-1], grid[:, 1:]) if axis else (grid[:-1], grid[1:])
        correlation = float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])
        assert abs(correlation) < 0.005
