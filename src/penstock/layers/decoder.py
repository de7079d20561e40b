"""The one decoder that every family is: embedding, blocks, a last norm, the head. Built from a ModelSpec and loaded values."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.core.state import StateSpec
from penstock.layers.attention import RopeTable
from penstock.layers.block import Block
from penstock.layers.identity import computation
from penstock.layers.linear import Values
from penstock.layers.norm import build_norm
from penstock.layers.rope import RopeSpec
from penstock.layers.spec import ModelSpec
from penstock.layers.step import KVView, Step
from penstock.ops.attention import Geometry
from penstock.ops.registry import Kernels


class Decoder:
    """Tokens in, logits out. `values` has every parameter that the spec lists, by its path."""

    def __init__(self, spec: ModelSpec, values: Values, kernels: Kernels, *, dtype: torch.dtype, device: torch.device,
                 max_model_len: int) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self._max_model_len = max_model_len
        self.states: list[StateSpec] = spec.states(str(dtype).removeprefix("torch."))
        ropes = dict.fromkeys(block.attention.rope for block in spec.blocks)
        tables: dict[RopeSpec | None, RopeTable] = {
            rope: rope.table(max_model_len, device) for rope in ropes if rope is not None}
        self.embedding = values.matrix("embedding.weight")
        self.positions = values.matrix("positions.weight") if spec.embedding.positions else None
        self.blocks = [Block(block, f"blocks.{i}", values, kernels, tables.get(block.attention.rope))
                       for i, block in enumerate(spec.blocks)]
        self.norm = build_norm(spec.norm, "norm", values, kernels)
        self.head_weight = self.embedding if spec.head.tied else values.matrix("head.weight")
        self.head_bias = values.tensor("head.bias") if spec.head.bias else None
        scale = spec.embedding.scale
        self._scale = torch.tensor(scale, dtype=dtype).item() if spec.embedding.round_scale else scale
        self.kernels = kernels
        self._linear = kernels.linear
        held = [*values.values(), *(tensor for table in tables.values() for tensor in table)]
        self.weight_bytes: int = sum(value.nbytes for value in held)
        """Bytes of all that the model holds: parameters as packed, and the rope tables."""

    @property
    def computation(self) -> str:
        """Equal where equal weights and tokens give equal cache entries (`layers/identity.py`)."""
        return computation(self.spec, self.states, self.kernels.table(), str(self.dtype), self._max_model_len)

    def attach(self, views: list[KVView]) -> None:
        """Gives each layer its window into the cache, in layer order."""
        assert len(views) == len(self.blocks), (len(views), len(self.blocks))
        for block, view in zip(self.blocks, views, strict=True):
            block.attention.attach(view)

    def detach(self) -> None:
        """Lets go of the cache; `attach` must come before the next step."""
        for block in self.blocks:
            block.attention.detach()

    @property
    def geometries(self) -> dict[Geometry, int]:
        """Those of all attention layers, and the cache group by whose table each goes, once they have their windows into it."""
        return {block.attention.geometry: block.attention.view.group for block in self.blocks}

    def forward(self, step: Step) -> torch.Tensor:
        """The hidden state of each of the step's T tokens after the last norm, [T, width] in the model's dtype; or, if the step
        says so, at its `ends` alone, [E, width].

        Writes the tokens' keys and values into the cache.
        """
        residual = self._linear.gather(step.tokens, self.embedding)
        if self._scale != 1.0:
            residual = residual * self._scale
        if self.positions is not None:
            residual = residual + self._linear.gather(step.positions, self.positions)
        delta: torch.Tensor | None = None
        *blocks, last = self.blocks
        for block in blocks:
            delta, residual = block(delta, residual, step)
        delta, residual = last(delta, residual, step, step.ends)
        return self.norm.add(delta, residual)[0]

    def compute_products(self, tokens: Iterable[int], lines: Iterable[int]) -> None:
        """Each product of another shape once with so many tokens, and the head with so many lines, of whatever memory holds."""
        products = {(linear.weight.n, linear.weight.k, linear.bias is None): (linear.weight.k, product)
                    for block in self.blocks for linear, product in block.products}
        for count in tokens:
            for width, product in products.values():
                product(torch.empty(count, width, dtype=self.dtype, device=self.device))
        for count in lines:
            self.head(torch.empty(count, self.spec.width, dtype=self.dtype, device=self.device))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [M, vocabulary], float32, of hidden states [M, width]."""
        logits = self._linear.apply(hidden, self.head_weight, self.head_bias, torch.float32)
        head = self.spec.head
        if head.divisor != 1.0:
            logits.div_(head.divisor)
        if head.softcap:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        return logits
