"""The host's work for each step, with a device that takes no time: LLM, engine, scheduler, cache and worker are the real
ones, and only the model's tensors are missing. Prints one JSON line a measurement: milliseconds of processor time of a step, by
part. (Of the processor, so that what else a machine does counts little.)

usage: python bench/host.py [--rows 1 32 256 512 1024] [--text] [--mix 256 1024] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fixed import workloads
from penstock.cache.manager import Cache
from penstock.canary import NAME
from penstock.checkpoint import resolve_folder
from penstock.cli.bench.environment import environment
from penstock.config.schema import EngineOptions
from penstock.core import service
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import EngineInfo
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.core.steptime import StepTime
from penstock.engine.adapters import Adapters
from penstock.engine.beam import BeamSearches
from penstock.engine.constraints import Constraints
from penstock.engine.engine import Engine
from penstock.engine.executor import Direct, Pending
from penstock.engine.inputs import Inputs
from penstock.engine.llm import LLM
from penstock.engine.outputs import Outputs
from penstock.engine.view import View
from penstock.layers.step import Step, Works
from penstock.ops.attention import Geometry
from penstock.ops.attention_triton import TritonAttention
from penstock.ops.step import GroupStep, StepTensors, bring, move_step
from penstock.scheduler.admission import Limits
from penstock.scheduler.promises import policy_of
from penstock.scheduler.scheduler import Scheduler
from penstock.text import Tokenizer
from penstock.worker.graphs import Graphs
from penstock.worker.worker import Worker

PAGE = 16
PARTS = ("plan", "launch", "result", "apply", "outputs")


class NoModel:
    """The members that the worker's host side needs of a model; it computes nothing."""

    def __init__(self) -> None:
        self.states = [StateSpec((Field("k", (1, 8), "bfloat16"), Field("v", (1, 8), "bfloat16")), Everything())]
        attention = TritonAttention(invariant=False)
        self.works = Works()
        self.works.index(0, Geometry(32, 8, 128, PAGE), attention)
        self.kernels = SimpleNamespace(attention=attention, build_step=self._build, bring=bring, move_step=move_step,
                                       sample=self, lora=None, chosen={"sample": SimpleNamespace(capturable=False)})
        self.spec = SimpleNamespace(begins=True, ends=True, drafts=False)
        self.lockstep = self.context = self.group = self.picks = None
        self.device = torch.device("cpu")
        self._hidden = torch.zeros(1 << 14, 1)
        self._tokens = torch.full((1 << 10,), 17, dtype=torch.int32)

    def _build(self, *arguments: Any) -> StepTensors:
        return StepTensors(self._tokens, self._tokens, [GroupStep(self._tokens, self._tokens)])

    def attach(self, views: Any) -> None:
        pass

    def detach(self) -> None:
        pass

    def forward(self, step: Step, *others: Any) -> torch.Tensor:
        return self._hidden[:len(step.context) if step.ends is None else len(step.ends)]

    def head(self, hidden: torch.Tensor, adapters: object = None) -> torch.Tensor:
        return hidden

    def choose(self, logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return self._tokens[:len(logits)]


class NoGraphs(Graphs):
    """Steps find their bucket and are filled in; replaying does nothing."""

    def capture(self) -> None:
        graph = SimpleNamespace(replay=lambda: None)
        for bucket in self.buckets.all():
            self._captured[bucket] = graph, torch.zeros(bucket.segments, 1)


class Times:
    """Seconds by part of every step, and of how many rows and tokens it was."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._last = time.thread_time()

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._now[name] += time.thread_time() - began
        return timed

    def step(self, plan: StepPlan) -> None:
        """A turn ends with handing out a plan: what was done since the last one belongs to this."""
        now = time.thread_time()
        self.steps.append({"rows": len(plan.rows), "tokens": int(plan.counts.sum()), "all": now - self._last, **self._now})
        self._last, self._now = now, dict.fromkeys(PARTS, 0.0)


class TimedWorker:
    """A worker whose `launch` and `result` are timed."""

    def __init__(self, worker: Worker, times: Times) -> None:
        self._launch = times.part("launch", worker.launch)
        self._times = times

    def launch(self, plan: StepPlan) -> Pending:
        launched = self._launch(plan)
        self._times.step(plan)
        result: Callable[[], StepResult] = self._times.part("result", launched.result)
        return SimpleNamespace(result=result)


class NoEngine(Engine):
    """The engine, but for how it is put together."""

    def __init__(self, rows: int, tokens: int, length: int, kv_tokens: int, times: Times,
                 step_target: float | None = None) -> None:
        model, device = NoModel(), torch.device("cpu")
        layout = lay_out(model.states, PAGE, lay_out(model.states, PAGE, 0).slab_bytes * (kv_tokens // PAGE))
        self.config, self._ended, self._profiled = SimpleNamespace(depth=2), False, False
        predicted = StepTime(chunk=tokens)
        self.scheduler = Scheduler(
            Cache(layout), Limits(length, rows, tokens, 1 << 20, 151_936, step_target=step_target),
            policy_of(EngineOptions.scheduling_policy, service.read(EngineOptions.classes), predicted, tokens), times=predicted)
        worker = Worker(model, layout, rows, length, device)
        worker.graphs = NoGraphs(model, worker.rows, PAGE, rows, 2048, None, worker.sampler)
        worker.graphs.capture()
        self.rank = SimpleNamespace(worker=worker)
        self.executor = Direct(TimedWorker(worker, times))
        self.view = View(self.scheduler)
        self.adapters = Adapters(self.rank, self.scheduler, False, 0, list, self._take_in)
        self.beams = BeamSearches(self._add, self._abort)
        self.constraints = Constraints(self.scheduler, 151_936, None, worker.sampler.mask_room)
        self.events, self._naming = None, SimpleNamespace(pending=False)
        self._in_flight = deque()
        self.info = EngineInfo(
            model="", architecture="", vocab_size=151_936, max_model_len=self.scheduler.admission.longest, max_num_seqs=rows,
            max_num_batched_tokens=tokens, page_size=PAGE, kv_tokens=kv_tokens, pages_total=layout.slabs, dtype="bfloat16",
            device="none", weight_bytes=0, step_bytes=0, kv_bytes=0, graph_bytes=0, graphs=0, prefix_caching=True,
            cache_identity="", kv_events=None, kernels=[], notes=[])
        self.scheduler.plan = times.part("plan", self.scheduler.plan)
        self.scheduler.apply = times.part("apply", self.scheduler.apply)


class NoLLM(LLM):
    """LLM.generate over such an engine."""

    def __init__(self, rows: int, tokens: int = 8192, length: int = 5120, kv_tokens: int = 1 << 20, text: bool = True) -> None:
        self.times = Times()
        self._tokenizer = Tokenizer.load(resolve_folder(NAME)) if text else None
        self.engine = NoEngine(rows, tokens, length, kv_tokens, self.times)
        self.inputs = Inputs(self._tokenizer, None, self.engine.info)
        self._outputs = Outputs(self._tokenizer)
        self._outputs.push = self.times.part("outputs", self._outputs.push)
        self._count, self._adapters = 0, {}


def prompts(rows: int) -> Iterator[list[int]]:
    """Of such lengths that as many rows come to the border of a page in every step."""
    draw = random.Random(0)
    for i in range(rows):
        yield [draw.randrange(100, 1000) for _ in range(128 + i % PAGE)]


def params(output: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


def decoding(rows: int, text: bool, output: int = 160) -> dict[str, float]:
    """Milliseconds of a step in which every row takes a token: medians, and the mean and 99th percentile of all parts."""
    llm = NoLLM(rows, text=text)
    llm.generate(list(prompts(rows)), params(output), use_tqdm=False)
    steps = [step for step in llm.times.steps[4:] if step["rows"] == step["tokens"] == rows]
    found = {name: statistics.median(step[name] for step in steps) for name in PARTS}
    whole = sorted(step["all"] for step in steps)
    found["rest"] = statistics.median(step["all"] - sum(step[name] for name in PARTS) for step in steps)
    found |= {"all": statistics.median(whole), "mean": statistics.mean(whole), "p99": whole[int(0.99 * len(whole))]}
    return {f"{name}_ms": round(value * 1e3, 4) for name, value in found.items()}


def mix(rows: int) -> dict[str, float]:
    """Seconds of the host for all of offline_mix1000."""
    asks = dict(workloads("qwen06b"))["offline_mix1000"]
    llm = NoLLM(rows, text=False)
    llm.generate([ask.prompt for ask in asks], [params(ask.output) for ask in asks], use_tqdm=False)
    steps = llm.times.steps[1:]
    found = {name: sum(step[name] for step in steps) for name in PARTS}
    found["all"] = sum(step["all"] for step in steps)
    return {"steps": len(steps), **{f"{name}_s": round(value, 4) for name, value in found.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256, 512, 1024])
    parser.add_argument("--text", action="store_true", help="with detokenization")
    parser.add_argument("--mix", type=int, nargs="*", default=[], metavar="ROWS")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    for count in options.rows:
        print(json.dumps({"rows": count, "text": options.text, **decoding(count, options.text), "environment": environment()}))
    for count in options.mix:
        print(json.dumps({"mix1000": count, **mix(count), "environment": environment()}))
    profile.disable()
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
