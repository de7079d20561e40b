"""GGUF files. `checkpoint/gguf.py` names their tensors as a Hugging Face folder does, and makes this method's config."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.quant.form import Form, Given, Reader
from penstock.quant.gguf import GGUF

METHODS = ("gguf",)

Adjust = Callable[[torch.Tensor], torch.Tensor]


def _rows_of_halves(heads: int) -> Adjust:
    """Rows (head, pair, half) as llama.cpp rotates them, back to (head, half, pair)."""
    def adjust(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        return found

    return adjust


class _GGUF(Reader):
    suffixes = ("weight",)
    arranged = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        if "kinds" not in config:
            raise ModelError("quantization_config: quant_method is 'gguf' in a folder; name its .gguf file as the model")
        self._kinds: Mapping[str, str] = config["kinds"]
        self._permuted = config.get("permuted")
        self._norms_up = bool(config.get("norms_up"))

    def form(self, module: str, n: int, k: int) -> Form | None:
        kind = self._kinds.get(module)
        if kind is None:
            return None
        scheme = GGUF(kind)
        given = (Given("weight", ("uint8",), ((n, scheme.row_bytes(k)),)),)
        adjust = self.adjust(f"{module}.weight")
        if adjust is None:
            return Form(scheme, given, lambda _: {}, {"weight": "weight"})
        return Form(scheme, given, lambda raw: {"weight": adjust(raw["weight"])})

    def adjust(self, name: str) -> Adjust | None:
        if self._permuted is not None:
            for place, part in enumerate(("q_proj", "k_proj")):
                if name.rsplit(".", 2)[-2] == part:
                    return _rows_of_halves(int(self._permuted[place]))
        if self._norms_up and name.endswith("norm.weight"):
            return lambda tensor: tensor - 1
        return None


reader = _GGUF
