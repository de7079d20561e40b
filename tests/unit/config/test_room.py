"""A GPU that others use: refused before anything is loaded, with what would fit."""

from __future__ import annotations

import pytest

from penstock.config.resolve import Occupancy, check_room
from penstock.core.errors import ConfigError

GIB = 1 << 30


def found(free: float, total: float = 80) -> Occupancy:
    return Occupancy(int(free * GIB), int(total * GIB))


@pytest.mark.parametrize(("utilization", "weights", "free"), [(0.9, 16, 79.5), (0.9, 16, 26), (1.0, 60, 62), (0.3, 16, 79)])
def test_enough(utilization: float, weights: float, free: float) -> None:
    check_room(utilization, int(weights * GIB), found(free))


def test_the_fraction_that_would_fit() -> None:
    """50 of 80 GiB are taken: 0.7 leaves 6, weights of 16 need (50 + 16 + 1) / 80."""
    with pytest.raises(ConfigError) as raised:
        check_room(0.7, 16 * GIB, found(30))
    message = str(raised.value)
    for part in ("weights take 16.0 GiB", "50.0 GiB of the GPU's 80.0 are in use", "gpu_memory_utilization 0.7 leaves 6.0 GiB",
                 "--gpu-memory-utilization 0.84 would fit"):
        assert part in message, message
    check_room(0.84, 16 * GIB, found(30))


@pytest.mark.parametrize(("weights", "free", "said"), [(16, 10, "Stop what uses the GPU"), (90, 79, "needs a larger GPU")])
def test_nothing_would_fit(weights: int, free: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        check_room(0.9, weights * GIB, found(free))
    assert "would fit" not in str(raised.value)
