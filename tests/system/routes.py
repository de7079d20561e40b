"""Routes as data: the axes along which a run may differ without its greedy output differing, and routes that cover their pairs.

A feature joins by adding an axis, or a value to one: the options that it sets, and perhaps something done to the engine.
Nothing else changes, as tests take their routes from `covering`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.masking import MaskedSegment
from penstock.core.plan import Masks
from penstock.core.request import Request, Sequence
from penstock.engine.engine import Engine
from penstock.scheduler.drafting import DraftPolicy
from penstock.worker.drafting import Drafting
from penstock.worker.worker import Worker


@dataclass(frozen=True)
class Value:
    """One value of an axis."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine. A callable is given a scratch folder."""
    apply: Callable[[Engine, list[Worker]], None] | None = None
    """Changes to the engine before it runs."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the run itself: batch, fork, again, tight, adapters, ranks (all do the same), tensors (divide layers)."""


def options(name: str, *values: Any) -> dict[str, Value]:
    """An axis that is one option."""
    return {str(value): Value({name: value}) for value in values}


def running(name: str, *values: Any) -> dict[str, Value]:
    """An axis of how the run is made."""
    return {str(value): Value(run={name: value}) for value in values}


class _Open:
    """A mask that excludes nothing."""

    def __init__(self, vocabulary: int) -> None:
        self._words = -(-vocabulary // 32)

    def wants(self, request: Request) -> bool:
        return not request.id.endswith("1")

    def masks(self, segments: list[MaskedSegment]) -> Masks:
        return Masks(np.full((sum(1 + len(drafts) for _, drafts in segments), self._words), -1, np.int32))


class _Drafts(DraftPolicy):
    """Drafts that repeat what the row's tokens did before: some are right. Every third step has none."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._turn = 0

    def begin(self, rows: int) -> int:
        self._turn += 1
        return self._turn % 3 > 0

    def count(self, sequence: Sequence) -> int:
        return self.most if sequence.index == 0 else len(sequence.tokens) % (self.most + 1)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: int) -> None:
        assert 0 <= kept <= tokens >= rows

    def propose(self, drafting: Drafting) -> None:
        tokens = drafting.rows.tokens
        for row, length, count in zip(drafting.row.tolist(), drafting.length.tolist(), drafting.count.tolist(), strict=True):
            known = tokens[row, :length].tolist()
            at = max((i for i in range(length - 1) if known[i] == known[-1]), default=0)
            tokens[row, length:length + count] = torch.tensor([known[min(at + 1 + i, length - 1)] for i in range(count)])


def _draft(count: int) -> Value:
    def apply(engine: Engine, workers: list[Worker]) -> None:
        engine.scheduler.drafts.policy = drafts = _Drafts(count)
        for worker in workers:
            worker.drafter = drafts

    return Value(apply=apply)


def _mask(engine: Engine, workers: list[Worker]) -> None:
    engine.scheduler.masker = _Open(workers[0].model.spec.vocab_size)


AXES: dict[str, dict[str, Value]] = {
    "batch": running("batch", 1, 7, 32),
    "chunk": options("max_num_batched_tokens", 8, 64, 4096),
    "page": options("block_size", 8, 16, 32),
    "depth": options("depth", 1, 2, 3),
    "memory": running("tight", False, True),
    "fork": running("fork", 1, 2),
    "kernel": {"default": Value(), "reference": Value({"kernels": {"*": "reference"}})},
    "tier": {"none": Value(), "host": Value({"cache_host_bytes": 1 << 20}),
             "evict": Value({"cache_host_bytes": 1 << 20, "cache_write": "evict", "cache_load": "always"}),
             "disk": Value({"cache_host_bytes": 5 << 17, "cache_disk": lambda folder: str(folder / "pages")})},
    "reuse": {"off": Value({"enable_prefix_caching": False}), "on": Value(), "again": Value(run={"again": True})},
    "policy": options("scheduling_policy", "priority", "fcfs"),
    "drafter": {"none": Value(), "one": _draft(1), "four": _draft(4),
                "lookup": Value({"speculate": "suffix", "draft_policy": "fixed"}),
                "model": Value({"speculative_model": "itself", "draft_policy": "fixed", "num_speculative_tokens": 3}),
                "adaptive": Value({"speculative_model": "itself"}),
                "eagle3": Value({"speculative_model": "eagle3", "draft_policy": "fixed", "num_speculative_tokens": 3}),
                "tree": Value({"speculative_model": "tree", "draft_policy": "fixed"})},
    "mask": {"none": Value(), "open": Value(apply=_mask)},
    "codec": options("kv_cache_dtype", "auto", "fp8", "int8", "turbo4"),
    "scheme": {"plain": Value(), **options("quantization", "fp8", "int4", "q8_0")},
    "adapter": {"none": Value(), "mixed": Value({"enable_lora": True, "max_loras": 3}, run={"adapters": 8})},
    "layout": {**running("ranks", 1, 2), **{f"tp{count}": Value(run={"tensors": count}) for count in (2, 3)},
               "pp2": Value({"pipeline_parallel_size": 2}), "cp2": Value({"context_parallel_size": 2})},
    "graph": {"eager": Value({"enforce_eager": True})} | ({"captured": Value()} if torch.cuda.is_available() else {}),
}
"""The first value of each axis is the plainest."""

EXCLUDED: list[tuple[tuple[str, str], tuple[str, str]]] = [
    # Few schemes and codecs, because each has answers of its own to compare with.
    *((("adapter", "mixed"), ("codec", one)) for one in ("int8", "turbo4")),
    *((("adapter", "mixed"), ("scheme", one)) for one in ("int4", "q8_0")),
    *((("tier", tier), ("reuse", "off")) for tier in ("host", "evict", "disk")),
    (("drafter", "tree"), ("layout", "cp2")),
    # The last place of a sum, which PyTorch's products of other sizes and sums over ranks change, may become a whole code.
    *((plain, stored) for plain in (("kernel", "reference"), ("layout", "tp2"), ("layout", "tp3"), ("layout", "cp2"))
      for stored in (*(("codec", name) for name in ("fp8", "int8", "turbo4")),
                     *(("scheme", name) for name in ("fp8", "int4", "q8_0")))),
]
"""Pairs that cannot be had together."""

Route = dict[str, str]


def possible(route: Mapping[str, str]) -> bool:
    return not any(route.get(one[0]) == one[1] and route.get(other[0]) == other[1] for one, other in EXCLUDED)


def covering(axes: Mapping[str, Mapping[str, object]], strength: int, seed: int = 0) -> list[Route]:
    """Routes such that every possible combination of values of any `strength` axes is in one of them. Greedy: each route
    begins with a combination that none has yet, and takes for each other axis the value that adds most."""
    draw = random.Random(seed)
    left = {frozenset(zip(names, values, strict=True))
            for names in itertools.combinations(axes, strength) for values in itertools.product(*(axes[name] for name in names))
            if possible(dict(zip(names, values, strict=True)))}
    routes: list[Route] = []
    while left:
        route: Route = dict(min(left, key=sorted))
        others = [name for name in axes if name not in route]
        draw.shuffle(others)
        for name in others:
            choices = [value for value in axes[name] if possible({**route, name: value})]
            draw.shuffle(choices)
            near = [combination for combination in left if any(axis == name for axis, _ in combination)]
            route[name] = max(choices, key=lambda value, name=name, near=near: sum(
                combination <= {*route.items(), (name, value)} for combination in near))
        found = {frozenset(part) for part in itertools.combinations(route.items(), strength)}
        assert found & left, "a combination that looked possible is not"
        left -= found
        routes.append({name: route[name] for name in axes})
    return routes


def named(route: Route) -> str:
    """A route's name: what is not plain about it."""
    return ",".join(f"{axis}={value}" for axis, value in route.items() if value != next(iter(AXES[axis]))) or "plain"


@dataclass
class Made:
    """A route's options and what the run is told."""

    options: dict[str, Any]
    run: dict[str, Any]
    apply: list[Callable[[Engine, list[Worker]], None]]


def made(route: Route, folder: Path) -> Made:
    """The options of a route. `folder` is empty and its own."""
    values = [AXES[axis][value] for axis, value in route.items()]
    chosen = {name: value(folder) if callable(value) else value for one in values for name, value in one.options.items()}
    return Made(chosen, {name: value for one in values for name, value in one.run.items()},
                [one.apply for one in values if one.apply is not None])


def every(names: tuple[str, ...]) -> Iterator[Route]:
    """All combinations of some axes, the others plain."""
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    for values in itertools.product(*(AXES[name] for name in names)):
        route = {**plain, **dict(zip(names, values, strict=True))}
        if possible(route):
            yield route
