"""The log probability of given answers: by a model in this process, or by a server that reports those of prompts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.canary.item import Item
from penstock.canary.likelihood import Values
from penstock.cli.api import Api, complaint
from penstock.core.errors import PenstockError
from penstock.core.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

WINDOW = 32
"""The most requests in flight at a server."""


def variables(item: Item) -> dict[str, Any]:
    """Variables for the chat template besides messages and tools."""
    return {"enable_thinking": True} if item.thinking else {}


def here(llm: LLM, items: Sequence[Item | None]) -> Values:
    """The log probability of each item's canonical answer; None for items that are None or do not fit the context."""
    tokenizer = llm.get_tokenizer()
    asked: list[tuple[int, int, list[int]]] = []
    for place, item in enumerate(items):
        if item is None:
            continue
        text = llm.inputs.render(item.messages, tools=list(item.tools) or None, chat_template_kwargs=variables(item))
        answer = tokenizer.encode(item.answer, add_special_tokens=False)
        ids = tokenizer.encode(text, add_special_tokens=False) + answer
        if len(ids) < llm.info.max_model_len:
            asked.append((place, len(answer), ids))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([ids for _, _, ids in asked], params, use_tqdm=False) if asked else []
    found: list[float | None] = [None] * len(items)
    for (place, count, ids), output in zip(asked, outputs, strict=True):
        lines = output.prompt_logprobs
        if lines is None:
            raise PenstockError(f"a prompt was not scored: {output.outputs[0].finish_reason}")
        found[place] = sum(line[token].logprob for line, token in zip(lines[-count:], ids[-count:], strict=True) if line)
    return found


def perplexity(llm: LLM, text: str, window: int) -> tuple[float, int]:
    """(perplexity, tokens scored) of a text that is read in windows of so many tokens, each without what came before."""
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    bos = llm.get_tokenizer().bos_id
    start = [] if bos is None else [bos]
    windows = [[*start, *ids[at:at + window - len(start) - 1]] for at in range(0, len(ids), window - len(start) - 1)]
    windows = [one for one in windows if len(one) > 1]
    if not windows:
        raise PenstockError("the text is too short to be scored: it needs two tokens at least")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for output, asked in zip(llm.generate([{"prompt_token_ids": one} for one in windows], params, use_tqdm=False), windows,
                             strict=True):
        for line, token in zip(output.prompt_logprobs or [], asked, strict=True):
            if line:
                total -= line[token].logprob
                count += 1
    return math.exp(total / count), count


async def served(api: Api, items: Sequence[Item | None]) -> Values | None:
    """The same of a server with /tokenize and `echo` with `logprobs`, as vLLM and this one have; None if it lacks them."""
    gate = asyncio.Semaphore(WINDOW)

    async def one(item: Item) -> float | None:
        async with gate:
            return await _one(api, item)

    try:
        first = next(item for item in items if item is not None)
        await _one(api, first)
    except (StopIteration, _LackingError):
        return None
    values = await asyncio.gather(*(one(item) for item in items if item is not None))
    left = iter(values)
    return [None if item is None else next(left) for item in items]


class _LackingError(Exception):
    """The server does not offer what this needs."""


async def _one(api: Api, item: Item) -> float | None:
    asked = {"model": api.model, "messages": item.messages, "add_generation_prompt": True,
             "chat_template_kwargs": variables(item)}
    if item.tools:
        asked["tools"] = item.tools
    prompt = await _tokens(api, asked)
    answer = await _tokens(api, {"model": api.model, "prompt": item.answer, "add_special_tokens": False})
    status, content = await api.post("/v1/completions", {"model": api.model, "prompt": prompt + answer, "max_tokens": 1,
                                                         "temperature": 0, "echo": True, "logprobs": 0})
    if status == 400 and b"context_length_exceeded" in content:
        return None
    if status != 200:
        raise _LackingError(complaint(status, content))
    lines = (json.loads(content)["choices"][0].get("logprobs") or {}).get("token_logprobs")
    if not lines:
        raise _LackingError("the server gave no log probabilities")
    # Behind the prompt's tokens comes the one that was generated.
    scored: list[float] = lines[len(prompt):len(prompt) + len(answer)]
    return sum(scored)


async def _tokens(api: Api, body: dict[str, Any]) -> list[int]:
    status, content = await api.post("/tokenize", body)
    if status != 200:
        raise _LackingError(complaint(status, content))
    tokens: list[int] = json.loads(content)["tokens"]
    return tokens
