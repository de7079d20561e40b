"""`penstock info --experts`: how often each layer's experts are picked while the engine answers graded prompts."""

import random
import time
from dataclasses import asdict
from typing import Any

from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError

_PROMPTS = 16
"""Of each skill; without a tokenizer, as many times random tokens."""
_TOKENS = 16
_WAIT = 0.6
"""Seconds after which the worker reports counts again."""


def picked(options: EngineOptions, model: dict[str, Any]) -> dict[str, Any]:
    """The picks by layer and expert, as plain data. ConfigError if the model has no experts."""
    from penstock.canary.suite import SKILLS, prompts
    from penstock.core.sampling import SamplingParams
    from penstock.engine.llm import LLM

    skills = [skill for skill in SKILLS if skill != "retrieve-4k"]
    asked: list[Any] = [item.messages[-1]["content"] for skill in skills for item in prompts(skill, _PROMPTS)]
    if options.skip_tokenizer_init:
        draw = random.Random(0)
        asked = [{"prompt_token_ids": [draw.randrange(model["vocab_size"]) for _ in range(64)]} for _ in asked]
    greedy = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    with LLM(**asdict(options)) as llm:
        llm.generate(asked, greedy, use_tqdm=False)
        time.sleep(_WAIT)
        llm.generate(asked[:1], greedy, use_tqdm=False)
        picks = llm.engine.stats().expert_picks
    if not picks:
        raise ConfigError(f"--experts: {model['architecture']} has no experts; leave it out")
    return {"prompts": len(asked), "picks": picks}


def as_lines(found: dict[str, Any]) -> list[str]:
    """The counts for people: a line for each layer."""
    lines = [f"Experts, picked while {found['prompts']} prompts were answered",
             "  layer  experts      picks  never picked  busiest, over the mean  experts with half of all picks"]
    for layer, picks in enumerate(found["picks"]):
        total, order = sum(picks), sorted(picks, reverse=True)
        half = next(i + 1 for i in range(len(order)) if 2 * sum(order[:i + 1]) >= total)
        most = f"{picks.index(order[0])}: {order[0] * len(picks) / max(1, total):.2f}"
        lines.append(f"  {layer:5}  {len(picks):7}  {total:9,}  {picks.count(0):12}  {most:>22}  {half:30}")
    return lines
