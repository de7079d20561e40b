"""Steps overlap: whenever the engine waits for a step, the device has the next one already, unless there is none to be had."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from penstock import LLM, SamplingParams
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.executor import Direct, Pending, Threaded
from penstock.worker.worker import Worker
from tests.data import MODELS, need


class Watched:
    """A worker that notes, each time that the engine waits for a step, how many it has been given and not asked for."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.in_flight = 0
        self.seen: list[int] = []
        self.rows: list[int] = []

    def launch(self, plan: StepPlan) -> Pending:
        self.in_flight += 1
        self.rows.append(len(plan.rows))
        return _Watching(self, self.worker.launch(plan))


class _Watching:
    def __init__(self, watched: Watched, pending: Pending) -> None:
        self._watched = watched
        self._pending = pending

    def result(self) -> StepResult:
        self._watched.seen.append(self._watched.in_flight)
        self._watched.in_flight -= 1
        return self._pending.result()


@pytest.fixture
def watched() -> Iterator[tuple[LLM, Watched]]:
    with LLM(str(need(MODELS / "stories260k")), threads=1, max_num_seqs=32, max_num_batched_tokens=96) as llm:
        llm.engine.executor.close()
        watched = Watched(llm.engine.rank.worker)
        llm.engine.executor = Direct(watched)
        yield llm, watched


def test_while_prompts_arrive_and_requests_end_in_every_step(watched: tuple[LLM, Watched]) -> None:
    llm, device = watched
    draw = random.Random(0)
    prompts = [[1, *(draw.randrange(3, 500) for _ in range(draw.randrange(1, 150)))] for _ in range(150)]
    params = [SamplingParams(max_tokens=draw.randrange(1, 40), temperature=0, ignore_eos=True) for _ in prompts]
    llm.generate(prompts, params, use_tqdm=False)
    assert max(device.rows) == 32 and len(device.seen) > 100
    # Behind the last step of all there is none.
    assert set(device.seen[:-1]) == {2} and device.seen[-1] == 1


def test_of_one_sequence(watched: tuple[LLM, Watched]) -> None:
    llm, device = watched
    llm.generate([[1, 5]], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True), use_tqdm=False)
    assert device.seen == [2] * 49 + [1]


def test_nobody_waits_twice_when_all_end_at_once(watched: tuple[LLM, Watched]) -> None:
    llm, device = watched
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    llm.generate([[1, 5 + i] for i in range(64)], params, use_tqdm=False)
    # The second half needs the rows of the first, and these are free when the last step of the first half has been looked at.
    assert device.seen.count(1) == 2 and len(device.seen) == 40


@pytest.mark.parametrize("executor", [Direct, Threaded])
@pytest.mark.parametrize("step", [0, 3])
def test_a_launch_that_fails_ends_the_call(watched: tuple[LLM, Watched], executor: type[Direct | Threaded], step: int) -> None:
    llm, device = watched

    class Failing:
        def launch(self, plan: StepPlan) -> Pending:
            if len(device.rows) == step:
                raise RuntimeError("out of memory")
            return device.launch(plan)

    llm.engine.executor = executor(Failing())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate([[1, 5]], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True), use_tqdm=False)
