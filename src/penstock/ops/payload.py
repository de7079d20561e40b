"""Rows of activations as they travel to other ranks' experts: as they are, or in eight bits. Registers `payload`."""

import torch

from penstock.ops.table import register

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max


@register("payload", "reference", rank=0)
class Payload:
    """The reference. An implementation has these functions. Rows are words, so that other words may travel beside them."""

    @staticmethod
    def pack(x: torch.Tensor) -> torch.Tensor:
        """Rows [T, W] as [T, C] int32. A row has a multiple of four bytes."""
        return x.contiguous().view(torch.int32)

    @staticmethod
    def unpack(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [T, W] of a model in `dtype`."""
        return words.contiguous().view(dtype)


@register("payload", "fp8", rank=-1)
class EightBits:
    """E4M3 with a float32 scale for each row. It changes results, so that it is taken only if asked for."""

    @staticmethod
    def pack(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.cat(((wide / scale).to(_FP8).view(torch.int32), scale.view(torch.int32)), 1)

    @staticmethod
    def unpack(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        coded, scale = words[:, :-1].contiguous().view(_FP8), words[:, -1:].contiguous().view(torch.float32)
        return (coded.float() * scale).to(dtype)
