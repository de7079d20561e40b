"""Random numbers as a pure function of (seed, position, token): the same whatever else is in the batch.

A counter-based generator: 32-bit integers through the finalizer "lowbias32" (Ellis, hash-prospector; public domain),
keyed by seed and position. The integers are the same on every device; `ops/sample_triton.py` computes them again."""

import torch

from penstock.ops.sample_table import M1, M2, SALT, STEP

_MASK = 0xFFFFFFFF


def signed(value: int) -> int:
    """A 32-bit value as int32 holds it."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_one(x: int) -> int:
    """The finalizer on one unsigned value."""
    x = ((x ^ (x >> 16)) * M1) & _MASK
    x = ((x ^ (x >> 15)) * M2) & _MASK
    return x ^ (x >> 16)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The same on int32 tensors: multiplication wraps, and the sign that right shifts carry is masked off."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * signed(M1)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * signed(M2)
    return x ^ ((x >> 16) & 0xFFFF)


def seed_key(seed: int) -> int:
    """The contribution of a 64-bit seed to the keys of all its positions, as int32."""
    return signed(_mix_one(_mix_one(seed & _MASK) ^ (seed >> 32 & _MASK) ^ SALT))


def keys(seed_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One 32-bit key for each pair of a `seed_key` and a position, int32."""
    return _mix(positions * signed(STEP) + seed_keys)


def exponential(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, float32, for keys [S, 1] and token ids [S or 1, V] (both int32).

    argmin(E / p) then draws from p (the exponential race, equal to Gumbel-max; Maddison et al. 2014). The uniform number is an
    odd multiple of 2^-24, so that neither end occurs: at 0 a token could not win, at 1 it would in any case."""
    bits = _mix(_mix(ids * signed(STEP) + key) ^ key)
    between = (((bits >> 9) & 0x7FFFFF) | 0x3F800000).view(torch.float32)  # 1 + k 2^-23, of 23 random bits k
    return between.sub_(1 - 2.0**-24).log_().neg_()
