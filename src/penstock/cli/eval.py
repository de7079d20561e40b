"""Ask a model graded questions and show how many of its answers are right: `penstock eval canary`.
MODEL is loaded here (canary, which comes with Penstock, if none is named); --base-url asks a running server instead.
Decoding is greedy. The prompts are the same every time, and canary never saw them in training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm

from penstock.canary.item import Item
from penstock.canary.suite import ALL, SKILLS, Score, graded, prompts, table
from penstock.cli.api import Api, add_target, complaint, open_api
from penstock.cli.model import model_of, model_or_canary
from penstock.config.flags import from_args, integer, nearest
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

SUITES = ("canary",)
WINDOW = 64
"""The most requests in flight at a server."""

Answer = tuple[str, list[dict[str, Any]], bool]
"""Text, tool calls if the server parsed them, and whether the model stopped by itself."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("suite", choices=SUITES, help="canary: repeating, retrieving, adding, JSON, tool calls and more")
    add_target(parser)
    parser.add_argument("--base-url", dest="url", metavar="URL", help="the same as --url")
    parser.add_argument("--prompts", type=integer, default=200, metavar="N", help="prompts for each skill (default: 200)")
    parser.add_argument("--skills", metavar="A,B",
                        help=f"these only (default: {','.join(SKILLS)}); edge, which only canary-edge learnt, must be named")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the scores; 0 however low they are. ConfigError for skills that do not exist."""
    if args.prompts < 1:
        raise ConfigError(f"--prompts must be at least 1, got {args.prompts}")
    items = [prompts(skill, args.prompts) for skill in chosen(args.skills)]
    model = model_of(args)
    if args.url and model:
        # As other evaluation tools have it: the name by which the server knows the model.
        args.served_model, args.model = args.served_model or model, None
    scores = asyncio.run(_asked(args, items)) if args.url else _here(args, items)
    if args.json:
        print(json.dumps({"suite": args.suite, "model": args.served_model or model_or_canary(args), "url": args.url,
                          "prompts": args.prompts, "scores": [as_json(score) for score in scores]}, indent=2))
    else:
        print(table(scores))
    return 0


def chosen(text: str | None) -> list[str]:
    """The skills of a list with commas; those of the whole family if there is none.

    ConfigError names the nearest to one that does not exist.
    """
    if text is None:
        return list(SKILLS)
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in ALL:
            raise ConfigError(f"there is no skill {name!r}{nearest(name, ALL)}; all are {', '.join(ALL)}")
    if not named:
        raise ConfigError(f"--skills names none; possible are {', '.join(ALL)}")
    return named


def as_json(score: Score) -> dict[str, Any]:
    """A score as plain data; shares from 0 to 1."""
    low, high = score.interval
    return {"skill": score.skill, "right": score.right, "asked": score.asked, "left_out": score.left_out,
            "share": round(score.share, 4), "low": round(low, 4), "high": round(high, 4)}


def room(item: Item) -> int:
    """Tokens that an answer may take: more than a right one can, since no token is shorter than a character."""
    return len(item.answer) + 16


# -- a model in this process

def _here(args: argparse.Namespace, items: Sequence[list[Item]]) -> list[Score]:
    # Late: this brings torch, which `penstock eval --help` must not.
    from penstock.engine.llm import LLM

    options = from_args(args, EngineOptions, model=model_or_canary(args))
    given = {field: getattr(options, field) for field in options.__dataclass_fields__}
    with LLM(**given) as llm, _bar(sum(map(len, items))) as bar:
        scores = []
        for group in items:
            scores.append(graded(group, answers(llm, group)))
            bar.update(len(group))
        return scores


def answers(llm: LLM, items: Sequence[Item]) -> list[Answer | None]:
    """What a model says to each item, all asked at once; None for those that do not fit its context."""
    tokenizer = llm.get_tokenizer()
    asked: list[tuple[int, list[int]]] = []
    for place, item in enumerate(items):
        text = llm.inputs.render(item.messages, tools=list(item.tools) or None, chat_template_kwargs=_variables(item))
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) + room(item) <= llm.info.max_model_len:
            asked.append((place, ids))
    params = [SamplingParams(temperature=0, max_tokens=room(items[place])) for place, _ in asked]
    outputs = llm.generate([ids for _, ids in asked], params, use_tqdm=False) if asked else []
    found: list[Answer | None] = [None] * len(items)
    for (place, _), output in zip(asked, outputs, strict=True):
        said = output.outputs[0]
        if said.finish_reason not in ("stop", "length"):
            raise PenstockError(f"a {items[place].skill} prompt was not answered: {said.finish_reason}")
        found[place] = (said.text, [], said.finish_reason == "stop")
    return found


def _variables(item: Item) -> dict[str, Any]:
    return {"enable_thinking": True} if item.thinking else {}


# -- a server

async def _asked(args: argparse.Namespace, items: Sequence[list[Item]]) -> list[Score]:
    gate = asyncio.Semaphore(WINDOW)
    async with open_api(args) as api:
        with _bar(sum(map(len, items))) as bar:
            async def one(item: Item) -> Answer | None:
                async with gate:
                    found = await _answer(api, item)
                bar.update()
                return found

            return [graded(group, await asyncio.gather(*map(one, group))) for group in items]


def body(item: Item, model: str) -> dict[str, Any]:
    """The request for an item, as OpenAI's API takes it."""
    more: dict[str, Any] = {}
    if item.tools:
        more["tools"] = item.tools
    if item.thinking:
        more["chat_template_kwargs"] = _variables(item)
    return {"model": model, "messages": item.messages, "temperature": 0, "max_tokens": room(item), **more}


async def _answer(api: Api, item: Item) -> Answer | None:
    reply = await api.transport.send("POST", "/v1/chat/completions", msgspec.json.encode(body(item, api.model)))
    content = await reply.read()
    if reply.status == 400 and b"context_length_exceeded" in content:
        return None
    if reply.status != 200:
        raise PenstockError(f"a {item.skill} prompt was refused: {complaint(reply.status, content)}")
    choice = json.loads(content)["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("content") or "", calls, choice["finish_reason"] in ("stop", "tool_calls")


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="prompts", unit="prompt", leave=False, file=sys.stderr, disable=not sys.stderr.isatty())
