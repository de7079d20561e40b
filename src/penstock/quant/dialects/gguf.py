"""GGUF files. `checkpoint/gguf.py` names their tensors as the model does its parameters, and makes this method's config."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.quant.form import FLOATS, Form, Given, Reader
from penstock.quant.gguf import GGUF
from penstock.quant.scheme import PLAIN

_WHOLE = {**dict.fromkeys("qkv", ("qkv",)), "queries": ("input",), "keys": ("input",), "values": ("input",),
          "gate": ("gate_up",), "up": ("gate_up",)}
"""Matrices that files may have of several of a model's."""
_NORMS = ("pre", "post", "norm", "q_norm", "k_norm")

Adjust = Callable[[torch.Tensor], torch.Tensor]


def _absorbed(keys: str, values: str, rank: int) -> Form:
    """The matrix of latents' keys and values, of which files have a half each: [heads, rank, key size] and [heads, value size,
    rank]. Both are decoded as they are loaded."""
    def halves(raw: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        k, v = (raw[name].float() if raw[name].is_floating_point() else GGUF(kind).decode({"weight": raw[name]}, torch.float32)
                for name, kind in (("k", keys), ("v", values)))
        return {"weight": torch.cat((k.transpose(1, 2), v), 1).reshape(-1, rank)}

    return Form(PLAIN, tuple(Given(name, ("uint8", *FLOATS)) for name in "kv"), halves)


class _Delta:
    """The rows of delta nets' tensors, in the model's order."""

    def __init__(self, sizes: Sequence[int], tiled: bool, joined: Sequence[str], blocks: Sequence[str]) -> None:
        self.keys, self.heads, self.key_size, self.value_size = sizes
        self.tiled, self.joined, self.blocks = tiled, joined, frozenset(blocks)

    def rows(self, name: str) -> tuple[torch.Tensor, int] | None:
        """(the file's row of each of the model's, the file's count) of blocks.N.attention.PART; None: they are the same. Of
        matrices that read values (out) these are columns."""
        _, block, _, part = (*name.split(".", 3), "", "", "")[:4]
        if block not in self.blocks or part not in ("input", "z", "b", "a", "conv", "decay", "step", "out"):
            return None
        shared = self.heads // self.keys
        for joined, parts, sizes in (("ssm_ba", "b a", (shared,) * 2), ("ssm_in", "q k v z", (
                self.key_size, self.key_size, *(shared * self.value_size,) * 2))):
            if joined in self.joined and part in (*parts.split(), *(("input",) if "z" in parts else ())):
                each = torch.arange(self.keys * sum(sizes)).view(self.keys, -1).split(sizes, 1)
                found = each[:3] if part == "input" else (each[parts.split().index(part)],)
                return torch.cat([one.flatten() for one in found]), self.keys * sum(sizes)
        if not self.tiled or shared == 1:
            return None
        size = 1 if part in ("b", "a", "decay", "step") else self.value_size
        first = 2 * self.keys * self.key_size if part in ("input", "conv") else 0
        values = first + torch.arange(self.heads * size).view(shared, self.keys, size).transpose(0, 1).flatten()
        return torch.cat((torch.arange(first), values)), first + self.heads * size


def _columns(scheme: GGUF, n: int, k: int, order: torch.Tensor, run: int) -> Form:
    """A matrix whose columns are sorted in runs. Blocks that hold several runs are decoded as they are loaded."""
    columns = scheme.grain[1]
    given = (Given("weight", ("uint8",), ((n, scheme.row_bytes(k)),)),)
    if run % columns:
        return Form(PLAIN, given, lambda raw: {"weight": scheme.decode(raw, torch.float32)[:, order.to(raw["weight"].device)]})
    blocks = order[::columns] // columns
    return Form(scheme, given, lambda raw: {
        "weight": raw["weight"].unflatten(1, (len(blocks), -1))[:, blocks.to(raw["weight"].device)].flatten(1)})


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
        self._delta = _Delta(**config["delta"]) if "delta" in config else None

    def form(self, module: str, n: int, k: int) -> Form | None:
        if f"{module}.k" in self._kinds:
            return _absorbed(self._kinds[f"{module}.k"], self._kinds[f"{module}.v"], k)
        stem, _, part = re.sub(r"(?<=experts)[.][0-9]+", "", module).rpartition(".")
        kind = next((self._kinds[name] for name in (module, *(f"{stem}.{whole}" for whole in _WHOLE.get(part, ())))
                     if name in self._kinds), None)
        rows = None if self._delta is None else self._delta.rows(module)
        plain = kind in ("f32", "f16", "bf16")
        if kind is None or (plain and rows is None):
            return None
        if self._delta is not None and rows is not None and part == "out":
            return _columns(GGUF(kind), n, k, rows[0], self._delta.value_size)
        if rows is not None:
            taken, shape = rows[0], (rows[1], k if plain else GGUF(kind).row_bytes(k))
            return Form(PLAIN if plain else GGUF(kind), (Given("weight", FLOATS if plain else ("uint8",), (shape,)),),
                        lambda raw: {"weight": raw["weight"][taken.to(raw["weight"].device)]})
        scheme = GGUF(kind)
        given = (Given("weight", ("uint8",), ((n, scheme.row_bytes(k)),)),)
        adjust = self.adjust(f"{module}.weight")
        if adjust is None:
            return Form(scheme, given, lambda _: {}, {"weight": "weight"})
        return Form(scheme, given, lambda raw: {"weight": adjust(raw["weight"])})

    def adjust(self, name: str) -> Adjust | None:
        """The inverse of the converter's change of a tensor, if it made one."""
        stem = re.sub(r"\.(weight|bias)$", "", name)
        part, rows = stem.rpartition(".")[2], None if self._delta is None else self._delta.rows(stem)
        if rows is not None or stem.endswith("attention.decay"):
            def ordered(tensor: torch.Tensor) -> torch.Tensor:
                if rows is not None:
                    order = rows[0].to(tensor.device)
                    tensor = tensor[:, order] if part == "out" else tensor.view(len(order), -1)[order].view(tensor.shape)
                return (-tensor).log() if part == "decay" else tensor

            return ordered
        if self._permuted is not None and part in ("q", "k"):
            heads = int(self._permuted["qk".index(part)])
            # Rows (head, pair, half) as llama.cpp rotates them, back to (head, half, pair).
            return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        if self._norms_up and part in _NORMS and name.endswith(".weight") and not (
                self._delta is not None and stem.endswith("attention.norm")):
            return lambda tensor: tensor - 1
        return None
