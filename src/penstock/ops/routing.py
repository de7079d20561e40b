"""The operation `route`: which experts a token is sent to, and with which weights.

`Routing` describes a router's arithmetic as data. The router's own matrix is not part of it: `route` takes its logits."""

from dataclasses import dataclass

import torch

from penstock.ops.table import register

SCORES = ("softmax", "softmax_after", "sigmoid", "sigmoid_after", "sparsemixer")


@dataclass(frozen=True)
class Routing:
    """The choice of `picks` of `experts` experts by the router's logits, and their weights."""

    experts: int
    picks: int
    score: str = "softmax"
    """softmax, sigmoid: of all logits, before the choice. softmax_after, sigmoid_after: of the chosen logits. sparsemixer: two
    picks, each weighted by a softmax over logits near its own (Liu et al. 2023, "Sparse Backpropagation for MoE Training")."""
    normalise: bool = False
    """Divide a token's weights by their sum."""
    scale: float = 1.0
    """Of the weights, after that."""
    corrected: bool = False
    """A learned bias for each expert is added to the scores for the choice, not for the weights (DeepSeek V3)."""
    groups: int = 1
    picked_groups: int = 1
    """Experts lie in so many equal groups; picks come from the `picked_groups` best ones."""
    group_score: str = "two"
    """A group's score: the sum of its "two" best scores (DeepSeek V3), or its "max" (DeepSeek V2)."""
    least: float = 1e-20
    """The smallest divisor of `normalise`."""
    jitter: float = 0.0
    """Of sparsemixer: logits within 2 * jitter of the best one, relatively, share its softmax."""
    shared: int = 0
    """Every token's last picks are so many experts more, with the numbers behind those of all others and weight 1."""

    def __post_init__(self) -> None:
        assert self.score in SCORES, self.score
        assert self.experts % self.groups == 0, "groups are equal"


@register("route", "reference", rank=0)
def route(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing, counts: torch.Tensor | None = None,
          live: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(picks [T, K + shared] int32, weights likewise float32) for logits [T, E] float32; `correction` [E] float32 if there is
    one.

    To counts [E] int64, if given, the picks of the first `live` [1] tokens (None: of all) are added: the others are padding.
    Ties are torch.topk's on the device, as transformers'. Other implementations pick the lowest index of equals."""
    picks, weights = _sparsemixer(logits, routing) if routing.score == "sparsemixer" else _best(logits, correction, routing)
    if counts is not None:
        count(picks, counts, live)
    if routing.shared:
        last = torch.arange(routing.experts, routing.experts + routing.shared, dtype=torch.int32, device=picks.device)
        picks = torch.cat((picks, last.expand(len(picks), -1)), 1)
        weights = torch.cat((weights, weights.new_ones(len(picks), routing.shared)), 1)
    return picks, weights


def count(picks: torch.Tensor, counts: torch.Tensor, live: torch.Tensor | None) -> None:
    """Adds the picks of live tokens to `counts`, without a look at any value on the host."""
    places = torch.arange(len(picks), device=picks.device)
    ones = torch.ones_like(places) if live is None else (places < live).long()
    counts.scatter_add_(0, picks.flatten().long(), ones.repeat_interleave(picks.shape[1]))


def _best(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores but sparsemixer's."""
    scores = logits
    if routing.score == "softmax":
        scores = logits.softmax(-1)
    elif routing.score == "sigmoid":
        scores = logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _within_groups(ranked, routing)
    if correction is None and routing.groups == 1:
        weights, picks = ranked.topk(routing.picks, -1)
    else:
        picks = ranked.topk(routing.picks, -1).indices
        weights = scores.gather(1, picks)
    if routing.score == "softmax_after":
        weights = weights.softmax(-1)
    elif routing.score == "sigmoid_after":
        weights = weights.sigmoid()
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.least)
    return picks.int(), weights if routing.scale == 1.0 else weights * routing.scale


def _within_groups(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The scores, with -inf for experts of groups that are not picked."""
    grouped = ranked.view(len(ranked), routing.groups, routing.experts // routing.groups)
    worth = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
    picked = worth.topk(routing.picked_groups, -1).indices
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, picked, True)
    return grouped.masked_fill(~allowed[:, :, None], float("-inf")).view_as(ranked)


def _sparsemixer(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """One pick after another: the best logit left, weighted by a softmax over those left that are near it."""
    picks, weights = [], []
    left = logits
    for _ in range(routing.picks):
        best, pick = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * routing.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, pick))
        picks.append(pick)
        left = left.scatter(1, pick, float("-inf"))
    return torch.cat(picks, 1).int(), torch.cat(weights, 1)
