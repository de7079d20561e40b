"""The threshold of filters over ranks that each have a share of the vocabulary, without gathering logits.

A threshold is a number of 32 bits that sorts like its logit. It is found eight bits at a time: each rank adds up the weight of
its tokens by their next eight bits, the ranks exchange these 256 sums, and go on below the same bits. Sums are float64."""

import torch

from penstock.ops.sample_table import Column, Feature
from penstock.parallel.group import Group


def border(logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor, group: Group) -> torch.Tensor:
    """As `SampleOps.threshold`, of shares [S, V / ranks] of the logits."""
    mine = table[row.long()]
    real = mine.view(torch.float32)
    x = logits.float() * real[:, Column.INVERSE_TEMPERATURE, None]
    peak = group.gather(x.amax(-1)).amax(0)
    top_k, top_p = mine[:, Column.TOP_K].double(), real[:, Column.TOP_P].double()
    ones = torch.ones_like(x, dtype=torch.float64)
    kth = _search(x, ones, torch.where(top_k > 0, top_k, torch.inf), group)
    floor = torch.maximum(peak + real[:, Column.LOG_MIN_P], kth)
    weight = (x - peak[:, None]).exp().double().masked_fill_(x < floor[:, None], 0)
    total = group.gather(weight.sum(-1)).sum(0)
    found = torch.where(top_p < 1, torch.maximum(floor, _search(x, weight, top_p * total, group)), floor)
    return found.masked_fill((mine[:, Column.FEATURES] & int(Feature.FILTER)) == 0, -torch.inf)


def _search(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, group: Group) -> torch.Tensor:
    """[S] the lowest value whose larger ones have less than the `wanted` weight [S], over all ranks; -inf: any has."""
    bits = x.view(torch.int32).long()
    key = torch.where(bits < 0, ~bits, bits | 1 << 31) & 0xFFFFFFFF
    found, above = torch.zeros_like(key[:, 0]), torch.zeros_like(wanted)
    for shift in (24, 16, 8, 0):
        inside = key >> (shift + 8) == found[:, None]
        sums = torch.zeros(len(x), 256, dtype=torch.float64, device=x.device)
        sums.scatter_add_(1, key >> shift & 255, torch.where(inside, weight, 0.0))
        # In the order of the ranks, so that all go the same way.
        sums = group.gather(sums).sum(0)
        larger = above[:, None] + sums.flip(1).cumsum(1).flip(1) - sums
        place = (larger < wanted[:, None]).int().argmax(1)
        found, above = found << 8 | place, larger.gather(1, place[:, None])[:, 0]
    number = torch.where(found >= 1 << 31, found & 0x7FFFFFFF, ~found).int().view(torch.float32)
    return torch.where(found == 0, -torch.inf, number)
