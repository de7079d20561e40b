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
    def unit(self) -> int:
        """Inputs of a key head: its query and key, then its values and their gates."""
        return 2 * self.key_size + 2 * self.shared * self.value_size


class DeltaWeights(NamedTuple):
    """conv [heads, 2 key_size + value_size, kernel], decay and step [heads] float32, norm [value_size]."""

    conv: torch.Tensor
    decay: torch.Tensor
    step: torch.Tensor
    norm: torch.Tensor


class DeltaState(NamedTuple):
    """Of each page of `page` positions: the state after `at` positions, and what the up to `most` positions behind them add. So
    the page can be continued at each of these positions, and drafts that were written may be rejected.

    state [pages, heads, key_size, value_size] float32; inputs [pages, heads, kernel - 1 + most, 2 key_size + value_size]: the
    convolution's query, key and value from kernel - 1 positions before `at` on; gates [pages, heads, most, 2] float32: decay (a
    logarithm) and step size; at [pages, heads] int32, equal for all heads: each is written where its head is computed."""

    state: torch.Tensor
    inputs: torch.Tensor
    gates: torch.Tensor
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
    hk, dk, dv, shared, most = shape.key_heads, shape.key_size, shape.value_size, shape.shared, state.gates.shape[2]
    both = x[:, :hk * shape.unit].reshape(-1, hk, shape.unit)
    q, k = (part.repeat_interleave(shared, 1) for part in both[..., :2 * dk].split(dk, 2))
    v, z = (part.reshape(-1, shape.heads, dv) for part in both[..., 2 * dk:].split(shared * dv, 2))
    # In float64: the last bit of PyTorch's exponentials in float32 depends on how many there are.
    b, a = (part.flatten(1) for part in x[:, hk * shape.unit:].reshape(-1, hk, 2 * shared).double().split(shared, 2))
    mixed = torch.cat((q, k, v), 2)
    gates = torch.stack((weights.decay.exp() * F.logsigmoid(-a - weights.step), torch.sigmoid(b)), 2).float()
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
        before, then = state.inputs[sources, :, :shape.kernel - 1 + replayed], state.state[sources]
        if fresh:
            before, then = torch.zeros_like(before), torch.zeros_like(then)
        inputs, ran = torch.cat((before, mixed[own].transpose(1, 2)), 2), replayed + count
        updates = torch.cat((state.gates[sources, :, :replayed], gates[own].transpose(1, 2)), 2)
        seen = (inputs[:, :, tap:tap + ran].float() * weights.conv[:, None, :, tap].float() for tap in range(shape.kernel))
        q, k, v = F.silu(sum(seen, inputs.new_zeros(()))).split((dk, dk, dv), 3)
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        kept = replayed + (1 if count <= 1 + most else count)
        parts = q * dk ** -0.5, k, v, updates
        results, then = _advance([part[:, :, :kept] for part in parts], then)
        rest, _ = _advance([part[:, :, kept:] for part in parts], then)
        out[own] = torch.cat((results, rest), 2)[:, :, replayed:].transpose(1, 2)
        for line, (segment, _, targets) in enumerate(segments):
            at = torch.tensor(targets, device=x.device)
            state.state[at] = then[line]
            state.inputs[at, :, :ran - kept + shape.kernel - 1] = inputs[line, :, kept:]
            state.gates[at, :, :ran - kept] = updates[line, :, kept:]
            state.at[at] = int(context[segment]) - ran + kept
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + shape.eps) * weights.norm.float()
    return (out * F.silu(z.float())).to(x.dtype).flatten(1)


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
