"""Routing on NVIDIA GPUs: one launch for scores, choice and weights."""

import torch

from penstock.ops import gpu, routing
from penstock.ops.routing import Routing
from penstock.ops.table import register


@register("route", "triton", rank=10, supports=gpu.supports)
def route(logits: torch.Tensor, correction: torch.Tensor | None, routing_: Routing, counts: torch.Tensor | None = None,
          live: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    block = gpu.covering(routing_.experts)
    uneven = routing_.groups > 1 and (block != routing_.experts or gpu.covering(routing_.groups) != routing_.groups
                                      or block < 2 * routing_.groups)
    if routing_.score == "sparsemixer" or uneven:
        return routing.route(logits, correction, routing_, counts, live)
    from penstock.ops.routing_kernel import route as kernel  # Triton: heavy, and not everywhere

    tokens, count = len(logits), routing_.picks
    picks = torch.empty(tokens, count, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return picks, weights
    linked = gpu.linked(logits.device) and tokens <= 8 * gpu.multiprocessors(logits.device)
    kernel[(tokens,)](logits.contiguous(), correction, picks, weights, counts, live, experts=routing_.experts, block=block,
                      count=count, slots=gpu.covering(count), score=routing_.score, normalise=routing_.normalise,
                      scale=routing_.scale, least=routing_.least, groups=routing_.groups, picked=routing_.picked_groups,
                      two=routing_.group_score == "two", linked=linked, num_warps=1, launch_pdl=linked)
    return picks, weights
