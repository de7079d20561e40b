"""The engine on a GPU: the trained models' golden outputs, and equal outputs whatever the route."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from penstock import canary
from penstock.ops import attention_work, registry
from penstock.ops.attention_sharing import SharedTiles, shared_tiles
from penstock.platform.facts import detect
from tests.data import MODELS, TRAINED, need
from tests.gpu.conftest import engine, generate
from tests.system.test_tiers import slab_bytes


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_golden(name: str, eager: bool) -> None:
    folder = need(MODELS / name)
    cases = json.loads((folder / "greedy_golden.json").read_text())["cases"]
    with engine(model=str(folder), enforce_eager=eager) as made:
        assert bool(made.info.graphs) is not eager
        found = generate(made, [case["prompt_ids"] for case in cases], len(cases[0]["greedy_ids"]))
    assert found == [case["greedy_ids"] for case in cases]


def _prompts(vocabulary: int, count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(1)
    return [[1] + [rng.randrange(3, vocabulary) for _ in range(rng.randint(0, longest))] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [32, 2048])
@pytest.mark.parametrize("eager", [False, True])
def test_routes(depth: int, chunk: int, eager: bool) -> None:
    """Batches, chunks, overlap, graphs and preemption: float32, so that no rounding hides behind a tie.

    The arena holds 24 pages of 16 tokens; the twelve requests need some 60 at once.
    """
    folder = str(need(MODELS / "stories260k"))
    prompts = _prompts(512, 12)
    with engine(model=folder, depth=1, max_num_seqs=1, enforce_eager=True) as plain:
        want = generate(plain, prompts, 24)
    with engine(model=folder, depth=depth, max_num_batched_tokens=chunk, max_num_seqs=12, max_model_len=128,
                enforce_eager=eager, kv_cache_memory_bytes=24 * slab_bytes("stories260k")[0]) as strained:
        assert generate(strained, prompts, 24) == want
        assert strained.stats().preemptions > 0


@pytest.mark.parametrize("eager", [False, True])
def test_a_beginning_that_many_share(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that attend together to what their prompts begin with give what each gives alone, while others end and come."""
    folder, several = str(need(MODELS / "stories260k")), list[int]()

    def watched(*arguments: Any) -> SharedTiles | None:
        found = shared_tiles(*arguments)
        several.append(0 if found is None else int(found.sizes.max()))
        return found

    monkeypatch.setattr(attention_work, "shared_tiles", watched)
    beginning, rest = _prompts(512, 1, 0)[0] + [7 + i * 31 % 500 for i in range(320)], _prompts(512, 40, 60)
    prompts, outputs = [beginning + mine for mine in rest], [8 + i % 23 for i in range(40)]
    with engine(model=folder, max_num_seqs=1, enforce_eager=True) as plain:
        want = generate(plain, prompts, outputs)
    assert not several
    with engine(model=folder, max_num_seqs=32, enforce_eager=eager) as made:
        assert generate(made, prompts, outputs) == want
    assert max(several) == 8 and len(several) > 10


def test_features_in_company() -> None:
    """Rows with every kind of sampling in one batch give what they give alone."""
    folder = str(need(MODELS / "stories260k"))
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.7}, {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "min_p": 0.1}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"logit_bias": {17: 4.0, 40: -9.0}}, {"allowed_token_ids": list(range(20, 60))}, {"logprobs": 5}]
    prompts = _prompts(512, len(kinds))
    with engine(model=folder, enforce_eager=True, max_num_seqs=1) as plain:
        alone = [generate(plain, [prompt], 16, [kind], seed=7)[0] for prompt, kind in zip(prompts, kinds, strict=True)]
    with engine(model=folder) as made:
        found = generate(made, prompts, 16, kinds, seed=7)
    assert found == alone


def test_every_operation_is_served_by_a_kernel() -> None:
    """The form of what ranks send has one implementation that serves: one rank sends nothing."""
    kernels = registry.bind(detect("cuda"), torch.bfloat16)
    assert {op for op, name in kernels.table() if name == "reference"} == {"payload"}, kernels.refused


def test_canary_is_as_good_as_on_a_cpu() -> None:
    """Every skill is within sampling error of what the model card says, at its own precision."""
    pytest.importorskip("httptools", reason="the evaluation's client is part of the server's packages")
    from penstock import LLM
    from penstock.canary.suite import SKILLS, graded, prompts
    from penstock.cli.eval import answers

    with LLM(canary.NAME, device="cuda", gpu_memory_utilization=0.2) as llm:
        scores = {}
        for skill in SKILLS:
            items = prompts(skill, 40)
            scores[skill] = graded(items, answers(llm, items)).right
    print(scores)
    for skill, right in scores.items():
        assert right >= (10 if skill == "count" else 37), (skill, scores)
