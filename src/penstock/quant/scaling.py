"""Scales of a projection's inputs that make its matrix (AWQ) or its activations (SmoothQuant) easier to round. Products stay
as they were: columns are multiplied by what the preceding norm or matrix is divided by."""

from collections.abc import Sequence

import torch

from penstock.quant.scheme import Scheme

_STEPS = 20
"""Exponents from 0 up to below 1 that AWQ tries."""
_LEAST = 1e-4


def awq(scheme: Scheme, matrices: Sequence[torch.Tensor], moments: torch.Tensor) -> torch.Tensor:
    """Scales [k] for matrices [n, k] of the same inputs, whose second moments are [k, k]: powers of the inputs' root mean
    square (Lin et al. 2023 take the mean magnitude), with the exponent whose rounded matrices change the products least."""
    size = moments.diagonal().double().clamp_min(0).sqrt().clamp_min(_LEAST)
    best, least = torch.ones_like(size), float("inf")
    for step in range(_STEPS):
        scale = size ** (step / _STEPS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).float()
        error = sum(_error(scheme, matrix, scale, moments) for matrix in matrices)
        if error < least:
            best, least = scale.double(), error
    return best.float()


def _error(scheme: Scheme, matrix: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor) -> float:
    """The sum of squares by which products with the inputs change."""
    off = scheme.decode(scheme.encode(matrix * scale), torch.float32) / scale - matrix
    return float(((off @ moments) * off).sum())


def smooth(matrices: Sequence[torch.Tensor], peaks: torch.Tensor, strength: float = 0.5) -> torch.Tensor:
    """Scales [k] by the inputs' largest magnitudes [k] (Xiao et al. 2022): peaks^strength / largest weights^(1 - strength)."""
    weights = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
    return (peaks.clamp_min(_LEAST) ** strength / weights.clamp_min(_LEAST) ** (1 - strength)).clamp_min(_LEAST)
