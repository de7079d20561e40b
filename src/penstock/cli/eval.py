"""Ask a model graded questions and show how many of its answers are right: `penstock eval canary`.
MODEL is loaded here (canary, which comes with Penstock, if none is named); --base-url asks a running server instead.
Decoding is greedy. The prompts are the same every time, and canary never saw them in training.
Beside it stands the log probability of the right answers, and whether it differs from what was recorded of the model."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from penstock import canary
from penstock.canary import likelihood
from penstock.canary.item import Item
from penstock.canary.likelihood import Comparison, Interval, Record, Values
from penstock.canary.suite import ALL, SKILLS, Score, graded, prompts, table
from penstock.cli.api import Api, add_target, complaint, model_of, model_or_canary, open_api
from penstock.config.flags import at_least, from_args, integer, nearest
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
    parser.add_argument("suite", choices=SUITES, help="canary: repeating, retrieving, adding, JSON, tool calls and more")
    add_target(parser)
    parser.add_argument("--base-url", dest="url", metavar="URL", help="the same as --url")
    parser.add_argument("--prompts", type=integer, default=200, metavar="N", help="prompts for each skill (default: 200)")
    parser.add_argument("--skills", metavar="A,B",
                        help=f"these only (default: {','.join(SKILLS)}); edge, which only canary-edge learnt, must be named")
    parser.add_argument("--logprobs", action=argparse.BooleanOptionalAction, default=True,
                        help=f"score the right answers of {likelihood.PROMPTS} prompts a skill, too (default: yes)")
    parser.add_argument("--reference", type=Path, metavar="FILE",
                        help=f"record to compare with (default: {likelihood.FILE} in the model's folder, if there is one)")
    parser.add_argument("--record", type=Path, metavar="FILE",
                        help="score MODEL by the reference kernels, write the record there, and end")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the scores; 0 however low they are. ConfigError for skills that do not exist."""
    at_least(args, 1, "prompts")
    skills = chosen(args.skills)
    model = model_of(args)
    if args.url and model:
        # As other evaluation tools have it: the name by which the server knows the model.
        args.served_model, args.model = args.served_model or model, None
    if args.record:
        return _record(args, skills)
    record = reference(args)
    items = [prompts(skill, args.prompts) for skill in skills]
    scores, values, dtype = asyncio.run(_asked(args, items)) if args.url else _here(args, items)
    fine = {score.skill: likelihood.score(found) for score, found in zip(scores, values, strict=True)} if values else {}
    compared = likelihood.compare(dict(zip(skills, values, strict=True)), record, dtype) if values and record else None
    if args.json:
        print(json.dumps({"suite": args.suite, "model": args.served_model or model_or_canary(args), "url": args.url,
                          "prompts": args.prompts, "scores": [as_json(score, fine.get(score.skill)) for score in scores],
                          "reference": compared and {"change": asdict(compared.change), "ratio": asdict(compared.ratio),
                                                     "differs": compared.differs, "skills": compared.differing}}, indent=2))
    else:
        print(table(scores, fine))
        if compared:
            print(verdict(compared))
        elif args.logprobs and not values:
            print("no log probabilities of right answers: the server does not tell those of prompts")
    return 0


def reference(args: argparse.Namespace) -> Record | None:
    """The record to compare with, if there is one. ConfigError for a file that is none."""
    path = args.reference
    if path is None and not args.url:
        # Late: a hub id has no folder before its model is loaded, and then no record either.
        folder = canary.model_folder() if model_or_canary(args) == canary.NAME else Path(model_or_canary(args))
        path = folder / likelihood.FILE if (folder / likelihood.FILE).is_file() else None
    if path is None or not args.logprobs:
        return None
    try:
        return Record.load(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--reference {path} cannot be used: {error}; `penstock eval canary MODEL --record FILE` writes "
                          "one") from None


def verdict(found: Comparison) -> str:
    """The result of the comparison with a record, in a line for people."""
    change, ratio = found.change, found.ratio
    where = f" ({', '.join(found.differing)})" if found.differing else ""
    said = f"DIFFERS from the record: more than rounding has changed{where}" if found.differs else "agrees with the record"
    return (f"{said}; right answers are {change.mean:+.4f} nats more probable ({change.low:+.4f} to {change.high:+.4f}), and "
            f"changes are {ratio.mean:.2f} times those of rounding ({ratio.low:.2f} to {ratio.high:.2f})")


def chosen(text: str | None) -> list[str]:
    """The skills of a list with commas; those of the whole family if there is none.

    ConfigError names the nearest to one that does not exist."""
    if text is None:
        return list(SKILLS)
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in ALL:
            raise ConfigError(f"there is no skill {name!r}{nearest(name, ALL)}; all are {', '.join(ALL)}")
    if not named:
        raise ConfigError(f"--skills names none; possible are {', '.join(ALL)}")
    return named


def as_json(score: Score, fine: Interval | None = None) -> dict[str, Any]:
    """A score as plain data; shares from 0 to 1, log probabilities of right answers in nats."""
    low, high = score.interval
    more = {"logprob": asdict(fine)} if fine is not None else {}
    return {"skill": score.skill, "right": score.right, "asked": score.asked, "left_out": score.left_out,
            "share": round(score.share, 4), "low": round(low, 4), "high": round(high, 4), **more}


def room(item: Item) -> int:
    """Tokens that an answer may take: more than a right one can, since no token is shorter than a character."""
    return len(item.answer) + 16


# -- a model in this process

def _here(args: argparse.Namespace, items: Sequence[list[Item]]) -> tuple[list[Score], list[Values] | None, str]:
    # Late: this brings torch, which `penstock eval --help` must not.
    from penstock.engine.llm import LLM

    with LLM(**asdict(from_args(args, EngineOptions, model=model_or_canary(args)))) as llm, _bar(sum(map(len, items))) as bar:
        scores = []
        for group in items:
            scores.append(graded(group, answers(llm, group)))
            bar.update(len(group))
        values = [here(llm, prompts(score.skill, likelihood.PROMPTS)) for score in scores] if args.logprobs else None
        return scores, values, llm.info.dtype


def _record(args: argparse.Namespace, skills: Sequence[str]) -> int:
    """Writes the scores in float32 by plain PyTorch, and in the model's own dtype and in float32 in other ways. 0."""
    from penstock.engine.llm import LLM

    def scores(dtype: str, kernels: dict[str, str]) -> tuple[str, dict[str, Values]]:
        with LLM(model_or_canary(args), dtype=dtype, device="cpu", kernels=kernels, max_num_seqs=32) as llm:
            return llm.info.dtype, {skill: here(llm, prompts(skill, likelihood.PROMPTS)) for skill in skills}

    plain = {"*": "reference"}
    _, exact = scores("float32", plain)
    Record(exact, dict((scores("auto", plain), scores("float32", {})))).dump(args.record)
    return 0


def variables(item: Item) -> dict[str, Any]:
    """Variables for the chat template besides messages and tools."""
    return {"enable_thinking": True} if item.thinking else {}


def _prompt(llm: "LLM", item: Item) -> list[int]:
    text = llm.inputs.render(item.messages, tools=list(item.tools) or None, chat_template_kwargs=variables(item))
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


def answers(llm: "LLM", items: Sequence[Item]) -> list[Answer | None]:
    """The model's answer to each item, all asked at once; None for those that do not fit its context."""
    asked: list[tuple[int, list[int]]] = []
    for place, item in enumerate(items):
        ids = _prompt(llm, item)
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


# -- a server

async def _asked(args: argparse.Namespace, items: Sequence[list[Item]]) -> tuple[list[Score], list[Values] | None, str]:
    gate = asyncio.Semaphore(WINDOW)
    async with open_api(args) as api:
        with _bar(sum(map(len, items))) as bar:
            async def one(item: Item) -> Answer | None:
                async with gate:
                    found = await _answer(api, item)
                bar.update()
                return found

            scores = [graded(group, await asyncio.gather(*map(one, group))) for group in items]
        values = []
        for score in scores if args.logprobs else ():
            found = await served(api, prompts(score.skill, likelihood.PROMPTS))
            if found is None:
                return scores, None, ""
            values.append(found)
        return scores, values or None, ""


def body(item: Item, model: str) -> dict[str, Any]:
    """The request for an item, as OpenAI's API takes it."""
    found = {"model": model, "messages": item.messages, "temperature": 0, "max_tokens": room(item)}
    if item.tools:
        found["tools"] = item.tools
    if item.thinking:
        found["chat_template_kwargs"] = variables(item)
    return found


async def _answer(api: Api, item: Item) -> Answer | None:
    status, content = await api.post("/v1/chat/completions", body(item, api.model))
    if status == 400 and b"context_length_exceeded" in content:
        return None
    if status != 200:
        raise PenstockError(f"a {item.skill} prompt was refused: {complaint(status, content)}")
    choice = json.loads(content)["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("content") or "", calls, choice["finish_reason"] in ("stop", "tool_calls")


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="prompts", unit="prompt", leave=False, file=sys.stderr, disable=not sys.stderr.isatty())


# -- log probabilities of given answers

def here(llm: "LLM", items: Sequence[Item | None]) -> Values:
    """The log probability of each item's canonical answer; None for items that are None or do not fit the context."""
    asked: list[tuple[int, int, list[int]]] = []
    for place, item in enumerate(items):
        if item is None:
            continue
        answer = llm.get_tokenizer().encode(item.answer, add_special_tokens=False)
        ids = _prompt(llm, item) + answer
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


def perplexity(llm: "LLM", text: str, window: int) -> tuple[float, int]:
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


async def served(api: Api, items: Sequence[Item]) -> Values | None:
    """As `here`, of a server with /tokenize and `echo` with `logprobs`, as vLLM and this one have; None if it lacks them."""
    gate = asyncio.Semaphore(WINDOW)

    async def one(item: Item) -> float | None:
        async with gate:
            return await _one(api, item)

    try:
        await _one(api, items[0])
    except _LackingError:
        return None
    return await asyncio.gather(*map(one, items))


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
