"""Every family through the whole engine: three requests at once, chunked, over small pages, as transformers says each alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config.schema import EngineOptions
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from tests.models.families import CASES, PROMPT, make
from tests.models.test_families import chosen

TOKENS = 40


@pytest.mark.parametrize("name", [
    "llama-llama3", "mistral-window", "qwen2-window", "qwen3-window", "gemma2-plain", "gemma3-grouped", "gemma4-shared",
    "gemma3n-shared", "gemma4-experts", "phi3-long",
    "olmo2-grouped", "granite-tied", "smollm3-window", "neox-parallel", "gpt2-inner",
    "deepseek3-experts", "deepseek32-long", "gpt-oss-plain", "falcon-alibi", "cohere2-window", "hunyuan-plain",
    "glm5-long", "graniteswa-odd", "mellum-odd", "flint-odd", "cohere2moe-odd"])
def test_three_at_once(name: str, tmp_path: Path) -> None:
    model = make(next(case for case in CASES if case.name == name), tmp_path)
    prompts = [torch.randint(3, 199, (PROMPT - 7 * i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
    engine = Engine(EngineOptions(model=str(tmp_path), max_model_len=160, max_num_batched_tokens=24, max_num_seqs=4,
                                  block_size=16, kv_cache_memory_bytes=1 << 21, threads=1))
    try:
        for i, prompt in enumerate(prompts):
            engine.submit(Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=TOKENS, seed=0, ignore_eos=True)))
        found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        while engine.busy:
            for update in engine.turn():
                found[update.request_id] += update.token_ids
    finally:
        engine.close()
    for i, prompt in enumerate(prompts):
        assert len(found[str(i)]) == TOKENS and found[str(i)] == chosen(model, prompt, found[str(i)])[1]
