"""Products with a matrix a head on CPUs against the reference, and the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.table import Implementation
from tests.ops.kernels import DTYPES, close, every, random, reference, usable


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("head_linear"))
def test_head_linear(implementation: Implementation, dtype: torch.dtype) -> None:
    call = usable(implementation, dtype)
    for tokens, heads, k, n in ((1, 1, 8, 8), (5, 3, 20, 33), (70, 4, 64, 16)):
        wide = random(tokens, heads, k + 6, dtype=dtype, seed=tokens)
        x, weight = wide[..., :k], random(heads, n, k, dtype=dtype, seed=2).transpose(1, 2)
        out = torch.full((tokens, heads, n + 5), 7.0, dtype=dtype)
        call.apply(x, call.pack(weight), out[..., :n])
        wanted = torch.empty(tokens, heads, n)
        reference("head_linear").apply(x.float(), weight.float(), wanted)
        close(out[..., :n], wanted, k ** 0.5, 2.0)
        assert (out[..., n:] == 7.0).all(), "what is beside the result stays"
        alone = torch.empty(1, heads, n, dtype=dtype)
        call.apply(x[-1:], call.pack(weight), alone)
        assert torch.equal(alone[0], out[-1, :, :n]), "a row's bits do not depend on the others"
