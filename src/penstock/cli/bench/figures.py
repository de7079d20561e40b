"""Statistics for reports: percentiles and spreads of measured times."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100), interpolated linearly."""
    return float(np.percentile(values, p))


def spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """mean_, median_, std_ and pP_ of values in milliseconds, under vLLM's names; None for each if there are no values."""
    figures: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": statistics.fmean, "median": statistics.median, "std": statistics.pstdev,
        **{f"p{p:g}": functools.partial(percentile, p=p) for p in percentiles}}
    return {f"{kind}_{name}_ms": figure(values) if values else None for kind, figure in figures.items()}
