"""Options are accepted in one place: `LLM`, `AsyncLLM`, the flags and the engine refuse the same values in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.flags import Parser, add_flags, from_args
from penstock.config.resolve import resolve
from penstock.config.schema import EngineOptions, ServerOptions, checked, engine_options
from penstock.core.errors import ConfigError
from penstock.core.rank import DeviceFacts
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.llm import LLM

CPU = DeviceFacts("cpu", "test", 8 << 30, 2)


@pytest.mark.parametrize(("given", "said"), [
    ({"cache_write": "typo"}, "cache_write is 'typo'; possible are through, evict"),
    ({"max_model_len": 0}, "max_model_len is 0; it must be at least 2"),
    ({"kv_cache_memory_bytes": 0}, "at least 1"),
    ({"max_num_seqs": "8"}, "max_num_seqs must be an integer or None, got '8'"),
    ({"enforce_eager": 1}, "enforce_eager must be True or False, got 1"),
    ({"gpu_memory_utilization": 1.5}, "a fraction above 0, at most 1"),
    ({"gpu_memory_utilization": float("nan")}, "a fraction above 0, at most 1"),
    ({"experts_on_device": "some"}, "experts_on_device is 'some'; possible are auto and a number of experts of each layer"),
    ({"experts_on_device": 0}, "experts_on_device is '0'"),
    ({"experts_on_device": 8, "tensor_parallel_size": 2}, "experts_on_device is for a single GPU"),
    ({"step_target_ms": 0}, "step_target_ms is 0.0; it must be above 0"),
    ({"max_model_length": 8}, "there is no option 'max_model_length'; similar are max_model_len"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be at least 1"),
])
def test_every_door_refuses_the_same(given: dict[str, Any], said: str) -> None:
    words = []
    for door in (lambda: LLM("canary", **given), lambda: AsyncLLM("canary", **given),
                 lambda: AsyncLLM(EngineOptions(), **given)):
        with pytest.raises(ConfigError) as raised:
            door()
        words.append(str(raised.value))
    assert said in words[0]
    assert len(set(words)) == 1


def test_the_engine_and_the_flags_come_through_the_same_door() -> None:
    bad = EngineOptions(cache_write="typo")
    with pytest.raises(ConfigError, match="possible are through, evict"):
        AsyncLLM(bad)
    with pytest.raises(ConfigError, match="possible are through, evict"):
        resolve(bad, 2048, "float32", CPU)
    parser = Parser(prog="sample")
    add_flags(parser, EngineOptions)
    with pytest.raises(ConfigError, match="max_model_len is 0; it must be at least 2"):
        from_args(parser.parse_args(["--max-model-len", "0"]), EngineOptions)


def test_values_get_their_types() -> None:
    found = engine_options("m", {"cache_disk": Path("/pages"), "step_target_ms": 50, "trust_remote_code": True})
    assert (found.cache_disk, found.step_target_ms) == ("/pages", 50.0)
    assert isinstance(found.step_target_ms, float)


@pytest.mark.parametrize(("given", "said"), [
    ({"port": 70000}, "between 0 and 65535"), ({"api_key": [" "]}, "api_key must not be empty"),
    ({"max_body_bytes": 0}, "at least 1"), ({"shutdown_timeout": -1.0}, "at least 0"), ({"log_level": "loud"}, "possible are"),
    ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "needs ssl_ca_certs"),
    ({"ssl_certfile": "c", "grpc_port": 1, "ssl_ciphers": "ALL"}, "ssl_ciphers is not possible with grpc_port"),
    ({"ssl_certfile": "c", "grpc_port": 1, "ssl_cert_reqs": 1, "ssl_ca_certs": "a"}, "ssl_cert_reqs 1 is not possible"),
])
def test_options_of_the_server(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(ServerOptions(**given))
