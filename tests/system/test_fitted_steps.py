"""Steps of fitted sizes (worker/step.py), which a GPU gets, answer as exact ones do: on a CPU, where both can be had."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.layers.build import Activated, Linear
from penstock.layers.step import BASE
from penstock.worker.step import fitted, fitted_sizes
from tests.data import MODELS, need


def test_sizes_are_few_and_never_below() -> None:
    sizes = list(fitted_sizes(20_000))
    assert sizes == sorted(set(sizes)) and len([size for size in sizes if size > 64]) < 110
    for count in range(1, 20_000):
        assert count <= fitted(count) < count + max(16, count // 7) and fitted(count) in sizes
    assert fitted(0) == 0


@pytest.mark.parametrize("chunk", [64, 2048])
def test_padding_changes_no_answer(chunk: int) -> None:
    """Single tokens, chunks and whole prompts, more rows than 64, prompts that are scored, with and without the cache."""
    draw = random.Random(chunk)
    lengths = [draw.choice((1, 5, 70, 130, 400)) for _ in range(90)]
    prompts = [{"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for length in lengths]
    params = [SamplingParams(max_tokens=draw.randrange(1, 12), temperature=draw.choice((0.0, 1.0)), seed=i, ignore_eos=True,
                             logprobs=draw.choice((None, 2)), prompt_logprobs=draw.choice((None, None, 1)))
              for i in range(len(prompts))]

    def answers(fits: bool) -> list[Any]:
        model = str(need(MODELS / "stories260k"))
        with LLM(model, max_num_seqs=80, max_num_batched_tokens=chunk + 80, max_model_len=512) as llm:
            llm.engine.rank.worker.runner.builder.fits = fits
            found = llm.generate(prompts, params, use_tqdm=False) + llm.generate(prompts[:20], params[:20], use_tqdm=False)
        return [(output.outputs[0].token_ids, [[(token, pytest.approx(one.logprob, abs=2e-5)) for token, one in place.items()]
                                               for places in (output.outputs[0].logprobs, output.prompt_logprobs)
                                               for place in places or () if place]) for output in found]

    assert answers(True) == answers(False)


def test_every_gemm_runs_with_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up of a GPU: each projection of a layer and the head, as far as their shapes differ."""
    with LLM(str(need(MODELS / "stories260k")), max_num_seqs=4, max_model_len=64) as llm:
        model, found, rows = llm.engine.rank.worker.model, list[tuple[int, int, int]](), list[int]()
        different = {(linear.weight.n, linear.weight.k) for linear in model.linears}
        assert len(model.linears) == 4 * len(model.blocks) and len(different) == 4
        for linear in model.linears:
            assert len(linear(torch.zeros(2, linear.weight.k), BASE)) == 2

        def watch(kind: type[Linear]) -> None:
            monkeypatch.setattr(kind, "__call__",
                                lambda linear, x, step: found.append((len(x), linear.weight.n, linear.weight.k)))

        watch(Linear)
        watch(Activated)
        monkeypatch.setattr(model, "head", lambda x: rows.append(len(x)))
        model.warm_up_gemms([1, 7, 80], [3, 5])
    assert sorted(found) == sorted((count, n, k) for count in (1, 7, 80) for n, k in different) and rows == [3, 5]
