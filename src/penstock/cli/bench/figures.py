"""Statistics for reports: percentiles and spreads of measured times."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100), interpolated linearly."""
    return float(np.percentile(values, p))


def spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """mean_, median_, std_ and pP_ of values in milliseconds, under vLLM's names; None for each if there are no values."""
    result = {f"mean_{name}_ms": statistics.fmean(values) if values else None,
              f"median_{name}_ms": statistics.median(values) if values else None,
              f"std_{name}_ms": statistics.pstdev(values) if values else None}
    for p in percentiles:
        result[f"p{p:g}_{name}_ms"] = percentile(values, p) if values else None
    return result
