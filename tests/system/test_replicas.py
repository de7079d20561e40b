"""Several engines behind one server: who gets which request, and what a lost one takes with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, LoRARequest
from penstock.config.resolve import replicas
from penstock.config.schema import EngineOptions, checked, place
from penstock.core.errors import ConfigError
from penstock.core.request import EngineStats, Request, TierStats
from penstock.core.sampling import SamplingParams
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.engine import Engine
from penstock.engine.replicas import Balancer, together
from penstock.worker.rank import Rank
from tests.models.families import CASES, make
from tests.system.adapters import made
from tests.system.served import served

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def request(name: str, prompt: list[int], salt: str = "") -> Request:
    return Request(name, prompt, SamplingParams(), salt=salt)


def test_requests_go_where_least_is_left_to_compute() -> None:
    balancer = Balancer(2)
    first = balancer.choose(request("a", [*range(640)]), [0, 1])
    assert balancer.choose(request("b", [7] * 640), [0, 1]) == 1 - first, "the other one has nothing to do"
    assert balancer.choose(request("c", [*range(640), 5]), [0, 1]) == first, "its beginning was sent there"
    assert balancer.choose(request("d", [*range(640), 5], salt="x"), [0, 1]) == 1 - first, "another namespace knows nothing"
    assert balancer.choose(request("e", [*range(640)]), [1 - first]) == 1 - first, "one that is gone gets nothing"
    for name in "abcde":
        balancer.computed(name)
        balancer.ended(name)
    assert balancer.work == [0, 0] and not balancer.open
    balancer.reset()
    assert {balancer.choose(request(str(i), [*range(640)]), [0, 1]) for i in range(2)} == {0, 1}, "equal ones take turns"


def test_a_hot_beginning_does_not_pile_up() -> None:
    """Once enough work waits where a prompt is cached, it is computed elsewhere, too."""
    balancer = Balancer(2)
    chosen = [balancer.choose(request(str(i), [*range(640), i]), [0, 1]) for i in range(40)]
    assert {chosen.count(0), chosen.count(1)} <= {*range(12, 29)}


def test_options_of_each() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///tmp/replay"}
    one, two = replicas(EngineOptions(data_parallel_size=2, kv_events_config=events))
    assert (one.data_parallel_rank, one.kv_events_config["endpoint"]) == (0, "tcp://*:5557")
    assert two.kv_events_config["endpoint"] == "tcp://*:5558" and two.kv_events_config["replay_endpoint"] == "ipc:///tmp/replay-1"
    with pytest.raises(ConfigError, match="data_parallel_size needs a server"):
        LLM("canary", data_parallel_size=2)


async def _answers(options: EngineOptions, prompts: list[list[int]]) -> list[list[int]]:
    """Of the first prompt alone, of all at once, and of the last alone after a pause. Prompts of odd length have the adapter
    that is served, if any."""
    llm = AsyncLLM(options)
    await llm.start()
    make, adapters = llm.inputs.request, [*llm.adapters.values()]

    def adapted(name: str, prompt: dict[str, list[int]], *rest: Any, **more: Any) -> Request:
        found = make(name, prompt, *rest, **more)
        found.adapter = adapters[0].digest if adapters and len(prompt["prompt_token_ids"]) % 2 else ""
        return found

    llm.inputs.request = adapted  # type: ignore[method-assign, assignment]
    try:
        async def one(number: int) -> list[int]:
            *_, last = [found async for found in llm.generate({"prompt_token_ids": prompts[number]}, GREEDY)]
            return list(last.outputs[0].token_ids)

        first = await one(0)
        every = await asyncio.gather(*map(one, range(len(prompts))))
        await asyncio.sleep(0.2)
        return [first, *every, await one(len(prompts) - 1)]
    finally:
        await llm.shutdown()


@pytest.mark.parametrize(("kind", "engines", "tensors"), [
    ("Qwen2Moe", 2, 2), *(pytest.param(*one, marks=pytest.mark.exhaustive)
      for one in (("Qwen3Moe", 2, 1), ("Qwen3Moe", 3, 1), ("Qwen3Moe", 4, 1), ("DeepseekV3", 2, 3)))])
def test_engines_that_share_experts_step_together(kind: str, engines: int, tensors: int, tmp_path: Path) -> None:
    """Attention by data: each has its own requests, some of the experts, and steps along while it has nothing to do. Several
    ranks of an engine divide its layers, and the experts with those of the others."""
    case = next(case for case in CASES if case.kind == kind)
    make(case, tmp_path)
    prompts = [[1, 5, 9, 44, 17, 60, 8], [1, *range(40, 75)], [1, 44], [3, 4, 5], [9] * 70]
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", threads=1, max_num_seqs=4,
                            max_num_batched_tokens=64, max_model_len=128, skip_tokenizer_init=True)
    with LLM(**dataclasses.asdict(options)) as llm:
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [list(found.outputs[0].token_ids) for found in llm.generate(asked, GREEDY, use_tqdm=False)]
    several = dataclasses.replace(options, data_parallel_size=engines, tensor_parallel_size=tensors,
                                  enable_expert_parallel=True, enable_eplb=True,
                                  eplb_config={"step_interval": 2, "num_redundant_experts": 3})
    assert asyncio.run(_answers(several, prompts)) == [wanted[0], *wanted, wanted[-1]]


def test_tokens_of_long_prompts_go_to_the_engines_of_their_experts(tmp_path: Path) -> None:
    """To those alone, in two batches, between processes."""
    make(next(case for case in CASES if case.kind == "Qwen3Moe"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    prompts = [[1 + i * i % 90 for i in range(2100)], [1, 44], [3 + i * 7 % 80 for i in range(2060)]]
    options = EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", threads=1, max_num_seqs=4,
                            max_num_batched_tokens=4096, max_model_len=2200, skip_tokenizer_init=True)
    with LLM(**dataclasses.asdict(options)) as llm:
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = [list(found.outputs[0].token_ids) for found in llm.generate(asked, GREEDY, use_tqdm=False)]
    several = dataclasses.replace(options, data_parallel_size=3, enable_expert_parallel=True,
                                  kernels={"messages": "overlapped"})
    assert asyncio.run(_answers(several, prompts)) == [wanted[0], *wanted, wanted[-1]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensors", [1, 2])
def test_engines_that_share_experts_have_adapters(tensors: int, tmp_path: Path) -> None:
    """Of all but the experts."""
    case, folder = next(case for case in CASES if case.kind == "Qwen3Moe"), tmp_path / "model"
    folder.mkdir()
    make(case, folder)
    prompts = [[1, 5, 9, 44, 17, 60, 8], [1, *range(40, 75)], [1, 44], [3, 4, 5]]
    mine = made(tmp_path / "mine", 1, config={"lora_alpha": 60}, modules=("self_attn.q_proj", "self_attn.o_proj"), model=folder)
    experts = made(tmp_path / "experts", 2, modules=("experts.0.down_proj",), model=folder)
    options = EngineOptions(model=str(folder), device="cpu", dtype="float32", threads=1, max_num_seqs=4, enable_lora=True,
                            max_num_batched_tokens=64, max_model_len=128, skip_tokenizer_init=True)
    with LLM(**dataclasses.asdict(options)) as llm:
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        named = [LoRARequest("mine", 1, str(mine)) if len(prompt) % 2 else None for prompt in prompts]
        bare, wanted = ([list(found.outputs[0].token_ids) for found in llm.generate(
            asked, GREEDY, use_tqdm=False, lora_request=adapters)] for adapters in (None, named))
    assert [one == other for one, other in zip(bare, wanted, strict=True)] == [False, True, True, False]
    several = dataclasses.replace(options, data_parallel_size=2, tensor_parallel_size=tensors, enable_expert_parallel=True,
                                  lora_modules=[f"mine={mine}"])
    assert asyncio.run(_answers(several, prompts)) == [wanted[0], *wanted, wanted[-1]]
    with pytest.raises(ConfigError, match="adapters of experts are not possible"):
        asyncio.run(_answers(dataclasses.replace(several, lora_modules=[f"experts={experts}"]), prompts))


@pytest.mark.parametrize("other", [{"pipeline_parallel_size": 2}, {"context_parallel_size": 2}], ids=str)
def test_attention_by_data_is_refused_with_other_axes(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attention is by data"):
        checked(EngineOptions(data_parallel_size=2, enable_expert_parallel=True, **other))


def test_drafts_by_layers_that_share_experts_are_refused() -> None:
    """Other engines take part in whole steps, not in some layers."""
    asked = EngineOptions(model=str(Path(__file__).parents[1] / "assets" / "canary-moe"), device="cpu", speculate="layer_skip",
                          data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="speculate layer_skip is not possible"):
        Engine(asked, rank=Rank(asked, place(asked)))


def test_statistics_together() -> None:
    one = EngineStats(time=1.0, running=2, kv_usage=0.5, pages_total=10, tiers=[TierStats("device", hit_tokens=3)],
                      accepted_by_place=[4, 1])
    two = EngineStats(time=2.0, running=3, kv_usage=1.0, pages_total=30, cache_identity="x", accepted_by_place=[1],
                      tiers=[TierStats("device", hit_tokens=4), TierStats("host", available=0)])
    found = together([one, two])
    assert (found.time, found.running, found.kv_usage, found.cache_identity) == (2.0, 5, 0.875, "x")
    assert found.accepted_by_place == [5, 1]
    assert [(tier.name, tier.hit_tokens, tier.available) for tier in found.tiers] == [("device", 7, 1), ("host", 0, 0)]
    assert one.tiers[0].hit_tokens == 3


def test_two_replicas_serve_and_one_goes_on_alone() -> None:
    with served("canary", "--data-parallel-size", "2", "--device", "cpu", "--max-model-len", "512") as server:
        def once() -> str:
            text: str = server.complete(prompt="Once upon a time", temperature=0, max_tokens=12)["choices"][0]["text"]
            return text

        texts = [once() for _ in range(4)]
        assert len(set(texts)) == 1
        children = _below(server.process.pid, "penstock.engine.process")
        assert len(children) == 2
        answers: list[Any] = []

        def ask(word: str) -> None:
            answers.append(server.post("/v1/completions", prompt=word, temperature=0, max_tokens=480, ignore_eos=True))

        threads = [threading.Thread(target=ask, args=(word,)) for word in ("red", "green")]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(children[0], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        assert "its replica is gone" in next(answer.text for answer in answers if answer.status_code == 503)
        assert once() == texts[0]
        assert server.http.get("/health").status_code == 200
        os.kill(children[1], signal.SIGKILL)
        assert server.ended(20) == 1


def _below(pid: int, module: str) -> list[int]:
    """Processes that a process has started to run a module."""
    children = list[int]()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            children += map(int, (thread / "children").read_text().split())
    return sorted(child for child in children if module in _command(child))


@pytest.mark.exhaustive
def test_replicas_of_several_ranks_do_not_meet_each_other() -> None:
    """Nor does a replica that starts again, whenever one of its ranks was lost, meet what the last start left behind."""
    with LLM("canary", device="cpu", max_model_len=512) as llm:
        (wanted,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    with served("canary", "--data-parallel-size", "2", "--tensor-parallel-size", "2", "--restart", "ranks", "--device", "cpu",
                "--max-model-len", "512", wait=False) as server:
        server.wait_ready(240)

        def check() -> None:
            for _ in range(4):
                found = server.complete(prompt="Once upon a time", temperature=0, max_tokens=12)
                assert found["choices"][0]["text"] == wanted.outputs[0].text

        check()
        first, _ = _below(server.process.pid, "penstock.engine.process")
        known = _below(first, "penstock.worker.process")
        os.kill(known[1], signal.SIGKILL)
        # Again while the new rank starts: then the engine starts again with all its ranks.
        ranks: list[int] = []
        until = time.monotonic() + 60
        while not ranks and time.monotonic() < until:
            ranks = [rank for rank in _below(first, "penstock.worker.process") if rank not in known]
            time.sleep(0.005)
        os.kill(ranks[0], signal.SIGKILL)
        check()
        until = time.monotonic() + 240
        while "1 of 2 replicas have started again" not in server.log and time.monotonic() < until:
            time.sleep(0.1)
        assert "lost while it started" in server.log and "1 of 2 replicas have started again" in server.log
        check()


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
