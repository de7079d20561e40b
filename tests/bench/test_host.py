"""The benchmarks of the host build an engine from its parts, which nothing else would notice when a part changes."""

from __future__ import annotations

import host
import predict


def test_steps_without_a_model_are_timed() -> None:
    found = host.decoding(3, text=False, output=24)
    assert found["all_ms"] > 0 and found["launch_ms"] > 0


def test_a_workload_on_a_virtual_card() -> None:
    card = predict.Card("qwen06b")
    asks = [predict.Ask([100 + i, *range(200, 327)], 8) for i in range(4)]
    found = predict.measure(asks, lambda worker: predict.VirtualDevice(worker, card.step, card.launching), 8, 512, 1 << 14)
    assert found["steps"] >= 8 and found["seconds"] > found["first_launch"] > 0


def test_two_virtual_cards_take_more_than_half_of_one() -> None:
    asks, found = [predict.Ask([100 + i, *range(200, 327)], 8) for i in range(4)], list[float]()
    for cards in (1, 2):
        card = predict.Card("llama8b", cards)
        run = predict.measure(asks, lambda worker, card=card: predict.VirtualDevice(worker, card.step, lambda _: 0.0), 8, 512,
                              1 << 14)
        found.append(run["seconds"] - run["first_launch"])
    assert 0.5 < found[1] / found[0] < 0.8
