"""A gated short convolution (LFM2) in place of attention: each channel sees its own last few positions. Description and layer.

Its inputs are cached for each position and kept as a sliding window's keys are. So contexts can be continued, shared and
rolled back at any position, which a snapshot a page could not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.core.state import Field, StateSpec, Window
from penstock.layers.build import Build, Linear, LinearSpec, Parameter, Piece, Split, TokenMixer, even_unit
from penstock.layers.step import StateView, Step, Works


@dataclass(frozen=True)
class ShortConvSpec:
    """b, c, u = W x; o (c * conv(b * u)). Ranks divide the channels."""

    width: int
    channels: int
    kernel: int
    """Positions that the convolution sees, a token's own among them."""
    bias: bool = False
    """Of both projections and of the convolution."""
    unit: int = 0
    """Channels that stay together on one rank; 0: as `even_unit` says."""

    name = "attention"

    @property
    def _together(self) -> int:
        return self.unit or even_unit(self.channels)

    @property
    def input(self) -> LinearSpec:
        pieces = tuple(Piece(name, self.channels, self._together) for name in ("b", "c", "u"))
        return LinearSpec(self.width, pieces, self.bias, Split.ROWS)

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.channels, (Piece("o", self.width),), self.bias, Split.COLUMNS, self._together)

    def share(self, ranks: int) -> "ShortConvSpec":
        return replace(self, channels=Piece("u", self.channels, self._together).room(ranks), unit=self._together)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.input.parameters(f"{path}.input")
        yield Parameter(f"{path}.conv.weight", (self.channels * self.kernel,), rest=0.5, split=Split.ROWS,
                        unit=self._together * self.kernel)
        if self.bias:
            yield Parameter(f"{path}.conv.bias", (self.channels,), split=Split.ROWS, unit=self._together)
        yield from self.output.parameters(f"{path}.o")

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        return (StateSpec((Field("inputs", (1, self.channels), dtype),), Window(self.kernel)),)

    def build(self, path: str, build: Build) -> "ShortConv":
        return ShortConv(self, path, build)


class ShortConv(TokenMixer):
    """x [T, W] -> [T, W]. Plain PyTorch on every device; it reads no value on the host, so steps can be captured."""

    def __init__(self, spec: ShortConvSpec, path: str, build: Build) -> None:
        self.input = Linear(spec.input, f"{path}.input", build)
        self.o = Linear(spec.output, f"{path}.o", build)
        self.taps = build.values.tensor(f"{path}.conv.weight").view(-1, spec.kernel).float().t().contiguous()
        self.bias = build.values.tensor(f"{path}.conv.bias").float() if spec.bias else None

    @property
    def linears(self) -> Sequence[Linear]:
        return self.input, self.o

    def attach(self, views: Sequence[StateView], works: Works) -> None:  # noqa: ARG002
        (view,) = views
        self.group, self.page, self.cache = view.group, view.page, view["inputs"][:, 0]

    def detach(self) -> None:
        del self.cache

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        b, c, u = self.input(x, step).chunk(3, 1)
        own, group, at = b * u, step.groups[self.group], step.positions.long()
        self._write(own, group.slots)
        tokens = torch.arange(len(x), device=x.device, dtype=step.query_start.dtype)
        segment = (torch.searchsorted(step.query_start, tokens, right=True) - 1).clamp(0, len(group.table) - 1)
        found = own.float() * self.taps[-1]
        for back in range(1, len(self.taps)):
            before = at - back
            # Positions before the first have no pages, and neither has padding: what is read there does not count.
            there = (before >= 0) & (group.slots >= 0)
            page = group.table[segment, before.clamp(min=0) // self.page].long()
            seen = self.cache[torch.where(there, page, 0), before % self.page].float()
            found = found + torch.where(there[:, None], seen, 0.0) * self.taps[-1 - back]
        if self.bias is not None:
            found = found + self.bias
        return self.o(*step.narrow(c * found.to(x.dtype), ends))

    def _write(self, own: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores the inputs of the step's tokens. Padding stores the first token's once more; if that is padding too, nothing
        changes: what is in the first slot is stored there again."""
        real, first = slots >= 0, slots[:1].clamp(min=0)
        stored = self.cache[first // self.page, first % self.page]
        own = torch.where(real[:, None], own, torch.where(real[:1, None], own[:1], stored))
        at = torch.where(real, slots, first)
        self.cache[at // self.page, at % self.page] = own
