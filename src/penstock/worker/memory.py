"""How much working memory the largest step takes, and how much a device has left. Counted on a CPU, measured on a GPU."""

from __future__ import annotations

import torch

from penstock.layers.decoder import Decoder
from penstock.platform.facts import available_memory


def step_bytes(model: Decoder, tokens: int, rows: int, dtype: torch.dtype) -> int:
    """Upper estimate of what a step of `tokens` tokens and `rows` sampled rows allocates beyond weights and cache.

    Counts the widest live set of a layer (residual, normed input, merged projections, their result) and the sampler's
    copies of the logits, all of which are as wide as the vocabulary and float32.
    """
    widest = max(parameter.shape[0] for parameter in model.spec.parameters() if parameter.name.startswith("blocks."))
    layer = tokens * (4 * model.spec.width + 2 * widest) * dtype.itemsize
    sampler = rows * model.spec.vocab_size * 4 * 6
    return layer + sampler


def free_bytes(device: torch.device, utilization: float) -> int:
    """Bytes that may still be taken on `device`; on a GPU, up to `utilization` of its memory for everything on it."""
    if device.type == "cpu":
        return available_memory()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(total * (1 - utilization)))
