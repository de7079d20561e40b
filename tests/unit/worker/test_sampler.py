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
from penstock.worker.rows import Parameters, Rows
from penstock.worker.sampler import MAX_LOGITS_ROWS, LogitsRows, RowMasks, Sampler

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
    lines = LogitsRows(np.arange(len(which)), row, places, torch.from_numpy(row), torch.from_numpy(places))
    return Sampler(SampleOps(), rows).launch(logits[which].clone(), lines).tokens().tolist()


def test_scores_of_named_tokens() -> None:
    """Rows that name tokens, rows that ask for the most likely ones and rows that ask for nothing, in one step, with and
    without what changes logits before the draw: each gets its own, of the model's own logits."""
    logits, tokens = torch.randn(5, V, generator=torch.Generator().manual_seed(3)) * 4, [[1, 2, 3]] * 5
    changes: list[dict[str, Any]] = [{}, {"logit_bias": {5: 50.0}}]
    for more in changes:
        params = [SamplingParams(temperature=0, logprob_token_ids=[40, 7], logprobs=2, **more),
                  SamplingParams(temperature=0, logprobs=3), SamplingParams(temperature=0),
                  SamplingParams(temperature=0, logprob_token_ids=[9], logprobs=1), SamplingParams(temperature=0, logprobs=0)]
        rows = _rows(tokens, [3] * 5, params)
        places = np.full(5, 3, np.int32)
        row = np.arange(5, dtype=np.int32)
        lines = LogitsRows(np.arange(5), row, places, torch.from_numpy(row), torch.from_numpy(places))
        sampled = Sampler(SampleOps(), rows).launch(logits.clone(), lines)
        assert sampled.scores is not None
        found, chosen = sampled.scores.logprobs(), sampled.tokens().tolist()
        assert found is not None and found.segments.tolist() == [0, 1, 3, 4]
        assert chosen[0] == (5 if more else int(logits[0].argmax()))
        exact = logits.double().log_softmax(-1)
        likely = logits[1].argsort(descending=True)[:3].tolist()
        asked: list[tuple[int, list[int]]] = [(0, [40, 7]), (1, likely), (3, [9]), (4, [])]
        for line, (segment, ids) in enumerate(asked):
            wanted = [chosen[segment], *ids]
            assert found.ids[line, :len(wanted)].tolist() == wanted
            assert found.values[line, :len(wanted)] == pytest.approx(exact[segment, wanted].numpy(), abs=1e-5)
            assert found.ranks[line, :len(wanted)].tolist() == [
                1 + int((logits[segment] > logits[segment, token]).sum()) for token in wanted]


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


def test_the_repetition_penalty_makes_prompt_and_output_less_likely() -> None:
    """Positive logits are divided by it, negative ones multiplied; tokens of the prompt count, and each counts once."""
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0, 1.0] + [0.0] * (V - 5)])
    rows = _rows([[0, 1, 0, 2, 2, 3]], [3], [SamplingParams(temperature=0, repetition_penalty=2.0)])
    found = logits.clone()
    SampleOps().penalize(found, rows.parameters.table, rows.tokens, *(torch.tensor([n], dtype=torch.int32) for n in (0, 6, 0)))
    assert found[0, :5].tolist() == [1.0, -4.0, 1.5, -6.0, 1.0] and not found[0, 5:].any()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("filters", [
    {"min_p": 0.2}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1, "top_k": 9}, {"min_p": 0.05, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.6}, {"min_p": 0.03, "top_k": 15, "top_p": 0.9}], ids=str)
def test_filters_apply_to_the_scaled_distribution_in_their_order(filters: dict[str, Any], temperature: float) -> None:
    """Temperature first; then min_p, top_k and top_p, each of what the one before has left: exactly the tokens that a plain
    computation keeps."""
    for seed in range(20):
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 2
        rows = _rows([[1]], [1], [SamplingParams(temperature=temperature, **filters)])
        least = SampleOps().threshold(logits, rows.parameters.table, torch.zeros(1, dtype=torch.int32))
        kept = set(((logits[0] / temperature) >= least[0] - 1e-6).nonzero()[:, 0].tolist())
        p = (logits[0].double() / temperature).softmax(0)
        left = [t for t in p.argsort(descending=True).tolist() if p[t] >= filters.get("min_p", 0) * p.max()]
        left = left[:filters.get("top_k", V)]
        total, wanted = sum(float(p[t]) for t in left), list[int]()
        for token in left:
            wanted.append(token)
            if sum(float(p[t]) for t in wanted) >= filters.get("top_p", 1.0) * total - 1e-12 and "top_p" in filters:
                break
        assert kept == set(wanted), (seed, sorted(kept ^ set(wanted)))


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


def test_filters_of_neighbours_do_not_matter() -> None:
    """Each pair of filters: one row's keeps its border whatever the other's is."""
    filters: list[dict[str, Any]] = [{"top_k": 1}, {"top_k": 5}, {"min_p": 0.02}, {"top_p": 0.6}, {"top_k": 7, "min_p": 0.1},
                                     {"top_p": 0.9, "top_k": 3}]
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(3)) * 2

    def least(*some: dict[str, Any]) -> list[float]:
        rows = _rows([[1, 2]] * len(some), [1] * len(some), [SamplingParams(temperature=1.3, **one) for one in some])
        row = torch.arange(len(some), dtype=torch.int32)
        return SampleOps().threshold(logits[-len(some):], rows.parameters.table, row).tolist()

    for one in filters:
        for other in filters:
            assert least(one, other)[1] == pytest.approx(least(other)[0]), (one, other)


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


def test_log_probabilities_are_of_the_models_own_logits() -> None:
    """Neither sampling's edits nor rows that ask for none or for fewer alternatives change them."""
    torch.manual_seed(4)
    cases: list[dict[str, Any]] = [
        {"logprobs": 3, "logit_bias": {4: 50.0}}, {}, {"logprobs": 0}, {"logprobs": 5, "repetition_penalty": 2.0, "top_k": 2},
        {"logprobs": 1, "allowed_token_ids": [8, 9]}]
    tokens = [[1, 2, 3, 4]] * len(cases)
    rows = _rows(tokens, [2] * len(cases), [SamplingParams(**case) for case in cases])
    logits = torch.randn(len(cases), V)
    which = np.array([4, 1, 0, 2, 3], np.int32)
    places = np.full(len(which), 4, np.int32)
    lines = LogitsRows(10 + np.arange(len(which)), which, places, torch.from_numpy(which), torch.from_numpy(places))
    found = Sampler(SampleOps(), rows).launch(logits[which].clone(), lines)
    scores, wanted = found.scores.logprobs(), logits[which].log_softmax(-1)
    assert scores is not None and scores.segments.tolist() == [10, 12, 13, 14] and scores.positions.tolist() == [4] * 4
    assert scores.ids.shape == (4, 6) and rows.tokens[which, 4].tolist() == found.tokens().tolist() and found.tokens()[2] == 4
    for line, segment in enumerate(scores.segments - 10):
        ids = scores.ids[line].astype(np.int64)
        assert ids[0] == found.tokens()[segment]
        np.testing.assert_allclose(scores.values[line], wanted[segment, ids].numpy(), rtol=1e-6)
        assert ids[1:].tolist() == wanted[segment].topk(5).indices.tolist()
        assert scores.ranks[line].tolist() == [int((wanted[segment] > wanted[segment, ids[0]]).sum()) + 1, 1, 2, 3, 4, 5]


def test_lists_stay_with_their_rows() -> None:
    """Rows with edits come and go, so that the lists are laid out anew again and again."""
    generator = np.random.default_rng(1)
    lasting, logits = Parameters(8, torch.device("cpu")), torch.randn(8, V)
    tokens = torch.randint(0, 5, (8, 20), dtype=torch.int32)
    row, position = torch.arange(8, dtype=torch.int32), torch.full((8,), 20, dtype=torch.int32)
    there: dict[int, Enter] = {}
    addresses = set()
    for turn in range(60):
        leaving = [i for i in there if generator.random() < 0.3]
        lasting.leave(leaving)
        there = {i: enter for i, enter in there.items() if i not in leaving}
        entering = [i for i in range(8) if i not in there and generator.random() < 0.6]
        enters = [Enter(i, [], 3, _edited(generator), turn, [1, 2]) for i in entering]
        lasting.enter(enters)
        there |= {enter.row: enter for enter in enters}
        addresses.add(lasting.lists.data_ptr())
        fresh = Parameters(8, torch.device("cpu"))
        fresh.enter(list(there.values()))
        lines = torch.tensor(sorted(there), dtype=torch.int32)
        found, wanted = logits.clone(), logits.clone()
        for parameters, changed in ((lasting, found), (fresh, wanted)):
            SampleOps().edit(changed, parameters.table, parameters.lists, tokens, row, position, lines)
        assert torch.equal(found, wanted)
        assert not there or not torch.equal(wanted, logits)
    assert 2 <= len(addresses) <= 20 and len(lasting.lists) < 4000


def _edited(generator: np.random.Generator) -> SamplingParams:
    ids = generator.integers(0, V, generator.integers(1, 30)).tolist()
    match generator.integers(4):
        case 0:
            return SamplingParams(logit_bias={token: float(token) for token in ids})
        case 1:
            return SamplingParams(allowed_token_ids=ids, min_tokens=17, max_tokens=40)
        case 2:
            return SamplingParams(bad_words_token_ids=[[token % 5, token] for token in ids] + [[9]])
    return SamplingParams(min_tokens=18, max_tokens=40, temperature=0.0)


def test_the_ends_of_the_noise() -> None:
    """With this key the first token's bits are all ones, and the second's all zeros: neither may win or lose by that alone."""
    key, ids = torch.tensor([[12345]], dtype=torch.int32), torch.tensor([[22661169, 21338042]], dtype=torch.int32)
    ends = noise.exponential(key, ids)
    assert ends[0, 0] == pytest.approx(2.0**-24) and ends[0, 1] == pytest.approx(24 * math.log(2), rel=1e-3)


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


def obeyed(device: str, ops: SampleOps) -> None:
    """Checks that each row chooses the one token that its mask allows: masks that a caller made, those in `mask_room`, and
    parts of those, as of a step of more rows than one pass takes; step behind step, while the device may be behind."""
    words, count, steps = 40, 96, 12
    there = torch.device(device)
    rows = Rows(2 * count, 64, 16, 1, there)
    params = SamplingParams(temperature=0)
    rows.apply(StepPlan(0, [Enter(i, [3], 1, params, 0, []) for i in range(2 * count)], [], [np.zeros((0, 3), np.int32)]))
    sampler = Sampler(ops, rows)
    which = np.arange(count)
    row = which.astype(np.int32)
    device_row = torch.from_numpy(row).to(there)
    lines = LogitsRows(which, row, np.ones_like(row), device_row, torch.ones_like(device_row))
    wanted, found = [], []
    for step in range(steps):
        tokens = (which * 31 + step * 97) % (32 * words)
        every = np.concatenate([tokens, tokens[::-1]])
        size = 2 * count if step % 3 == 2 else count
        bits = sampler.mask_room(size, words) if step % 3 else np.empty((size, words), np.int32)
        bits.fill(0)
        bits.view(np.uint32)[np.arange(size), every[:size] // 32] = np.uint32(1) << (every[:size] % 32).astype(np.uint32)
        for part in range(0, size, count):
            logits = torch.zeros(count, 32 * words, device=there)
            found.append(sampler.launch(logits, lines, RowMasks(bits[part:part + count], which)))
            wanted.append(every[part:part + count].tolist())
    if device == "cuda":
        torch.cuda.synchronize()
    assert [sampled.tokens().tolist() for sampled in found] == wanted
    assert sampler.mask_room(MAX_LOGITS_ROWS + 1, words).shape == (MAX_LOGITS_ROWS + 1, words)


def test_rows_obey_their_masks_wherever_those_were_written() -> None:
    obeyed("cpu", SampleOps())
