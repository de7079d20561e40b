"""Adapters on a GPU: steps of any mix replay the graphs that were captured at the start, and answer as without graphs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from penstock.ops import compile
from penstock.worker.graphs import Graphs
from tests.gpu.conftest import engine
from tests.system.adapters import made

COUNT = 6


def mixes() -> list[list[int]]:
    """The adapter of each request of a batch; -1: none."""
    draw = random.Random(3)
    drawn = [[draw.randrange(-1, COUNT) for _ in range(size)] for size in (3, 8, 20, 40)]
    return [[-1], [0], [1], [0, 1], [-1, 2], list(range(COUNT)), [*range(COUNT)] * 4, [5] * 24, [-1] * 30 + [4], *drawn]


def answered(llm: Engine, names: list[str], mix: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in mix]
    for i, adapter in enumerate(mix):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=1)
        prompt = [5 + (7 * i + j) % 900 for j in range(4 + 9 * i % 70)]
        llm.submit(Request(str(i), prompt, params, adapter=names[adapter] if adapter >= 0 else ""))
    while llm.busy:
        for update in llm.turn():
            assert update.finish_reason in (None, "length"), update
            found[int(update.request_id)] += update.token_ids
    return found


def test_any_mix_replays_the_same_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [made(tmp_path / f"{i}", i, rank) for i, rank in enumerate((3, 16, 16, 9, 2, 24))]
    options = {"model": "canary", "dtype": "float32", "enable_lora": True, "max_loras": COUNT, "max_lora_rank": 24,
               "max_num_seqs": 40, "max_model_len": 512, "skip_tokenizer_init": True}
    with engine(**options, enforce_eager=True) as plain:
        names = [plain.add_adapter(str(folder)) for folder in folders]
        wanted = [answered(plain, names, mix) for mix in mixes()]
    captures, replays, replay = 0, 0, torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(graph)

    capture = Graphs._capture

    def captured(*arguments: object) -> object:
        nonlocal captures
        captures += 1
        return capture(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    monkeypatch.setattr(Graphs, "_capture", captured)
    with engine(**options) as llm:
        assert [llm.add_adapter(str(folder)) for folder in folders] == names
        first, compiled = captures, compile.tally.compiled
        assert llm.info.graphs > 0 and first >= llm.info.graphs
        for mix, expected in zip(mixes(), wanted, strict=True):
            before = replays
            assert answered(llm, names, mix) == expected, mix
            assert replays - before >= 12, "decode steps replay"
        assert (captures, compile.tally.compiled) == (first, compiled), "no mix has a graph of its own"
    assert len({str(one) for one in wanted}) == len(wanted)
