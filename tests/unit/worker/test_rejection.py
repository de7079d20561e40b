"""Rejection sampling of drafts on tables of probabilities: tokens have the target's distribution, whatever drafted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.plan import Enter, StepPlan, Want
from penstock.core.sampling import SamplingParams
from penstock.worker.drafting import Drafting
from penstock.worker.rejection import Rejection
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows
from penstock.worker.verify import Verifier

V, K, ROWS = 4, 3, 40000


def _table(seed: int) -> torch.Tensor:
    """[V] * K + [V]: the distribution of the next token after up to K tokens that begin with V - 1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*([V] * (K + 1)), generator=draw) * 1.3


def _round(method: str, drawn: bool) -> tuple[torch.Tensor, float]:
    """The first K + 1 tokens of each row, those behind the kept ones from the target itself, and the drafts kept on average."""
    rows = Rows(ROWS, K + 4, 16, 1, torch.device("cpu"))
    rows.apply(StepPlan(0, enter=[Enter(row, [0], 1, SamplingParams(temperature=1.0), row, []) for row in range(ROWS)],
                        edits=[np.zeros((0, 3), np.int32)]))
    every = np.arange(ROWS, dtype=np.int32)
    plan = StepPlan(1, rows=every, starts=0 * every, counts=0 * every + 1 + K, wants=0 * every + int(Want.SAMPLE | Want.EACH))
    target, source = _table(1), _table(2)
    rejection, verifier = Rejection(rows, method, V), Verifier(rows)
    drafting = Drafting(plan, rows)
    rejection.begin(drafting)
    tokens = rows.tokens

    def after(table: torch.Tensor, place: int) -> torch.Tensor:
        """Logits [rows, V] of the token at this place, given those before it."""
        index = tuple(tokens[:, 1 + i].long() for i in range(place)) + (torch.zeros(ROWS, dtype=torch.long),) * (K - place)
        return table[index]

    for place in range(K):
        if drawn:
            rejection.draw(after(source, place), drafting.row, drafting.length + place)
        else:
            tokens[:, 1 + place] = (tokens[:, place] + 1) % V
    logits = torch.stack([after(target, place) for place in range(K + 1)], 1).flatten(0, 1)
    segments = np.repeat(every, K + 1)
    positions = np.tile(np.arange(1, K + 2, dtype=np.int32), ROWS)
    lines = LogitsRows(segments.astype(np.int64), segments, positions, torch.from_numpy(segments), torch.from_numpy(positions))
    drafts = verifier.drafts(lines)
    judging = rejection.judge(lines, drafts)
    assert judging.needed
    for part in lines.parts(ROWS + 1):
        judging.take(part, logits[judging._at:judging._at + len(part.rows)].softmax(-1))
    found = verifier.verify(plan, lines, *judging.settle(torch.zeros(len(segments), dtype=torch.int32)))
    kept = torch.from_numpy(found.kept())
    draw = torch.Generator().manual_seed(9)
    for place in range(K + 1):
        more = torch.multinomial(after(target, place).softmax(-1), 1, generator=draw)[:, 0].int()
        tokens[:, 1 + place] = torch.where(kept > place, tokens[:, 1 + place], more)
    return tokens[:, 1:K + 2].long(), float(kept.float().mean()) - 1


def _square(found: torch.Tensor) -> tuple[float, int]:
    """Chi-square of the joint distribution of K + 1 tokens against the target's."""
    target, joint = _table(1), torch.ones(1)
    for place in range(K + 1):
        given = target[(slice(None),) * place + (0,) * (K - place)].softmax(-1)
        joint = joint[..., None] * given if place else given
    number = sum(found[:, place] * V ** (K - place) for place in range(K + 1))
    seen, expected = torch.bincount(number, minlength=V ** (K + 1)).double(), joint.flatten().double() * ROWS
    few = expected < 5
    seen, expected = (torch.cat((x[~few], x[few].sum()[None])) for x in (seen, expected))
    return float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1


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
