"""The sampler on a GPU: what the CPU chooses, without waiting for the device, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.plan import Enter, Logprobs, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.ops.sample import SampleOps
from penstock.ops.sample_table import Column
from penstock.ops.sample_triton import TritonSample
from penstock.worker.rows import Rows
from penstock.worker.sampler import LogitsRows, Sampled, Sampler
from tests.unit.worker.test_sampler import CASES, obeyed

LENGTH = 300
MORE: list[dict[str, Any]] = [
    {"bad_words_token_ids": [[4], [1, 2], [5, 6, 7]]}, {"min_tokens": 290, "max_tokens": 300}, {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3}, {"logprobs": 0}, {"top_p": 0.9, "logprobs": 20}]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Side:
    """Rows of a device, filled alike on every device."""

    def __init__(self, params: list[SamplingParams], vocab: int, device: str, ops: SampleOps) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device = torch.device(device)
        self.rows = Rows(len(params), LENGTH, 16, 1, self.device)
        self.known = torch.randint(2, LENGTH - 1, (len(params),), generator=generator).numpy().astype(np.int32)
        tokens = [torch.randint(0, min(vocab, 40), (int(known),), generator=generator).tolist() for known in self.known]
        enter = [Enter(i, known, len(known) // 2, one, 31 * i, [0, 3])
                 for i, (known, one) in enumerate(zip(tokens, params, strict=True))]
        with no_waiting() if device == "cuda" else nullcontext():
            self.rows.apply(StepPlan(0, enter, [], [np.zeros((0, 3), np.int32)]))
        self.sampler = Sampler(ops, self.rows)

    def lines(self, which: np.ndarray) -> LogitsRows:
        rows, positions = which.astype(np.int32), self.known[which]
        return LogitsRows(np.arange(len(which)), rows, positions, torch.from_numpy(rows).to(self.device),
                     torch.from_numpy(positions).to(self.device))

    def launch(self, logits: torch.Tensor, which: np.ndarray) -> Sampled:
        there, lines = logits[torch.from_numpy(which)].to(self.device), self.lines(which)
        if self.device.type == "cpu":
            return self.sampler.launch(there, lines)
        torch.cuda.synchronize()
        with no_waiting():
            found = self.sampler.launch(there, lines)
        torch.cuda.synchronize()
        return found


def _numbers(found: Sampled) -> tuple[list[int], Logprobs]:
    assert found.scores is not None
    logprobs = found.scores.logprobs()
    assert logprobs is not None
    return found.tokens().tolist(), logprobs


@pytest.mark.parametrize("vocab", [61, 5003, 151936])
def test_the_cpu_chooses_the_same(vocab: int) -> None:
    params = [SamplingParams(**{"temperature": 0.9, **case}) for case in [*CASES, *MORE] * 3]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(2)) * 2
    every = np.arange(len(params))
    wanted, scores = _numbers(Side(params, vocab, "cpu", SampleOps()).launch(logits, every))
    found, others = _numbers(Side(params, vocab, "cuda", TritonSample()).launch(logits, every))
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= (vocab > 100_000), (found, wanted)
    same = [line for line, segment in enumerate(scores.segments) if found[segment] == wanted[segment]]
    assert np.array_equal(scores.segments, others.segments) and np.array_equal(scores.positions, others.positions)
    assert np.array_equal(scores.ids[same], others.ids[same]) and np.array_equal(scores.ranks[same], others.ranks[same])
    assert np.abs(scores.values[same] - others.values[same]).max() < 1e-5


def test_neighbours_do_not_matter() -> None:
    """The same tokens, and the same bits of thresholds and log probabilities, alone and in batches of 2 to 256."""
    vocab = 151936
    kinds = [{**case, "logprobs": 5} for case in [*CASES, *MORE]]
    params = [SamplingParams(**{"temperature": 0.9, **kinds[i % len(kinds)]}) for i in range(256)]
    logits = torch.randn(256, vocab, generator=torch.Generator().manual_seed(3)) * 2
    side = Side(params, vocab, "cuda", TritonSample())
    tokens, scores = _numbers(side.launch(logits, np.arange(256)))
    for which in (np.arange(255, -1, -1)[:2], np.arange(30, 47), *(np.array([i]) for i in range(len(kinds)))):
        some, others = _numbers(side.launch(logits, which))
        assert some == [tokens[i] for i in which]
        for name in ("ids", "values", "ranks"):
            assert np.array_equal(getattr(others, name), getattr(scores, name)[which]), (name, which)
        there = logits[torch.from_numpy(which)].cuda()
        lines = side.lines(which)
        table = side.rows.parameters.table
        alone = TritonSample().threshold(there, table, lines.row)
        among = TritonSample().threshold(logits.cuda(), table, side.lines(np.arange(256)).row)
        assert torch.equal(alone, among[torch.from_numpy(which).cuda()])


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_filters_of_a_whole_vocabulary(scale: float) -> None:
    """The reference's sets, but for tokens on top_p's border whose sum before is top_p's to 1e-6."""
    vocab = 151936
    params = [SamplingParams(**one) for one in (
        {"top_k": 1}, {"top_k": 50}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"top_p": 0.9}, {"top_p": 0.5},
        {"top_p": 0.999}, {"min_p": 0.05}, {"top_k": 30000}, {"top_k": 30000, "top_p": 0.9}, {"top_k": 1000, "min_p": 0.01})]
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(4)) * scale
    here, there = (Side(params, vocab, device, SampleOps()) for device in ("cpu", "cuda"))
    row = torch.arange(len(params), dtype=torch.int32)
    wanted = SampleOps().threshold(logits, here.rows.parameters.table, row)
    found = TritonSample().threshold(logits.cuda(), there.rows.parameters.table, row.cuda()).cpu()
    x = logits * here.rows.parameters.table.view(torch.float32)[:, Column.INVERSE_TEMPERATURE, None]
    for line, one in enumerate(params):
        kept, expected = x[line] >= found[line], x[line] >= wanted[line]
        if not torch.equal(kept, expected):
            weights = (x[line].double() - x[line].max()).exp()
            if one.top_k > 0:
                weights[x[line] < x[line].topk(one.top_k).values[-1]] = 0
            apart = float(weights[kept != expected].sum() / weights.sum())
            assert one.top_p < 1 and apart < 1e-6 + float(weights.max() / weights.sum()) * (scale < 0.1), (one, apart)


def test_choosing_can_be_captured() -> None:
    vocab, lines = 128256, 33
    side = Side([SamplingParams(temperature=i % 2 * 0.8) for i in range(lines)], vocab, "cuda", TritonSample())
    assert side.sampler.plain(np.arange(lines, dtype=np.int32))
    their = side.lines(np.arange(lines))
    logits = torch.randn(lines, vocab, device="cuda")
    row = their.row.clone()
    row[-1] = -1
    side.sampler.choose(logits, row, their.position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = side.sampler.choose(logits, row, their.position)
    for _ in range(3):
        logits.normal_()
        their.position.add_(-1)
        wanted = SampleOps().choose(logits.clone(), side.rows.parameters.table, side.rows.tokens.clone(), row, their.position)
        graph.replay()
        assert torch.equal(found[:-1], wanted[:-1])
        assert torch.equal(side.rows.tokens[row[:-1].long(), their.position[:-1].long()], wanted[:-1])


@pytest.mark.parametrize("case", [{}, {"top_k": 12}, {"top_p": 0.8, "temperature": 1.4}], ids=str)
def test_the_distribution_drawn(case: dict[str, Any]) -> None:
    vocab, draws = 4099, 100_000
    logits = torch.randn(vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) * 2
    side = Side([SamplingParams(**{"temperature": 1.0, **case})], vocab, "cuda", TritonSample())
    table = side.rows.parameters.table.repeat(draws // 10, 1)
    counts = torch.zeros(vocab, device="cuda")
    lines = torch.arange(len(table), dtype=torch.int32, device="cuda")
    wide = logits.repeat(len(table), 1)
    threshold = TritonSample().threshold(wide[:1], table, lines[:1])
    lowest = threshold.repeat(len(table))
    for batch in range(10):
        table[:, Column.SEED_KEY] = torch.randint(-2**31, 2**31, (len(table),), device="cuda").int()
        tokens = torch.zeros((len(table), 10), dtype=torch.int32, device="cuda")
        found = TritonSample().choose(wide, table, tokens, lines, torch.full_like(lines, batch), lowest)
        counts += torch.bincount(found.long(), minlength=vocab)
    x = logits.double() * float(table[0].view(torch.float32)[Column.INVERSE_TEMPERATURE])
    wanted = torch.where(x >= threshold[0], x, -torch.inf).softmax(-1)
    assert float(counts[wanted == 0].sum()) == 0
    likely = wanted * draws >= 5
    chi = float(((counts[likely] - draws * wanted[likely]) ** 2 / (draws * wanted[likely])).sum())
    freedom = max(1, int(likely.sum()) - 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5, (chi, freedom)


def test_rows_obey_their_masks_wherever_those_were_written() -> None:
    obeyed("cuda", TritonSample())
