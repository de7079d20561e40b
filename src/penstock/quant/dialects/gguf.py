"""GGUF files. `checkpoint/gguf.py` names their tensors as the model does its parameters, and makes this method's config."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.quant.form import FLOATS, Form, Given, Reader
from penstock.quant.gguf import GGUF
from penstock.quant.scheme import PLAIN

_WHOLE = {**dict.fromkeys("qkv", ("qkv",)), "gate": ("gate_up",), "up": ("gate_up",)}
"""Matrices that files may have of several of a model's."""
_NORMS = ("pre", "post", "norm", "q_norm", "k_norm")

Adjust = Callable[[torch.Tensor], torch.Tensor]


def _rows_of_halves(heads: int) -> Adjust:
    """Rows (head, pair, half) as llama.cpp rotates them, back to (head, half, pair)."""
    return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _absorbed(keys: str, values: str, rank: int) -> Form:
    """The matrix of latents' keys and values, of which files have a half each: [heads, rank, key size] and [heads, value size,
    rank]. Both are decoded as they are loaded."""
    def halves(raw: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        k, v = (raw[name].float() if raw[name].is_floating_point() else GGUF(kind).decode({"weight": raw[name]}, torch.float32)
                for name, kind in (("k", keys), ("v", values)))
        return {"weight": torch.cat((k.transpose(1, 2), v), 1).reshape(-1, rank)}

    return Form(PLAIN, tuple(Given(name, ("uint8", *FLOATS)) for name in "kv"), halves)


class _GGUF(Reader):
    methods = ("gguf",)
    suffixes = ("weight", "k", "v")
    arranged = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        if "kinds" not in config:
            raise ModelError("quantization_config: quant_method is 'gguf' in a folder; name its .gguf file as the model")
        self._kinds: Mapping[str, str] = config["kinds"]
        self._permuted = config.get("permuted")
        self._norms_up = bool(config.get("norms_up"))

    def form(self, module: str, n: int, k: int) -> Form | None:
        if f"{module}.k" in self._kinds:
            return _absorbed(self._kinds[f"{module}.k"], self._kinds[f"{module}.v"], k)
        stem, _, part = re.sub(r"(?<=experts)[.][0-9]+", "", module).rpartition(".")
        kind = next((self._kinds[name] for name in (module, *(f"{stem}.{whole}" for whole in _WHOLE.get(part, ())))
                     if name in self._kinds), None)
        if kind is None:
            return None
        scheme = GGUF(kind)
        given = (Given("weight", ("uint8",), ((n, scheme.row_bytes(k)),)),)
        adjust = self.adjust(f"{module}.weight")
        if adjust is None:
            return Form(scheme, given, lambda _: {}, {"weight": "weight"})
        return Form(scheme, given, lambda raw: {"weight": adjust(raw["weight"])})

    def adjust(self, name: str) -> Adjust | None:
        """The inverse of the converter's change of a tensor, if it made one."""
        part = name.rsplit(".", 2)[-2]
        if self._permuted is not None and part in ("q", "k"):
            return _rows_of_halves(int(self._permuted["qk".index(part)]))
        if self._norms_up and part in _NORMS and name.endswith(".weight"):
            return lambda tensor: tensor - 1
        return None
