"""Verification of drafts on tables of probabilities: tokens have the target's distribution, whatever drafted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.plan import Enter, StepPlan, Want
from penstock.core.sampling import SamplingParams
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from penstock.worker.drafting import Drafting
from penstock.worker.rejection import Judging, Rejection
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows
from penstock.worker.verify import Verifier

V, K, ROWS = 4, 3, 40000
OPS = bind(detect("cpu"), torch.float32).sample


def _table(seed: int) -> torch.Tensor:
    """[V] * K + [V]: the distribution of the next token after up to K tokens that begin with V - 1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*([V] * (K + 1)), generator=draw) * 1.3


def _round(method: str, drawn: bool, count: int = ROWS, **filtered: float) -> tuple[torch.Tensor, float]:
    """The first K + 1 tokens of each row, those behind the kept ones from the target itself, and the drafts kept on average.
    `method`: of rejection, or empty: drafts are kept where the target's sampler chooses them."""
    rows, params = Rows(count, K + 4, 16, 1, torch.device("cpu")), SamplingParams(temperature=1.0, **filtered)
    rows.apply(StepPlan(0, enter=[Enter(row, [0], 1, params, row, []) for row in range(count)],
                        edits=[np.zeros((0, 3), np.int32)]))
    every = np.arange(count, dtype=np.int32)
    plan = StepPlan(1, rows=every, starts=0 * every, counts=0 * every + 1 + K, wants=0 * every + int(Want.SAMPLE | Want.EACH))
    target, source = _table(1), _table(2)
    rejection, verifier = Rejection(rows, method, V), Verifier(rows)
    drafting = Drafting(plan, rows)
    rejection.begin(drafting)
    tokens, table = rows.tokens, rows.parameters.table

    def after(of: torch.Tensor, place: int) -> torch.Tensor:
        """Logits [rows, V] of the token at this place, given those before it."""
        index = tuple(tokens[:, 1 + i].long() for i in range(place)) + (torch.zeros(count, dtype=torch.long),) * (K - place)
        return of[index]

    for place in range(K):
        if drawn and not method:
            OPS.choose(after(source, place), table, tokens, drafting.row, drafting.length + place)
        elif drawn:
            rejection.draw(after(source, place), drafting.row, drafting.length + place)
        else:
            tokens[:, 1 + place] = (tokens[:, place] + 1) % V
    logits = torch.stack([after(target, place) for place in range(K + 1)], 1).flatten(0, 1)
    segments = np.repeat(every, K + 1)
    positions = np.tile(np.arange(1, K + 2, dtype=np.int32), count)
    lines = LogitsRows(segments.astype(np.int64), segments, positions, torch.from_numpy(segments), torch.from_numpy(positions))
    drafts = verifier.drafts(lines)
    border = OPS.threshold(logits, table, lines.row)
    if method:
        judging = Judging(rejection, rows, lines, drafts)
        assert judging.needed
        for part in lines.parts(1 << 16):
            here = slice(judging._at, judging._at + len(part.rows))
            judging.take(part, OPS.probabilities(logits[here], table, part.row, border[here]))
        found = verifier.verify(plan, lines, *judging.settle(torch.zeros(len(segments), dtype=torch.int32)))
    else:
        found = verifier.verify(plan, lines, drafts, OPS.choose(logits, table, tokens, lines.row, lines.position, border))
    kept = torch.from_numpy(found.kept())
    draw = torch.Generator().manual_seed(9)
    for place in range(K + 1):
        line = after(target, place)
        chances = OPS.probabilities(line, table, drafting.row, OPS.threshold(line, table, drafting.row))
        more = torch.multinomial(chances, 1, generator=draw)[:, 0].int()
        tokens[:, 1 + place] = torch.where(kept > place, tokens[:, 1 + place], more)
    return tokens[:, 1:K + 2].long(), float(kept.float().mean()) - 1


def _kept_by(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The filters' rules once more, over the last axis: the probabilities of what stays."""
    chance = logits.softmax(-1)
    chance = chance.where(chance >= min_p * chance.amax(-1, keepdim=True), 0.0)
    ranked = chance.sort(-1, descending=True)
    stays = torch.arange(V) < (top_k or V)
    before = (ranked.values * stays).cumsum(-1) - ranked.values * stays
    stays = stays & (before < top_p * (ranked.values * stays).sum(-1, keepdim=True))
    chance = torch.zeros_like(chance).scatter_(-1, ranked.indices, ranked.values * stays)
    return chance / chance.sum(-1, keepdim=True)


def _square(found: torch.Tensor, **filtered: float) -> tuple[float, int]:
    """Chi-square of the joint distribution of K + 1 tokens against the target's."""
    target, joint = _table(1).double(), torch.ones(1)
    for place in range(K + 1):
        given = _kept_by(target[(slice(None),) * place + (0,) * (K - place)], **filtered)
        joint = joint[..., None] * given if place else given
    number = sum(found[:, place] * V ** (K - place) for place in range(K + 1))
    seen, expected = torch.bincount(number, minlength=V ** (K + 1)).double(), joint.flatten() * len(found)
    assert not seen[expected == 0].any(), "a token was drawn that the filters exclude"
    few = expected < 5
    seen, expected = (torch.cat((x[~few], x[few].sum()[None])) for x in (seen, expected))
    some = expected > 0
    return float(((seen - expected)[some] ** 2 / expected[some]).sum()), int(some.sum()) - 1


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
def test_tokens_have_the_targets_distribution_and_blocks_keep_more(drawn: bool) -> None:
    lengths = {}
    for method in ("token", "block"):
        found, lengths[method] = _round(method, drawn)
        square, freedom = _square(found)
        assert freedom > 60 and square < freedom + 5 * (2 * freedom) ** 0.5, (method, square, freedom)
    # Of certain drafts both keep as many: the ratios are at most 1.
    assert lengths["block"] > lengths["token"] + (0.02 if drawn else -0.02), lengths
    assert lengths["token"] > 0.3


@pytest.mark.parametrize(("count", "rule"), [
    (20_000, ""), *(pytest.param(250_000, rule, marks=pytest.mark.exhaustive) for rule in ("", "token", "block"))])
@pytest.mark.parametrize("filtered", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2},
                                      {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_million_tokens_have_the_filtered_distribution(filtered: dict[str, float], count: int, rule: str) -> None:
    """Four tokens of each row by the sampler, its filters and the verification that serve."""
    square, freedom = _square(_round(rule, True, count, **filtered)[0], **filtered)
    assert freedom > 15 and square < freedom + 5 * (2 * freedom) ** 0.5, (square, freedom)
