"""The layout that `--layout auto` chooses, by a model's numbers, the GPUs' memory and the links between them. Pure.

Figures are those of the table in docs/parallel.md ("On paper"), which bench/layouts.py prints."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError

READ, COMPUTE, STEP, FURTHER, CROSSING = 0.86 * 4247e9, 800e12, 0.15e-3, 1.3e-6, 2e-6
"""Bytes/s of one card's decode steps, FLOP/s of its products (H200); seconds of a step that no number of ranks shortens, and
those that each rank beyond two, and a second crossing of the link, add to a sum (assumed)."""
LINKS = {"NVLink": (4.5e-6, 360e9), "PCIe": (12e-6, 24e9), "the host": (25e-6, 10e9)}
"""Seconds of a short sum over two ranks, and bytes/s one way. NVLink's were measured, the others are assumed."""
_WEIGHTS, _FILLED = 0.8, 0.95
"""The most of what an engine may fill that weights take, and that they take with one context of full length."""
_ROWS, _PROMPT = 16, 4
"""Sequences of each GPU, and tokens of prompts for each that is generated."""
_CHANNELS = 128
"""Channels of an expert below which a rank's part of it takes as long as if it had so many: a tile of products."""
_GIB = 1 << 30


class Model(NamedTuple):
    """A model's numbers. 0: not known. `weights` and `entry`, a position in the cache, are bytes; `keys`: key/value heads;
    `channels`: of an expert; `context`: positions that one sequence must be able to have."""

    weights: int
    heads: int = 0
    keys: int = 0
    layers: int = 0
    width: int = 0
    entry: int = 0
    channels: int = 0
    context: int = 0


def shares_from(ranks: int, link: str = "NVLink") -> float:
    """Bytes of a sum from which on each of n ranks adds up a share for all (two-shot). Each sends 2 (n - 1) / n times the bytes
    instead of n - 1, but they cross the link twice. Two ranks would send the same. By count, not measured."""
    return CROSSING * LINKS[link][1] * ranks / ((ranks - 1) * (ranks - 2)) if ranks > 2 else math.inf


def sum_seconds(nbytes: float, ranks: int, link: str = "NVLink") -> float:
    """Seconds of a sum over two ranks or more: short ones are pushed to all, of long ones each rank adds up its share."""
    first, rate = LINKS[link]
    shares = nbytes >= shares_from(ranks, link)
    moved = nbytes * (ranks - 1) * (2 / ranks if shares else 1)
    return first + FURTHER * (ranks - 2) + CROSSING * shares + moved / rate


def _seconds(model: Model, tensors: int, stages: int, link: str) -> float:
    """Of one token for each sequence and prompts beside it. A stage reads its weights for each of `stages` parts."""
    rows, size = _ROWS * tensors * stages, 2 * model.width
    sums = sum_seconds(rows / stages * size, tensors, link) + sum_seconds(_PROMPT * rows * size, tensors, link) / stages
    sent = stages * LINKS[link][0] + (1 + _PROMPT) * rows * size / LINKS[link][1] if stages > 1 else 0.0
    computing = (1 + _PROMPT) * rows * model.weights / COMPUTE / tensors / stages
    return STEP * stages + model.weights / tensors / READ + computing + 2 * model.layers * sums * (tensors > 1) + sent


def chosen(model: Model, gpus: Sequence[int], utilization: float, link: str = "NVLink") -> tuple[dict[str, Any], str]:
    """Values of an engine's options, and why, given each GPU's bytes of memory. ConfigError if weights fit on no number.
    An engine has as few as hold them and one context of full length, in the way predicted to be fastest; replicas use all."""
    if not gpus:
        return {}, "one process, because there is no GPU and ranks would share this computer"
    count, each = len(gpus), min(gpus) * utilization
    room, size = each * _WEIGHTS, f"{model.weights / _GIB:.1f} GiB of weights"
    least = max(1, -int(-model.weights // room))
    if least > count:
        raise ConfigError(f"layout auto: {size} need {least} GPUs with room for {room / _GIB:.1f} GiB each, but there are "
                          f"{count}; quantize the model, or use several machines (nnodes)")
    ways: list[tuple[int, float, tuple[int, int, int]]] = []
    first = next(n for n in range(least, count + 1) if count % n == 0)
    # Replicas use all GPUs, so their ranks divide the number of GPUs.
    for ranks in (n for n in range(first, count + 1) if count % n == 0 and not ways):
        for tensors, stages in product(range(1, ranks + 1), repeat=2):
            contexts, weights = ranks // (tensors * stages), model.weights / (tensors * stages)
            cache = model.context * model.entry / max(1, min(tensors, model.keys or tensors) * stages * contexts)
            if contexts * tensors * stages == ranks and model.heads % tensors == 0 and weights <= room \
                    and (weights + cache <= each * _FILLED or ranks == count):
                # More ranks than weights need are for one long context, whose prompt stages would compute one after another.
                last = contexts if ranks == first else stages
                ways.append((last, _seconds(model, tensors, stages, link), (tensors, stages, contexts)))
    (last, seconds, (tensors, stages, contexts)), *others = sorted(ways)
    ranks = tensors * stages * contexts
    whole = f" and a context of {model.context} tokens" if model.context else ""
    parts = [f"{size}{whole} " + ("fit on each GPU" if ranks == 1 else f"need {ranks} of {count} GPUs")]
    if tensors > 1:
        parts.append(f"{tensors} ranks divide each layer" + (f" and its {model.heads} heads evenly" if model.heads else ""))
    experts = tensors > 1 and 0 < model.channels < _CHANNELS * tensors
    parts += [f"each has whole experts, as parts of {model.channels} channels would be narrow"] * experts
    parts += [f"{stages} stages divide the layers"] * (stages > 1) + [f"{contexts} ranks divide each context"] * (contexts > 1)
    if model.width and others and ranks == first and others[0][0] == last:
        other, (heads, runs, _) = others[0][1:]
        parts.append(f"over {link} that is predicted {other / seconds:.2f} times as fast as {heads} ranks in {runs} stages")
    parts.append(f"{count // ranks} replicas, which exchange nothing" if count > ranks else "one engine has them all")
    return {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages, "context_parallel_size": contexts,
            "data_parallel_size": count // ranks, "enable_expert_parallel": experts}, "; ".join(parts)
