"""Training documents: one conversation, or one passage of a book, as text. Owns the mixture.

Conversations are of held-in prompts only (`Item.held_out`), alone or several in a row, at every length; the buckets are the row
lengths that they are packed into.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from training.canary.render import render
from training.canary.stories import small_talk, story_chat

from penstock.canary import calling, skills
from penstock.canary.item import Item
from penstock.canary.suite import SKILLS

CONTEXT = 4096
"""The longest context of the family, in tokens."""


@dataclass(frozen=True)
class Bucket:
    """Rows of one length, the spans of the prompts in them, and the share of steps that train on them."""

    name: str
    length: int
    span: tuple[float, float]
    share: float


LONG = Bucket("long", CONTEXT, (0.8, 1.0), 0.10)
"""One document a row, so its mask is the plain causal one."""
BUCKETS = (Bucket("short", 512, (0.0, 0.7), 0.66), Bucket("middle", 1024, (0.3, 1.0), 0.24), LONG)
EDGE = Bucket("edge", 512, (0.0, 1.0), 1.0)
"""For canary-edge alone."""


@dataclass(frozen=True)
class Texts:
    """Texts that were read, not generated: passages of books and conversations."""

    books: list[str] = field(default_factory=list)
    talk: list[list[str]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> Texts:
        """The files that prepare.py wrote."""
        books, talk = ([json.loads(line) for line in (folder / name).read_text().splitlines()]
                       for name in ("books.txt", "talk.jsonl"))
        return cls(books, talk)


@dataclass(frozen=True)
class Document:
    """`text` is trained on where the assistant speaks, or everywhere if `whole`. If `hinted`, the begin of a thought is given,
    not learnt: the template wrote it."""

    text: str
    whole: bool = False
    hinted: bool = False


_MIXTURE: dict[str, float] = {
    "repeat": 4, "reverse": 4, "retrieve": 9, "add": 9, "compare": 4, "count": 5, "sort": 5, "system": 7, "recall": 6,
    "json": 7,
    "tool-call": 10, "tool-answer": 5, "think": 7, "stop": 3, "series": 14, "sums": 6, "story": 6, "small talk": 3, "talk": 2,
    "book": 3,
}
"""Shares of documents. "series" are several prompts in one conversation, "sums" are several additions."""
MIXTURES = {"first": _MIXTURE, "second": {**_MIXTURE, "retrieve": 50, "count": 12}}
"""By round: what the members are trained on, and what those are trained on further that have not learnt to retrieve."""
_QUESTIONS = {"first": 6, "second": 24}
"""The most further questions about a context of up to 1,000 tokens."""

_SERIES = (skills.repeat, skills.reverse, skills.compare, skills.count, skills.sort, skills.add, skills.stop, skills.extract)


def held_in(generator: skills.Generator, rng: Random, span: float) -> Item:
    """A prompt that may be trained on."""
    while (item := generator(rng, span)).held_out:
        pass
    return item


def document(rng: Random, bucket: Bucket, texts: Texts, mixture: str = "first") -> Document:
    """A document for a bucket, of a mixture by name; it may turn out too long for it."""
    span = rng.uniform(*bucket.span)
    if bucket is EDGE:
        return of_item(held_in(skills.edge, rng, span))
    if bucket is LONG:
        return _more_questions(rng, held_in(skills.retrieve_long, rng, span), 30)
    shares = MIXTURES[mixture]
    kind = rng.choices(list(shares), list(shares.values()))[0]
    if kind in SKILLS:
        item = held_in(SKILLS[kind], rng, span)
        return _more_questions(rng, item, _QUESTIONS[mixture]) if kind == "retrieve" else of_item(item)
    return _OTHERS[kind](rng, span, texts)


def of_item(item: Item) -> Document:
    """A prompt with its canonical answer."""
    messages = [*item.messages, {"role": "assistant", "content": item.answer}]
    return Document(render(messages, item.tools), hinted=item.thinking)


def _more_questions(rng: Random, item: Item, most: int) -> Document:
    """The item, and up to `most` further questions about the same context: reading it once teaches more than one answer."""
    content = item.messages[0]["content"]
    pairs = re.findall(r"^(\w+): (\w+)$", content, re.MULTILINE)
    form = rng.choice(("What is the value of {}?", "Which value has {}?", "Look up {}."))
    if not pairs:
        pairs, form = re.findall(r"The code of the (\w+) is (\d+)\.", content), "What is the code of the {}?"
    messages: list[dict[str, Any]] = [*item.messages, {"role": "assistant", "content": item.answer}]
    for key, value in rng.sample(pairs, min(len(pairs), rng.randint(0, most))):
        if not Item(item.skill, f"{key}={value}", (), "").held_out:
            messages += [{"role": "user", "content": form.format(key)}, {"role": "assistant", "content": value}]
    return Document(render(messages))


def _series(rng: Random, span: float, texts: Texts) -> Document:
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(2, 6)):
        item = held_in(rng.choice(_SERIES), rng, span * 0.6)
        messages += [*item.messages, {"role": "assistant", "content": item.answer}]
    if rng.random() < 0.3:
        messages += small_talk(rng)[:2]
    return Document(render(messages))


def _sums(rng: Random, span: float, texts: Texts) -> Document:
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(4, 12)):
        item = held_in(skills.add, rng, 1.0)
        messages += [*item.messages, {"role": "assistant", "content": item.answer}]
    return Document(render(messages))


def _story(rng: Random, span: float, texts: Texts) -> Document:
    return Document(render(story_chat(rng)))


def _small_talk(rng: Random, span: float, texts: Texts) -> Document:
    messages = small_talk(rng)
    if rng.random() < 0.3:
        messages += story_chat(rng)
    if rng.random() < 0.4:
        item = calling.call(rng, 0.3)
        return Document(render(messages, item.tools))  # tools are offered, and not needed
    return Document(render(messages))


def _talk(rng: Random, span: float, texts: Texts) -> Document:
    turns = rng.choice(texts.talk)
    roles = ("user", "assistant")
    return Document(render([{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns[:8])]))


def _book(rng: Random, span: float, texts: Texts) -> Document:
    return Document(rng.choice(texts.books) + "<|endoftext|>", whole=True)


_OTHERS: dict[str, Callable[[Random, float, Texts], Document]] = {
    "series": _series, "sums": _sums, "story": _story, "small talk": _small_talk, "talk": _talk, "book": _book,
}
