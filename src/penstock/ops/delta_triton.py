"""The gated delta rule on NVIDIA GPUs: convolution, recurrence, and norm and gates, in a launch each.

The recurrence takes one token after another in prompts, too: a token's results are the same bits wherever steps end. Each
program has a few of a head's values, so that all multiprocessors share the prompt of one sequence."""

import torch

from penstock.ops import gpu
from penstock.ops.delta import DeltaShape, DeltaState, DeltaWeights
from penstock.ops.table import register

_SOME = 16
"""Values of a program of the recurrence."""


@register("delta_rule", "triton", rank=10, supports=gpu.supports)
def delta_rule(x: torch.Tensor, shape: DeltaShape, weights: DeltaWeights, state: DeltaState, table: torch.Tensor,
               query_start: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    from penstock.ops import delta_kernel as kernels  # Triton: heavy, and not everywhere

    key_heads, heads, key_size, value_size, kernel, eps = shape
    tokens, segments, most = len(x), len(context), state.inputs.shape[2] - kernel + 1
    out = torch.empty(tokens, heads * value_size, dtype=x.dtype, device=x.device)
    if tokens == 0 or segments == 0:
        return out.zero_()
    rows, wide, high = tokens + most * segments, max(4, gpu.covering(key_size)), gpu.covering(value_size)
    mixed, updates = (torch.empty(rows, size, device=x.device) for size in (key_heads * shape.channels, 2 * heads))
    sizes = {"key_heads": key_heads, "shared": shape.shared, "key_size": key_size, "value_size": value_size, "most": most,
             "page": state.page, "num_warps": 1, **gpu.linked(x.device)}
    steps = state.at, table, query_start, context, mixed
    pages = x.stride(0), state.inputs.stride(0), state.at.stride(0), table.stride(0)
    kernels.mix[(rows, key_heads, 2 + shape.shared)](
        x, *weights[:3], state.inputs, *steps, updates, tokens, segments, key_size ** -0.5, *pages, kernel=kernel,
        wide=max(wide, high), **sizes)
    kernels.advance[(-(-value_size // _SOME), heads, segments)](
        state.state, *steps, updates, tokens, segments, state.state.stride(0), *pages[2:], wide=wide, some=_SOME, **sizes)
    kernels.finish[(tokens + segments, key_heads)](
        x, weights.norm, state.inputs, *steps, out, tokens, segments, eps, *pages, kernel=kernel, high=high,
        full=gpu.covering(shape.kept), **sizes)
    return out
