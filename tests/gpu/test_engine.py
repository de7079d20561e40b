"""The engine on a GPU: the trained models' golden outputs, and equal outputs whatever the route."""

from __future__ import annotations

import json
import random

import pytest
import torch

from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from tests.data import MODELS, TRAINED, need

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def _generate(engine: Engine, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, seed=0)))
    found: dict[str, list[int]] = {}
    while engine.busy:
        for update in engine.turn():
            assert update.finish_reason in (None, "length"), update
            found.setdefault(update.request_id, []).extend(update.token_ids)
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("name", TRAINED)
def test_golden(name: str) -> None:
    folder = need(MODELS / name)
    cases = json.loads((folder / "greedy_golden.json").read_text())["cases"]
    engine = Engine(EngineOptions(model=str(folder), device="cuda", gpu_memory_utilization=0.2))
    found = _generate(engine, [case["prompt_ids"] for case in cases], len(cases[0]["greedy_ids"]))
    engine.close()
    assert found == [case["greedy_ids"] for case in cases]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [32, 2048])
def test_routes(depth: int, chunk: int) -> None:
    folder = need(MODELS / "stories260k")
    rng = random.Random(1)
    prompts = [[1] + [rng.randrange(3, 512) for _ in range(rng.randint(0, 90))] for _ in range(12)]
    plain = Engine(EngineOptions(model=str(folder), device="cuda", depth=1, gpu_memory_utilization=0.2, max_num_seqs=1))
    want = _generate(plain, prompts, 24)
    plain.close()
    strained = Engine(EngineOptions(model=str(folder), device="cuda", depth=depth, max_num_batched_tokens=chunk,
                                    max_num_seqs=12, max_model_len=128, kv_cache_memory_bytes=24 * 16 * 5 * 2 * 4 * 8 * 4))
    assert _generate(strained, prompts, 24) == want
    assert strained.stats().preemptions > 0
    strained.close()
