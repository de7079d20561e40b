"""Defaults and conflicts between options, and how memory is divided."""

from __future__ import annotations

import pytest

from penstock.config.resolve import memory_limits, plan_memory, resolve
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.rank import DeviceFacts
from penstock.core.state import Everything, Field, StateSpec

CPU = DeviceFacts("cpu", "test", 8 << 30, 2)
STATES = [StateSpec((Field("k", (4, 64), "bfloat16"), Field("v", (4, 64), "bfloat16")), Everything())] * 10
TOKEN = 10 * 2 * 4 * 64 * 2


def test_defaults() -> None:
    config = resolve(EngineOptions(model="m"), 2048, "bfloat16", CPU)
    assert (config.dtype, config.max_model_len, config.threads) == ("bfloat16", 2048, 2)
    assert config.max_num_batched_tokens >= config.max_num_seqs


@pytest.mark.parametrize(("changes", "word"), [
    ({"max_model_len": 4096}, "2048"), ({"max_model_len": 1}, "at least 2"), ({"max_num_seqs": 0}, "at least 1"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "raise it to 64"), ({"block_size": 0}, "at least 1"),
    ({"gpu_memory_utilization": 1.5}, "fraction"), ({"depth": 0}, "at least 1"), ({"depth": 5}, "1 to 4"),
    ({"dtype": "int3"}, "possible are"),
    ({"max_num_queued_reqs": 0}, "at least 1"),
])
def test_refusals_say_what_would_do(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        resolve(EngineOptions(model="m", **changes), 2048, "float32", CPU)


def test_starts_are_exact_where_kernels_or_stages_need_it() -> None:
    """Batch-invariant kernels on GPUs have work lists that no uncertain start fits; ranks divide segments by their places."""
    gpu = DeviceFacts("cuda", "test", 8 << 30, 2)
    for options, on_cpu, on_gpu in (({}, False, False), ({"batch_invariant": True}, False, True),
                                    ({"context_parallel_size": 2}, True, True), ({"pipeline_parallel_size": 2}, True, True)):
        for facts, exact in ((CPU, on_cpu), (gpu, on_gpu)):
            assert resolve(EngineOptions(model="m", **options), 2048, "bfloat16", facts).exact is exact, (options, facts.kind)


def test_memory_is_what_is_useful_at_most() -> None:
    options = EngineOptions(model="m", max_num_seqs=2)
    config = resolve(options, 256, "bfloat16", CPU)
    plan = plan_memory(memory_limits(options), config, STATES, 0, 0, 1 << 40)
    assert plan.max_model_len == 256
    assert 2 * 255 * TOKEN <= plan.layout.nbytes <= 3 * 272 * TOKEN


def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    options = EngineOptions(model="m", max_model_len=2048, max_num_seqs=2)
    config = resolve(options, 4096, "bfloat16", CPU)
    with pytest.raises(ConfigError, match="the longest that fits is 161 tokens") as caught:
        plan_memory(memory_limits(options), config, STATES, 0, 0, 160 * TOKEN + 1000)
    assert "--max-model-len 161" in str(caught.value)
    smaller = EngineOptions(model="m", max_model_len=161, max_num_seqs=2)
    plan = plan_memory(memory_limits(smaller), resolve(smaller, 4096, "bfloat16", CPU), STATES, 0, 0, 160 * TOKEN + 1000)
    assert plan.max_model_len == 161


def test_a_default_length_shrinks_to_what_fits() -> None:
    options = EngineOptions(model="m", max_num_seqs=2)
    plan = plan_memory(memory_limits(options), resolve(options, 4096, "bfloat16", CPU), STATES, 0, 0, 160 * TOKEN + 1000)
    assert plan.max_model_len == 161


def test_a_cache_larger_than_memory_is_refused() -> None:
    options = EngineOptions(model="m", kv_cache_memory_bytes=1 << 30)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        plan_memory(memory_limits(options), resolve(options, 256, "bfloat16", CPU), STATES, 0, 0, 1 << 20)
