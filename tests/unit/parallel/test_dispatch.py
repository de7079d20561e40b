"""Tokens that travel to the experts of other ranks: results are those of one rank that has all experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.ops.payload import EightBits, Payload
from penstock.parallel import dispatch
from penstock.parallel.dispatch import Tokens, together
from penstock.parallel.lockstep import Lockstep
from tests.system.ranks import Shared, Threads

_WIDTH, _EXPERTS = 8, 12


@pytest.mark.parametrize("payload", [Payload, EightBits])
@pytest.mark.parametrize(("ranks", "picks", "counts", "runs", "form"), [
    (2, 1, (40, 3), 2, "picked"), (3, 2, (21, 0, 64), 4, "picked"), (4, 2, (9, 70, 0, 33), 2, "picked"),
    (2, 4, (40, 0), 2, "everywhere"), (3, 2, (5, 0, 7), 1, "everywhere"), (4, 6, (64, 1, 2, 63), 3, "everywhere")])
def test_each_token_gets_the_results_of_its_experts(ranks: int, picks: int, counts: tuple[int, ...], runs: int, form: str,
                                                    payload: type[Payload], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one batch and of two; a rank without tokens takes part."""
    made: list[str] = []
    for kind in (dispatch._Picked, dispatch._Everywhere):
        monkeypatch.setattr(kind, "compute", lambda self, compute, was=kind.compute: (
            made.append(type(self).__name__), was(self, compute))[1])
    draw = torch.Generator().manual_seed(ranks)
    factors = torch.randn(_EXPERTS, generator=draw)
    shared, agreed = Shared(ranks), Shared(ranks)
    inputs = [(torch.randn(count, _WIDTH, generator=draw),
               torch.stack([torch.randperm(_EXPERTS, generator=draw)[:picks] for _ in range(count)]).int() if count else
               torch.zeros(0, picks, dtype=torch.int32), torch.rand(count, picks, generator=draw)) for count in counts]

    def one(rank: int) -> torch.Tensor:
        data = Lockstep(Threads(rank, shared), Threads(rank, agreed), str(tmp_path / "wave"))
        x, experts, weights = inputs[rank]
        data.begin(len(x), False)

        def compute(x: torch.Tensor, places: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            # Expert e is on rank e modulo ranks, at place e / ranks.
            own = factors[(places * ranks + rank).clamp(0, _EXPERTS - 1)] * (places >= 0)
            return x * (own * shares).sum(1, keepdim=True)

        return together(data, Tokens(x, experts % ranks, experts // ranks, weights), payload(), runs, compute)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(one, range(ranks)))
    for (x, experts, weights), out in zip(inputs, found, strict=True):
        most = float(x.abs().max() if len(x) else 0) * picks * float(factors.abs().max())
        close = 1e-6 if payload is Payload else 0.07 * most
        torch.testing.assert_close(out, x * (factors[experts.long()] * weights).sum(1, keepdim=True), rtol=1e-5, atol=close)
    assert set(made) == {"_Picked" if form == "picked" else "_Everywhere"}
    assert len(made) == ranks * min(2, runs)


def test_tokens_in_eight_bits_lose_little() -> None:
    x = torch.randn(50, 64) * torch.logspace(-6, 4, 50)[:, None]
    x[7] = 0
    for dtype in (torch.float32, torch.bfloat16):
        words = EightBits.pack(x.to(dtype))
        assert words.dtype == torch.int32 and words.shape == (50, 17)
        found = EightBits.unpack(words, dtype)
        assert found.dtype == dtype and bool(((found.float() - x).abs() <= 0.04 * x.abs().amax(1, keepdim=True)).all())
        assert torch.equal(Payload.unpack(Payload.pack(x.to(dtype)), dtype), x.to(dtype))


def test_a_rank_without_its_plan_waits_for_it_once_another_of_its_engine_has_begun(tmp_path: Path) -> None:
    """Rank 1 follows other engines when rank 0 has the plan of both already; ranks 2 and 3 have nothing to do."""
    agreed = Shared(4)
    sides = [Lockstep(Threads(rank, Shared(4)), Threads(rank, agreed), str(tmp_path / "wave"), 2) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        def begin(*tokens: int) -> None:
            list(pool.map(lambda side, count: side.begin(count, count < 5), sides, tokens))

        begin(5, 0, 0, 0)
        assert [(one.most, one.share, one.decodes, one.awaits) for one in sides] == [
            (5, 3, False, False), (5, 3, False, True), (5, 3, False, False), (5, 3, False, False)]
        assert [one.active for one in sides] == [True, False, True, True]
        # The plan comes: this round was agreed on before, with nobody else.
        assert sides[1].begin(5, False) is False and sides[1].active and not sides[1].awaits
        begin(0, 0, 2, 2)
        assert [(one.most, one.awaits) for one in sides] == [(2, False)] * 4
        begin(0, 0, 0, 0)
        assert [(one.most, one.active) for one in sides] == [(0, False)] * 4


def test_a_message_to_an_engines_ranks_ends_no_round_of_others(tmp_path: Path) -> None:
    """Rank 0 has a message at which the ranks of its engine wait for each other, rank 1 not yet; ranks 2 and 3 have tokens."""
    agreed = Shared(4)
    sides = [Lockstep(Threads(rank, Shared(4)), Threads(rank, agreed), str(tmp_path / "wave"), 2) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for tokens, most in (((-1, 0, 3, 3), 3), ((-1, 0, 0, 0), 0), ((-1, -1, -1, -1), 0)):
            list(pool.map(lambda side, count: side.begin(count, True), sides, tokens))
            assert [(one.most, one.awaits) for one in sides] == [(most, not count and side < 2)
                                                                 for side, count in enumerate(tokens)]
            if sides[1].awaits:
                sides[1].begin(-1, True)
            assert sides[1].most == most and not sides[1].awaits
    assert not any(side.active for side in sides)
