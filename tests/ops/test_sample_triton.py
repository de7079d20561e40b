"""Triton's sampling against the reference: every parameter, odd vocabularies, strided lines, equals, NaN and infinities; in the
interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.core.plan import NOT_FINITE, Enter
from penstock.core.sampling import SamplingParams
from penstock.ops import noise, sample_triton
from penstock.ops.sample import SampleOps
from penstock.ops.sample_table import Column
from penstock.ops.sample_triton import TritonSample
from penstock.worker.rows import Parameters
from tests.ops.interpreter import DEVICE, DTYPES
from tests.ops.kernels import random

CPU = torch.device("cpu")
LENGTH = 700
REFERENCE, TRITON = SampleOps(), TritonSample()


class Batch:
    """Rows 1.. of a table, one for each of `params`, with random tokens; on the CPU and on the device of the kernels."""

    def __init__(self, params: list[SamplingParams], vocab: int, *, banned: list[int] | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lines = len(params)
        self.position = torch.randint(1, LENGTH - 1, (lines,), generator=generator).int()
        prompt = (self.position * torch.rand(lines, generator=generator)).int()
        # Few kinds of tokens, so that they repeat; what lies behind a row's tokens is no token at all.
        self.tokens = torch.randint(0, min(vocab, 50), (lines + 1, LENGTH), generator=generator).int()
        for line, known in enumerate(self.position.tolist()):
            self.tokens[line + 1, known:] = 2**30
        self.row = torch.arange(1, lines + 1, dtype=torch.int32)
        self.lines = torch.arange(lines, dtype=torch.int32)
        enter = [Enter(line + 1, [], int(prompt[line]), one, 977 * line + seed, banned or [])
                 for line, one in enumerate(params)]
        self.there = Parameters(lines + 1, DEVICE)
        self.here = Parameters(lines + 1, CPU)
        for parameters in (self.there, self.here):
            parameters.enter(enter)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float() * self.here.table[self.row.long()].view(torch.float32)[:, Column.INVERSE_TEMPERATURE, None]

    def threshold(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = TRITON.threshold(_there(logits), self.there.table, self.row.to(DEVICE))
        return found.cpu(), REFERENCE.threshold(logits, self.here.table, self.row)


def _there(logits: torch.Tensor, gap: int = 0) -> torch.Tensor:
    """On the kernels' device, with lines `gap` elements apart."""
    wide = torch.full((logits.shape[0], logits.shape[1] + gap), torch.nan, dtype=logits.dtype)
    wide[:, :logits.shape[1]] = logits
    return wide.to(DEVICE)[:, :logits.shape[1]]


@pytest.mark.parametrize(("lines", "vocab", "gap"), [(1, 61, 0), (3, 1000, 7), (19, 5003, 0), (40, 2048, 16), (2, 33000, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limited", [False, True])
def test_choose(lines: int, vocab: int, gap: int, limited: bool, dtype: torch.dtype) -> None:
    """The reference's tokens, to be found in the rows as well; a draw may differ where two race values are equal to 1e-4."""
    params = [SamplingParams(temperature=(0, 0.3, 1.0, 4.0)[line % 4]) for line in range(lines)]
    batch = Batch(params, vocab, seed=lines)
    logits = (random(lines, vocab, seed=vocab) * 3).to(dtype)
    threshold = batch.scaled(logits).topk(min(vocab, 40)).values[:, -1].contiguous() if limited else None
    before = batch.tokens.clone()
    wanted = REFERENCE.choose(logits, batch.here.table, batch.tokens, batch.row, batch.position, threshold)
    there = before.to(DEVICE)
    found = TRITON.choose(_there(logits, gap), batch.there.table, there, batch.row.to(DEVICE), batch.position.to(DEVICE),
                          None if threshold is None else threshold.to(DEVICE)).cpu()
    # Into the host's memory, at a place that is not aligned to anything.
    out = torch.full((lines + 2,), 77, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")[1:]
    for ops, batch_there, to in ((TRITON, batch.there, DEVICE), (REFERENCE, batch.here, torch.device("cpu"))):
        given = ops.choose(logits.clone().to(to), batch_there.table, before.to(to), batch.row.to(to), batch.position.to(to),
                           None if threshold is None else threshold.to(to), out[:lines])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert given.data_ptr() == out.data_ptr() and int(out[lines]) == 77
        assert torch.equal(given, found if ops is TRITON else wanted)
        wide = torch.full((2 * lines + 9,), 77, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
        ops.choose(logits.clone().to(to), batch_there.table, before.to(to), batch.row.to(to), batch.position.to(to),
                   None if threshold is None else threshold.to(to), wide,
                   torch.tensor([lines + 3], dtype=torch.int32, device=to))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(wide[lines + 3:2 * lines + 3], given)
        assert (wide[:lines + 3] == 77).all() and (wide[2 * lines + 3:] == 77).all()
    before[batch.row.long(), batch.position.long()] = found
    assert torch.equal(there.cpu(), before)
    keys = noise.keys(batch.here.table[batch.row.long(), Column.SEED_KEY], batch.position)[:, None]
    for line in (found != wanted).nonzero()[:, 0].tolist():
        assert not params[line].greedy
        pair = torch.stack((found[line], wanted[line]))[None]
        race = batch.scaled(logits)[line, pair.long()] - noise.exponential(keys[line:line + 1], pair).log()
        assert abs(float(race[0, 0] - race[0, 1])) < 1e-4
    assert int((found != wanted).sum()) <= lines // 20


def test_choose_takes_the_lowest_of_equals_in_any_tile() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [8999, 40, 5000]] = logits[1, [1024, 1023]] = 7.0
    batch = Batch([SamplingParams(temperature=0)] * 3, 9000)
    found = TRITON.choose(_there(logits), batch.there.table, batch.tokens.to(DEVICE), batch.row.to(DEVICE),
                          batch.position.to(DEVICE))
    assert found.tolist() == [40, 1023, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lines_that_cannot_be_sampled_and_padding(temperature: float) -> None:
    logits = random(6, 3000, seed=1)
    logits[0, 2999], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[4, :2990] = -torch.inf
    batch = Batch([SamplingParams(temperature=temperature, top_p=0.9)] * 6, 3000)
    row = batch.row.clone()
    row[5] = -1
    threshold = TRITON.threshold(_there(logits), batch.there.table, row.to(DEVICE))
    tokens = batch.tokens.to(DEVICE)
    found = TRITON.choose(_there(logits), batch.there.table, tokens, row.to(DEVICE), batch.position.to(DEVICE), threshold).cpu()
    assert found[:3].tolist() == [NOT_FINITE] * 3 and int(found[3]) >= 0 and int(found[4]) >= 2990
    assert torch.equal(tokens[6].cpu(), batch.tokens[6]), "padding wrote a token"
    assert tokens[1, int(batch.position[0])] == 0


FILTERS: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 2500}, {"top_k": 10**9}, {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.9},
    {"top_p": 0.999}, {"min_p": 0.3}, {"min_p": 1e-4}, {"top_k": 50, "top_p": 0.9}, {"top_k": 2500, "top_p": 0.7},
    {"min_p": 0.02, "top_p": 0.8}, {"min_p": 0.02, "top_k": 30}, {"top_k": 64, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.3, "top_p": 0.9}, {"temperature": 3.0, "top_k": 300}, {"temperature": 0, "top_k": 5},
]


def _logits(kind: str, lines: int, vocab: int) -> torch.Tensor:
    x = random(lines, vocab, seed=vocab)
    match kind:
        case "normal":
            return x * 2
        case "flat":
            return x * 1e-3
        case "peaked":
            return (x * 4).pow(3)
        case "equals":
            return (x * 3).round()
        case "same":
            return torch.full_like(x, 2.5)
        case "masked":
            return x.masked_fill(random(lines, vocab, seed=3) > -1, -torch.inf)
        case "outliers":
            return (x * 2).index_fill_(1, torch.arange(0, vocab, 20), -1e4)
        case "wide":
            return x.sign() * (x * 15).exp()
    raise AssertionError(kind)


@pytest.mark.parametrize(("kind", "vocab"), [
    *((kind, 61) for kind in ("normal", "flat", "peaked", "equals", "same", "masked", "wide")),
    *((kind, 3001) for kind in ("normal", "equals", "masked", "outliers", "wide")), ("peaked", 2048)])
@pytest.mark.parametrize("tile", [512, 4096])
def test_threshold(kind: str, vocab: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens stay, but for those that top_p has on its very border: the sum before them is top_p's to 1e-6."""
    if tile > vocab > 61 and DEVICE.type == "cpu":
        pytest.skip("the interpreter takes too long")
    monkeypatch.setattr(sample_triton, "_TILE", tile)
    params = [SamplingParams(**one) for one in FILTERS]
    batch = Batch(params, vocab)
    logits = _logits(kind, len(params), vocab)
    found, wanted = batch.threshold(logits)
    x = batch.scaled(logits)
    for line, one in enumerate(params):
        kept, expected = x[line] >= found[line], x[line] >= wanted[line]
        assert kept.any() and (one.greedy or kept[x[line].argmax()])
        if torch.equal(kept, expected):
            continue
        assert one.top_p < 1, (one, int(kept.sum()), int(expected.sum()))
        between = x[line][kept != expected]
        possible = x[line] >= max(float(x[line].max()) + (torch.tensor(one.min_p).log().item() if one.min_p else -1e9),
                                  float(x[line].topk(min(one.top_k, vocab)).values[-1]) if one.top_k > 0 else -1e9)
        weights = torch.where(possible, (x[line].double() - x[line].double().max()).exp(), 0.0)
        before = float(weights[x[line] > between.max()].sum() / weights.sum())
        assert abs(before - one.top_p) < 1e-6 and len(between.unique()) <= 2, (one, before)


def test_threshold_where_nothing_can_be_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """More equals at the border than there is room for, and more that top_k leaves: the search goes on in all logits."""
    monkeypatch.setattr(sample_triton, "_TILE", 512)
    vocab = 3200
    params = [SamplingParams(**one) for one in ({"top_k": 1500}, {"top_p": 0.5}, {"top_k": 2200, "top_p": 0.6}, {"top_k": 9})]
    batch = Batch(params, vocab)
    logits = random(4, vocab, seed=1) * 1e-7 + 1.0
    logits[1:3] = (random(2, vocab, seed=2) * 1.2).round()
    found, wanted = batch.threshold(logits)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("vocab", [61, 5000])
def test_penalize(vocab: int) -> None:
    cases = [{"presence_penalty": 1.5}, {"frequency_penalty": 0.3}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.5},
             {"presence_penalty": -1.0, "frequency_penalty": -0.2, "repetition_penalty": 1.1}]
    params = [SamplingParams(**cases[line % len(cases)]) for line in range(40)]
    batch = Batch(params, vocab)
    logits = random(40, vocab, seed=1) * 4
    lines = batch.lines[[0, 3, *range(5, 40)]]
    wanted, found = logits.clone(), _there(logits)
    REFERENCE.penalize(wanted, batch.here.table, batch.tokens, batch.row, batch.position, lines)
    TRITON.penalize(found, batch.there.table, batch.tokens.to(DEVICE), batch.row.to(DEVICE), batch.position.to(DEVICE),
                    lines.to(DEVICE))
    assert not torch.equal(wanted, logits)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=2e-5)
    assert torch.equal(found[[1, 2, 4]].cpu(), logits[[1, 2, 4]])


@pytest.mark.parametrize(("vocab", "words"), [(61, 2), (5003, 157), (5003, 3)])
def test_mask(vocab: int, words: int) -> None:
    """The bits say what stays, whichever lines are masked; a NaN survives; tokens beyond the words are excluded."""
    generator = torch.Generator().manual_seed(vocab)
    bits = torch.randint(-2**31, 2**31, (3, words), generator=generator).int()
    bits[1], lines = -1, torch.tensor([4, 0, 3], dtype=torch.int32)
    logits = random(6, vocab, seed=1)
    logits[4, 7] = torch.nan
    wanted, found = logits.clone(), _there(logits, 5)
    REFERENCE.mask(wanted, bits, lines)
    TRITON.mask(found, bits.to(DEVICE), lines.to(DEVICE))
    assert torch.equal(found.cpu().nan_to_num(99), wanted.nan_to_num(99)) and wanted[4, 7].isnan()
    for line, own in zip(lines.tolist(), bits.tolist(), strict=True):
        for token in range(vocab):
            kept = token < 32 * words and own[token // 32] >> token % 32 & 1
            assert token == 7 or float(wanted[line, token]) == (float(logits[line, token]) if kept else -torch.inf)
    assert torch.equal(wanted[[1, 2, 5]], logits[[1, 2, 5]])


def test_edit() -> None:
    vocab = 5003
    words = [[7], [1, 2, 3], [4, 9], [*range(30)], [49, 48]]
    params = [SamplingParams(**one) for one in (
        {"logit_bias": {3: 4.0, 9: -100.0, 5002: 1.0}}, {"allowed_token_ids": [2, 4, 31, 32, 4999]},
        {"allowed_token_ids": [5002], "logit_bias": {5002: -3.0, 5: 1.0}}, {"bad_words_token_ids": words},
        {"min_tokens": 699, "max_tokens": 700}, {"min_tokens": 1, "logit_bias": {1: 2.0}}, {},
        {"logit_bias": dict.fromkeys(range(300), 0.5)}, {"allowed_token_ids": [*range(0, 5003, 2)], "min_tokens": 5})]
    for seed in range(3):
        batch = Batch(params, vocab, banned=[0, 5001], seed=seed)
        for line, known in enumerate(batch.position.tolist()):  # some rows end in the beginnings of bad words
            for end in (words[seed + 1][:-1],) if known > 35 else ():
                batch.tokens[line + 1, known - len(end):known] = torch.tensor(end)
        batch.there.table[:, Column.PROMPT] = batch.here.table[:, Column.PROMPT] = 3
        logits = random(len(params), vocab, seed=1)
        logits[1, 77] = torch.nan
        wanted, found = logits.clone(), _there(logits, 5)
        REFERENCE.edit(wanted, batch.here.table, batch.here.lists, batch.tokens, batch.row, batch.position, batch.lines)
        TRITON.edit(found, batch.there.table, batch.there.lists, batch.tokens.to(DEVICE), batch.row.to(DEVICE),
                    batch.position.to(DEVICE), batch.lines.to(DEVICE))
        assert torch.equal(found.cpu().nan_to_num(99), wanted.nan_to_num(99))
        assert int(wanted[1].isfinite().sum()) == 5 and wanted[1, 77].isnan() and wanted[6].equal(logits[6])
        assert float(wanted[3, words[seed + 1][-1]]) == -torch.inf


@pytest.mark.parametrize(("lines", "vocab", "top"), [(1, 61, 20), (5, 7, 20), (9, 9001, 5), (3, 4096, 0), (2, 5000, 130)])
def test_score(lines: int, vocab: int, top: int) -> None:
    logits = random(lines + 2, vocab, seed=vocab) * 5
    logits[0, :vocab // 2] = -torch.inf
    tokens = torch.randint(0, vocab, (lines,), generator=torch.Generator().manual_seed(1)).int()
    some = torch.arange(lines + 2, dtype=torch.int32)[2:]
    for chosen in (None, some):
        these = logits[:lines] if chosen is None else logits
        wanted = REFERENCE.score(these, tokens, top, chosen)
        found = TRITON.score(_there(these, 3), tokens.to(DEVICE), top, None if chosen is None else chosen.to(DEVICE))
        known = wanted[1] > -torch.inf  # among equals, as those of no probability are, any order is right
        assert torch.equal(found[0].cpu()[known], wanted[0][known]) and torch.equal(found[2].cpu()[known], wanted[2][known])
        torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(("lines", "vocab", "width"), [(1, 61, 1), (5, 9001, 3), (9, 131, 140)])
def test_score_of_named_tokens(lines: int, vocab: int, width: int) -> None:
    """Several tokens of each line, in more pairs than are scored at a time, also -1 and one token twice."""
    logits = random(lines + 2, vocab, seed=vocab) * 5
    tokens = torch.randint(-1, vocab, (lines, width), generator=torch.Generator().manual_seed(1)).int()
    for chosen in (None, torch.arange(lines + 2, dtype=torch.int32)[2:]):
        these = logits[:lines] if chosen is None else logits
        wanted = REFERENCE.score(these, tokens, 0, chosen)
        found = TRITON.score(_there(these, 3), tokens.to(DEVICE), 0, None if chosen is None else chosen.to(DEVICE))
        assert torch.equal(found[0].cpu(), wanted[0]) and torch.equal(found[2].cpu(), wanted[2])
        torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-6, atol=4e-6)
        rows = these if chosen is None else these[chosen.long()]
        for column in range(width):
            one = REFERENCE.score(rows, tokens[:, column], 0)
            assert all(torch.equal(whole[:, column], alone[:, 0]) for whole, alone in zip(wanted, one, strict=True))
