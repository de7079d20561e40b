"""A rank's start: several ranks as one, what is left behind where a start fails, and what an end does whatever happens."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock import canary
from penstock.config.resolve import resolve
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.plan import StepResult
from penstock.core.rank import Loaded
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine import engine as engine_module
from penstock.engine.engine import Engine
from penstock.engine.ranks import Progress
from penstock.parallel.axis import Place, places
from penstock.worker.rank import Rank
from penstock.worker.worker import Worker
from tests.data import MODELS, need
from tests.sampling import sampled
from tests.system.ranks import Several

PROMPTS = [[1, 5, 9], [1, *range(40, 70)], [1, 44]]


def options(**more: Any) -> EngineOptions:
    return EngineOptions(**{"model": str(need(MODELS / "stories260k")), "device": "cpu", "threads": 1, "max_num_seqs": 4,
                            "max_num_batched_tokens": 16, "max_model_len": 100, **more})


def generate(engine: Engine) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Request(str(i), prompt, SamplingParams(temperature=0.7, max_tokens=20, seed=i, ignore_eos=True)))
    found: list[list[int]] = [[] for _ in PROMPTS]
    while engine.busy:
        for update in engine.turn():
            found[int(update.request_id)] += update.token_ids
    return found


class Compared(Several):
    """Every rank runs every plan, and all must say the same."""

    steps = 0

    def agree(self, results: Sequence[StepResult]) -> StepResult:
        first = results[0]
        for other in results[1:]:
            assert other.id == first.id and np.array_equal(other.tokens, first.tokens)
        self.steps += 1
        return first


class Small(Rank):
    """A rank with less room than others."""

    room = 1 << 18

    def load(self, progress: Progress | None = None) -> Loaded:
        return replace(super().load(progress), room=self.room, step_bytes=1234567890)


def test_two_ranks_in_one_process_are_one_to_the_engine() -> None:
    alone = Engine(options())
    wanted, pages = generate(alone), alone.info.pages_total
    alone.close()
    told: list[tuple[int, int]] = []
    group = Compared([Rank(options()), Small(options())])
    engine = Engine(options(), progress=lambda done, total: told.append((done, total)), rank=group)
    assert generate(engine) == wanted and group.steps == engine.stats().steps > 20
    assert told[-1][0] == told[-1][1] and len({total for _, total in told}) == 1, "progress is that of one rank"
    assert engine.info.pages_total < pages and engine.info.kv_bytes <= Small.room, "all hold what the smallest can"
    assert engine.info.step_bytes == 1234567890
    engine.close()
    assert all(rank.worker.closed for rank in group.ranks)


def test_machines_that_were_started_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other weights of the same shapes, other options or versions. Where the folder is, is each machine's own matter."""
    own = canary.model_folder()
    for name in ("copy", "other"):
        shutil.copytree(own, tmp_path / name)
    tensors = load_file(own / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, tmp_path / "other" / "model.safetensors")
    two = {"tensor_parallel_size": 2, "nnodes": 2}

    def surveyed(model: Path, **more: Any) -> None:
        ranks = [Rank(options(**asked), one) for asked, one in zip(
            ({**two, "model": str(own)}, {**two, "model": str(model), "node_rank": 1, **more}),
            places(Place(tensors=2)), strict=True)]
        assert Several(ranks).survey().folder == own

    surveyed(tmp_path / "copy")
    for model, more, message in (("other", {}, "weights [0-9a-f]{16}, but rank 0 with weights"),
                                 ("copy", {"load_format": "dummy"}, "weights dummy-0"),
                                 ("copy", {"quantization": "int8"}, "quantization int8, but rank 0 with quantization None")):
        with pytest.raises(ConfigError, match=f"rank 1 was started with {message}"):
            surveyed(tmp_path / model, **more)
    ranks = [Rank(options(**two, model=str(own)), one) for one in places(Place(tensors=2))]
    asked = iter((b"one", b"another"))
    monkeypatch.setattr("penstock.worker.rank.sources", lambda: next(asked))
    with pytest.raises(ConfigError, match=r"rank 1 was started with sources [0-9a-f]+, but rank 0 with sources [0-9a-f]+;"):
        Several(ranks).survey()


def test_machines_with_other_draft_weights_are_refused(tmp_path: Path) -> None:
    """Each reads the draft model where its own machine has it, with the settings of machine 0."""
    own = Path(__file__).parents[1] / "assets" / "canary-draft"
    for name in ("copy", "other"):
        shutil.copytree(own, tmp_path / name)
    tensors = load_file(own / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, tmp_path / "other" / "model.safetensors")

    def ranks(config: dict[str, Any]) -> list[Rank]:
        two = {"model": "canary", "tensor_parallel_size": 2, "nnodes": 2}
        return [Rank(options(**two, speculative_config={"model": str(own), "num_speculative_tokens": 2}), Place(tensors=2)),
                Rank(options(**two, node_rank=1, speculative_config=config), Place(tensor=1, tensors=2))]

    group = Several(ranks({"model": str(tmp_path / "copy"), "num_speculative_tokens": 4}))
    found = group.survey()
    group.check(resolve(group.ranks[0]._options, found.max_positions, found.dtype, found.device, found.parameters))
    drafts = [rank._draft for rank in group.ranks]
    assert [(draft.folder, draft.asked.tokens) for draft in drafts] == [(own, 2), (tmp_path / "copy", 2)]
    for config, said in (({"model": str(tmp_path / "other")}, "[0-9a-f]{16}"), ({"method": "ngram"}, "none"), ({}, "none")):
        with pytest.raises(ConfigError, match=f"rank 1 was started with draft weights {said}, but rank 0 with draft weights"):
            Several(ranks(config)).survey()


def test_the_engines_half_has_no_torch() -> None:
    code = "import sys, penstock.engine.engine, penstock.engine.llm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _held() -> Counter[str]:
    """Threads of this process, and what it has open: files by name, sockets and the like by kind."""
    gc.collect()
    found = [f"thread {thread.name}" for thread in threading.enumerate()]
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{number}")
            found.append(link if link.startswith("/") else link.partition(":")[0])
    return Counter(name for name in found if "/proc/" not in name)


STAGES = ["rank", "survey", "config", "check", "load", "memory", "stores", "worker", "warm-up", "events", "scheduler"]


@pytest.mark.parametrize("stage", sampled(STAGES, 3, 1))
def test_a_start_that_fails_leaves_nothing_behind(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: no thread, socket, open file or memory of the cache, and the folder can be used by the next one."""
    def fail(*_: Any, **__: Any) -> Any:
        raise ConfigError("it fails here")

    place = {"rank": (engine_module, "make_rank"), "survey": (Rank, "survey"), "check": (Rank, "check"),
             "config": (engine_module, "resolve"),
             "load": (Rank, "load"), "memory": (engine_module, "plan_memory"), "stores": (engine_module, "set_up"),
             "worker": (Worker, "_set_up"), "warm-up": (Worker, "warm_up"), "events": (engine_module, "open_events"),
             "scheduler": (engine_module, "Scheduler")}[stage]
    wanted = options(cache_host_bytes=1 << 20, cache_disk=str(tmp_path / "pages"),
                     kv_events_config={"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"})
    before, closed = _held(), list[Rank]()
    end = Rank.close
    monkeypatch.setattr(Rank, "close", lambda self: (closed.append(self), end(self)))
    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(ConfigError, match="it fails here"):
            Engine(wanted)
    assert bool(closed) == (stage != "rank")
    # Objects that other tests left may go meanwhile.
    assert not _held() - before
    assert all(rank._worker is None or rank._worker.closed for rank in closed)
    engine = Engine(wanted)
    assert generate(engine)[0]
    engine.close()


@pytest.mark.parametrize("culprit", ["executor", "events", "tiers", "rank", "_naming"])
def test_an_end_finishes_whatever_happens(culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part that cannot be closed keeps none of the others from it; the error is told; closing again does nothing."""
    before = _held()
    engine = Engine(options(cache_host_bytes=1 << 20, cache_disk=str(tmp_path / "pages"),
                            kv_events_config={"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}))
    generate(engine)
    part = getattr(engine, culprit)
    worker, close = engine.rank.worker, part.close

    def broken() -> None:
        close()
        raise OSError("it does not close")

    object.__setattr__(part, "close", broken) if culprit == "tiers" else monkeypatch.setattr(part, "close", broken)
    with pytest.raises(OSError, match="it does not close"):
        if culprit in ("rank", "tiers", "_naming"):
            # These were named when the engine started.
            engine._closing.callback(broken)
        engine.close()
    assert worker.closed
    assert not _held() - before
    engine.close()
