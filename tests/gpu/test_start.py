"""Starting on a GPU: what is compiled when, and what a GPU that cannot serve says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.core.errors import ConfigError
from penstock.ops import compile

PROMPTS: list[Any] = [{"prompt_token_ids": [5 + n % 60] * n} for n in (1, 2, 30, 200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)


def tokens(llm: LLM, params: SamplingParams = GREEDY, prompts: list[Any] = PROMPTS) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm() -> Any:
    started = LLM(dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, gpu_memory_utilization=0.5)
    yield started
    started.close()


def test_start_compiles_nothing_in_its_own_process() -> None:
    """It finds everything in the cache that other processes have filled: the rehearsal forgets no kernel."""
    before, loaded = len(compile.tally.names), compile.tally.loaded
    LLM(dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=24, max_num_batched_tokens=4000,
        kv_cache_memory_bytes=1 << 28).close()
    assert compile.tally.names[before:] == [] and compile.tally.loaded - loaded > 10


def test_nothing_is_compiled_after_ready(llm: LLM) -> None:
    """Over lengths, batches and every feature of sampling. Compiling here would be counted (tests/ops/test_compile.py)."""
    before = compile.tally.compiled
    longest = llm.info.max_model_len - 10
    for lengths in ([1], [3], [17] * 7, [100] * 64, [longest, 2], [50] * 33):
        prompts = [{"prompt_token_ids": [5 + i % 60] * n} for i, n in enumerate(lengths)]
        tokens(llm, GREEDY, prompts)
        for more in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"logprobs": 2},
                     {"repetition_penalty": 1.3, "logprobs": 0}, {"logit_bias": {7: 3.0}}, {"prompt_logprobs": 1},
                     {"allowed_token_ids": [5, 6]}, {"min_tokens": 2, "stop_token_ids": [9]}):
            tokens(llm, SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 4, "detokenize": False} | more), prompts)
    assert compile.tally.compiled == before, compile.tally.names[before:]


@pytest.mark.parametrize("operation", ["attention", "rope_write", "sample", "linear", "rms_norm", "*"])
def test_any_operation_can_be_plain(llm: LLM, operation: str) -> None:
    """The advice in the message about a kernel that does not compile."""
    plain = LLM(dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=8, gpu_memory_utilization=0.3,
                kv_cache_memory_bytes=1 << 28, kernels={operation: "reference"})
    try:
        chosen = dict(plain.info.kernels)
        assert all(name == "reference" for op, name in chosen.items() if operation in (op, "*"))
        assert all(len(found) == 8 for found in tokens(plain))
        assert bool(plain.info.graphs) == (operation not in ("attention", "rope_write", "*"))
        assert any("no CUDA graphs" in note for note in plain.info.notes) != bool(plain.info.graphs)
    finally:
        plain.close()


def test_busy_gpu() -> None:
    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(int(free - 0.25 * total), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(ConfigError, match=r"are in use already, and gpu_memory_utilization 0\.5 leaves 0\.0 .*would fit"):
            LLM(dtype="bfloat16", skip_tokenizer_init=True, gpu_memory_utilization=0.5)
    finally:
        del taken
        torch.cuda.empty_cache()


def test_checkpoints_come_as_they_are(tmp_path: Path, llm: LLM) -> None:
    """A second engine from the same files gives the same tokens: what streams in by many threads is what is stored."""
    again = LLM(dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, kv_cache_memory_bytes=1 << 28)
    try:
        assert tokens(again) == tokens(llm)
    finally:
        again.close()
