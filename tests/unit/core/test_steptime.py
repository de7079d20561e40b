"""The model of step time: what it learns from scattered steps, what it keeps, and that its two questions agree."""

from __future__ import annotations

import random

import pytest

from penstock.core.steptime import TERMS, Load, StepTime


def truth(load: Load) -> float:
    """A device bound by reading weights up to 200 tokens, by compute above, with attention beside."""
    return 0.004 + max(0, load.tokens - 200) * 22e-6 + load.tokens * 2e-6 + load.read * 3e-8 + load.work * 8e-10


def some(draw: random.Random, prefill: bool) -> Load:
    rows, longest = int(2 ** draw.uniform(0, 8)), int(2 ** draw.uniform(4, 12))
    read = rows * draw.uniform(100, 4000)
    return Load(rows + 1, rows + longest, read, longest * longest / 2) if prefill else Load(rows, rows, read)


def fitted(steps: int = 600) -> StepTime:
    draw, times = random.Random(1), StepTime()
    for i in range(steps):
        load = some(draw, i % 2 == 0)
        times.learn(load, truth(load) * draw.uniform(0.93, 1.07))
    return times


def test_it_predicts_steps_that_it_has_not_seen() -> None:
    times, draw = fitted(), random.Random(2)
    loads = [some(draw, i % 2 == 0) for i in range(400)]
    errors = sorted(abs(times.seconds(load) - truth(load)) / truth(load) for load in loads)
    assert errors[200] < 0.03 and errors[380] < 0.12
    assert times.error < 0.08 and len(times.weights) == len(TERMS) and min(times.weights) >= 0


def test_decode_does_not_erase_what_prefill_costs() -> None:
    times, draw, long = fitted(), random.Random(3), Load(1, 2048, 0.0, 2048 ** 2 / 2)
    for _ in range(400):
        load = some(draw, False)
        times.learn(load, truth(load))
    assert times.seconds(long) == pytest.approx(truth(long), rel=0.1)


def test_tokens_within_a_time_take_that_time() -> None:
    times = fitted()
    for rows in (1, 32, 200):
        decode = Load(rows, rows, rows * 1000.0)
        for seconds in (0.02, 0.05, 0.2):
            tokens = times.within(decode, seconds)
            assert times.seconds(Load(rows + 1, rows + tokens, decode.read)) == pytest.approx(seconds, rel=0.02)
        assert times.within(decode, 0.001) == 0


def test_steps_are_padded_to_buckets() -> None:
    times = StepTime([0.0] * 5 + [1e-3] * (len(TERMS) - 5), buckets=[64, 256])
    assert times.seconds(Load(1, 65)) == times.seconds(Load(1, 256)) == pytest.approx(0.256)
    assert times.seconds(Load(1, 300)) == pytest.approx(0.3)


def test_a_slower_device_is_learned_anew() -> None:
    times, draw = fitted(), random.Random(4)
    for i in range(300):
        load = some(draw, i % 2 == 0)
        times.learn(load, 3 * truth(load))
    load = Load(33, 1056, 32_000.0, 1024 ** 2 / 2)
    assert times.seconds(load) == pytest.approx(3 * truth(load), rel=0.1)


def test_one_absurd_measurement_changes_little() -> None:
    load = Load(33, 1056, 32_000.0, 1024 ** 2 / 2)
    for absurd in (1e-7, 30.0):
        times = fitted()
        before = times.seconds(load)
        times.learn(load, absurd)
        assert times.seconds(load) == pytest.approx(before, rel=0.15)


def test_steps_longer_than_all_seen_are_not_taken_to_be_free() -> None:
    times, draw = StepTime(), random.Random(5)
    for i in range(60):
        load = Load(8, 8, 3000.0) if i % 2 else Load(9, 8 + draw.randint(100, 400), 3000.0)
        times.learn(load, 0.005 + load.tokens * 2e-5)
    assert times.seconds(Load(1, 50_000)) == pytest.approx(1.0, rel=0.2)
    assert times.within(Load(8, 8, 3000.0), 0.1) == pytest.approx(4700, rel=0.2)


def test_the_first_long_prompt_is_learned_from_at_once() -> None:
    """After thousands of short ones, whose attention is too little to be seen."""
    draw, times = random.Random(3), StepTime()
    for _ in range(2000):
        count = draw.randint(50, 200)
        times.learn(Load(1, count, 0.0, count * count / 2), 0.002 + count ** 0.9 * 5e-5)
    long = Load(1, 300, 0.0, 300 * 3000.0)
    took = 0.002 + 300 * 3e-5 + long.work * 3e-8
    assert times.seconds(long) < took / 2
    times.learn(long, took)
    assert times.seconds(long) > 0.7 * took


def test_times_that_scatter_are_predicted_by_their_mean() -> None:
    """Simulations add predictions up: the value with the least relative error would be too short by a tenth."""
    draw, times, load = random.Random(4), StepTime(), Load(8, 8, 8000.0)
    for _ in range(600):
        times.learn(load, truth(load) * draw.choice([0.75, 0.85, 1.0, 1.4]))
    assert times.seconds(load) == pytest.approx(truth(load), rel=0.04)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_usual_model_predicts_hours(slow: int) -> None:
    """A device that is slower for spells: the newest steps say what the next one takes, their mean what many take."""
    draw, times, seen = random.Random(5), StepTime(), list[tuple[Load, float]]()
    for i in range(6000):
        load = some(draw, i % 2 == 0)
        seen.append((load, truth(load) * (1.4 if i // 100 % 2 == slow else 1.0) * draw.uniform(0.8, 1.2)))
        times.learn(*seen[-1])
    usual, took = StepTime(times.usual.tolist()), sum(seconds for _, seconds in seen[-3000:])
    assert sum(usual.seconds(load) for load, _ in seen[-3000:]) == pytest.approx(took, rel=0.03)
    assert abs(sum(times.seconds(load) for load, _ in seen[-3000:]) / took - 1) > 0.08
