"""The layout that `--layout auto` chooses, from a model's size and a machine's GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from penstock.core.errors import ConfigError

_WEIGHTS = 0.8
"""The most of what an engine may fill that weights take: the rest is for the cache and for steps."""
_GIB = 1 << 30


class Layout(NamedTuple):
    """Ranks that divide each layer, pipeline stages, replicas; and why, in one sentence."""

    tensors: int
    stages: int
    replicas: int
    why: str


def chosen(weights: int, heads: int, gpus: Sequence[int], utilization: float) -> Layout:
    """`weights`: their bytes; `heads`: of attention, 0 where that is not known; `gpus`: the bytes of memory of each.
    ConfigError if all of them together are too small."""
    if not gpus:
        return Layout(1, 1, 1, "one process, because there is no GPU and ranks would share this computer")
    count, room = len(gpus), int(min(gpus) * utilization * _WEIGHTS)
    size = f"{weights / _GIB:.1f} GiB of weights"
    least = max(1, -(-weights // room))
    if least > count:
        raise ConfigError(f"layout auto: {size} need {least} GPUs with room for {room / _GIB:.1f} GiB each, but there are "
                          f"{count}; quantize the model, or use several machines (nnodes)")
    # Replicas use all GPUs, so their ranks divide the number of GPUs.
    ranks = next(n for n in range(least, count + 1) if count % n == 0)
    tensors = gcd(heads, ranks)
    stages, replicas = ranks // tensors, count // ranks
    parts = [f"{size} fit on each GPU" if ranks == 1 else f"{size} need {ranks} of {count} GPUs"]
    if tensors > 1:
        parts.append(f"{tensors} ranks divide each layer" + (f" and its {heads} heads evenly" if heads else ""))
    if stages > 1:
        parts.append(f"{stages} stages divide the layers, as {ranks} ranks would not divide {heads} heads")
    parts.append(f"{replicas} replicas, which exchange nothing" if replicas > 1 else "one engine has them all")
    return Layout(tensors, stages, replicas, "; ".join(parts))
