"""Layers that read the keys and values of earlier ones, have inputs of their own and perhaps several streams: greedy tokens
whatever the route, how the cache stores what is read, quantized matrices, and what is refused."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.config.resolve import resolve
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError, ModelError
from penstock.core.request import Request
from penstock.engine.engine import Engine
from penstock.layers.attention import AttentionSpec
from penstock.layers.decoder import Decoder
from penstock.layers.step import Step
from penstock.models import configured, describe, load
from penstock.models.caching import KEY
from penstock.ops.attention import AttentionOps, Geometry, Ints, Span
from penstock.ops.gpu import Chip
from penstock.worker import rehearsal
from penstock.worker.rank import Rank
from tests.models.families import CASES, make
from tests.models.harness import CPU, Runner, open_model, reference
from tests.system.ranks import Threaded, drained

ROUTES: dict[str, dict[str, Any]] = {
    "batch": {"max_num_seqs": 8}, "chunks": {"max_num_batched_tokens": 7, "block_size": 4},
    "deep": {"max_num_seqs": 8, "depth": 3, "block_size": 8},
    "tiers": {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 8, "kv_cache_memory_bytes": 1 << 18,
              "cache_host_bytes": 1 << 21},
    "two ranks": {"tensor_parallel_size": 2}, "three ranks": {"tensor_parallel_size": 3},
    "away": {"offload_weights": "1"}, "half away": {"offload_weights": "0.5"},
    "first layers draft": {"speculate": "layer_skip", "num_speculative_tokens": 3, "draft_policy": "fixed"},
}
KINDS = ["gemma4-shared", "gemma4-experts", "gemma3n-shared"]


def folder_of(kind: str, folder: Path, **changes: Any) -> Path:
    case = next(case for case in CASES if case.name == kind)
    make(replace(case, config={**case.config, **changes}), folder)
    return folder


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 4, "max_model_len": 128,
            "skip_tokenizer_init": True, "max_num_batched_tokens": 128, **more}


def greedy(folder: Path, twice: bool = False, alone: bool = False, **more: Any) -> list[list[int]]:
    draw = random.Random(3)
    shared = [draw.randrange(3, 199) for _ in range(60)]
    prompts = [[draw.randrange(3, 199) for _ in range(length)] for length in (1, 16, 70)]
    prompts += [shared[:cut] + [draw.randrange(3, 199) for _ in range(extra)] for cut, extra in ((60, 1), (48, 9), (30, 4))]
    asked = EngineOptions(**options(folder, **more))
    engine = Engine(asked, rank=Threaded(asked) if asked.ranks > 1 else None)
    found: list[list[int]] = []
    try:
        for _ in range(1 + twice):
            found = []
            for together in [[i] for i in range(len(prompts))] if alone else [range(len(prompts))]:
                for place, i in enumerate(together):
                    engine.submit(Request(str(place), prompts[i], SamplingParams(
                        temperature=0, max_tokens=20, seed=0, ignore_eos=True)))
                found += drained(engine, len(together))
        if twice:
            assert engine.stats().cached_tokens > 60
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_route_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    wanted = greedy(folder, alone=True, max_num_seqs=1, depth=1, enable_prefix_caching=False)
    for name, route in ROUTES.items():
        assert greedy(folder, **route) == wanted, name
    for size in (4, 16):
        assert greedy(folder, twice=True, block_size=size) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_divided_among_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the inputs of its own tokens of a long segment."""
    folder, counts = folder_of(kind, tmp_path), list[int]()
    wanted, inner = greedy(folder, alone=True), Decoder._divided

    def counted(self: Decoder, step: Step, own: torch.Tensor) -> torch.Tensor:
        found = inner(self, step, own)
        assert step.inputs is not None and step.inputs.shape[1] == len(own)
        counts.append(len(own))
        return found

    def spans(_ops: AttentionOps, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
        return [Span(s, int(counts[:s].sum()), int(counts[s]), int(context[s] - counts[s]))
                for s in np.flatnonzero(counts >= 9).tolist()] if geometry.stripe.of > 1 else []

    monkeypatch.setattr(Decoder, "_divided", counted)
    monkeypatch.setattr(AttentionOps, "library_spans", spans)
    found = greedy(folder, context_parallel_size=2, block_size=4, max_num_batched_tokens=24, kernels={"*": "reference"})
    assert found == wanted and counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_reads_what_is_stored_as_its_source_is(kind: str, tmp_path: Path) -> None:
    """A codec's states are those of layers with keys of their own, and the last layer's place is its source's."""
    folder = folder_of(kind, tmp_path)
    config = configured(folder)
    for plain, kept in (((), ()), (("last",), (1,)), (("0", "4"), (0, 2)), (("sliding_window",), (0, 2))):
        asked = {"codec": "fp8", "plain": plain, "scales": {str(layer): [1.0 + layer, 1.0] for layer in range(6)}}
        spec = describe({**config, KEY: asked})
        own = [mixer for mixer in spec.attentions if mixer.reads is None]
        assert [mixer.codec is None for mixer in own] == [layer in kept for layer in range(3)]
        for mixer in spec.attentions:
            source = mixer if mixer.reads is None else spec.attentions[mixer.reads]
            assert mixer.codec == source.codec
        assert [len(state.fields) for state in spec.states("float32")] == [2, 2, 2]
    for codec in ("fp8", "int8"):
        assert greedy(folder, kv_cache_dtype=codec, alone=True) == greedy(
            folder, kv_cache_dtype=codec, max_num_batched_tokens=16, block_size=8)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_inputs_are_quantized(kind: str, tmp_path: Path) -> None:
    """Tables, routers and what blocks do not fit stay plain."""
    folder = folder_of(kind, tmp_path, hidden_size=64, hidden_size_per_layer_input=32, intermediate_size=96)
    found = []
    for scheme in (None, "int8_weights", "q8_0"):
        decoder = load(folder, configured(folder, scheme), dtype=torch.float32, device=CPU, kernels=reference(),
                       max_model_len=256)
        stored = {one.stem: one.scheme.name for one in decoder.spec.parameters() if one.scheme is not None}
        for path in ("inputs.projection", "blocks.1.inputs.up", "blocks.1.inputs.down", "blocks.5.attention.q"):
            assert (stored[path] == "plain") == (scheme is None)
        assert stored["inputs.table"] == "plain" == stored.get("blocks.0.mixture.router", "plain")
        found.append(Runner(decoder).prompt(0, list(range(3, 60))))
    assert found[0].std() > 0.5
    for other in found[1:]:
        assert 0 < (other - found[0]).abs().mean() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_rehearsed_with_a_block_of_each_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(kind, tmp_path)
    spec = describe(configured(folder))
    if kind == "gemma4-shared":
        assert [mixer.reads for mixer in spec.with_blocks([0, 1, 4, 5]).attentions] == [None, None, 0, 1]
    monkeypatch.setattr(rehearsal, "recording", lambda *_: nullcontext({}))
    assert rehearsal.rehearse(spec, reference(), dtype=torch.float32, rows=2, tokens=4, max_model_len=32, page=8,
                              graph_tokens=0, chip=Chip((9, 0), 132)) == []


def test_drafts_read_streams_between_layers(tmp_path: Path) -> None:
    """`Decoder.tap` keeps the stream before and behind layers, of chunks too."""
    decoder: Decoder = open_model(folder_of("gemma4-shared", tmp_path))
    prompt = list(range(3, 60))
    plain = Runner(decoder).prompt(0, prompt)
    decoder.tap([0, 3, 6], 64)
    runner = Runner(decoder)
    torch.testing.assert_close(runner.step([(0, prompt)]), plain, atol=1e-4, rtol=0)
    whole = decoder.tapped[:len(prompt)].clone()
    runner = Runner(decoder)
    runner.step([(0, prompt[:20])])
    runner.step([(0, prompt[20:])])
    torch.testing.assert_close(decoder.tapped[:len(prompt) - 20], whole[20:], atol=1e-4, rtol=0)
    assert whole.std(0).min() > 0
    several = open_model(folder_of("gemma3n-shared", tmp_path / "several"))
    with pytest.raises(ModelError, match="layers of this model have several; use a draft model or ngram"):
        several.tap([0], 64)


def test_streams_are_no_batch_invariant(tmp_path: Path) -> None:
    asked = EngineOptions(**options(folder_of("gemma3n-shared", tmp_path)))
    rank = Rank(asked)
    found = rank.survey()
    config = resolve(asked, found.max_positions, found.dtype, found.device, found.parameters)
    with pytest.raises(ConfigError, match="batch_invariant is not possible with a model of several streams"):
        rank.check(replace(config, batch_invariant=True))
    rank.close()


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    (folder / "model.safetensors").unlink()
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=64, device="cpu") as llm:
        found = llm.generate([{"prompt_token_ids": [5, 9, 7]}], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(found[0].outputs[0].token_ids) == 4


def test_experts_one_by_one_and_unused_keys(tmp_path: Path) -> None:
    """As quantized checkpoints have experts; and as published ones have keys of layers that read another's."""
    folder = folder_of("gemma4-experts", tmp_path)
    wanted = Runner(open_model(folder)).prompt(0, list(range(3, 60)))
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for i, each in enumerate(tensor):
                tensors |= {f"{stem}.{i}.{half}_proj.weight": rows.clone() for half, rows in zip(
                    ("gate", "up"), each.chunk(2), strict=True)}
        elif part == "down_proj" and stem.endswith("experts"):
            tensors |= {f"{stem}.{i}.down_proj.weight": each.clone() for i, each in enumerate(tensor)}
        else:
            tensors[name] = tensor
    at = "model.layers.5.self_attn"
    tensors |= {f"{at}.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors, folder / "model.safetensors")
    torch.testing.assert_close(Runner(open_model(folder)).prompt(0, list(range(3, 60))), wanted, atol=1e-5, rtol=0)
    save_file({**tensors, f"{at}.q_proj.bias": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"unused.*\n.*q_proj.bias"):
        open_model(folder)


def test_only_own_keys_take_memory(tmp_path: Path) -> None:
    spec = describe(configured(folder_of("gemma4-shared", tmp_path)))
    assert len(spec.states("float32")) == 3 and len(spec.attentions) == 6
    assert [mixer.reads for mixer in spec.attentions if isinstance(mixer, AttentionSpec)] == [None] * 3 + [1, 2, 1]
