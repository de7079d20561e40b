"""Greedy output is identical whatever the route. Routes are data (`routes.py`): `make test-all` runs every pair of values of
any two axes on each model, and every three; `make test` a third of the routes of pairs on a trained model.

A trained model, and a random one whose layers alternate between full attention and a short sliding window.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.state import lay_out
from penstock.engine.engine import Engine
from penstock.worker.rank import Rank
from tests.data import MODELS, need
from tests.sampling import sampled
from tests.system.random_models import saved_head, saved_random
from tests.system.ranks import Several, Threaded
from tests.system.routes import AXES, Route, Value, covering, every, made, named, possible

ASSETS = Path(__file__).resolve().parents[1] / "assets"
OUTPUT = 20
PAGES = (8, 16, 32)
BATCHES = (1, 7, 32)
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
    return saved_random(model, tmp_path_factory.mktemp("alternating"), 0.25)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE whose routers send neighbours to different experts."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=48, intermediate_size=80, moe_intermediate_size=36, num_experts=9, num_experts_per_tok=3,
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=16, vocab_size=160,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, norm_topk_prob=True)
    torch.manual_seed(4)
    model = transformers.Qwen3MoeForCausalLM(config)
    return saved_random(model, tmp_path_factory.mktemp("mixture"), 0.25)


@cache
def _prompts(vocabulary: int, count: int) -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, 90, 33, 8, 64, 17, 16] + [rng.randint(1, 100) for _ in range(25)]
    return [[1] + [rng.randrange(3, vocabulary) for _ in range(length - 1)] for length in lengths[:count]]


def _run(folder: Path, vocabulary: int, route: Route, scratch: Path, *, alone: int = 0
         ) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Outputs by (prompt, index), and the number of preemptions. alone: of so many prompts, one after another."""
    found = made(route, scratch)
    told = {"batch": 1, "fork": 1, "tight": False, "again": False, "adapters": 0, "ranks": 1, "tensors": 1, **found.run}
    rows = told["batch"] * told["fork"]
    options = {"model": str(folder), "max_num_seqs": rows, "max_model_len": 128, "device": "cpu", "threads": 1,
               **found.options}
    if folder.parent == ASSETS:  # the reference's products of bfloat16 depend on the batch
        options["dtype"] = "float32"
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], rows)
    models = 1 + ("speculative_model" in options)
    if told["tight"]:
        options["kv_cache_memory_bytes"] = _tight(folder, options["block_size"], options["max_num_batched_tokens"], models)
    if models > 1:
        asked = options["speculative_model"]
        options["speculative_model"] = str(folder if asked == "itself" else saved_head(folder, scratch / "head", 3))
        if asked == "tree":
            # Chains where trees are refused.
            branches = 3 if _full_attention(folder) else 1
            options["speculative_config"] = {"model": options.pop("speculative_model"), "num_speculative_tokens": 3,
                                             "draft_policy": options.pop("draft_policy"), "speculative_eagle_topk": branches}
        if "cache_host_bytes" in options:
            options["cache_host_bytes"] *= models
    settled = EngineOptions(**options)
    ranks: list[Rank]
    settled = replace(settled, tensor_parallel_size=told["tensors"])
    if settled.ranks > 1:
        group: Several = Threaded(settled)
        ranks = group.ranks
    else:
        ranks = [Rank(settled) for _ in range(told["ranks"])]
        group = Several(ranks)
    engine = Engine(settled, rank=ranks[0] if len(ranks) == 1 else group)
    for change in found.apply:
        change(engine, [rank.worker for rank in ranks])
    names = [*(engine.add_adapter(str(one)) for one in _adapters(folder)[:told["adapters"]]), ""]
    prompts, out = _prompts(vocabulary, max(BATCHES)), dict[tuple[int, int], list[int]]()
    for turn in range(1 + told["again"]):
        seen: dict[tuple[int, int], list[int]] = {}
        for together in [[i] for i in range(alone)] if alone else [range(told["batch"])]:
            for i in together:
                params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=0, n=told["fork"])
                engine.submit(Request(f"{turn}-{i}", prompts[i], params, adapter=names[i % len(names)]))
            while engine.busy:
                for update in engine.turn():
                    assert update.finish_reason in (None, "length"), update
                    seen.setdefault((int(update.request_id[2:]), update.index), []).extend(update.token_ids)
        assert not out or seen == out, "what was cached changed the output"
        out = seen
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    engine.scheduler.check()
    engine.close()
    return out, stats.preemptions


def _full_attention(folder: Path) -> bool:
    from penstock import models
    from penstock.checkpoint import read_config
    from penstock.layers.attention import AttentionSpec

    blocks = models.describe(read_config(folder)).blocks
    mixers = [mixer for block in blocks for mixer in block.mixers if mixer.states("float32")]
    return all(isinstance(mixer, AttentionSpec) and not mixer.window and not mixer.slopes for mixer in mixers)


@cache
def _tight(folder: Path, page: int, chunk: int, count: int = 1) -> int:
    """Bytes of cache for the longest sequence of `count` equal models, and little more."""
    from penstock import models
    from penstock.checkpoint import read_config

    states = models.describe(read_config(folder)).states("float32") * count
    layout = lay_out(states, page, 0)
    return layout.slab_bytes * (layout.slabs_for(128, chunk) + 4)


@cache
def _adapters(folder: Path) -> list[Path]:
    """Eight random adapters of several ranks on what projections of attention and dense MLPs the model has."""
    found = [Path(tempfile.mkdtemp()) / str(number) for number in range(8)]
    base = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for number, one in enumerate(found):
        draw, rank, tensors = torch.Generator().manual_seed(number), (1, 3, 8, 16)[number % 4], {}
        for name, tensor in base.items():
            module = name.removesuffix(".weight")
            if module.endswith(("q_proj", "v_proj", "o_proj", "self_attn.o_proj", ".mlp.down_proj", ".mlp.up_proj")):
                n, k = tensor.shape
                tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, k, generator=draw) / k ** 0.5
                tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(n, rank, generator=draw) * 0.3 / rank ** 0.5
        one.mkdir()
        save_file(tensors, one / "adapter_model.safetensors")
        (one / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return found


@cache
def _alone(folder: Path, vocabulary: int, count: int, kernel: str, codec: str, scheme: str, adapter: str) -> list[list[int]]:
    """The continuation of each of so many prompts by itself, on the plainest route but for these."""
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    route = {**plain, "kernel": kernel, "codec": codec, "scheme": scheme, "adapter": adapter, "chunk": "4096", "page": "16"}
    found, _ = _run(folder, vocabulary, route, folder, alone=count)
    return [found[i, 0] for i in range(count)]


def _check(folder: Path, vocabulary: int, route: Route, scratch: Path) -> int:
    batch = int(route["batch"])
    want = _alone(folder, vocabulary, batch, route["kernel"], route["codec"], route["scheme"], route["adapter"])
    said = {tuple(tokens) for tokens in want}
    assert len(said) > batch // 3, "the model says the same to everything: it would hide mistakes"
    out, preemptions = _run(folder, vocabulary, route, scratch)
    assert len(out) == batch * int(route["fork"])
    for (i, index), tokens in out.items():
        assert tokens == want[i], (i, index)
    return preemptions


PAIRS = covering(AXES, 2)
CLASSIC = ("batch", "chunk", "page", "depth", "memory", "fork")
"""Axes whose every combination is run by `make test-all`, beside every combination of any three axes."""


def test_pairs_are_covered_by_few_routes() -> None:
    """Every two values that can be had together are, in far fewer routes than there are combinations."""
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[one], AXES[other]):
            route = dict(zip((one, other), pair, strict=True))
            assert not possible(route) or any(route.items() <= found.items() for found in PAIRS), route
    # The two longest axes alone need a route for each of their pairs.
    most, next_most = sorted(map(len, AXES.values()))[:-3:-1]
    assert len(PAIRS) <= 1.5 * most * next_most and all(possible(route) for route in PAIRS)
    assert len(covering({"a": dict.fromkeys("xyz"), "b": dict.fromkeys("xyz"), "c": dict.fromkeys("xy")}, 2)) == 9


@pytest.mark.parametrize("route", sampled(PAIRS, 6, name=named))
def test_trained(route: Route, tmp_path: Path) -> None:
    preemptions = _check(need(MODELS / "stories260k"), 512, route, tmp_path)
    # With room for one sequence and little more, so many cannot be held; codes are a quarter of what the room is measured for,
    # and two ranks that divide contexts have it twice.
    few = (route["memory"] == "False" or route["batch"] != "32" or route["reuse"] == "again" or route["codec"] != "auto"
           or route["layout"].startswith("cp"))
    assert preemptions > 0 or few


@pytest.mark.parametrize("route", sampled(PAIRS, 16, 1, named))
def test_alternating_windows(alternating: Path, route: Route, tmp_path: Path) -> None:
    _check(alternating, 160, route, tmp_path)


LATENT_AXES = AXES | {axis: dict([next(iter(AXES[axis].items()))]) for axis in ("codec", "adapter")} | {
    "layout": {name: value for name, value in AXES["layout"].items() if name != "tp3"}}
LATENT = covering(LATENT_AXES, 2)
"""The cache has no codecs for latents, four of their pages are more than a third of the tiers' memory, and the test's adapters
have other projections."""
RECURRENT = [route for route in covering(LATENT_AXES | {
    "drafter": {name: value for name, value in AXES["drafter"].items() if name not in ("model", "adaptive")},
    "layout": {name: value for name, value in LATENT_AXES["layout"].items() if name != "cp2"},
    "scheme": {"plain": Value()}}, 2) if route["tier"] != "disk" or route["layout"] in ("1", "2")]
"""The same holds for recurrent states, which contexts do not divide. A draft model must be able to lag behind; a chunk's end
changes the last place of a sum over it, which with quantized activations may become a whole code; four pages are more than
half of the tiers' memory."""
MIXED = {"canary-mla": LATENT, "canary-sink": PAIRS, "canary-moe": PAIRS, "canary-hybrid": RECURRENT}
"""Latents with experts; sinks and windows with experts; experts alone; recurrent states with experts. All trained."""


SAMPLED = {"canary-mla": 1, "canary-sink": 14, "canary-moe": 0, "canary-hybrid": 3}
"""A route of seven sequences for each; with those of the other models, every value of every axis is in one."""


@pytest.mark.parametrize("name, route", [(name, [route for route in MIXED[name] if route["batch"] == "7"][place])
                                         for name, place in SAMPLED.items()], ids=SAMPLED)
def test_latents_and_sinks(name: str, route: Route, tmp_path: Path) -> None:
    _check(ASSETS / name, 4096, route, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, route", [(name, route) for name, routes in MIXED.items() for route in routes],
                         ids=[f"{name}-{named(route)}" for name, routes in MIXED.items() for route in routes])
def test_latents_and_sinks_by_all_pairs(name: str, route: Route, tmp_path: Path) -> None:
    _check(ASSETS / name, 4096, route, tmp_path)


@pytest.mark.parametrize("route", sampled(PAIRS, 32, 2, named))
def test_mixture(mixture: Path, route: Route, tmp_path: Path) -> None:
    _check(mixture, 160, route, tmp_path)


@cache
def _all() -> list[Route]:
    return [*covering(AXES, 3), *every(CLASSIC)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(20))
def test_every_route(alternating: Path, mixture: Path, shard: int, tmp_path: Path) -> None:
    for number, route in enumerate(_all()[shard::20]):
        for model, vocabulary in ((need(MODELS / "stories260k"), 512), (alternating, 160), (mixture, 160)):
            try:
                _check(model, vocabulary, route, tmp_path / f"{number}-{vocabulary}")
            except AssertionError as error:
                raise AssertionError(f"{model.name}, {named(route)}: {error}") from error


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
        # The least that the second and third waves share with earlier requests.
        assert hits > 400, hits
        strained, hits, evicted = _serve(folder, vocabulary, page=page, depth=depth, strained=True, cached=True, alone=alone)
        assert strained == want and hits > 50 and evicted > 0, (hits, evicted)


CACHED = [(page, depth) for turn, page in enumerate(PAGES) for depth in (DEPTHS if turn % 2 else DEPTHS[::-1])]
"""In an order in which every other one has all pages and all depths."""


@pytest.mark.parametrize("case", sampled(CACHED, 2, name=str))
def test_cached_trained(case: tuple[int, int]) -> None:
    _check_cache(need(MODELS / "stories260k"), 512, *case)


@pytest.mark.parametrize("case", sampled(CACHED, 2, 1, str))
def test_cached_alternating_windows(alternating: Path, case: tuple[int, int]) -> None:
    _check_cache(alternating, 160, *case)


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
