"""The block types of GGUF files. A matrix stays as the file has it, in rows of blocks; `gguf_blocks.py` says what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.core.errors import ModelError
from penstock.quant import gguf_blocks, gguf_encoding
from penstock.quant.scheme import Part, Weights


@dataclass(frozen=True)
class GGUF(Weights):
    """`name` is a type's name in lower case, as q4_k."""

    name: str

    @property
    def grain(self) -> tuple[int, int]:
        return 1, gguf_blocks.KINDS[self.name].columns

    def parts(self, n: int, k: int, _dtype: str) -> tuple[Part, ...]:
        return (Part("weight", (n, self.row_bytes(k)), "uint8"),)

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k columns; ModelError if they are no whole blocks."""
        kind = gguf_blocks.KINDS[self.name]
        if k % kind.columns:
            raise ModelError(f"rows of {k} columns cannot be stored as {self.name}, whose blocks have {kind.columns}")
        return k // kind.columns * kind.nbytes

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        self.row_bytes(matrix.shape[-1])
        blocks = matrix.float().unflatten(-1, (-1, gguf_blocks.KINDS[self.name].columns))
        return {"weight": gguf_encoding.encode(self.name, blocks).flatten(-2)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        kind = gguf_blocks.KINDS[self.name]
        return kind.decode(parts["weight"].unflatten(-1, (-1, kind.nbytes))).flatten(-2).to(dtype)
