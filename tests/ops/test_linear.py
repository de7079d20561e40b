"""Products with packed weights against float64, over shapes that miss every blocking, and the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch

from penstock.ops.table import Implementation
from tests.ops.kernels import DTYPES, close, every, random, usable

SHAPES = [(1, 1, 1), (1, 33, 17), (2, 31, 64), (3, 64, 65), (5, 100, 7), (7, 96, 300), (12, 32, 128), (13, 129, 515),
          (17, 40, 1024), (25, 65, 33), (64, 70, 130), (70, 200, 259), (300, 288, 128), (530, 65, 300)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("linear"))
def test_product(implementation: Implementation, dtype: torch.dtype) -> None:
    linear = usable(implementation, dtype)
    for rows, n, k in SHAPES:
        w, x, bias = random(n, k, dtype=dtype, seed=1), random(rows, k, dtype=dtype, seed=2), random(n, dtype=dtype, seed=3)
        packed = linear.pack(w)
        assert packed.nbytes <= (n + 63) * (k + 1) * w.element_size()
        exact = x.double() @ w.double().T
        scale = k ** 0.5
        close(linear.apply(x, packed), exact, scale)
        close(linear.apply(x, packed, bias), exact + bias.double(), scale)
        logits = linear.apply(x, packed, None, torch.float32)
        assert logits.dtype is torch.float32
        close(logits, exact, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("linear"))
def test_a_bias_reaches_every_row(implementation: Implementation, dtype: torch.dtype) -> None:
    """Long prompts are computed in several passes of rows (PASS in csrc/linear.cpp), each with the bias."""
    linear = usable(implementation, dtype)
    n, k = 34, 16
    packed, bias = linear.pack(random(n, k, dtype=dtype, seed=1)), random(n, dtype=dtype, seed=3) + 4
    for rows in (511, 512, 513, 1025):
        x = random(rows, k, dtype=dtype, seed=2)
        added = linear.apply(x, packed, bias, torch.float32) - linear.apply(x, packed, None, torch.float32)
        torch.testing.assert_close(added, bias.float().expand(rows, n), atol=2e-2, rtol=1e-2)
        narrow = linear.apply(x, packed, bias)
        torch.testing.assert_close(narrow.float(), linear.apply(x, packed, bias, torch.float32), atol=2e-2, rtol=1e-2)
        both = linear.gated(x, packed, bias, "silu")
        torch.testing.assert_close(both.float(), torch.nn.functional.silu(narrow[:, :17].float()) * narrow[:, 17:].float(),
                                   atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("linear"))
def test_strides(implementation: Implementation, dtype: torch.dtype) -> None:
    linear = usable(implementation, dtype)
    w, wide = random(50, 37, dtype=dtype, seed=1), random(9, 80, dtype=dtype, seed=2)
    x = wide[:, 11:48]
    exact = x.double() @ w.double().T
    close(linear.apply(x, linear.pack(w)), exact, 6)
    close(linear.apply(x, linear.pack(w.T.contiguous().T)), exact, 6)
    close(linear.apply(x[2:3], linear.pack(random(70, 60, dtype=dtype)[:, 5:42])),
          x[2:3].double() @ random(70, 60, dtype=dtype)[:, 5:42].double().T, 6)
    assert linear.apply(x[:0], linear.pack(w)).shape == (0, 50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("linear"))
def test_gather(implementation: Implementation, dtype: torch.dtype) -> None:
    linear = usable(implementation, dtype)
    for n, k in ((100, 64), (33, 7), (1, 1), (64, 129)):
        w = random(n, k, dtype=dtype)
        ids = torch.randint(0, n, (40,), generator=torch.Generator().manual_seed(0))
        packed = linear.pack(w)
        assert torch.equal(linear.gather(ids, packed), w[ids])
        assert torch.equal(linear.gather(ids.int()[::2], packed), w[ids[::2]])
        for bad in (n, -1):
            with pytest.raises(IndexError):
                linear.gather(torch.tensor([0, bad]), packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", every("linear"))
def test_a_row_in_any_company(implementation: Implementation, dtype: torch.dtype) -> None:
    """The bits of an output row do not depend on how many rows there are or where it stands."""
    linear = usable(implementation, dtype)
    for n, k in ((300, 700), (64, 2050)):
        packed = linear.pack(random(n, k, dtype=dtype, seed=1))
        x = random(560, k, dtype=dtype, seed=2)  # more than one pass of rows (PASS)
        whole = linear.apply(x, packed, None, torch.float32)
        alone = torch.cat([linear.apply(x[i:i + 1], packed, None, torch.float32) for i in range(70)])
        assert torch.equal(whole[:70], alone)
        for rows in (*range(2, 40), 47, 48, 49, 60, 64, 100, 200, 241, 257, 300):
            assert torch.equal(linear.apply(x[3:3 + rows], packed, None, torch.float32), whole[3:3 + rows]), rows


@pytest.mark.parametrize("implementation", every("linear"))
def test_infinities_and_nan_stay_in_their_row(implementation: Implementation) -> None:
    linear = usable(implementation, torch.bfloat16)
    packed = linear.pack(random(40, 65, dtype=torch.bfloat16))
    x = random(20, 65, dtype=torch.bfloat16, seed=1)
    clean = linear.apply(x, packed)
    x[7, 64] = float("nan")
    found = linear.apply(x, packed)
    assert found[7].isnan().all()
    keep = torch.arange(20) != 7
    assert torch.equal(found[keep], clean[keep])
