"""An adapter's matrices for the experts of mixtures, as PEFT writes them: those of modules, or of stacked parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.checkpoint.adapter import AdapterConfig
from penstock.layers.parameter import Parameter, Piece, even_unit
from penstock.layers.spec import ModelSpec
from penstock.models.rules import Rule, stacked
from penstock.parallel.axis import Place

Factors = tuple[torch.Tensor | None, ...]
"""Of a mixture: A [E, r, k] and B [E, n, r] of gate_up, gates first, then those of down; None where there are none."""


@dataclass(frozen=True)
class _Part:
    """A pair for all experts of a stack, or for some rows of one."""

    a: torch.Tensor
    """[E, r, k], of one expert [1, r, k]."""
    b: torch.Tensor
    expert: int = -1
    first: int = 0
    """Of the expert's rows."""


class ExpertAdapters:
    """Gathers the pairs of one adapter."""

    def __init__(self, spec: ModelSpec, rules: Sequence[Rule]) -> None:
        self._spec, self._rules = spec, rules
        self._stacks = {one.name: one for one in spec.parameters() if one.stack}
        self._pieces = {piece.name: (one, number) for one in self._stacks.values() for number, piece in enumerate(one.pieces)}
        self._parts: dict[str, list[_Part]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self, module: str, pair: Mapping[str, torch.Tensor], config: AdapterConfig, most: int) -> str | None:
        """Takes the pair of a module, if that is of experts: "", or why it cannot be used. None if it is not."""
        wanted = self._places(module)
        if not wanted:
            return None
        if not {"A", "B"} <= pair.keys() or "magnitude" in pair:
            return f"{module} has {' and '.join(pair)}; adapters of experts have A and B, and no magnitudes (DoRA)"
        a, b = pair["A"], pair["B"]
        for turned in (False, True):
            for name, stack, number, rule in wanted:
                rank, scale = config.scale(name)
                count = 1 if number is not None else stack.stack
                rows = stack.shape[0] // stack.stack if number is None else stack.pieces[number].rows
                shapes = (rank * count, stack.shape[1]), (rows, rank * count)
                if turned:
                    shapes = (rank * count, rows), (stack.shape[1], rank * count)
                if rank <= most and (a.shape, b.shape) == shapes:
                    self._add(stack, number, rule, *_factors(a.float(), b.float() * scale, count, turned))
                    return ""
        asked = "; ".join(f"{name}: rank {config.scale(name)[0]}, {rows_of(stack, number)} x {stack.shape[1]}"
                          for name, stack, number, _ in wanted)
        return (f"{module} has A {list(a.shape)} and B {list(b.shape)}, which fit none of its matrices ({asked}), or have a "
                f"rank above {most} (--max-lora-rank)")

    def _places(self, module: str) -> list[tuple[str, Parameter, int | None, Rule]]:
        """(name, stack, the piece that it is, its rule) of the matrices that a module may adapt: one of an expert's, or those
        parameters of a layer's experts of which PEFT wraps one around the other."""
        found: list[tuple[str, Parameter, int | None, Rule]] = []
        if not self._stacks:
            return found
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        for rule in self._rules:
            name = f"{module}.{rule.source.rpartition('.')[2].replace('*', 'weight')}"
            target = rule.match(name) or ""
            if target in self._stacks:
                found.append((name.removesuffix(".weight"), self._stacks[target], None, rule))
            elif target in self._pieces:
                return [(module, *self._pieces[target], rule)]
        return found

    def _add(self, stack: Parameter, number: int | None, rule: Rule, a: torch.Tensor, b: torch.Tensor) -> None:
        if number is None:
            if rule.change is not None:
                # The rule reorders a stack's rows, and so those of B, which lie like the checkpoint's.
                b = rule.change(b if rule.change is stacked else b.transpose(1, 2), self._spec).view(b.shape)
            part = _Part(a, b)
        else:
            each = len(stack.pieces) // stack.stack
            part = _Part(a, b, number // each, number % each * stack.pieces[number].rows)
        self._parts.setdefault(stack.stem, []).append(part)

    def packed(self, dtype: torch.dtype, place: Place) -> Iterator[tuple[str, Factors]]:
        """The path of each mixture, and the rank's share of its factors."""
        for path in sorted({stem.rpartition(".")[0] for stem in self._parts}):
            up, down = (self._joined(f"{path}.{name}") for name in ("gate_up", "down"))
            if place.tensors > 1 and not place.experts:
                inner = self._stacks[f"{path}.down.weight"].shape[1]
                if up is not None:
                    halves = up[1].view(len(up[1]), 2, inner, -1)
                    up = up[0], _own(halves.transpose(2, 3), inner, place).transpose(2, 3).flatten(1, 2)
                if down is not None:
                    down = _own(down[0], inner, place), down[1]
            every = (*(up or (None, None)), *(down or (None, None)))
            yield path, tuple(None if one is None else one.to(dtype).contiguous() for one in every)

    def _joined(self, stem: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        parts, stack = self._parts.get(stem), self._stacks[f"{stem}.weight"]
        if parts is None:
            return None
        ranks = [sum(one.a.shape[1] for one in parts if one.expert in (-1, expert)) for expert in range(stack.stack)]
        a = torch.zeros(stack.stack, max(ranks), stack.shape[1])
        b = torch.zeros(stack.stack, stack.shape[0] // stack.stack, max(ranks))
        at = [0] * stack.stack
        for one in parts:
            for expert in range(stack.stack) if one.expert < 0 else (one.expert,):
                some, source = slice(at[expert], at[expert] + one.a.shape[1]), expert if one.expert < 0 else 0
                a[expert, some], b[expert, one.first:one.first + one.b.shape[1], some] = one.a[source], one.b[source]
                at[expert] = some.stop
        return a, b


def rows_of(stack: Parameter, number: int | None) -> int:
    return stack.shape[0] // stack.stack if number is None else stack.pieces[number].rows


def _factors(a: torch.Tensor, b: torch.Tensor, count: int, turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, k] and B [E, n, r] of PEFT's [E * r, k] and [n, r * E]. `turned`: as PEFT before 0.18 wrote them for parameters
    [E, outputs, inputs], with the two axes the other way round."""
    first, second = a.view(count, -1, a.shape[1]), b.view(len(b), -1, count).permute(2, 0, 1)
    return (second.transpose(1, 2), first.transpose(1, 2)) if turned else (first, second)


def _own(matrix: torch.Tensor, inner: int, place: Place) -> torch.Tensor:
    """A rank's channels of the last axis, filled up with zeros."""
    piece = Piece("up", inner, even_unit(inner))
    first, last = piece.share(place.tensor, place.tensors)
    own = matrix.new_zeros(*matrix.shape[:-1], piece.room(place.tensors))
    own[..., :last - first] = matrix[..., first:last]
    return own
