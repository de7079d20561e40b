"""A mixer that the engine does not know, with a snapshot a page, runs through scheduler, cache and worker as attention does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from tests.models import fakes
from tests.models.families import CASES, make

ROUTES: dict[str, dict[str, Any]] = {
    "batch": {"max_num_seqs": 8},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7, "block_size": 4},
    "deep": {"max_num_seqs": 8, "depth": 3, "block_size": 8},
    "reference": {"kernels": {"*": "reference"}, "enable_prefix_caching": False},
    "tight": {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 8, "kv_cache_memory_bytes": 1 << 16},
    "tiers": {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 8, "kv_cache_memory_bytes": 1 << 16,
              "cache_host_bytes": 1 << 20},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes.enter(monkeypatch, fakes.family(recurrent=True))
    return fakes.configured(tmp_path / "model")


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    shared = [draw.randrange(3, 131) for _ in range(40)]
    found = [[draw.randrange(3, 131) for _ in range(length)] for length in (1, 5, 8, 16, 33, 50)]
    return found + [shared[:cut] + [draw.randrange(3, 131) for _ in range(extra)] for cut, extra in ((40, 1), (32, 9), (17, 4))]


def answers(folder: Path, twice: bool = False, **options: Any) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=128, device="cpu",
             **options) as llm:
        for _ in range(2 if twice else 1):
            found = llm.generate(asked, params, use_tqdm=False)
        if options.get("kv_cache_memory_bytes"):
            assert llm.engine.stats().preemptions > 0, "the cache is too small for all of them at once"
        if twice:
            assert sum(output.num_cached_tokens or 0 for output in found) > 0, "contexts were found in the cache"
    return [list(output.outputs[0].token_ids) for output in found]


@pytest.fixture
def alone(folder: Path) -> list[list[int]]:
    """One sequence at a time, nothing shared."""
    return answers(folder, max_num_seqs=1, depth=1, enable_prefix_caching=False, max_num_batched_tokens=128)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_the_same_tokens(route: str, folder: Path, alone: list[list[int]]) -> None:
    assert answers(folder, **ROUTES[route]) == alone


def test_contexts_are_found_again(folder: Path, alone: list[list[int]]) -> None:
    assert answers(folder, twice=True, max_num_seqs=4, block_size=8) == alone


def test_a_forgotten_state_shows(folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: without what is behind a segment, tokens change."""
    attach = fakes.Recurrence.attach

    def forgetful(self: fakes.Recurrence, views: Any, works: Any) -> None:
        attach(self, views, works)

        class Nothing(dict[str, torch.Tensor]):
            def __getitem__(self, name: str) -> torch.Tensor:
                return super().__getitem__(name).clone().zero_()

        self.view.fields = Nothing(self.view.fields)

    monkeypatch.setattr(fakes.Recurrence, "attach", forgetful)
    assert answers(folder, **ROUTES["batch"]) != alone


def test_recurrent_states_come_back_from_the_prefix_cache_as_they_were() -> None:
    """With products that round no activation, log probabilities are the same whatever a segment began with (decision 0248)."""
    model = str(Path(__file__).parents[1] / "assets" / "canary-hybrid")
    asked = [{"prompt_token_ids": [1, *range(40 + 7 * i, 110 + 7 * i)]} for i in range(3)]
    params, found = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True), []
    for rounds, options in ((1, {"enable_prefix_caching": False}), (2, {}), (1, {"max_num_batched_tokens": 16})):
        with LLM(model, quantization="int4", dtype="float32", kernels={"*": "reference"}, max_model_len=128, max_num_seqs=4,
                 block_size=8, threads=1, device="cpu", **options) as llm:  # type: ignore[arg-type]
            for _ in range(rounds):
                outputs = llm.generate(asked, params, use_tqdm=False)
        assert rounds == 1 or all(one.num_cached_tokens for one in outputs)
        scores = [one.outputs[0].logprobs for one in outputs]
        found.append(torch.tensor([[place[token].logprob for place, token in zip(line, one.outputs[0].token_ids, strict=True)]
                                   for line, one in zip(scores, outputs, strict=True) if line is not None]))
    assert len(found[0]) == 3
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-5)


def test_recurrent_states_of_pages_shorter_than_drafts(tmp_path: Path) -> None:
    """Where prompts of a few tokens are read in one step, all that they write is on pages of their own."""
    make(next(case for case in CASES if case.name == "qwen3next-mixed"), tmp_path)
    draw = random.Random(5)
    stems = [[draw.randrange(3, 60) for _ in range(length)] for length in (8, 33, 20)]
    asked = [{"prompt_token_ids": [*draw.choice(stems)[:draw.randint(1, 33)],
                                   *(draw.randrange(3, 60) for _ in range(draw.choice((0, 1, 5, 20))))]} for _ in range(14)]
    params = [SamplingParams(temperature=0, max_tokens=6 + 7 * (i % 5), ignore_eos=True) for i in range(14)]
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "draft_policy": "fixed"}}
    found = []
    for options in ({"max_num_seqs": 1, "enable_prefix_caching": False},
                    *({"max_num_seqs": 2, "max_num_batched_tokens": 14, "block_size": page, "kv_cache_memory_bytes": 600_000,
                       **drafting} for page in (1, 2))):
        with LLM(str(tmp_path), dtype="float32", max_model_len=160, skip_tokenizer_init=True, threads=1, device="cpu",
                 **options) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)])
    assert found[1] == found[0] and found[2] == found[0]
