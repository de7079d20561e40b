"""The length of mixed steps follows what the device can do."""

from __future__ import annotations

from penstock.scheduler.pace import Pace


def test_without_a_target_nothing_is_cut() -> None:
    pace = Pace(None, 8192)
    pace.learn(8192, 100.0)
    assert pace.tokens() == 8192


def test_a_slow_device_gets_short_steps_and_a_fast_one_whole_ones() -> None:
    slow, fast = Pace(0.050, 8192), Pace(0.050, 8192)
    assert slow.tokens() == 8192
    slow.learn(8192, 0.200)
    fast.learn(8192, 0.020)
    assert slow.tokens() == 2048 and fast.tokens() == 8192


def test_it_follows_a_change_and_ignores_small_steps() -> None:
    pace = Pace(0.050, 8192)
    pace.learn(1000, 0.050)
    pace.learn(1, 0.050)
    assert pace.tokens() == 1000
    for _ in range(40):
        pace.learn(1000, 0.025)
    assert 1990 <= pace.tokens() <= 2000


def test_prompts_always_go_on() -> None:
    pace = Pace(0.050, 8192)
    pace.learn(512, 60.0)
    assert pace.tokens() == 256
    assert Pace(0.050, 64).tokens() == 64
