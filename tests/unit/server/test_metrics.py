"""/metrics: what the engine counts, as samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.core.request import EngineStats
from penstock.observe.figures import Figures
from penstock.server.connections import Counts
from penstock.server.metrics import EngineCollector


def samples(stats: EngineStats) -> dict[tuple[str, str], float]:
    """Values by name and by the value of the last label."""
    llm: Any = SimpleNamespace(stats=stats, adapters={}, info=None, traffic=SimpleNamespace(figures=Figures(512)))
    collector = EngineCollector(llm, "m", Counts)
    metrics = [*collector._states(), *collector._counters()]
    return {(sample.name, list(sample.labels.values())[-1]): sample.value for metric in metrics for sample in metric.samples}


def test_picks_of_experts() -> None:
    """By expert, of all layers; how uneven each layer is; hits of experts on the device."""
    found = samples(EngineStats(expert_picks=[[6, 1, 1, 0], [2, 2, 2, 2]], expert_hits=9))
    assert [found["penstock:expert_picks_total", str(expert)] for expert in range(4)] == [8, 3, 3, 2]
    assert [found["penstock:expert_imbalance", str(layer)] for layer in range(2)] == [3.0, 1.0]
    assert found["penstock:expert_hits_total", "0"] == 9
    assert not any(name.startswith("penstock:expert_picks") for name, _ in samples(EngineStats())), "a dense model has none"


def test_seconds_of_each_rank() -> None:
    found = samples(EngineStats(rank_seconds=[1.5, 2.5]))
    assert [found["penstock:rank_seconds_total", str(rank)] for rank in range(2)] == [1.5, 2.5]
    assert not any(name.startswith("penstock:rank_seconds") for name, _ in samples(EngineStats())), "one rank is the worker"
