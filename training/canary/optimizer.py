"""Muon for the matrices inside the model, Adam for everything else, and the learning rate over a training.

Muon (Keller Jordan, 2024): the momentum of a matrix's gradient is replaced by the nearest orthogonal matrix, found by five
Newton-Schulz steps, so that every direction is learnt at the same rate. Small models learn in about half the steps.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

MATRIX_RATE, OTHER_RATE = 0.02, 0.004
WARM_UP = 100
"""Steps until the learning rate is full."""
PLATEAU = 0.35
"""Share of the training after which the learning rate begins to fall, linearly to nearly nothing."""
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""The quintic's coefficients, from Jordan's description."""


def rate(step: int, progress: float) -> float:
    """The share of the full learning rates for step `step`, counted from 0, when so much of the training is done (0 to 1)."""
    return min(1.0, (step + 1) / WARM_UP, max(0.01, (1 - progress) / (1 - PLATEAU)))


def orthogonal(batch: torch.Tensor) -> torch.Tensor:
    """[N, rows, columns] float32, rows <= columns: about the nearest orthogonal matrices."""
    x = batch.to(torch.bfloat16 if batch.is_cuda else torch.float32)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.float()


class Muon:
    """Matrices of one shape are stacked and stepped as one."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.momentum, self.decay = momentum, decay
        shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            shapes[parameter.shape].append(parameter)
        self.groups = [(group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in shapes.items()]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step at this learning rate."""
        for group, moment in self.groups:
            gradient = torch.stack([parameter.grad for parameter in group])
            moment.lerp_(gradient, 1 - self.momentum)
            update = gradient.lerp(moment, self.momentum)
            rows, columns = update.shape[-2:]
            flat = update.reshape(-1, rows, columns)
            flat = orthogonal(flat.mT).mT if rows > columns else orthogonal(flat)
            update = flat.reshape(update.shape) * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-rate)


class Optimizer:
    """Both, over a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            inside = parameter.ndim >= 2 and min(parameter.shape[-2:]) >= 16 and not any(
                part in name for part in ("embed_tokens", "lm_head", "router", "mlp.gate.", "conv1d", "bias"))
            (matrices if inside else others).append(parameter)
        self.model = model
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)

    def step(self, share: float) -> None:
        """One step at this share of the full learning rates; clears the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(MATRIX_RATE * share)
        for group in self.adam.param_groups:
            group["lr"] = OTHER_RATE * share
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
