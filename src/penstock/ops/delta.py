"""The gated delta rule behind a short convolution (Gated Delta Networks, Yang, Kautz and Hatamizadeh 2024)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from penstock.ops.table import register

_CHUNK = 64
"""Tokens whose updates of the state are computed together."""


class DeltaShape(NamedTuple):
    """`heads` value heads, of which `heads / key_heads` consecutive ones share a query and a key. The convolution sees `kernel`
    positions; `eps` is that of the results' norm."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    kernel: int
    eps: float

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.heads // self.key_heads

    @property
    def channels(self) -> int:
        """Inputs of a key head that the convolution sees: its query, key and values."""
        return 2 * self.key_size + self.shared * self.value_size

    @property
    def unit(self) -> int:
        """Inputs of a key head: those, then its values' gates."""
        return self.channels + self.shared * self.value_size

    @property
    def kept(self) -> int:
        """Inputs of a key head that a page keeps: `channels`, and those of its values' step sizes and decays."""
        return self.channels + 2 * self.shared


class DeltaWeights(NamedTuple):
    """conv [key_heads, channels, kernel], decay and step [heads] float32, norm [value_size]."""

    conv: torch.Tensor
    decay: torch.Tensor
    step: torch.Tensor
    norm: torch.Tensor


class DeltaState(NamedTuple):
    """Of each page of `page` positions: the state after `at` positions, and what the up to `most` positions behind them add. So
    the page can be continued at each of these positions, and drafts that were written may be rejected.

    state [pages, heads, key_size, value_size] float32; inputs [pages, key_heads, kernel - 1 + most, kept]: from kernel - 1
    positions before `at` on; at [pages, key_heads] int32, equal for all heads: each is written where its head's inputs are."""

    state: torch.Tensor
    inputs: torch.Tensor
    at: torch.Tensor
    page: int


@register("delta_rule", "reference", rank=0, capturable=False)
def delta_rule(x: torch.Tensor, shape: DeltaShape, weights: DeltaWeights, state: DeltaState, table: torch.Tensor,
               query_start: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Runs the recurrence over S segments and returns its normed and gated results [T, heads x value_size].

    x [T, key_heads x (unit + 2 shared)]: of each key head query, key, values and gates z; then of each key head the inputs b of
    its values' step sizes and those a of their decays. Query, key and value pass the convolution and SiLU; query and key then
    have length 1. With g = -exp(decay) softplus(a + step) and the step size sigmoid(b), a head's state M [key_size, value_size]
    becomes M' = exp(g) M + k (sigmoid(b) (v - exp(g) M^T k))^T, and its result M'^T q / sqrt(key_size) is normed (RMSNorm) and
    multiplied by SiLU(z). All of it is float32.

    table [S, columns] int32, query_start [S + 1], context [S] int32: as `layers/step.py::Step`. A segment begins with the page
    of the position before it, or with zeros. Of a segment of at most 1 + most tokens, all of its pages get the state behind its
    first token and the inputs of the others; of a longer one, its last page gets the state at its end."""
    (hk, _, dk, dv, kernel, _), shared, most = shape, shape.shared, state.inputs.shape[2] - shape.kernel + 1
    mixed, z = x[:, :hk * shape.unit].reshape(-1, hk, shape.unit).split((shape.channels, shared * dv), 2)
    given = torch.cat((mixed, x[:, hk * shape.unit:].reshape(-1, hk, 2 * shared)), 2)
    out = torch.zeros(len(x), shape.heads, dv, device=x.device)
    starts, pages = query_start.tolist(), table.tolist()
    alike = defaultdict[tuple[int, bool, int, int], list[tuple[int, int, list[int]]]](list)
    for segment, length in enumerate(context.tolist()):
        count = starts[segment + 1] - starts[segment]
        begin = length - count
        if count == 0:
            continue
        source = pages[segment][(begin - 1) // state.page] if begin else 0
        replayed = min(most, max(0, begin - int(state.at[source, 0]))) if begin and most else 0
        first = begin // state.page if count <= 1 + most else (length - 1) // state.page
        targets = pages[segment][first:(length - 1) // state.page + 1]
        # Single tokens together: of others the bits of a matrix product would depend on how many there are.
        alone = -1 if count + replayed == 1 else segment
        alike[count, begin == 0, replayed, alone].append((segment, source, targets))
    for (count, fresh, replayed, _), segments in alike.items():
        sources = torch.tensor([source for _, source, _ in segments], device=x.device)
        own = torch.tensor([range(starts[segment], starts[segment] + count) for segment, *_ in segments], device=x.device)
        before, then = state.inputs[sources, :, :kernel - 1 + replayed], state.state[sources]
        if fresh:
            before, then = torch.zeros_like(before), torch.zeros_like(then)
        inputs, ran = torch.cat((before, given[own].transpose(1, 2)), 2), replayed + count
        # In float64: the last bit of PyTorch's exponentials in float32 depends on how many there are.
        b, a = inputs[:, :, kernel - 1:, shape.channels:].double().transpose(2, 3).split(shared, 2)
        grown = weights.decay.exp()[:, None] * F.logsigmoid(-a.flatten(1, 2) - weights.step[:, None])
        updates = torch.stack((grown, torch.sigmoid(b).flatten(1, 2)), 3).float()
        seen = (inputs[:, :, tap:tap + ran, :shape.channels].float() * weights.conv[:, None, :, tap].float()
                for tap in range(kernel))
        q, k, v = F.silu(sum(seen, inputs.new_zeros(()))).split((dk, dk, shared * dv), 3)
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        q, k = (part.repeat_interleave(shared, 1) for part in (q, k))
        v = v.unflatten(3, (shared, dv)).transpose(2, 3).flatten(1, 2)
        kept = replayed + (1 if count <= 1 + most else count)
        parts = q * dk ** -0.5, k, v, updates
        results, then = _advance([part[:, :, :kept] for part in parts], then)
        rest, _ = _advance([part[:, :, kept:] for part in parts], then)
        out[own] = torch.cat((results, rest), 2)[:, :, replayed:].transpose(1, 2)
        for line, (segment, _, targets) in enumerate(segments):
            at = torch.tensor(targets, device=x.device)
            state.state[at] = then[line]
            state.inputs[at, :, :ran - kept + kernel - 1] = inputs[line, :, kept:]
            state.at[at] = int(context[segment]) - ran + kept
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + shape.eps) * weights.norm.float()
    return (out.flatten(1) * F.silu(z.float().flatten(1))).to(x.dtype)


def _advance(parts: Sequence[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(results [B, H, T, V], the state after them) of q, k [B, H, T, K], v [B, H, T, V], gates [B, H, T, 2] and the state
    [B, H, K, V] before them. The updates of a chunk of tokens are a triangular system of equations (section 3.3 there)."""
    results = [parts[2][:, :, :0]]
    for q, k, v, gates in zip(*(part.split(_CHUNK, 2) for part in parts), strict=True) if parts[0].shape[2] else ():
        decay, size = gates.split(1, 3)
        total = decay.cumsum(2)
        count = total.shape[2]
        # From one token to a later one; before the exponential, so that none overflows.
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        between = (total - total.transpose(2, 3)).masked_fill(future, -torch.inf).exp()
        right = size * torch.cat((v, k * total.exp()), 3)
        if count > 1:
            system = size * _product(k, k.transpose(2, 3)) * between
            right = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new, read = right.split((v.shape[3], k.shape[3]), 3)
        new = new - _product(read, state)
        results.append(_product(q * total.exp(), state) + _product(_product(q, k.transpose(2, 3)) * between, new))
        last = total[:, :, -1:]
        state = state * last.exp() + (k * (last - total).exp()).transpose(2, 3) @ new
    return torch.cat(results, 2), state


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., T, N] times b [..., N, M]; of one token as a sum whose order does not depend on how many others there are."""
    return a @ b if a.shape[2] > 1 else (a.transpose(2, 3) * b).sum(2, keepdim=True)
