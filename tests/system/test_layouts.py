"""Greedy tokens are those of one rank, however the model is divided: every family's shapes, and the trained models.

Ranks are threads of this process (`ranks.py`); those in processes are in test_processes.py.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, canary
from penstock.canary import suite
from penstock.checkpoint import read_config
from penstock.config.schema import EngineOptions, place
from penstock.core.errors import ConfigError, ModelError, PenstockError
from penstock.core.request import EngineStats, Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from penstock.layers.decoder import Decoder
from penstock.layers.experts import Experts, ExpertsSpec
from penstock.layers.latent import LatentAttention
from penstock.models.registry import describe
from penstock.ops import messages
from penstock.ops.attention import AttentionOps, Geometry, Ints, Span
from penstock.parallel.group import Runs
from penstock.parallel.placement import Held
from tests.models.families import CASES, ENDS, Case, make
from tests.sampling import sampled
from tests.system.random_models import saved_random
from tests.system.ranks import Threaded, Threads, drained

ASSETS = Path(__file__).parents[1] / "assets"
MEMBERS = ["canary", *sorted(folder.name for folder in ASSETS.iterdir() if (folder / "config.json").is_file())]
PROMPTS = [[1, 5, 9, 44, 17, 60, 8], [1, *range(40, 75)], [1, 44]]
RANKS = (2, 3, 4)
OVERLAPPED = {"kernels": {"messages": "overlapped"}}
FIRST = [next(case for case in CASES if case.kind == kind) for kind in dict.fromkeys(case.kind for case in CASES)]
"""One case of each family."""


def options(folder: Path | str, **more: Any) -> EngineOptions:
    return EngineOptions(**{"model": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 4,
                            "max_num_batched_tokens": 64, "max_model_len": 128, "skip_tokenizer_init": True, **more})


def greedy(engine: Engine, **params: Any) -> list[list[int]]:
    """The continuations of PROMPTS; the engine is closed."""
    try:
        for i, prompt in enumerate(PROMPTS):
            engine.submit(Request(str(i), prompt, SamplingParams(
                **{"temperature": 0, "max_tokens": 16, "seed": i, "ignore_eos": True, **params})))
        return drained(engine, len(PROMPTS))
    finally:
        engine.close()


ALONE: dict[str, list[list[int]]] = {}
"""The tokens of one rank, by folder and parameters: many layouts are compared with the same ones."""


def same(folder: Path | str, ranks: int, stages: int = 1, layers: str = "", params: dict[str, Any] | None = None,
         **more: Any) -> Threaded:
    """Greedy tokens, or those that `params` ask for, are the same with `more` options."""
    key = f"{folder} {params}"
    if key not in ALONE:
        ALONE[key] = greedy(Engine(options(folder)), **(params or {}))
    wanted = ALONE[key]
    asked = options(folder, tensor_parallel_size=ranks, pipeline_parallel_size=stages, pipeline_layers=layers, **more)
    group = Threaded(asked)
    assert greedy(Engine(asked, rank=group), **(params or {})) == wanted
    return group


@pytest.mark.parametrize("case", sampled(FIRST, 4, name=lambda case: case.name))
def test_a_shape_of_every_family(case: Case, tmp_path: Path) -> None:
    make(case, tmp_path)
    same(tmp_path, RANKS[CASES.index(case) % 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_shape_of_every_family(case: Case, ranks: int, tmp_path: Path) -> None:
    make(case, tmp_path)
    same(tmp_path, ranks)


@functools.cache
def has_family(name: str) -> bool:
    try:
        describe(read_config(canary.model_folder() if name == "canary" else ASSETS / name))
    except PenstockError:
        return False
    return True


def members(counts: Sequence[int], each: int) -> list[Any]:
    """Pairs of a trained model and a number of ranks; all but one of `each` are exhaustive."""
    return [pytest.param(name, ranks, marks=[] if i % each == at else [pytest.mark.exhaustive])
            for i, name in enumerate(MEMBERS) for at, ranks in enumerate(counts)]


@pytest.mark.parametrize(("name", "ranks"), members(RANKS, 3))
def test_every_trained_model(name: str, ranks: int) -> None:
    if not has_family(name):
        pytest.skip("no family runs it yet")
    same("canary" if name == "canary" else ASSETS / name, ranks)


def test_sums_are_made_by_the_norm_after_them() -> None:
    """One exchange for each branch, in one call with its norm, so that one kernel can do both."""
    seen: list[int] = []
    joined = Threads.add_norm

    def watched(self: Threads, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(x))
        return joined(self, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Threads, "add_norm", watched)
        group = same("canary", 2)
    blocks = len(describe(read_config(canary.model_folder())).blocks)
    assert group.ranks and len(seen) % (2 * 2 * blocks) == 0 and seen

@pytest.mark.parametrize(("name", "ranks", "stages"), [
    ("canary", 2, 1), ("canary", 3, 1), ("canary", 4, 1), ("canary-moe", 3, 1), ("canary-moe", 2, 2), ("canary-mla", 4, 1),
    ("canary-sink", 3, 1)])
def test_long_sums_are_made_in_runs(name: str, ranks: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are left, summed and normed run by run, by each rank its share where there are more than two."""
    seen: list[tuple[bool, int]] = []
    leave = Runs.leave

    def watched(self: Runs, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        seen.append((self.shares, len(self.borders)))
        return leave(self, compute)

    monkeypatch.setattr(messages, "LEAST", 8)
    monkeypatch.setattr(Runs, "leave", watched)
    folder = "canary" if name == "canary" else ASSETS / name
    for batch, params in ((24, None), (64, None), (24, {"logprobs": 3, "prompt_logprobs": 2})):
        same(folder, ranks, stages, params=params, max_num_batched_tokens=batch, **OVERLAPPED)
    if name == "canary" and ranks == 2:
        same(folder, ranks, context_parallel_size=2, block_size=4)
    assert any(shares for shares, _ in seen) == (ranks > 2)
    assert max(count for _, count in seen) > 2


def test_long_sums_are_made_at_once_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LEAST", 8)
    monkeypatch.setattr(Runs, "leave", None)
    same("canary", 2)


@pytest.mark.parametrize("params", [
    {"temperature": 0.9}, {"temperature": 0.9, "top_k": 12}, {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 100, "top_p": 0.8, "min_p": 0.001}, {"temperature": 1.3, "top_k": 300},
    {"temperature": 0.9, "min_p": 0.05}, {"repetition_penalty": 1.3}, {"logit_bias": {7: 3.0, 3000: 5.0}},
    {"allowed_token_ids": [5, 900, 2047, 2048, 4095]}, {"logprobs": 3, "prompt_logprobs": 2}], ids=str)
def test_every_way_of_choosing(params: dict[str, Any]) -> None:
    """The race of a random choice is run by token, wherever its logit is."""
    same("canary", 3, params=params)


@pytest.mark.parametrize(("params", "gathered"), [
    ({"top_k": 12}, False), ({"top_k": 128, "top_p": 0.5}, False), ({"min_p": 0.1}, False), ({"top_k": 129}, False),
    ({"top_p": 0.9}, False), ({"repetition_penalty": 1.2}, True)], ids=str)
def test_filters_gather_no_logits(params: dict[str, Any], gathered: bool) -> None:
    seen: list[int] = []
    whole = Decoder.whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "whole", lambda self, logits: (seen.append(len(logits)), whole(self, logits))[1])
        same("canary", 2, params={"temperature": 1.0, **params})
    assert bool(seen) == gathered


STAGES = ((1, 2), (1, 3), (2, 2))
"""(Ranks that divide each layer, pipeline stages)."""


@pytest.mark.parametrize(("name", "ranks", "stages"), [
    (name, *mesh) if i % len(STAGES) == at else pytest.param(name, *mesh, marks=pytest.mark.exhaustive)
    for i, name in enumerate(MEMBERS) for at, mesh in enumerate(STAGES)])
def test_every_trained_model_in_stages(name: str, ranks: int, stages: int) -> None:
    if not has_family(name):
        pytest.skip("no family runs it yet")
    folder = "canary" if name == "canary" else ASSETS / name
    if len(describe(read_config(canary.model_folder() if name == "canary" else folder)).blocks) < stages:  # type: ignore[arg-type]
        pytest.skip("it has fewer layers than stages")
    same(folder, ranks, stages)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_shape_of_every_family_in_stages(case: Case, stages: int, tmp_path: Path) -> None:
    make(case, tmp_path)
    spec = describe(read_config(tmp_path))
    if len(spec.blocks) < stages or spec.inputs:
        pytest.skip("it has fewer layers than stages, or layers with inputs of their own")
    same(tmp_path, 1, stages)


@pytest.mark.parametrize("size", [0, 7])
def test_stages_of_layers_that_take_what_others_made_are_refused(size: int, tmp_path: Path) -> None:
    """The keys and values of earlier layers, and inputs that are made with the embedding."""
    case = next(case for case in CASES if case.name == "gemma4-reading")
    make(replace(case, config={**case.config, "hidden_size_per_layer_input": size}), tmp_path)
    same(tmp_path, 2)
    asked = options(tmp_path, pipeline_parallel_size=2)
    with pytest.raises(ModelError, match=r"inputs of their own, or read the keys and values.*use tensor_parallel_size"):
        Engine(asked, rank=Threaded(asked))


@pytest.mark.parametrize("params", [{"temperature": 0.9, "top_k": 12}, {"repetition_penalty": 1.3},
                                    {"logprobs": 3, "prompt_logprobs": 2}], ids=str)
def test_every_way_of_choosing_at_a_pipelines_end(params: dict[str, Any]) -> None:
    same("canary", 1, 2, "1,7", params=params)


@functools.cache
def questions() -> list[list[int]]:
    """Prompts whose answers repeat them."""
    with LLM("canary", threads=1, max_model_len=256) as llm:
        asked = [item.messages for skill in ("repeat", "json") for item in suite.prompts(skill, 3)]
        return [found.prompt_token_ids for found in llm.chat(asked, SamplingParams(max_tokens=1), use_tqdm=False)]


def repeated(predicted: Sequence[Sequence[int]] = (), params: dict[str, Any] | None = None,
             drafters: list[Any] | None = None, **more: Any) -> tuple[list[list[int]], EngineStats]:
    """Answers to `questions`, more of them than rows and pages suffice for. `drafters`: gets those of the ranks."""
    asked = options(**{"folder": "canary", "max_num_batched_tokens": 24, "max_model_len": 192,
                       "kv_cache_memory_bytes": 3 << 18, **more})
    group = Threaded(asked) if place(asked).ranks > 1 else None
    engine = Engine(asked) if group is None else Engine(asked, rank=group)
    if group is not None and drafters is not None:
        drafters += [rank._drafter for rank in group.ranks]
    found: list[list[int]] = [[] for _ in questions()]
    try:
        for i, prompt in enumerate(questions()):
            engine.submit(Request(str(i), prompt, SamplingParams(
                **{"temperature": 0, "max_tokens": 40, "seed": i, "ignore_eos": True, **(params or {})}),
                predicted=array("I", predicted[i]).tobytes() if predicted else b""))
        while engine.busy:
            for update in engine.turn():
                assert update.finish_reason in (None, "length"), update
                found[int(update.request_id)] += update.token_ids
        return found, engine.stats()
    finally:
        engine.close()


UNDIVIDED: dict[str, tuple[list[list[int]], EngineStats]] = {}


def undivided(params: dict[str, Any] | None = None, **more: Any) -> tuple[list[list[int]], EngineStats]:
    """The answers of one rank to `questions`, asked for once: many layouts are compared with the same answers."""
    key = repr((params or {}, sorted(more.items())))
    if key not in UNDIVIDED:
        UNDIVIDED[key] = repeated(params=params, **more)
    return UNDIVIDED[key]


DRAFTERS: dict[str, dict[str, Any]] = {
    **{name: {"speculate": name} for name in ("ngram", "suffix", "lookahead", "auto")},
    "model": {"speculative_model": str(ASSETS / "canary-draft")}}


IN_STAGES = [("ngram", 1, 2, 3 << 18), ("model", 1, 3, 3 << 18), ("suffix", 2, 2, 3 << 17), ("lookahead", 1, 2, 3 << 18),
             ("model", 1, 2, 15 << 16), ("auto", 1, 3, 5 << 16), ("lookahead", 1, 3, 5 << 16)]
"""(Drafter, ranks that divide each layer, stages, bytes of cache); the second and the third are run with one kind of
parameters each."""
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"repetition_penalty": 1.2, "logprobs": 1}]


@pytest.mark.parametrize(("drafter", "ranks", "stages", "room", "params"), [
    pytest.param(*case, params, marks=[] if i in (1, 2) and i % 3 == way else [pytest.mark.exhaustive])
    for i, case in enumerate(IN_STAGES) for way, params in enumerate(WAYS)], ids=str)
def test_drafts_in_stages(drafter: str, ranks: int, stages: int, room: int, params: dict[str, Any]) -> None:
    """The first stage drafts for all of them; of rows that change hands, too, whose tokens come from the last one."""
    wanted, _ = undivided(params)
    found, stats = repeated(params=params, tensor_parallel_size=ranks, pipeline_parallel_size=stages, draft_policy="fixed",
                            num_speculative_tokens=3, kv_cache_memory_bytes=room, **DRAFTERS[drafter])
    assert found == wanted and stats.drafts > 50
    assert stats.preemptions > 0 and stats.accepted_tokens > (0 if params else 50)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_predictions_in_stages(stages: int) -> None:
    """The host's drafts, some of them wrong: the next step of their sequence begins where only the last stage knows."""
    wanted, _ = undivided()
    wrong = [[*answer[:9], 7, *answer[10:20], 9, 9, *answer[23:]] for answer in wanted]
    for predicted in (wanted, wrong):
        found, stats = repeated(predicted, pipeline_parallel_size=stages)
        assert found == wanted and stats.accepted_tokens > 20
    assert stats.drafted_tokens > stats.accepted_tokens


EAGLE, DRAFT, LATENT = (str(ASSETS / name) for name in ("canary-eagle", "canary-draft", "canary-mla"))
LATE: dict[str, dict[str, Any]] = {
    "eagle": {"model": EAGLE}, "tree": {"model": EAGLE, "speculative_eagle_topk": 2}, "mtp": {"method": "mtp"},
    "model-tree": {"model": DRAFT, "speculative_eagle_topk": 2}, "ahead": {"model": DRAFT, "ahead": 2, "device": "cpu"},
    "ruled": {"model": DRAFT, "rejection_sample_method": "block"}}
"""Drafters of the last stage."""


OF_LAST = [("eagle", 1, 3), ("tree", 2, 2), ("mtp", 1, 2), ("ruled", 1, 2), ("eagle", 2, 2), ("tree", 1, 3),
           ("model-tree", 1, 2), ("ahead", 1, 2), ("mtp", 2, 2), ("ruled", 1, 3)]
"""(Drafter, ranks that divide each layer, stages); the first and the second are run, greedy and drawn."""


@pytest.mark.parametrize(("drafter", "ranks", "stages", "params"), [
    pytest.param(*case, params, marks=[] if i < 2 and i % 2 == way else [pytest.mark.exhaustive])
    for i, case in enumerate(OF_LAST) for way, params in enumerate(WAYS[:1 if case[0] == "ruled" else 2])], ids=str)
def test_drafts_of_the_last_stage(drafter: str, ranks: int, stages: int, params: dict[str, Any]) -> None:
    """Hidden states of earlier stages reach the head, drafts and their trees all stages; as many are right as on one rank."""
    model = LATENT if drafter == "mtp" else "canary"
    drafting = {"speculative_config": {"draft_policy": "fixed", "num_speculative_tokens": 3, **LATE[drafter]},
                "kv_cache_memory_bytes": 3 << 20}
    wanted, _ = undivided(params, folder=model)
    _, alone = undivided(params, folder=model, **drafting)
    found, stats = repeated(params=params, folder=model, tensor_parallel_size=ranks, pipeline_parallel_size=stages, **drafting)
    assert found == wanted
    assert 0.95 < stats.accepted_tokens / alone.accepted_tokens < 1.05 and stats.drafts > 50


def test_a_lone_sequence_is_drafted_for_in_stages() -> None:
    asked = options("canary", max_model_len=192, pipeline_parallel_size=2, speculative_model=DRAFT, draft_policy="fixed")
    engine = Engine(asked, rank=Threaded(asked))
    engine.submit(Request("0", questions()[0], SamplingParams(temperature=0, max_tokens=40, seed=0, ignore_eos=True)))
    drained(engine, 1)
    assert engine.stats().accepted_tokens > 10
    engine.close()


def test_rejection_sampling_in_stages_draws_what_one_rank_draws() -> None:
    """Where each round drafts as many, tokens are the same: a sequence at a time, and a share of random ones."""
    found = []
    for more in ({}, {"pipeline_parallel_size": 2}):
        asked = options("canary", max_model_len=192, **more, speculative_config={
            "model": DRAFT, "draft_policy": "fixed", "num_speculative_tokens": 3, "rejection_sample_method": "probabilistic"})
        engine = Engine(asked, rank=Threaded(asked)) if more else Engine(asked)
        said = []
        for i, prompt in enumerate(questions()[:3]):
            engine.submit(Request("0", prompt, SamplingParams(temperature=1.1, max_tokens=40, seed=i, ignore_eos=True)))
            said += drained(engine, 1)
        found.append((said, engine.stats().accepted_tokens))
        engine.close()
    assert found[0] == found[1] and found[0][1] > 40


def test_layer_skip_is_refused_with_stages() -> None:
    asked = options("canary", pipeline_parallel_size=2, speculate="layer_skip")
    with pytest.raises(ConfigError, match="layer_skip is not possible with pipeline_parallel_size"):
        Engine(asked, rank=Threaded(asked))


@pytest.mark.parametrize(("layers", "message"), [("3", "2 numbers"), ("0,6", "above 0"), ("2,2", "sum is")])
def test_layers_that_are_no_stages_are_refused(layers: str, message: str) -> None:
    asked = options("canary", pipeline_parallel_size=2, pipeline_layers=layers)
    with pytest.raises(PenstockError, match=message):
        Engine(asked, rank=Threaded(asked))


CONTEXTS = (2, 4)
"""Ranks that divide the positions of every context."""


def over_contexts(folder: Path | str, ranks: int, **more: Any) -> None:
    """Greedy tokens are the same, with prompts in chunks and pages of few positions. Skips a model without such a cache."""
    try:
        same(folder, 1, block_size=4, context_parallel_size=ranks, **more)
    except ModelError as error:
        assert "layers of another kind" in str(error)
        pytest.skip("it has a cache of another kind")


@pytest.mark.parametrize(("case", "ranks"), [
    (case, ranks) if (i + at) % 32 == 0 else pytest.param(case, ranks, marks=pytest.mark.exhaustive)
    for i, case in enumerate(CASES) for at, ranks in enumerate(CONTEXTS)], ids=lambda found: getattr(found, "name", found))
def test_every_shape_of_every_family_by_contexts(case: Case, ranks: int, tmp_path: Path) -> None:
    make(case, tmp_path)
    over_contexts(tmp_path, ranks, max_num_batched_tokens=16)


@pytest.mark.parametrize(("name", "ranks"), members(CONTEXTS, 4))
def test_every_trained_model_by_contexts(name: str, ranks: int) -> None:
    if not has_family(name):
        pytest.skip("no family runs it yet")
    over_contexts("canary" if name == "canary" else ASSETS / name, ranks)


@pytest.mark.parametrize(("contexts", "tensors"), [(2, 1), (4, 2)])
def test_latents_by_contexts_in_the_form_of_long_prompts(contexts: int, tensors: int, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a prompt over the latents of all ranks, keys and values expanded from these; others beside them, absorbed."""
    make(next(case for case in CASES if case.name == "deepseek3-halved"), tmp_path)
    expanded: list[int] = []
    expand = LatentAttention._expand

    def counted(self: LatentAttention, q: torch.Tensor, held: Any, *rest: torch.Tensor) -> None:
        expanded.append(held[0].count)
        expand(self, q, held, *rest)

    def spans(_ops: AttentionOps, _geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        return [Span(s, 0, int(counts[s]), int(context[s] - counts[s])) for s in np.flatnonzero(counts >= 3).tolist()]

    same(tmp_path, 1)
    monkeypatch.setattr(LatentAttention, "_expand", counted)
    monkeypatch.setattr(AttentionOps, "library_spans", spans)
    same(tmp_path, tensors, context_parallel_size=contexts, block_size=4, max_num_batched_tokens=24)
    assert expanded and min(expanded) >= 3


def test_contexts_beside_tensors_and_stages() -> None:
    """Eight ranks; equal memory of each holds twice as much context."""
    group = same("canary", 2, 2, context_parallel_size=2, kv_cache_memory_bytes=1 << 18)
    alone = options("canary", tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_memory_bytes=1 << 18)
    engine = Engine(alone, rank=Threaded(alone))
    both = options("canary", tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_memory_bytes=1 << 18,
                   context_parallel_size=2)
    wide = Engine(both, rank=Threaded(both))
    assert len(group.ranks) == 8 and wide.info.kv_tokens >= 2 * engine.info.kv_tokens > 0
    engine.close()
    wide.close()


@pytest.mark.parametrize("name", [pytest.param("canary", marks=pytest.mark.exhaustive), "canary-mla"])
def test_draft_models_beside_contexts(name: str) -> None:
    """Each rank has the whole of a draft model's cache."""
    folder = "canary" if name == "canary" else ASSETS / name
    for tensors, policy in ((1, "fixed"), (2, "adaptive")):
        same(folder, tensors, context_parallel_size=2, block_size=4, max_num_batched_tokens=24, draft_policy=policy,
             speculative_model=str(ASSETS / "canary-draft"))


def medusa(folder: Path) -> Path:
    """Two heads for canary, each with one layer, and logits of the model's own vocabulary."""
    draw = torch.Generator().manual_seed(3)
    embedding = load_file(canary.model_folder() / "model.safetensors")["model.embed_tokens.weight"].float()
    width = embedding.shape[1]
    folder.mkdir()
    save_file({**{f"{head}.0.linear.weight": torch.randn(width, width, generator=draw) * 0.02 for head in range(2)},
               **{f"{head}.1.weight": embedding.roll(head, 1) for head in range(2)}}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"medusa_num_heads": 2}')
    return folder


def weights(drafter: Any) -> int:
    """The numbers in a drafter's matrices."""
    if drafter.model is None:
        return sum(matrix.numel() for layers in drafter.heads for matrix, _ in layers)
    return int(drafter.model.spec.size)


@pytest.mark.parametrize(("name", "ranks", "more"), [
    ("canary-draft", 2, {"pipeline_parallel_size": 2}), ("medusa", 3, {}),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("canary-draft", 2, {}), ("canary-draft", 2, {"context_parallel_size": 2, "block_size": 4}), ("canary-draft", 3, {}),
        ("medusa", 2, {}), ("canary-eagle", 3, {})))], ids=str)
def test_ranks_divide_a_drafters_weights(name: str, ranks: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Or each has all of them. Answers are the same, and drafts as often right."""
    folder = medusa(tmp_path / "medusa") if name == "medusa" else ASSETS / name
    wanted, _ = undivided()
    accepted, sizes = [], []
    for divided in (1, ranks):
        drafters: list[Any] = []
        asked = {"model": str(folder), "num_speculative_tokens": 2, "draft_policy": "fixed",
                 "draft_tensor_parallel_size": divided}
        found, stats = repeated(drafters=drafters, tensor_parallel_size=ranks, speculative_config=asked,
                                kv_cache_memory_bytes=3 << 19, **more)
        assert found == wanted and stats.drafts > 50
        accepted.append(stats.accepted_tokens)
        sizes.append(weights(drafters[0]))
    assert abs(accepted[0] - accepted[1]) <= 2 + 0.02 * accepted[0]
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize(("drafter", "stages"), [
    ("eagle", 2), ("mtp", 1), *(pytest.param(drafter, 1, marks=pytest.mark.exhaustive) for drafter in ("skip", "many"))])
def test_drafts_beside_contexts(drafter: str, stages: int) -> None:
    """Hidden states of all tokens reach heads, also of prompts that ranks divide, and so do long drafts: planned ahead, too."""
    drafting: dict[str, Any] = {"draft_policy": "fixed", "num_speculative_tokens": 12 if drafter == "many" else 3,
                                "depth": stages + 1, "kv_cache_memory_bytes": 3 << 20,
                                **{"eagle": {"speculative_model": EAGLE}, "mtp": {"speculate": "mtp"},
                                   "skip": {"speculate": "layer_skip"}, "many": {"speculate": "ngram"}}[drafter]}
    model = LATENT if drafter == "mtp" else "canary"
    wanted, _ = undivided(folder=model)
    _, alone = undivided(folder=model, **{**drafting, "depth": 1})
    found, stats = repeated(folder=model, context_parallel_size=2, block_size=4, pipeline_parallel_size=stages, **drafting)
    assert found == wanted and 0.95 < stats.accepted_tokens / alone.accepted_tokens < 1.05


def mixture(case: Case, folder: Path) -> bool:
    make(case, folder)
    return any(isinstance(mixer, ExpertsSpec) for block in describe(read_config(folder)).blocks for mixer in block.mixers)


MIXTURES = [case for case in CASES if any("expert" in key for key in case.config)]
FAMILIES = [next(case for case in MIXTURES if case.kind == kind) for kind in dict.fromkeys(case.kind for case in MIXTURES)]
BALANCED = {"enable_eplb": True, "eplb_config": {"step_interval": 2, "num_redundant_experts": 3}}


@pytest.mark.parametrize(("case", "ranks"), [
    (case, ranks) if i % 4 == at and case in FAMILIES else pytest.param(case, ranks, marks=pytest.mark.exhaustive)
    for i, case in enumerate(MIXTURES) for at, ranks in enumerate((2, 4))], ids=lambda found: getattr(found, "name", found))
def test_experts_over_ranks(case: Case, ranks: int, tmp_path: Path) -> None:
    if not mixture(case, tmp_path):
        pytest.skip("this one has no experts")
    spread = {"expert_placement_strategy": "round_robin"}
    same(tmp_path, ranks, enable_expert_parallel=True, **(BALANCED if ranks == 2 else spread))


def test_experts_move_while_requests_run(tmp_path: Path) -> None:
    """Also those of another stage, and none is lost."""
    case = next(case for case in MIXTURES if case.kind == "Qwen3Moe")
    make(case, tmp_path)
    seen: list[Held] = []
    hold = Experts.hold

    def watched(self: Experts, held: Held) -> None:
        hold(self, held)
        seen.append(held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "hold", watched)
        same(tmp_path, 2, 2, enable_expert_parallel=True, **BALANCED)
    assert len(set(seen)) > 3
    assert all({expert for line in held for expert in line} >= set(range(7)) for held in seen)


def test_experts_of_a_model_without_any_are_refused() -> None:
    asked = options("canary", tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(PenstockError, match="mixtures"):
        Engine(asked, rank=Threaded(asked))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose shares on two ranks are whole blocks of every scheme."""
    import transformers

    torch.manual_seed(6)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        vocab_size=160, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    return saved_random(model, tmp_path_factory.mktemp("blocks"), 0.1)


STORED = [{"quantization": name} for name in ("fp8_block", "int4", "int4_zeros", "q8_0", "nvfp4")] + [
    {"kv_cache_dtype": name} for name in ("fp8", "int8", "turbo4")]


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_stored_matrices_and_caches_are_divided(blocks: Path, stored: dict[str, Any]) -> None:
    """Each rank has its share of the same codes, and heads are encoded as on one rank."""
    wanted = greedy(Engine(options(blocks, **stored)))
    asked = options(blocks, tensor_parallel_size=2, **stored)
    assert greedy(Engine(asked, rank=Threaded(asked))) == wanted


def test_blocks_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="cut apart blocks"):
        Threaded(options("canary", tensor_parallel_size=2, quantization="fp8_block")).survey()
    shutil.copytree(ASSETS / "canary-draft", tmp_path, dirs_exist_ok=True)
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    asked = {"model": str(tmp_path), "draft_tensor_parallel_size": 2}
    found = options("canary", tensor_parallel_size=2, speculative_config=asked)
    with pytest.raises(PenstockError, match=r"the draft model: 2 ranks would cut apart .*draft_tensor_parallel_size to 1"):
        Engine(found, rank=Threaded(found))


def drawn(seed: int) -> tuple[Case, dict[str, Any], int]:
    """A model of odd sizes, options of a layout that need not suit it, and the fewest rows of a run."""
    draw = random.Random(seed)
    kind, layers = draw.choice(["Llama", "Qwen3", "Qwen2", "Qwen3Moe", "Mixtral"]), draw.randint(2, 5)
    heads, each = draw.randint(1, 5), draw.randint(1, 4)
    config = {"vocab_size": draw.randint(80, 330), "hidden_size": heads * each * draw.choice([4, 6, 10, 14]),
              "intermediate_size": draw.randint(9, 150), "num_hidden_layers": layers,
              "num_attention_heads": heads * each, "num_key_value_heads": heads,
              "head_dim": draw.choice([8, 12, 16]), "max_position_embeddings": 512,
              "tie_word_embeddings": draw.random() < 0.4, **ENDS}
    experts = draw.randint(2, 9)
    if kind in ("Qwen3Moe", "Mixtral"):
        config |= {"num_experts" if kind == "Qwen3Moe" else "num_local_experts": experts,
                   "moe_intermediate_size": draw.randint(5, 60), "num_experts_per_tok": draw.randint(1, min(4, experts))}
    stages = draw.randint(1, min(3, layers))
    borders = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    layout: dict[str, Any] = {"ranks": draw.randint(1 if stages > 1 else 2, 5 if stages == 1 else 3), "stages": stages,
                              "max_num_batched_tokens": draw.choice([16, 27, 64])}
    if stages > 1:
        layout["layers"] = ",".join(str(b - a) for a, b in pairwise(borders))
    if draw.random() < 0.3 and stages * layout["ranks"] < 5:
        layout |= {"context_parallel_size": 2, "block_size": 4}
    if "num_experts_per_tok" in config and layout["ranks"] > 1 and draw.random() < 0.6:
        layout |= {"enable_expert_parallel": True, **draw.choice([BALANCED, {"expert_placement_strategy": "round_robin"}, {}])}
    return Case(f"drawn-{seed}", kind, config), layout, draw.choice([4, 8, 1024])


@pytest.mark.parametrize("seed", sampled(range(64), 20))
def test_layouts_drawn_at_random(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of heads, fewer heads of keys than ranks, vocabularies and channels that do not divide, uneven stages."""
    case, layout, least = drawn(seed)
    make(case, tmp_path)
    monkeypatch.setattr(messages, "LEAST", least)
    same(tmp_path, **layout, **OVERLAPPED)
