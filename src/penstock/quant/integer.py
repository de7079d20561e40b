"""Integers: int8 with a scale for each row, whose activations may be int8 too, and codes of 2, 3, 4 or 8 bits with a scale for
each group of columns. They may be rounded by GPTQ (Frantar et al. 2022): columns one after another, and later
ones are changed to make up for each error."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.ops.bits import blocks, pack, spread, unpack
from penstock.quant.scheme import Activation, Part, Scheme, Weights, rounded


@dataclass(frozen=True)
class Int8:
    """weight = code * scale, a scale a row, with int8 activations or plain ones."""

    activation: Activation = "none"

    name = "int8"
    grain = (1, 1)

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        found = Part("weight", (n, k), "int8"), Part("scale", (n,), "float32", columns=None)
        return (*found, Part("input_scale", (1,), "float32", None, None)) if self.activation == "tensor" else found

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        x = matrix.float()
        scale = x.abs().amax(-1).clamp_min(1e-12) / 127
        found = {"weight": torch.round(x / scale[..., None]).to(torch.int8), "scale": scale}
        return {**found, "input_scale": torch.ones(1, device=x.device)} if self.activation == "tensor" else found

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return (parts["weight"].float() * parts["scale"][..., None]).to(dtype)

    def inputs(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return rounded(x, self.activation, parts.get("input_scale"), torch.int8)


@dataclass(frozen=True)
class Grouped(Weights):
    """weight = (code - zero) * scale. Without zeros the middle code, 2^(bits - 1), stands for 0."""

    bits: int
    group: int
    """Columns that share a scale; 0: the whole row. The last group may be shorter."""
    zeros: str = ""
    """The type of the stored zeros: "uint8", or a float type where they need not be codes; empty: there are none."""
    scales: str = "float16"
    ordered: bool = False
    """The columns are sorted by group (GPTQ's act-order): stored column j is input order[j]."""
    activation: Activation = "none"
    rounding: str = "int8"
    """The type to which activations are rounded, if they are."""

    @property
    def name(self) -> str:
        return f"int{self.bits}{f'g{self.group}' if self.group else 'row'}{'' if self.activation == 'none' else 'a8'}"

    @property
    def grain(self) -> tuple[int, int]:
        return (0, 0) if self.ordered else (1, self.group or 0)

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        groups = -(-k // self.group) if self.group else 1
        found = [Part("weight", (n, k * self.bits // 8), "uint8"), Part("scale", (n, groups), self.scales)]
        if self.zeros:
            found.append(Part("zero", (n, groups), self.zeros))
        if self.ordered:
            found.append(Part("order", (k,), "int32", None, 0))
        return tuple(found)

    def inputs(self, x: torch.Tensor, _parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # compressed-tensors divides by half of the range of int8, whose least code is one more.
        return rounded(x, self.activation, None, getattr(torch, self.rounding), 127.5 * (self.rounding == "int8"))

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        x, k = matrix.float(), matrix.shape[-1]
        grouped, middle = blocks(x, self.group or k), 1 << self.bits - 1
        kind = getattr(torch, self.scales)
        if self.zeros:
            low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
            scale = ((high - low) / (2 * middle - 1)).clamp_min(1e-7).to(kind)
            zero = torch.round(-low / scale.float()).clamp(0, 2 * middle - 1)
        else:
            scale = (grouped.abs().amax(-1) / (middle - 0.5)).clamp_min(1e-7).to(kind)
            zero = torch.full_like(scale, middle, dtype=torch.float32)
        codes = torch.round(x / spread(scale.float(), self.group or k, k)) + spread(zero, self.group or k, k)
        found = {"weight": pack(codes.clamp(0, 2 * middle - 1).to(torch.uint8), self.bits), "scale": scale}
        if self.zeros:
            found["zero"] = zero.to(getattr(torch, self.zeros))
        if self.ordered:
            found["order"] = torch.arange(k, dtype=torch.int32, device=matrix.device)
        return found

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes = unpack(parts["weight"], self.bits).float()
        k = codes.shape[-1]
        size = self.group or k
        zero = spread(parts["zero"].float(), size, k) if self.zeros else 1 << self.bits - 1
        matrix = ((codes - zero) * spread(parts["scale"].float(), size, k)).to(dtype)
        if not self.ordered:
            return matrix
        return torch.empty_like(matrix).index_copy_(-1, parts["order"].long(), matrix)


_BLOCK = 128
"""Columns whose corrections of later columns are added in one product."""


def serves(scheme: Scheme) -> bool:
    """Whether the scheme's codes are integers with scales that do not depend on the order of rounding."""
    return isinstance(scheme, Int8) or (isinstance(scheme, Grouped) and not scheme.ordered)


def gptq(scheme: Scheme, matrix: torch.Tensor, moments: torch.Tensor, damping: float = 0.01) -> dict[str, torch.Tensor]:
    """The scheme's parts of a matrix [n, k] whose products with inputs x change least; moments [k, k]: the sum of x x^T.

    Columns come by falling moments, as act-order does, but groups and their scales are those of the original order, so that the
    format needs no order. `damping` is a share of the mean moment."""
    n, k = matrix.shape
    assert isinstance(scheme, Int8 | Grouped)
    parts = scheme.encode(matrix)
    scale, zero, low, high = _grid(scheme, parts, n, k)
    moments = moments.double().clone()
    weight = matrix.double().clone()
    dead = moments.diagonal() == 0
    moments.diagonal()[dead] = 1.0
    weight[:, dead] = 0.0
    moments.diagonal().add_(damping * moments.diagonal().mean())
    order = moments.diagonal().argsort(descending=True)
    weight, scale, zero, moments = weight[:, order], scale[:, order], zero[:, order], moments[order][:, order]
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    codes = torch.empty_like(weight)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        errors = torch.empty(n, end - begin, dtype=weight.dtype, device=weight.device)
        for at in range(begin, end):
            code = (torch.round(weight[:, at] / scale[:, at]) + zero[:, at]).clamp(low, high)
            error = (weight[:, at] - (code - zero[:, at]) * scale[:, at]) / inverse[at, at]
            weight[:, at:end] -= error[:, None] * inverse[at, at:end]
            codes[:, at], errors[:, at - begin] = code, error
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    found = torch.empty_like(codes)
    found[:, order] = codes
    if isinstance(scheme, Int8):
        return {**parts, "weight": found.to(torch.int8)}
    return {**parts, "weight": pack(found.to(torch.uint8), scheme.bits)}


def _grid(scheme: Int8 | Grouped, parts: dict[str, torch.Tensor], n: int, k: int
          ) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Scale and zero of each element [n, k], the smallest and the largest code."""
    if isinstance(scheme, Int8):
        scale = parts["scale"].double()[:, None].expand(n, k)
        return scale, torch.zeros_like(scale), -127.0, 127.0
    size, middle = scheme.group or k, 1 << scheme.bits - 1
    scale = spread(parts["scale"].double(), size, k)
    zero = spread(parts["zero"].double(), size, k) if scheme.zeros else torch.full_like(scale, middle)
    return scale, zero, 0.0, 2.0 * middle - 1
