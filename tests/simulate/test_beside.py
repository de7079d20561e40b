"""Short chats, one after another, beside requests that ask for much: by a virtual clock, on a device as slow as two cores."""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from penstock.cli.simulation.fleet import Cost, Record, Replica
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.service import BUILT_IN
from penstock.scheduler.scheduler import Scheduler

COST = Cost(weights={"step": 1.3e-3, "prefill": 0.3e-3, "segment": 0.12e-3, "read": 1e-7, "work": 2e-8, "scored": 0.1e-3,
                     **{f"tokens_from_{knot}": 0.1e-3 for knot in (0, 4, 16, 64, 256, 1024, 4096)}},
            kv_tokens=60_000, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096, page_size=16, step_target=0.05,
            overhead=0.0)
SECONDS = 10.0
GAP = 0.025
"""Seconds between the end of a chat and the next one."""


DONE = Counter[str]()
"""Tokens of all answers, by the kind of request."""


class Engine(Replica):
    """Counts the choices of a request that have not ended."""

    def __init__(self) -> None:
        super().__init__(COST, "promises", BUILT_IN)
        self.left: Counter[str] = Counter()

    def submit(self, request: Request, now: float) -> None:
        self.left[request.id] = request.params.n
        self.add(request, Record(now, request.tier, "", len(request.prompt_ids)), now)

    def _updates(self, now: float) -> list[str]:
        updates = self.scheduler.take_updates()
        for update in updates:
            DONE[update.request_id.partition(" ")[0]] += len(update.token_ids)
        ended = [update.request_id for update in updates if update.finish_reason is not None]
        self.left.subtract(ended)
        return [name for name in ended if not self.left[name]]


def asked(kind: str, number: int, now: float) -> list[Request]:
    """One hostile request, as the engine sees it."""
    def request(index: int, prompt: list[int], **params: Any) -> Request:
        first = f"{kind} {number} 0"
        return Request(f"{kind} {number} {index}", prompt, SamplingParams(seed=1, **params), arrival=now, tier="standard",
                       follows=first if index else "")

    if kind == "choices":
        return [request(0, [3], n=128, logprobs=20, max_tokens=100, ignore_eos=True)]
    if kind == "words":
        return [request(i, [3], max_tokens=16, ignore_eos=True) for i in range(2048)]
    scores = 5 if kind == "echo" else None
    return [request(i, [3 + i + number] * 100, prompt_logprobs=scores, max_tokens=1) for i in range(64)]


def chats(*kinds: str) -> list[float]:
    """Seconds of each chat of 30 tokens and an answer of 8 beside endless requests of these kinds, ascending."""
    engine, draw, now, numbers = Engine(), random.Random(1), 0.0, Counter[str]()
    began, due, found = 0.0, 1.0, list[float]()
    while now < SECONDS:
        for kind in kinds:
            if not any(count > 0 for name, count in engine.left.items() if name.startswith(kind)):
                numbers[kind] += 1
                for request in asked(kind, numbers[kind], now):
                    engine.submit(request, now)
        if not began and now >= due:
            began = now
            engine.submit(Request(f"chat {now}", [draw.randrange(500) for _ in range(30)], SamplingParams(
                seed=1, max_tokens=8, ignore_eos=True), arrival=now, tier="standard"), now)
        now = min(engine.wake, due) if not began else engine.wake
        if engine.wake <= now and any(name.startswith("chat") for name in engine.turn(now)):
            found.append(now - began)
            began, due = 0.0, now + GAP
    assert all(numbers.values()) and sum(numbers.values()) >= len(kinds)
    return sorted(found)


@functools.cache
def chats_alone() -> list[float]:
    """The seconds of chats without others, the same each time."""
    return chats()


@pytest.mark.parametrize(("kinds", "usual", "late"), [
    (("echo",), 0.021, 0.021), (("prompts",), 0.018, 0.020), (("choices",), 0.018, 0.020), (("echo", "choices"), 0.027, 0.032),
    (("words",), 0.018, 0.020)], ids=str)
def test_a_short_chat_waits_for_one_piece_of_others_work(kinds: tuple[str, ...], usual: float, late: float) -> None:
    """Beside what it takes alone (16 ms): a piece of 2.5 times the shortest step (4 ms; 5 where prompts are scored, of at least
    16 tokens). The others add nothing to its steps, as they had theirs between the chats; two kinds at once go on by turns."""
    alone, beside = chats_alone(), chats(*kinds)
    assert len(beside) > 100, beside
    assert alone[-1] < 0.017 and beside[int(0.99 * len(beside))] < late, beside[-5:]
    assert beside[len(beside) // 2] < usual


def test_prompts_that_wait_cost_a_step_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,048 prompts that wait, a step looks at few: it makes fewer calls in all than there are prompts."""
    steps, calls = 0, 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal steps, calls
        steps += event == "call" and frame.f_code is Scheduler.plan.__code__
        calls += event == "call"

    monkeypatch.setattr("tests.simulate.test_beside.SECONDS", 1.5)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        chats("words")
    finally:
        sys.setprofile(before)
    assert steps > 200 and calls / steps < 2048, (steps, calls / steps)


@pytest.mark.parametrize("kind", ["echo", "prompts", "choices"])
def test_others_go_on_beside_chats_without_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chats follow each other without a gap, the others' part of their steps is theirs again. In ten seconds alone they
    read 480 scored prompts or 14,400 others, or choose 37,600 tokens; beside such chats a third of that, choices a fifth."""
    monkeypatch.setattr("tests.simulate.test_beside.GAP", 0.0)
    before = Counter(DONE)
    chats(kind)
    assert DONE[kind] - before[kind] > {"echo": 150, "prompts": 4500, "choices": 7500}[kind]


def test_choices_rest_only_where_a_small_request_is_expected() -> None:
    """Alone they have every row in every step; within a second after a chat a step takes a piece, none planned behind it."""
    engine, now, seen = Engine(), 0.0, list[tuple[float, int, bool]]()
    engine.submit(asked("choices", 1, now)[0], now)
    due = 0.5
    while now < 3.0:
        now = min(engine.wake, due) if due else engine.wake
        if now == due:
            due = 0.0
            engine.submit(Request("chat", [7] * 30, SamplingParams(seed=1, max_tokens=8), arrival=now, tier="standard"), now)
        if engine.wake <= now:
            engine.turn(now)
        step = engine.scheduler.in_flight[-1]
        seen.append((now, len(step.sequences), step.held))
    pieces = sorted((count, held) for at, count, held in seen if 0.6 < at < 1.4)
    whole = sorted((count, held) for at, count, held in seen if 0.1 < at < 0.5 or at > 1.7)
    # Where rows end together, others enter.
    assert all(held for _, held in pieces) and pieces[int(0.9 * len(pieces))][0] <= 12
    assert not any(held for _, held in whole) and whole[len(whole) // 10][0] >= 30
