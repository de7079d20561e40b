"""What prompts may add to a step follows what the device can do, and how long they have waited."""

from __future__ import annotations

import random

import pytest

from penstock.scheduler.pace import Pace


def learnt(pace: Pace, alone: float, each: float, decoding: int = 30) -> Pace:
    """After many steps on a device that takes so long for one without prompts, and for each of their tokens besides."""
    for tokens in [0, 500] * 40:
        pace.learn(decoding, tokens, alone + tokens * each)
    return pace


def test_without_a_target_nothing_is_cut() -> None:
    assert learnt(Pace(None, 8192), 0.005, 1.0).tokens(100, 0.0) == 8192


def test_what_is_not_known_is_found_out() -> None:
    """At first a whole step; before there was one without prompts, as many tokens as take the target."""
    pace = Pace(0.050, 8192)
    assert pace.tokens(100, 0.0) == 8192
    pace.learn(0, 8192, 0.2048)
    assert pace.tokens(100, 0.0) == 100 + 2000


def test_three_quarters_of_a_step_are_added_at_most() -> None:
    assert learnt(Pace(0.050, 8192), 0.0048, 20e-6).tokens(30, 0.0) == pytest.approx(30 + 180, abs=1)
    # Where they seem to cost nothing, it is still taken to be a tenth of the step.
    assert learnt(Pace(0.050, 8192), 0.0048, 0.0).tokens(30, 0.0) == pytest.approx(30 + 3750, abs=12)


def test_who_has_waited_long_adds_more_up_to_the_target() -> None:
    pace = learnt(Pace(0.050, 8192), 0.010, 20e-6)
    found = [pace.tokens(30, waited) - 30 for waited in (0.0, 0.5, 1.0, 2.0, 4.0, 100.0)]
    assert found == pytest.approx([375, 375, 750, 1500, 2000, 2000], abs=2)


def test_a_device_that_is_slower_than_the_target_lets_prompts_go_on() -> None:
    pace = learnt(Pace(0.050, 8192), 0.120, 4e-3)
    assert pace.tokens(30, 100.0) == pytest.approx(30 + 22, abs=1)
    pace = learnt(Pace(0.050, 8192), 0.120, 1.0)
    assert pace.tokens(30, 0.0) == 30 + 16


def test_more_sequences_than_were_measured_are_taken_to_be_slower() -> None:
    """In doubt prompts go on: they end, and what was in doubt is measured."""
    pace = learnt(Pace(10.0, 8192), 0.005, 20e-6, decoding=10)
    assert pace.tokens(100, 0.0) == pytest.approx(100 + 1875, abs=2)
    assert pace.tokens(5, 0.0) == pytest.approx(5 + 187, abs=2)


def test_it_follows_a_device_that_changes_and_is_not_led_astray() -> None:
    """Times that scatter, one step that took forever, and steps that seem to cost nothing."""
    draw, pace = random.Random(1), learnt(Pace(0.050, 8192), 0.002, 5e-6)
    pace.learn(30, 400, 3.0)
    pace.learn(30, 400, 1e-6)
    pace.learn(30, 400, 0.0)
    for _ in range(100):
        tokens = draw.choice([0, 0, 200, 900])
        pace.learn(30, tokens, (0.006 + tokens * 20e-6) * draw.uniform(0.8, 1.25))
    assert 30 + 130 < pace.tokens(30, 0.0) < 30 + 370
