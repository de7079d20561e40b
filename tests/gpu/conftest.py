"""Shared by the GPU tests. They run on a bare machine: torch, triton, transformers and the engine, no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.config.schema import EngineOptions
from penstock.core.request import Request, Update
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    """An engine on the GPU for the length of a block; its memory is free afterwards."""
    made = Engine(EngineOptions(**{"device": "cuda", "gpu_memory_utilization": 0.2, **options}))
    try:
        yield made
    finally:
        made.close()


def updates(made: Engine, prompts: list[list[int]], outputs: int | list[int], kinds: list[dict[str, Any]] | None = None,
            **params: Any) -> list[list[Update]]:
    """Every update of each prompt's request; greedy unless `params`, for all, or `kinds`, one each, say otherwise."""
    each = outputs if isinstance(outputs, list) else [outputs] * len(prompts)
    for i, (prompt, output, kind) in enumerate(zip(prompts, each, kinds or [{}] * len(prompts), strict=True)):
        chosen = SamplingParams(**{"temperature": 0, "max_tokens": output, "ignore_eos": True, "seed": i, **params, **kind})
        made.submit(Request(str(i), prompt, chosen))
    found: list[list[Update]] = [[] for _ in prompts]
    while made.busy:
        for update in made.turn():
            assert update.finish_reason in (None, "length"), update
            found[int(update.request_id)].append(update)
    return found


def generate(made: Engine, prompts: list[list[int]], outputs: int | list[int], kinds: list[dict[str, Any]] | None = None,
             **params: Any) -> list[list[int]]:
    """The tokens of each prompt's continuation."""
    found = updates(made, prompts, outputs, kinds, **params)
    return [[token for update in mine for token in update.token_ids] for mine in found]
