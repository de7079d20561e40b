"""Layouts, drafters, engine options and kinds of requests, crossed at random: the answers are those of plain decoding.

Every draw either answers as one rank that drafts nothing, or is refused at its start by a message that names an option.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.canary import suite
from penstock.config.schema import EngineOptions, place
from penstock.core.errors import ConfigError, ModelError
from penstock.core.request import Sequence
from penstock.engine.adapters import LoRARequest
from penstock.engine.engine import Engine
from penstock.scheduler.drafting import Adaptive, DraftPolicy
from tests.sampling import sampled
from tests.system.random_models import saved_head
from tests.system.ranks import Threaded
from tests.system.test_block_heads import saved as saved_block
from tests.system.test_draft_heads import CANARY
from tests.system.test_layouts import ASSETS, medusa
from tests.system.test_speculation import CONSTRAINTS, _masked

MODELS = ("canary", "canary", "canary-moe", "canary-sink", "canary-window", "canary-mla", "canary-hybrid")
DRAFT, EAGLE = (str(ASSETS / name) for name in ("canary-draft", "canary-eagle"))
PIRATE = LoRARequest("pirate", 1, str(ASSETS / "canary-pirate"))
ITEMS = [item.messages for skill in ("repeat", "json", "recall") for item in suite.prompts(skill, 3)]
COMMON: dict[str, Any] = {"threads": 1, "max_num_seqs": 6, "max_model_len": 384, "device": "cpu", "dtype": "float32"}
DRAFTING: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("ngram", "suffix", "lookahead", "layer_skip", "auto")},
    "model": {"model": DRAFT}, "eagle3": {"model": EAGLE}, "tree": {"model": EAGLE, "speculative_eagle_topk": 3},
    "model-tree": {"model": DRAFT, "speculative_eagle_topk": 2}, "ahead": {"model": DRAFT, "ahead": 3, "device": "cpu"},
    "pard": {"model": "pard"}, "p-eagle": {"model": "p-eagle"},
    **{name: {"model": name} for name in ("eagle1", "medusa", "dflash", "dspark")},
    "medusa-tree": {"model": "medusa", "speculative_eagle_topk": 2, "num_speculative_tokens": 2}}
ANY = ("ngram", "suffix", "lookahead", "layer_skip", "auto", "model", "model-tree", "ahead", "pard")
"""Drafters of any model with canary's tokens."""
ASKED: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20, "min_p": 0.02}, {"temperature": 1.0, "n": 2},
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.4, "temperature": 0.7}, {"stop": ["e"]},
    {"stop": ["ed", "re"], "include_stop_str_in_output": True, "temperature": 0.6}, {"max_tokens": 1}, {"max_tokens": 2},
    {"max_tokens": 7, "ignore_eos": True}, {"min_tokens": 9, "logit_bias": {5: 2.0}}, {"logprobs": 2}, {"prompt_logprobs": 1},
    {"logprobs": 0, "temperature": 0.9, "n": 2}, {"bad_words": ["the", "red"]}, {"allowed_token_ids": [*range(200, 300)]},
    {"beam_width": 3, "n": 2, "max_tokens": 12}, {"stop_token_ids": [223], "min_tokens": 2},
    *({"structured_outputs": one, "temperature": heat} for one in CONSTRAINTS for heat in (0.0, 0.8))]


class Chance(DraftPolicy):
    """Draws how many tokens are drafted, and when the drafter rests, as measured times may have it."""

    def __init__(self, most: int, whole: bool, seed: int) -> None:
        """`whole`: as `Adaptive`."""
        super().__init__(most)
        self._draw, self._whole, self._drafts, self._left, self._reads = random.Random(seed), whole, 0, 0, False

    def begin(self, rows: int) -> int:
        before = self._drafts
        if not self._left:
            self._drafts = self._draw.choice([0, self.most] if self._whole else [0, 0, *range(1, self.most + 1)])
            self._left, self.reads_prompts = self._draw.randint(1, 4), self._draw.random() < 0.5
        self._left -= 1
        self._reads = before == 0 < self._drafts
        return self._drafts

    def count(self, sequence: Sequence) -> int:
        if self._reads or self._whole:
            return 0 if self._reads else self._drafts
        return self._draw.randint(0, self.most)


def folder_of(name: str, out: Path) -> str:
    """The folder of a drafter that is made."""
    if name in ("pard", "p-eagle"):
        _masked(DRAFT if name == "pard" else EAGLE, out)
    elif name == "medusa":
        medusa(out)
    elif name == "eagle1":
        saved_head(CANARY, out, 1)
    else:
        saved_block(out, name == "dspark")
    return str(out)


def drawn(seed: int) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[tuple[int, dict[str, Any], bool]]]:
    """A model, options that change its numbers, a layout, drafting, and the requests: prompt, parameters, adapter or none."""
    draw = random.Random(seed)
    name = draw.choice(MODELS)
    numbers: dict[str, Any] = {}
    if draw.random() < 0.2:
        numbers["quantization"] = draw.choice(["fp8", "int8"])
    if name not in ("canary-mla", "canary-hybrid") and draw.random() < 0.2:
        numbers["kv_cache_dtype"] = draw.choice(["fp8", "int8", "turbo4"])
    if draw.random() < 0.15:
        numbers["batch_invariant"] = True
    lora = name == "canary" and draw.random() < 0.3
    if lora:
        numbers |= {"enable_lora": True, "max_loras": 2}
    layout: dict[str, Any] = {"tensor_parallel_size": draw.choice([1, 1, 2, 2, 3, 4]),
                              "pipeline_parallel_size": draw.choice([1, 1, 1, 2, 3])}
    if draw.random() < 0.25 and layout["tensor_parallel_size"] < 3:
        layout |= {"context_parallel_size": 2, "block_size": draw.choice([4, 8])}
    if name == "canary-moe" and layout["tensor_parallel_size"] > 1 and draw.random() < 0.6:
        layout |= {"enable_expert_parallel": True}
        if draw.random() < 0.5:
            layout |= {"enable_eplb": True, "eplb_config": {"step_interval": 3, "num_redundant_experts": 2}}
    drafting = dict(DRAFTING[draw.choice([*(DRAFTING if name == "canary" else ANY)])])
    if name == "canary-mla" and draw.random() < 0.5:
        drafting = {"method": "mtp"}
    if drafting:
        drafting = {"num_speculative_tokens": draw.choice([2, 3, 5]), "draft_policy": draw.choice(["fixed", "adaptive"]),
                    **drafting}
        if drafting.get("model") == "medusa":
            drafting["num_speculative_tokens"] = 2
        if drafting.get("model") == DRAFT and draw.random() < 0.2 and "ahead" not in drafting:
            drafting["draft_tensor_parallel_size"] = layout["tensor_parallel_size"]
    other: dict[str, Any] = {"speculative_config": drafting}
    other["max_num_batched_tokens"] = draw.choice([16, 24, 64, 512])
    if draw.random() < 0.5:
        other["depth"] = draw.choice([1, 2])
    if draw.random() < 0.4:
        other["kv_cache_memory_bytes"] = draw.choice([9 << 18, 3 << 20])
    if draw.random() < 0.3:
        other |= {"cache_host_bytes": 1 << 21, **draw.choice([{}, {"cache_write": "evict", "cache_load": "always"}])}
    count = draw.randint(8, 12)
    requests = [(draw.randrange(len(ITEMS)), draw.choice(ASKED), lora and draw.random() < 0.5) for _ in range(count)]
    return name, numbers, layout, other, requests


@functools.cache
def texts(name: str) -> LLM:
    """Reads and writes texts of a model; its engine is exchanged."""
    return LLM("canary" if name == "canary" else str(ASSETS / name), **COMMON, enable_lora=name == "canary")


def answered(name: str, requests: list[tuple[int, dict[str, Any], bool]], **options: Any) -> list[Any]:
    """The answers, asked for twice, so that the second time finds the first's prefixes. Errors of the start are raised."""
    llm = texts(name)
    asked = EngineOptions(**{"model": "canary" if name == "canary" else str(ASSETS / name), **COMMON, **options})
    engine = Engine(asked, rank=Threaded(asked)) if place(asked).ranks > 1 else Engine(asked)
    own, llm.engine = llm.engine, engine
    llm._adapters.clear()
    policy = engine.scheduler.drafts.policy
    if isinstance(policy, Adaptive):
        # Not as times of this machine are, so that it is the same each time.
        engine.scheduler.drafts.policy = Chance(policy.most, policy.whole, len(requests))
    try:
        found = []
        for _ in range(2):
            params = [SamplingParams(**{"temperature": 0, "max_tokens": 40, "seed": 7 + i, **more})
                      for i, (_, more, _) in enumerate(requests)]
            found += llm.chat([ITEMS[item] for item, _, _ in requests], params, use_tqdm=False,
                              lora_request=[PIRATE if adapted else None for _, _, adapted in requests])
        return [[(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.error,
                  None if one.logprobs is None else [{token: pytest.approx(said.logprob, abs=2e-3) for token, said in
                                                      line.items()} for line in one.logprobs])
                 for one in output.outputs] for output in found]
    finally:
        llm.engine = own
        engine.close()


def values(found: list[Any]) -> list[Any]:
    """Without the tolerance."""
    return [[(*one[:-1], one[-1] and [{token: said.expected for token, said in line.items()} for line in one[-1]])
             for one in output] for output in found]


@pytest.mark.parametrize("seed", sampled(range(128), 103, 22))
def test_answers_are_those_of_one_rank_that_drafts_nothing(seed: int, tmp_path: Path) -> None:
    name, numbers, layout, other, requests = drawn(seed)
    config = other.pop("speculative_config")
    if config.get("model") in ("pard", "p-eagle", "medusa", "eagle1", "dflash", "dspark"):
        config["model"] = folder_of(config["model"], tmp_path / "drafter")
    try:
        found = answered(name, requests, **numbers, **layout, **other, speculative_config=config)
    except (ConfigError, ModelError) as error:
        pytest.skip(f"refused: {error}")
    # Codes are of sums, whose last place other orders change.
    coded = {"quantization", "kv_cache_dtype"} & set(numbers)
    wanted = answered(name, requests, **numbers, **(layout if coded else {}))
    for place_, (one, two) in enumerate(zip(values(found), wanted, strict=True)):
        assert one == two, (requests[place_ % len(requests)], layout, other, numbers, config)
