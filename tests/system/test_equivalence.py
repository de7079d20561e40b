"""Greedy output is identical whatever the route: batch size, chunk, depth, preemption, page size, fork, what was cached.

A trained model, and a random one whose layers alternate between full attention and a short sliding window.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock.config.schema import EngineOptions
from penstock.core.layout import lay_out
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from tests.data import MODELS, need

OUTPUT = 20
PAGES = (8, 16, 32)
BATCHES = (1, 7, 32)
CHUNKS = (8, 64, 4096)
DEPTHS = (1, 2)

ALTERNATING = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "vocab_size": 160,
    "max_position_embeddings": 256, "sliding_window": 13, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "rope_theta": 10000.0,
}


@pytest.fixture(scope="session")
def alternating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma-2-like model with weights wide enough that its continuations vary."""
    import transformers

    config = transformers.Gemma2Config(**{k: v for k, v in ALTERNATING.items() if k != "architectures"},
                                       layer_types=["sliding_attention", "full_attention"] * 2)
    torch.manual_seed(3)
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    folder = tmp_path_factory.mktemp("alternating")
    model.save_pretrained(folder)
    return folder


@cache
def _prompts(vocabulary: int, count: int) -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, 90, 33, 8, 64, 17, 16] + [rng.randint(1, 100) for _ in range(25)]
    return [[1] + [rng.randrange(3, vocabulary) for _ in range(length - 1)] for length in lengths[:count]]


def _run(folder: Path, batch: int, vocabulary: int, *, chunk: int, depth: int, page: int, strained: bool, fork: int,
         only: int | None = None) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Outputs by (prompt, index), and the number of preemptions."""
    options = {"model": str(folder), "depth": depth, "block_size": page, "max_num_batched_tokens": max(chunk, batch * fork),
               "max_num_seqs": batch * fork, "max_model_len": 128, "device": "cpu"}
    if strained:
        options["kv_cache_memory_bytes"] = _tight(folder, page, max(chunk, batch * fork))
    engine = Engine(EngineOptions(**options))
    prompts = _prompts(vocabulary, max(BATCHES))
    for i in range(batch) if only is None else [only]:
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=0, n=fork)
        engine.submit(Request(str(i), prompts[i], params))
    out: dict[tuple[int, int], list[int]] = {}
    while engine.busy:
        for update in engine.turn():
            assert update.finish_reason in (None, "length"), update
            out.setdefault((int(update.request_id), update.index), []).extend(update.token_ids)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    engine.close()
    return out, stats.preemptions


@cache
def _tight(folder: Path, page: int, chunk: int) -> int:
    """Bytes of cache for the longest sequence and little more."""
    from penstock import models
    from penstock.checkpoint import read_config

    states = models.describe(read_config(folder)).states("float32")
    layout = lay_out(states, page, 0)
    return layout.slab_bytes * (layout.slabs_for(128, chunk) + 4)


@cache
def _alone(folder: Path, vocabulary: int) -> list[list[int]]:
    """Each prompt's continuation by itself, on the plainest route."""
    found = []
    for i in range(max(BATCHES)):
        out, _ = _run(folder, 1, vocabulary, chunk=4096, depth=1, page=16, strained=False, fork=1, only=i)
        found.append(out[i, 0])
    return found


def _check(folder: Path, vocabulary: int, batch: int, depth: int, page: int) -> None:
    want = _alone(folder, vocabulary)
    assert len({tuple(tokens) for tokens in want}) > 10, "the model says the same to everything: it would hide mistakes"
    preempted = 0
    for chunk in CHUNKS:
        for strained in (False, True):
            for fork in (1, 2):
                out, preemptions = _run(folder, batch, vocabulary, chunk=chunk, depth=depth, page=page, strained=strained,
                                        fork=fork)
                preempted += preemptions
                assert len(out) == batch * fork
                for (i, index), tokens in out.items():
                    assert tokens == want[i], (chunk, strained, fork, i, index)
    assert preempted > 0 or batch == 1, "no run was preempted"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("batch", BATCHES)
def test_trained(batch: int, depth: int, page: int) -> None:
    _check(need(MODELS / "stories260k"), 512, batch, depth, page)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("batch", BATCHES)
def test_alternating_windows(alternating: Path, batch: int, depth: int, page: int) -> None:
    _check(alternating, 160, batch, depth, page)


def _waves(vocabulary: int) -> list[list[list[int]]]:
    """Prompts that come one wave after another: shared beginnings that part at page borders and inside pages, and turns that go
    on from what an earlier one was (its answer is put in when it is known)."""
    rng = random.Random(11)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    system, document = [1, *words(46)], [1, *words(63)]
    first = [system + words(9), system + words(3), document, document[:32] + words(8), document[:37] + words(1), words(5)]
    second = [*[list(prompt) for prompt in first], system[:21] + words(6), document + words(2)]
    return [first, second, [list(prompt) for prompt in second[:4]]]


def _serve(folder: Path, vocabulary: int, *, page: int, depth: int, strained: bool, cached: bool, alone: bool
           ) -> tuple[list[list[int]], int, int]:
    """Outputs of the waves, prompts going on from outputs; tokens found in the cache, and pages evicted."""
    options = {"model": str(folder), "depth": depth, "block_size": page, "max_num_batched_tokens": 48, "max_num_seqs": 8,
               "max_model_len": 128, "device": "cpu", "enable_prefix_caching": cached}
    if strained:
        options["kv_cache_memory_bytes"] = _tight(folder, page, 48)
    engine = Engine(EngineOptions(**options))
    found: list[list[int]] = []
    earlier: list[list[int]] = []
    for number, wave in enumerate(_waves(vocabulary)):
        # The last wave goes on with what was answered in the one before.
        prompts = [prompt + earlier[i] + [7] for i, prompt in enumerate(wave)] if number == 2 else wave
        out: dict[int, list[int]] = {}
        for batch in [[i] for i in range(len(prompts))] if alone else [range(len(prompts))]:
            for i in batch:
                params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=0)
                engine.submit(Request(f"{number}-{i}", prompts[i], params))
            while engine.busy:
                for update in engine.turn():
                    assert update.finish_reason in (None, "length"), update
                    out.setdefault(int(update.request_id.split("-")[1]), []).extend(update.token_ids)
        earlier = [out[i] for i in range(len(prompts))]
        found += earlier
    stats, evicted = engine.stats(), sum(engine.scheduler.cache.evictor.evicted)
    assert stats.pages_used == 0
    engine.scheduler.check()
    engine.close()
    return found, stats.cached_tokens, evicted


def _check_cache(folder: Path, vocabulary: int, page: int, depth: int) -> None:
    want, none, _ = _serve(folder, vocabulary, page=page, depth=1, strained=False, cached=False, alone=True)
    assert none == 0 and len({tuple(tokens) for tokens in want}) > 8
    for alone in (True, False):
        roomy, hits, evicted = _serve(folder, vocabulary, page=page, depth=depth, strained=False, cached=True, alone=alone)
        assert roomy == want and not evicted
        # What the second and third waves share with what came before, at least.
        assert hits > 400, hits
        strained, hits, evicted = _serve(folder, vocabulary, page=page, depth=depth, strained=True, cached=True, alone=alone)
        assert strained == want and hits > 50 and evicted > 0, (hits, evicted)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page", PAGES)
def test_cached_trained(page: int, depth: int) -> None:
    _check_cache(need(MODELS / "stories260k"), 512, page, depth)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page", PAGES)
def test_cached_alternating_windows(alternating: Path, page: int, depth: int) -> None:
    _check_cache(alternating, 160, page, depth)


@pytest.mark.parametrize("name", ["stories260k", "babyllama-tok105", "babyllama-tok361"])
def test_golden(name: str) -> None:
    """The trained models' greedy continuations, by an independent implementation: ids exactly, logprobs to 1e-3."""
    folder = need(MODELS / name)
    cases = json.loads((folder / "greedy_golden.json").read_text())["cases"]
    engine = Engine(EngineOptions(model=str(folder), device="cpu"))
    for i, case in enumerate(cases):
        params = SamplingParams(temperature=0, max_tokens=len(case["greedy_ids"]), ignore_eos=True, seed=0, logprobs=1)
        engine.submit(Request(str(i), case["prompt_ids"], params))
    ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    while engine.busy:
        for update in engine.turn():
            ids.setdefault(update.request_id, []).extend(update.token_ids)
            assert update.logprobs is not None
            logprobs.setdefault(update.request_id, []).extend(line.logprobs[0] for line in update.logprobs)
            assert all(line.ranks[0] == 1 and len(line.ids) == 2 for line in update.logprobs)
    engine.close()
    for i, case in enumerate(cases):
        assert ids[str(i)] == case["greedy_ids"]
        assert logprobs[str(i)] == pytest.approx(case["logprobs"], abs=1e-3)


@pytest.mark.parametrize("chunk", [8, 512])
def test_prompt_logprobs(chunk: int) -> None:
    """A golden continuation, given as a prompt, scores as when it was generated, at any chunking and under preemption."""
    folder = need(MODELS / "stories260k")
    cases = json.loads((folder / "greedy_golden.json").read_text())["cases"]
    engine = Engine(EngineOptions(model=str(folder), device="cpu", max_num_batched_tokens=chunk, max_num_seqs=5,
                                  kv_cache_memory_bytes=_tight(folder, 16, chunk) * 2))
    for i, case in enumerate(cases):
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, seed=0, prompt_logprobs=2)
        engine.submit(Request(str(i), case["prompt_ids"] + case["greedy_ids"][:100], params))
    scored: dict[str, list[float]] = {}
    while engine.busy:
        for update in engine.turn():
            if update.prompt_logprobs is not None:
                assert update.request_id not in scored
                assert all(len(line.ids) == 3 for line in update.prompt_logprobs)
                scored[update.request_id] = [line.logprobs[0] for line in update.prompt_logprobs]
    assert engine.stats().preemptions > 0
    engine.close()
    for i, case in enumerate(cases):
        assert len(scored[str(i)]) == len(case["prompt_ids"]) + 100 - 1
        assert scored[str(i)][-100:] == pytest.approx(case["logprobs"][:100], abs=1e-3)
