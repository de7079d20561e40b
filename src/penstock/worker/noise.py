"""Random numbers as a pure function of (seed, position, token): the same whatever else is in the batch.

A counter-based generator: 32-bit integers through the finalizer "lowbias32" (Ellis, hash-prospector; public domain),
keyed by seed and position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_M1, _M2, _STEP = 0x7FEB352D, 0x846CA68B, 0x9E3779B9


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_host(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer on 32-bit values held in 64 bits."""
    mask = np.uint64(0xFFFFFFFF)
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(_M1)) & mask
    x = x ^ (x >> np.uint64(15))
    x = (x * np.uint64(_M2)) & mask
    return x ^ (x >> np.uint64(16))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The same on int32 tensors, whose products wrap and whose right shifts carry the sign, which is masked off."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(_M1)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(_M2)
    return x ^ ((x >> 16) & 0xFFFF)


def keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """One 32-bit key for each (seed, position) pair."""
    mask = np.uint64(0xFFFFFFFF)
    key = _mix_host(seeds & mask)
    key = _mix_host(key ^ (seeds >> np.uint64(32)) ^ np.uint64(0x85EBCA6B))
    key = _mix_host((key + positions.astype(np.uint64) * np.uint64(_STEP)) & mask)
    return key.astype(np.uint32).view(np.int32)


def exponential(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, float32, for keys [S, 1] and token ids [S or 1, V] (both int32).

    argmin(E / p) then draws from p (the exponential race, equal to Gumbel-max; Maddison et al. 2014).
    """
    bits = _mix(_mix(ids * _signed(_STEP) + key) ^ key)
    uniform = ((bits >> 8) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_()
