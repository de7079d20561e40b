"""The prefill tokens that a step may add follow the device's speed, and how long prompts have waited."""

from __future__ import annotations

import random

import pytest

from penstock.core.request import Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.core.steptime import Load, StepTime
from penstock.scheduler import pace as module


class Pace(module.Pace):
    """With a model of its own, and steps told by how many decode and how many tokens of prompts they have."""

    def __init__(self, target: float | None, most: int) -> None:
        super().__init__(target, most, StepTime())

    def tokens(self, decoding: int | Load, reading: int, unread: int, waited: float, promised: float | None = None,
               at: float = 0.0, scored: float = 0.0) -> int:
        decode = Load(decoding, decoding) if isinstance(decoding, int) else decoding
        return super().tokens(decode, reading, unread, waited, promised, at, scored)

    def learn(self, decoding: int, tokens: int, seconds: float) -> None:
        super().learn(Load(decoding + bool(tokens), decoding + tokens), decoding, seconds)


def learnt(pace: Pace, alone: float, each: float, decoding: int = 30, tokens: int = 1500) -> Pace:
    """After many steps on a device that takes so long for one without prompts, and for each of their tokens besides."""
    for some in [0, tokens] * 40:
        pace.learn(decoding, some, alone + some * each)
    return pace


def added(pace: Pace, waited: float, decoding: int = 30) -> int:
    """Tokens of prompts in the next step, when fewer read than decode."""
    return pace.tokens(decoding, 1, 100_000, waited) - decoding


def test_without_a_target_nothing_is_cut() -> None:
    assert learnt(Pace(None, 8192), 0.005, 1.0).tokens(100, 1, 100_000, 0.0) == 8192


def test_what_is_not_known_is_found_out() -> None:
    """At first a whole step; before there was one without prompts, as many tokens as take the target."""
    pace = Pace(0.050, 8192)
    assert pace.tokens(100, 1, 100_000, 0.0) == 8192
    pace.learn(0, 8192, 0.2048)
    assert pace.tokens(100, 1, 100_000, 0.0) == 1920  # whole tiles of 2,000, those that decode included


def test_a_share_of_a_step_is_added_at_first() -> None:
    assert added(learnt(Pace(0.050, 8192), 0.016, 20e-6), 0.0, 40) == 640 - 40  # whole tiles of 680


def test_what_nobody_notices_may_always_be_added() -> None:
    assert added(learnt(Pace(0.050, 8192), 0.001, 20e-6), 0.0, 40) == 192 - 40
    assert added(learnt(Pace(0.001, 8192), 0.0005, 20e-6), 0.0) == pytest.approx(50, abs=2)


def test_who_has_waited_long_adds_more_up_to_the_target() -> None:
    pace = learnt(Pace(0.050, 8192), 0.010, 20e-6)
    found = [30 + added(pace, waited) for waited in (0.0, 2.0, 4.0, 8.0, 16.0, 1e6)]
    assert found == [384, 384, 768, 1664, 1920, 1920]  # whole tiles of 425, 425, 850, 1,700, 2,000, 2,000 more than 30


def test_while_most_are_reading_the_target_is_what_counts() -> None:
    pace = learnt(Pace(0.050, 8192), 0.010, 20e-6)
    assert pace.tokens(30, 30, 100_000, 0.0) == 1920


def test_one_long_step_if_that_is_most_of_it() -> None:
    pace = learnt(Pace(0.050, 8192), 0.010, 20e-6)
    assert pace.tokens(30, 30, 12_288, 0.0) == 8192
    assert pace.tokens(30, 30, 12_289, 0.0) < 2100
    assert pace.tokens(30, 29, 12_288, 0.0) < 2100


def test_no_leap_beyond_what_was_measured() -> None:
    """However little short chunks seem to cost, the next is twice as long at most."""
    pace = learnt(Pace(0.050, 8192), 0.010, 1e-6, tokens=300)
    assert 512 <= 30 + added(pace, 1e6) <= 630


def test_tokens_that_seemed_to_be_free_are_found_out() -> None:
    """Short chunks cost nothing, long ones much: what is added grows to where it costs what it may, and no further."""
    def seconds(tokens: int) -> float:
        return 0.0105 + max(0, tokens - 300) * 33e-6

    pace = learnt(Pace(0.050, 8192), 0.0105, 33e-6)
    for _ in range(40):
        pace.learn(30, 300, seconds(300))
        pace.learn(30, 0, seconds(0))
    for _ in range(30):
        tokens = added(pace, 0.0)
        pace.learn(30, tokens, seconds(tokens))
    assert 0.016 < seconds(added(pace, 0.0)) < 0.0105 * 1.85 * 1.1


def test_tiles_of_products_are_filled() -> None:
    """Down to whole tiles, unless there is hardly one."""
    for tokens in (40, 128, 200, 300, 383, 500, 1000, 5000):
        pace = learnt(Pace(0.050, 8192), 0.010, 1e-2 / tokens, tokens=tokens)
        total = 30 + added(pace, 8.0)
        assert total < 128 or total % (64 if total < 384 else 128) == 0


def test_a_device_that_is_slower_than_the_target_lets_prompts_go_on() -> None:
    assert added(learnt(Pace(0.050, 8192), 0.120, 4e-3), 1e6) == pytest.approx(25, abs=1)
    assert added(learnt(Pace(0.050, 8192), 0.120, 1.0), 0.0) == 16


def test_now_and_then_no_prompt_is_read() -> None:
    """Otherwise a step's time without prompts would stay unknown while prompts never end, or while ever more rows decode."""
    pace = learnt(Pace(0.050, 8192), 0.010, 20e-6)
    found = [added(pace, 0.0) for _ in range(100)]
    assert found.count(0) == 3 and min(count for count in found if count) > 300
    assert added(pace, 0.0, 45) and not added(pace, 0.0, 46) and added(pace, 0.0, 46)


def test_it_follows_a_device_that_changes_and_is_not_led_astray() -> None:
    """Times that scatter, one step that took forever, and steps that seem to cost nothing."""
    draw, pace = random.Random(1), learnt(Pace(0.050, 8192), 0.002, 5e-6)
    pace.learn(30, 400, 3.0)
    pace.learn(30, 400, 1e-6)
    pace.learn(30, 400, 0.0)
    for _ in range(100):
        tokens = draw.choice([0, 0, 200, 900])
        pace.learn(30, tokens, (0.010 + tokens * 20e-6) * draw.uniform(0.8, 1.25))
    assert 270 < added(pace, 0.0) < 540


def sequence(tokens: int, follows: str = "", stretched: bool = False) -> Sequence:
    request = Request("b" if follows else "a", [1] * tokens, SamplingParams(max_tokens=9), follows=follows)
    found = Sequence(request, 0, 0, 1 << 20)
    found.stretched = stretched
    return found


def budget(pace: Pace, decoding: int, reading: list[Sequence], now: float, owners: set[str]) -> int:
    tokens, part, _ = pace.budget(Load(decoding, decoding), reading, now, 0.2, owners)
    return tokens + part


def test_further_prompts_of_a_request_add_little_to_the_steps_of_another() -> None:
    """Not beside answers of the same request, nor the prompt of a request of its own."""
    pace, many = learnt(Pace(0.050, 8192), 0.010, 20e-6, decoding=1), [sequence(1000, "first") for _ in range(40)]
    assert budget(pace, 1, many, 1.0, {"other"}) < 300
    assert budget(pace, 1, many, 1.0, {"first", "other"}) < 300
    assert budget(pace, 1, many, 1.0, {"first"}) > 1500
    assert budget(pace, 1, [sequence(1000) for _ in range(40)], 1.0, {"other"}) > 1500


def test_where_short_prompts_come_a_long_one_leaves_room_for_the_next() -> None:
    """Without any that decodes: a request that comes waits for the step that runs and for the next."""
    pace, long = learnt(Pace(0.050, 8192), 0.010, 20e-6, decoding=1), [sequence(100_000)]
    assert budget(pace, 0, long, 5.0, set()) == 8192
    assert budget(pace, 0, [*long, sequence(500)], 6.0, set()) == 500 + 384  # whole tiles of 450
    assert budget(pace, 0, long, 6.5, set()) == pytest.approx(750, abs=130)
    assert budget(pace, 0, long, 7.1, set()) == 8192
    budget(pace, 4, [sequence(500)], 8.0, {"c"})
    assert budget(pace, 0, long, 8.5, set()) < 1000
    assert budget(pace, 0, [sequence(500)] * 3, 8.6, set()) == 8192


def test_further_prompts_that_could_add_few_tokens_save_up_for_more() -> None:
    """On a device where a few tokens of a prompt take longer than a step without any."""
    pace = Pace(0.050, 8192)
    for tokens in [0, 16, 64, 1500] * 40:
        pace.learn(1, tokens, 0.002 + bool(tokens) * 0.002 + tokens * 60e-6)
    found = [budget(pace, 1, [sequence(1000, "first")], 1.0, {"other"}) - 1 for _ in range(60)]
    assert set(found[:5]) == {0} and min(filter(None, found)) >= 64
    seconds = sum(0.002 + tokens * 60e-6 for tokens in found if tokens)
    assert seconds == pytest.approx(0.45 * 60 * 0.002, rel=0.2), "the same part of the device"
    slow = learnt(Pace(0.050, 8192), 0.100, 0.010, decoding=1)
    assert budget(slow, 1, [sequence(1000, "first")], 1.0, {"other"}) == 1 + 16, "steps are longer than the target as it is"


def test_a_step_that_is_held_back_for_short_prompts_says_so() -> None:
    """Also where the only answers beside are those of the request that reads."""
    pace, many = learnt(Pace(0.050, 8192), 0.010, 20e-6, decoding=1), [sequence(1000, "first") for _ in range(40)]
    assert budget(pace, 0, many, 5.0, set()) == 8192 and not pace.held
    budget(pace, 0, [sequence(500)], 6.0, set())
    assert not pace.held
    assert budget(pace, 1, many, 6.5, {"first"}) == pytest.approx(750, abs=130) and pace.held
    assert budget(pace, 1, many, 7.1, {"first"}) > 1500 and not pace.held


def test_one_long_step_is_none_where_attention_would_break_a_promise() -> None:
    """The end of a long prompt, far from its beginning, beside one that decodes."""
    pace = learnt(Pace(0.050, 1024), 0.005, 10e-6, decoding=1, tokens=900)
    for _ in range(60):
        module.Pace.learn(pace, Load(2, 901, 0.0, 900 * 30_000), 1, 0.015 + 900 * 30_000 * 1e-8)
    late = pace.tokens(1, 1, 900, 0.0, 0.050, 30_000)
    assert late < 300 < 900 < pace.tokens(1, 1, 900, 0.0, 0.050)


def test_rounding_leaves_no_room_without_an_end() -> None:
    """On the next piece of the model, if that has no slope."""
    flat = StepTime([0.0] * 6 + [1e-3, 3e-4, 7e-5, 1.1e-4, 1.7e-4, 0.0, 1e-4])
    assert all(flat.within(Load(0, 0), most * 1e-3 / 7) < 1024 for most in range(1, 700))


def test_scored_positions_cost_what_was_measured() -> None:
    """A prompt whose tokens are scored gets fewer of them into the same time."""
    times = StepTime()
    for tokens, scored in [(0, 0), (100, 0), (100, 100), (300, 0), (300, 300)] * 40:
        times.learn(Load(2, 1 + tokens, scored=scored) if tokens else Load(1, 1), 0.002 + tokens * 1e-4 + scored * 1e-4)
    plain, scored = times.within(Load(1, 1), 0.022), times.within(Load(1, 1), 0.022, scored=1.0)
    assert plain == pytest.approx(200, rel=0.1) and scored == pytest.approx(100, rel=0.1)


def test_short_prompts_that_fill_a_step_leave_others_a_part() -> None:
    """They may be waiting for just these, for the pages that they compute: else nobody would ever have a segment."""
    for most in (2, 48, 512):
        pace = learnt(Pace(0.050, most), 0.010, 20e-6, decoding=1, tokens=most)
        reading = [sequence(600), sequence(600), sequence(200, "another")]
        found = [pace.budget(Load(0, 0), reading, place / 100, None, set())[:2] for place in range(40)]
        assert max(part for _, part in found) >= min(16, most // 2)
        assert all(tokens >= 0 and tokens + part <= most for tokens, part in found)
        assert max(tokens for tokens, _ in found) >= most - 16
