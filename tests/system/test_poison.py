"""A request whose logits are not numbers fails alone: its neighbours go on, and the pages it leaves behind harm nobody."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from tests.data import MODELS, need

POISON = 509


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 260K model with one token's embedding not a number, which its golden outputs never use. The head is its own."""
    source = need(MODELS / "stories260k")
    folder = tmp_path_factory.mktemp("poisoned")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


@pytest.mark.parametrize("kernels", [{}, {"*": "reference"}], ids=["best", "reference"])
def test_a_poisoned_request_fails_alone(poisoned: Path, kernels: dict[str, str]) -> None:
    cases = json.loads((MODELS / "stories260k" / "greedy_golden.json").read_text())["cases"]
    assert not any(POISON in case["prompt_ids"] + case["greedy_ids"] for case in cases)
    # So few pages that those of a failed request are used again at once.
    engine = Engine(EngineOptions(model=str(poisoned), device="cpu", kernels=kernels, max_num_seqs=4,
                                  kv_cache_memory_bytes=40 * 16 * 5 * 2 * 4 * 8 * 4))
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for turn, case in enumerate(cases):
        for name, prompt in ((f"bad{turn}", [1, *[POISON] * 60]), (f"good{turn}", case["prompt_ids"])):
            engine.submit(Request(name, prompt, SamplingParams(temperature=0, max_tokens=60, seed=0, ignore_eos=True)))
    while engine.busy:
        for update in engine.turn():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason:
                ends[update.request_id] = update.finish_reason
                assert bool(update.error) == update.request_id.startswith("bad")
    assert engine.stats().pages_used == 0
    engine.close()
    for turn, case in enumerate(cases):
        assert (ends[f"bad{turn}"], ends[f"good{turn}"]) == ("error", "length")
        assert tokens[f"good{turn}"] == case["greedy_ids"][:60]
