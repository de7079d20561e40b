"""A mixture of experts: a router, many small feed-forward networks of which each token takes a few, and perhaps a shared one.

A mixer without a state. The routing is data (`ops/routing.py::Routing`); the arithmetic is the operation `experts`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from penstock.core.state import StateSpec
from penstock.layers.block import RMSNorm, RMSNormSpec
from penstock.layers.build import Build, Linear, LinearSpec, Mixer, Parameter, Piece, Split, even_unit, own_channels
from penstock.layers.mlp import MLP, MLPSpec
from penstock.layers.step import Step
from penstock.ops.experts import Glu, changed
from penstock.ops.experts_hosted import HostedStack, Residency
from penstock.ops.linear import Weight
from penstock.ops.routing import Routing
from penstock.parallel.dispatch import Tokens, together
from penstock.parallel.lockstep import Lockstep
from penstock.parallel.placement import Held, linear, places_of
from penstock.quant.scheme import PLAIN


@dataclass(frozen=True)
class ExpertsSpec:
    """The weighted sum of a token's picked experts, plus the shared expert."""

    width: int
    inner: int
    """Of one expert."""
    routing: Routing
    glu: Glu = Glu()
    bias: bool = False
    """Experts have biases."""
    router_bias: bool = False
    shared_inner: int = 0
    """Of the network that every token takes; 0: there is none."""
    shared_gate: bool = False
    """The shared network's result is multiplied by the sigmoid of one more logit (Qwen2-MoE)."""
    shared_bias: bool = False
    inward: bool = False
    """Weights multiply the experts' inputs, not their results (Llama 4)."""

    divided: tuple[int, int] = (0, 1)
    """(the whole's `inner`, ranks), where this describes one rank's part."""
    dealt: bool = False
    """Ranks divide the experts, not the channels of each."""
    spare: int = 0
    """Experts for which each rank has room besides its share, for replicas of those that are picked most."""
    slots: int = 0
    """Of one rank's part: experts for which it has room."""
    norm: RMSNormSpec | None = None
    """Router and experts norm what they read, each by weights of its own; the router's logits are then divided by the root of
    the width, and a learned factor of each expert multiplies its weights (Gemma 4)."""
    name: str = "mlp"

    def share(self, ranks: int) -> "ExpertsSpec":
        """Every rank has its share of the channels of all experts, or of the experts."""
        shared = 0 if self.shared is None else self.shared.share(ranks).inner
        if self.dealt:
            return replace(self if self.slots else self.deal(ranks), shared_inner=shared)
        return replace(self, inner=Piece("up", self.inner, even_unit(self.inner)).room(ranks), shared_inner=shared,
                       divided=(self.inner, ranks))

    def deal(self, ranks: int) -> "ExpertsSpec":
        """One rank's part where only the experts are divided."""
        return replace(self, slots=-(-self.routing.experts // ranks) + self.spare, divided=(self.inner, ranks))

    @property
    def router(self) -> LinearSpec:
        return LinearSpec(self.width, (Piece("router", self.routing.experts),), self.router_bias)

    @property
    def shared(self) -> MLPSpec | None:
        return MLPSpec(self.width, self.shared_inner, self.glu.kind, bias=self.shared_bias) if self.shared_inner else None

    @property
    def joined(self) -> Routing | None:
        """The routing that has the shared network as experts more, where it is a multiple of one and has nothing of its own."""
        runs, rest = divmod(self.shared_inner, self.inner)
        own = self.shared_gate or self.shared_bias or self.bias or self.inward or self.dealt or self.norm is not None
        return None if rest or own or not runs else replace(self.routing, shared=runs)

    @property
    def gate(self) -> LinearSpec:
        return LinearSpec(self.width, (Piece("shared_gate", 1),))

    def parameters(self, path: str) -> Iterator[Parameter]:
        if self.norm is not None:
            for name in ("router", "experts"):
                yield from self.norm.parameters(f"{path}.{name}_norm", self.width)
            yield Parameter(f"{path}.factors", (self.routing.experts,), rest=1.0)
        yield from self.router.parameters(f"{path}.router")
        if self.routing.corrected:
            yield Parameter(f"{path}.correction", (self.routing.experts,), dtype="float32")
        yield from self._stacks(f"{path}.experts")
        if self.shared is not None:
            yield from self.shared.parameters(f"{path}.shared")
        if self.shared_gate:
            yield from self.gate.parameters(f"{path}.shared_gate")

    def _stacks(self, path: str) -> Iterator[Parameter]:
        """gate_up [E * 2 F, W] and down [E * W, F]: an expert's matrices behind the previous expert's."""
        count, inner, picks = self.slots or self.routing.experts, self.inner, self.routing.picks
        unit = even_unit(inner)
        # Whole experts are runs of rows of both stacks.
        dealt: dict[str, Any] = {"split": Split.ROWS, "listed": True} if self.dealt else {}
        halves = tuple(Piece(f"{path}.{e}.{half}.weight", inner, unit) for e in range(count) for half in ("gate", "up"))
        yield Parameter(f"{path}.gate_up.weight", (count * 2 * inner, self.width), PLAIN, halves, stack=count, picks=picks,
                        live=picks * 3 * inner, **(dealt or {"split": Split.ROWS}), unit=2 * inner if dealt else 1)
        if self.bias:
            # Every rank has all of them and takes its own.
            whole = self.divided[0] or inner
            biases = (Piece(f"{path}.{e}.{half}.bias", whole) for e in range(self.routing.experts) for half in ("gate", "up"))
            yield Parameter(f"{path}.gate_up.bias", (self.routing.experts * 2 * whole,), None, tuple(biases))
        downs = tuple(Piece(f"{path}.{e}.down.weight", self.width) for e in range(count))
        yield Parameter(f"{path}.down.weight", (count * self.width, inner), PLAIN, downs, stack=count, picks=picks,
                        live=picks * 2 * self.width, **(dealt or {"split": Split.COLUMNS}), unit=self.width if dealt else unit)
        if self.bias:
            yield Parameter(f"{path}.down.bias", (self.routing.experts, self.width))

    def states(self, _dtype: str) -> tuple[StateSpec, ...]:
        return ()

    def build(self, path: str, build: Build) -> "Experts":
        return Experts(self, path, build)


class Router(Linear):
    """x [T, W] -> logits [T, E] in float32, whatever x's dtype: near scores decide which experts run."""

    _plain = False

    def __init__(self, spec: LinearSpec, path: str, build: Build) -> None:
        super().__init__(spec, path, build)
        self._apply = partial(self.weight.ops.apply, out_dtype=torch.float32)
        self.shape = (*self.shape, "float32")


class Experts(Mixer):
    """x [T, W] -> [T, W]."""

    looks_around = False

    def __init__(self, spec: ExpertsSpec, path: str, build: Build) -> None:
        self.spec = spec
        self.path = f"{path}.experts"
        self.router = Router(spec.router, f"{path}.router", build)
        values = build.values
        self._norms = [] if spec.norm is None else [
            RMSNorm(spec.norm, f"{path}.{name}_norm", build) for name in ("router", "experts")]
        self._factors = None if spec.norm is None else values.tensor(f"{path}.factors").float()
        self.correction = values.tensor(f"{path}.correction") if spec.routing.corrected else None
        self.up, self.down = (values.stack(f"{path}.experts.{name}.weight") for name in ("gate_up", "down"))
        self.up_bias, self.down_bias = (values.tensor(f"{path}.experts.{name}.bias").view(spec.routing.experts, -1)
                                        if spec.bias else None for name in ("gate_up", "down"))
        self._whole_biases = self.up_bias, self.down_bias
        if build.group is not None and self.up_bias is not None and not spec.dealt:
            self.up_bias = own_channels(self.up_bias.unflatten(1, (2, -1)), build.group.rank, spec.divided[1]).flatten(1)
            # It is added once.
            self.down_bias = self.down_bias if build.group.rank == 0 else None
        self.shared = None if spec.shared is None else MLP(spec.shared, f"{path}.shared", build)
        self.shared_gate = Linear(spec.gate, f"{path}.shared_gate", build) if spec.shared_gate else None
        self.joined = spec.joined if build.data is None and not isinstance(self.up, HostedStack) else None
        self.counts = torch.zeros(spec.routing.experts, dtype=torch.int64, device=build.device)
        """The number of times each expert was picked. The last layer counts only steps in which every token runs to the end."""
        self.residency = (Residency(self.up, self.down, build.stages, spec.glu, self.up_bias, self.down_bias, spec.inward)
                          if isinstance(self.up, HostedStack) and isinstance(self.down, HostedStack) else None)
        """If some experts are in host memory alone."""
        self.placement: torch.Tensor | None = None
        """[E, R] int32: where in the stacks an expert's R replicas are; -1 where another rank has it, unless `owners` says
        which; None: at its own number. Neighbouring tokens take different replicas."""
        self.owners: torch.Tensor | None = None
        """[E, R] int32: the rank of each replica, where ranks have other tokens, too."""
        self.held: Held | None = None
        """Of ranks that divide the experts: where each one is."""
        self._data, self._payload, self._messages = build.data, build.kernels.payload, build.kernels.messages
        self._tensor = build.group
        group = build.group if build.data is None else build.data.group
        if spec.slots:
            self._rank = 0 if group is None else group.rank
            # The last line is nobody's: it stands for no pick.
            self.placement = torch.full((spec.routing.experts + 1, 1 + spec.spare * spec.divided[1]), -1, dtype=torch.int32,
                                        device=build.device)
            self.owners = None if build.data is None else self.placement.clone()
            self.hold(linear(spec.routing.experts, spec.divided[1], spec.slots))
        self._route = build.kernels.route
        self._leaves_parts = False
        self._reduce = None if build.group is None or build.data is not None else build.group.reduce

    def hold(self, held: Held) -> None:
        """Says which rank has which experts from now on. Memory that graphs know stays where it is."""
        assert self.placement is not None
        self.held = held
        owners, slots = torch.tensor(places_of(held, *self.placement[:-1].shape), dtype=torch.int32).unbind(-1)
        if self.owners is None:
            slots = slots.masked_fill(owners != self._rank, -1)
        else:
            self.owners[:-1].copy_(owners)
        self.placement[:-1].copy_(slots)
        own = torch.tensor([max(0, expert) for expert in held[self._rank]], device=self.placement.device)
        found = [None if bias is None else bias[own] for bias in self._whole_biases]
        if self.up_bias is self._whole_biases[0]:
            self.up_bias, self.down_bias = found
        else:
            for bias, now in zip((self.up_bias, self.down_bias), found, strict=True):
                if bias is not None and now is not None:
                    bias.copy_(now)

    @property
    def linears(self) -> Sequence[Linear]:
        return *super().linears, *(() if self.shared is None else self.shared.linears)

    def reader(self, width: int) -> Weight | None:
        return None if self._norms else self.up.coded or super().reader(width)

    def leave_sum(self) -> bool:
        if self._reduce is None or (self.shared is not None and not self.shared.leave_sum()):
            return False
        self._reduce = None
        return True

    def leave_parts(self) -> None:
        self._leaves_parts = self._data is None and self.residency is None and self.placement is None

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        spec, counted = self.spec, (self.counts, step.query_start[-1:])
        if ends is not None or step.division is not None:  # how many of them are padding is not known here
            (x, step), counted = step.narrow(x, ends), (None, None)  # type: ignore[assignment]
        routing, shared = spec.routing, None
        if self.joined is not None and self.shared is not None and step.delta is None:
            pair = self.shared.up.weight, self.shared.down.weight
            if self.up.grouped.joins(len(x), routing.picks, self.up, self.down, pair):
                routing, shared = self.joined, pair
        if self._factors is None:
            picks, weights = self._route(self.router(x, step), self.correction, routing, *counted)
        else:
            routed, x = (norm(x) for norm in self._norms)
            logits = self.router(routed, step) * spec.width**-0.5
            picks, weights = self._route(logits, self.correction, routing, *counted)
            weights = weights * self._factors[picks.long()]
        if self._data is not None:
            if ends is None:
                picks = picks.masked_fill((torch.arange(len(x), device=x.device) >= step.query_start[-1])[:, None],
                                          spec.routing.experts)
            out = self._together(self._data, x, picks, weights)
            return out if self.shared is None else self._with_shared(out, x, step)
        places = picks if self.placement is None else placed(picks, self.placement)
        apart = () if step.delta is None else step.delta.apart(self.path)
        join = None
        if self.residency is not None:
            places, join = self.residency.begin(x, places, weights, whole=bool(apart))
        told = self.up, self.down, spec.glu, self.up_bias, self.down_bias, spec.inward
        added = bool(apart) or (self.shared is not None and shared is None)  # to the sum
        parts = self._leaves_parts and not added and self.up.grouped.leaves_parts(len(x), self.up)
        out = self.up.grouped.apply(x, places, weights, *told, shared, not parts)
        if join is not None:
            join(out)
        for rows, factors in apart:
            out[rows] = changed(x[rows], picks[rows], places[rows], weights[rows], *told, factors)
        if self._reduce is not None:
            out = self._reduce(out)
        return out if self.shared is None or shared is not None else self._with_shared(out, x, step)

    def follow(self, x: torch.Tensor) -> None:
        """Takes part in a step of other ranks without a token: x [0, W]."""
        assert self._data is not None
        count = self.spec.routing.picks
        self._together(self._data, x, torch.empty(0, count, dtype=torch.int32, device=x.device),
                       torch.empty(0, count, device=x.device))

    def _together(self, data: Lockstep, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The experts' results for this rank's tokens, where every rank has other tokens and other experts."""
        assert self.placement is not None and self.owners is not None
        up, spec, count, ranks = self.up, self.spec, len(x), self._tensor
        tokens = Tokens(x, placed(picks, self.owners), placed(picks, self.placement), weights)
        each = -(-count // data.tensors)
        if ranks is not None:
            # Ranks that divide the layers have the same tokens: each sends a run of them.
            tokens = Tokens(*(one[ranks.rank * each:][:each] for one in tokens))
        runs = self._messages(data.share, 0, False)
        out = together(data, tokens, self._payload, runs, lambda x, places, shares: up.grouped.apply(
            x, places, shares, up, self.down, spec.glu, self.up_bias, self.down_bias, spec.inward))
        if ranks is None or not count:
            return out
        return ranks.gather(torch.cat((out, out.new_zeros(each - len(out), spec.width)))).flatten(0, 1)[:count]

    def _with_shared(self, out: torch.Tensor, x: torch.Tensor, step: Step) -> torch.Tensor:
        assert self.shared is not None
        shared = self.shared(x, step)
        return out + (shared if self.shared_gate is None else self.shared_gate(x, step).sigmoid() * shared)


def placed(picks: torch.Tensor, placement: torch.Tensor) -> torch.Tensor:
    """Places in the stacks [T, K] of picks [T, K]; token t takes replica t % R."""
    replicas, at = placement.shape[1], picks
    if replicas > 1:
        replica = torch.arange(len(picks), dtype=picks.dtype, device=picks.device) % replicas
        at = torch.add(replica[:, None], picks, alpha=replicas)
    return placement.view(-1).index_select(0, at.view(-1)).view(picks.shape)
