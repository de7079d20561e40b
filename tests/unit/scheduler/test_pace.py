"""The length of mixed steps follows what the device can do, and how many wait for it."""

from __future__ import annotations

from penstock.scheduler.pace import Pace


def test_without_a_target_nothing_is_cut() -> None:
    pace = Pace(None, 8192)
    pace.learn(8192, 100.0, True)
    assert pace.tokens(100, 1) == 8192


def test_a_slow_device_gets_short_steps_and_a_fast_one_whole_ones() -> None:
    slow, fast = Pace(0.050, 8192), Pace(0.050, 8192)
    assert slow.tokens(100, 1) == 8192
    slow.learn(8192, 0.200, False)
    fast.learn(8192, 0.020, False)
    assert slow.tokens(100, 1) == 2048 and fast.tokens(100, 1) == 8192


def test_whole_steps_while_most_are_reading() -> None:
    pace = Pace(0.050, 8192)
    pace.learn(8192, 0.200, False)
    assert pace.tokens(16, 16) == 8192
    assert pace.tokens(17, 16) == 2048


def test_it_follows_mixed_steps_and_ignores_small_ones() -> None:
    pace = Pace(0.050, 8192)
    pace.learn(1000, 0.020, False)
    pace.learn(1000, 0.050, True)
    pace.learn(1, 0.050, True)
    pace.learn(8000, 0.100, False)
    assert pace.tokens(2, 1) == 1000
    for _ in range(40):
        pace.learn(1000, 0.025, True)
    assert 1990 <= pace.tokens(2, 1) <= 2000


def test_prompts_always_go_on() -> None:
    pace = Pace(0.050, 8192)
    pace.learn(512, 60.0, True)
    assert pace.tokens(2, 1) == 256
    assert Pace(0.050, 64).tokens(2, 1) == 64
