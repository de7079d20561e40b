"""Rotary position embedding: the frequencies of each published way to stretch a context, and the tables of a model.

Pure functions of numbers. Reading them from a config is `models/config.py`; applying them is the operation `rope_write`."""

import math
from dataclasses import dataclass

import torch


def base_frequencies(theta: float, dim: int) -> torch.Tensor:
    """theta^(-2i / dim) for i below dim / 2, rounded up (Su et al. 2021). float32 [ceil(dim / 2)]."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


@dataclass(frozen=True)
class RopeScaling:
    """A method to use rotary positions beyond the trained length; this base class changes nothing."""

    def frequencies(self, theta: float, dim: int, _max_model_len: int, /) -> torch.Tensor:
        """Radians per position, float32 [ceil(dim / 2)]."""
        return base_frequencies(theta, dim)

    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def reach(self, max_positions: int) -> int:
        """The context length, given `max_position_embeddings`."""
        return max_positions


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al. 2023): all frequencies divided by `factor`."""

    factor: float

    def frequencies(self, theta: float, dim: int, _max_model_len: int, /) -> torch.Tensor:
        return base_frequencies(theta, dim) / self.factor

    def reach(self, max_positions: int) -> int:
        return int(max_positions * self.factor)


@dataclass(frozen=True)
class DynamicScaling(LinearScaling):
    """NTK-aware scaling of the base by the length in use.

    The length is `max_model_len`, once for all: were it each sequence's own (as in transformers), a key's rotation would
    depend on how long its sequence was when it was written, and no page could be shared. Up to `original` nothing changes."""

    original: int

    def frequencies(self, theta: float, dim: int, max_model_len: int, /) -> torch.Tensor:
        length = max(max_model_len, self.original)
        stretch = self.factor * length / self.original - (self.factor - 1)
        return base_frequencies(theta * stretch ** (dim / (dim - 2)), dim)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: long wavelengths are interpolated by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int

    def frequencies(self, theta: float, dim: int, _max_model_len: int, /) -> torch.Tensor:
        plain = base_frequencies(theta, dim)
        turns = self.original / (2 * math.pi / plain)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - kept) * plain / self.factor + kept * plain


@dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Gemma 4: the first `fraction` of the frequencies of all dimensions of a head, divided by `factor`; the rest is 0."""

    fraction: float
    factor: float = 1.0

    def frequencies(self, theta: float, dim: int, _max_model_len: int, /) -> torch.Tensor:
        plain = base_frequencies(theta, dim) / self.factor
        plain[int(self.fraction * dim // 2):] = 0.0
        return plain


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023): interpolation below `beta_slow` turns in the original context, none above `beta_fast`."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, theta: float, dim: int, _max_model_len: int, /) -> torch.Tensor:
        def dimension(turns: float) -> float:
            return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        plain = base_frequencies(theta, dim)
        ramp = (torch.arange(len(plain), dtype=torch.float32) - low) / (high - low if high != low else 0.001)
        ramp = ramp.clamp(0.0, 1.0)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def score_factor(self) -> float:
        """DeepSeek's: what scores are multiplied by where `mscale_all_dim` is given."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def reach(self, max_positions: int) -> int:
        return max(max_positions, int(self.original * self.factor))


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al. 2024), of Phi-3 and Phi-4: a divisor for each frequency, one set for short and one for long use.

    The long set serves if `max_model_len` is beyond the original length, as in vLLM: one choice for good, since keys of both
    kinds do not mix. transformers chooses at every length, so a short prompt agrees with it only under the short set."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float
    attention_factor: float | None = None

    def frequencies(self, theta: float, dim: int, max_model_len: int, /) -> torch.Tensor:
        divisors = self.long if max_model_len > self.original else self.short
        return base_frequencies(theta, dim) / torch.tensor(divisors, dtype=torch.float32)

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if self.factor > 1 else 1.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of the first `dim` dimensions of a head; an odd `dim` is rounded up. Layers of equal spec share a table."""

    theta: float
    dim: int
    scaling: RopeScaling = RopeScaling()
    interleaved: bool = False
    """Whether neighbours rotate together (GPT-J's order), not the two halves (GPT-NeoX's)."""

    def resolve(self, max_model_len: int) -> tuple[torch.Tensor, float]:
        """Radians per position, float32 [ceil(dim / 2)], and what cosines and sines are multiplied by. Rotations depend on
        nothing else, so this is what identifies them (`layers/decoder.py`)."""
        return self.scaling.frequencies(self.theta, self.dim, max_model_len), self.scaling.amplitude()

    def table(self, max_model_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [max_model_len, ceil(dim / 2)]."""
        if device.type == "meta":  # torch's own way to the shapes imports its compiler, which takes seconds
            both = torch.empty(2, max_model_len, -(-self.dim // 2), device=device)
            return both[0], both[1]
        frequencies, amplitude = self.resolve(max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float32, device=device)[:, None] * frequencies.to(device)
        return angles.cos().mul_(amplitude), angles.sin().mul_(amplitude)
