"""Triton's products against float64: odd sizes, strided rows, every way of cutting; interpreted where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.ops import gpu, linear_triton, rows_triton
from penstock.ops.activation import ACTIVATIONS, gated
from penstock.ops.linear_invariant import InvariantLinear, choose
from penstock.ops.linear_triton import Tile, TritonLinear, launch
from tests.ops.interpreter import DEVICE, DTYPES, interpreter
from tests.ops.kernels import close, random

HALF = [dtype for dtype in DTYPES if dtype != torch.float32]
FEW = [Tile(1, 8, 64, stages=3), Tile(1, 4, 128, warps=2, stages=1, ahead=3)]
TILES = [Tile(16, 32, 64), Tile(16, 64, 32, split=3, swap=True), Tile(32, 16, 64, split=2), Tile(64, 32, 64, group=4),
         Tile(32, 32, 64, split=2, joined=True)]


def matrix(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return random(*shape, seed=seed).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", FEW + TILES, ids=lambda tile: "-".join(map(str, tile)))
def test_product(tile: Tile, dtype: torch.dtype) -> None:
    """Sizes that no block divides, rows that do not lie together, bias, logits in float32, and the gated form."""
    for rows, n, k in [(1, 33, 160), (1, 7, 512)] if tile.tall == 1 else [(3, 70, 352), (19, 33, 80), (70, 64, 64)]:
        x = matrix(rows, k + 32, dtype=dtype, seed=1)[:, 16:16 + k]
        weight, pair = (TritonLinear.pack(matrix(size, k, dtype=dtype, seed=size)) for size in (n, 2 * n))
        bias = matrix(2 * n, dtype=dtype, seed=3)
        exact, scale = x.double() @ weight.data.double().T, k ** 0.5
        close(launch(tile, x, weight, None, dtype), exact, scale)
        close(launch(tile, x, weight, bias[:n], torch.float32), exact + bias[:n].double(), scale, factor=4)
        if tile.joined:
            continue
        wanted = gated(x.double() @ pair.data.double().T + bias.double(), "silu")
        close(launch(tile, x, pair, bias, dtype, "silu"), wanted, scale, factor=4)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("tile", [FEW[0], TILES[0]], ids=["one row", "few rows"])
def test_activation_within_a_product(tile: Tile, kind: str) -> None:
    """The same, to the bit, as the product followed by the operation: sums are rounded before the activation."""
    x, pair = matrix(tile.tall, 160, dtype=torch.float16, seed=1), matrix(80, 160, dtype=torch.float16, seed=2)
    weight = TritonLinear.pack(pair)
    found = launch(tile, x, weight, None, torch.float16, kind)
    apart = launch(tile, x, weight, None, torch.float16)
    assert torch.equal(found, rows_triton.gated(apart, kind))
    close(found, gated(x.double() @ pair.double().T, kind), 160 ** 0.5, factor=4)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_boxed_product(dtype: torch.dtype) -> None:
    """Blocks that reach beyond all three matrices, and more tiles than programs."""
    for rows, n, k in ((1, 8, 16), (70, 200, 352), (133, 136, 96)):
        x = matrix(rows, k + 32, dtype=dtype, seed=1)[:, 16:16 + k]
        weight, bias = TritonLinear.pack(matrix(n, k, dtype=dtype, seed=2)), matrix(n, dtype=dtype, seed=3)
        wanted, tile = x.double() @ weight.data.double().T, Tile(64, 64, 64, group=2, boxed=True)
        close(launch(tile, x, weight, None, dtype), wanted, k ** 0.5)
        close(launch(tile, x, weight, bias, torch.float32), wanted + bias.double(), k ** 0.5, factor=4)
        pair, biases = TritonLinear.pack(matrix(2 * n, k, dtype=dtype, seed=4)), matrix(2 * n, dtype=dtype, seed=5)
        wanted = gated(x.double() @ pair.data.double().T + biases.double(), "silu")
        close(launch(tile, x, pair, biases, dtype, "silu"), wanted, k ** 0.5, factor=4)


def in_order(builder: object, a: Any, b: Any, total: Any, precision: object, imprecise: object) -> Any:
    """The interpreter's product of tiles, but along K in order as in a GPU: NumPy's own order depends on a tile's shape."""
    found = total.data.copy()
    for i in range(a.data.shape[1]):
        found += a.data[:, i:i + 1].astype(np.float32) * b.data[i:i + 1].astype(np.float32)
    return interpreter.TensorHandle(found, total.dtype.scalar)


WINDOWS = ((0, 1), (17, 18), (5, 7), (3, 60), (1, 65), (100, 230), (299, 300))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [160, 77, 515])
def test_a_row_in_any_company(k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a row are the same alone, among others, anywhere. x's rows are strided, and aligned to nothing."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)
    n = 40 if DEVICE.type == "cpu" else 400
    x = matrix(300, k + 5, dtype=dtype, seed=1)[:, 3:3 + k]
    weight, bias = InvariantLinear.pack(matrix(2 * n, k, dtype=dtype, seed=2)), matrix(2 * n, dtype=dtype, seed=3)
    whole, whole_gated = InvariantLinear.apply(x, weight, bias, torch.float32), InvariantLinear.gated(x, weight, None, "silu")
    close(whole, x.double() @ weight.data.double().T + bias.double(), k ** 0.5, factor=4)
    for begin, end in WINDOWS:
        assert torch.equal(InvariantLinear.apply(x[begin:end], weight, bias, torch.float32), whole[begin:end]), (begin, end)
        assert torch.equal(InvariantLinear.gated(x[begin:end], weight, None, "silu"), whole_gated[begin:end]), (begin, end)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("sizes", [(40, 160, 1), (72, 1040, 4), (33, 605, 2), (7, 1250, 4)], ids=str)
def test_every_tile_sums_alike(sizes: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile that some number of rows chooses gives the same bits; K undivided, divided among programs, or within one."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)
    n, k, split = sizes
    x, bias = matrix(130, k, dtype=dtype, seed=1), matrix(2 * n, dtype=dtype, seed=3)
    weight, pair = (TritonLinear.pack(matrix(size, k, dtype=dtype, seed=2)) for size in (n, 2 * n))
    boxes = (False, True) if n % 8 == 0 and k % 16 == 0 and gpu.capability(DEVICE)[0] != 8 else (False,)

    def chosen(gated: bool) -> dict[Tile, int]:
        """Each tile, and the least number of rows that chooses it."""
        return {choose(1 << i, n, k, dtype, gated, boxed): min(1 << i, len(x)) for i in range(14, -1, -1) for boxed in boxes}

    whole = launch(Tile(16, 32, 64, split), x, weight, bias[:n], torch.float32)
    close(whole, x.double() @ weight.data.double().T + bias[:n].double(), k ** 0.5, factor=4)
    for tile, rows in chosen(False).items():
        assert tile.split == split, "the matrix alone is to say how K is divided"
        for count in {rows, len(x)}:
            assert torch.equal(launch(tile, x[:count], weight, bias[:n], torch.float32), whole[:count]), (tile, count)
    whole = launch(Tile(16, 32, 64), x, pair, bias, dtype, "silu")
    for tile, rows in chosen(True).items():
        for count in {rows, len(x)}:
            assert torch.equal(launch(tile, x[:count], pair, bias, dtype, "silu"), whole[:count]), (tile, count)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="real sizes need a GPU")
@pytest.mark.parametrize(("dtype", "n", "k"), [(torch.bfloat16, 6144, 4096), (torch.bfloat16, 1024, 3072),
                                               (torch.float16, 1024, 2048)], ids=str)
def test_a_row_among_thousands(dtype: torch.dtype, n: int, k: int) -> None:
    """Every tile that `choose` knows, at real sizes: 1 to 8,192 rows."""
    x, weight = matrix(8192, k, dtype=dtype, seed=1), InvariantLinear.pack(matrix(n, k, dtype=dtype, seed=2))
    whole, whole_gated = InvariantLinear.apply(x, weight), InvariantLinear.gated(x, weight, None, "silu")
    for count in (1, 2, 16, 17, 33, 64, 65, 128, 200, 256, 500, 1000, 3000, 8191):
        for begin in {0, 8192 - count, (8192 - count) // 3}:
            part = x[begin:begin + count]
            assert torch.equal(InvariantLinear.apply(part, weight), whole[begin:begin + count]), (n, count, begin)
            assert torch.equal(InvariantLinear.gated(part, weight, None, "silu"), whole_gated[begin:begin + count])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="cuBLAS serves here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whatever_serves(dtype: torch.dtype) -> None:
    """`apply` and `gated` over rows on both sides of every boundary, and sizes that nothing divides."""
    for n, k in ((4096, 8192), (1000, 1088), (130, 48), (100, 77)):
        weight, bias = TritonLinear.pack(matrix(2 * n, k, dtype=dtype, seed=2)), matrix(2 * n, dtype=dtype, seed=3)
        exact = weight.data.double()
        for rows in (0, 1, 16, 33, 65, 300):
            x = matrix(rows, k, dtype=dtype, seed=rows)
            wanted = x.double() @ exact.T
            close(TritonLinear.apply(x, weight, bias, torch.float32), wanted + bias.double(), k ** 0.5, factor=4)
            close(TritonLinear.gated(x, weight, bias, "silu"), gated(wanted + bias.double(), "silu"), k ** 0.5, factor=4)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_split_tiles_in_a_graph_leave_their_tickets() -> None:
    """Replays of a graph give equal bits, and programs of a split tile leave the counters as they were."""
    tile, x = Tile(16, 64, 128, split=4), matrix(9, 4096, dtype=torch.bfloat16, seed=1)
    weight = TritonLinear.pack(matrix(1024, 4096, dtype=torch.bfloat16, seed=2))
    first = launch(tile, x, weight, None, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [launch(tile, x, weight, None, torch.float32) for _ in range(20)]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outs)
    assert not linear_triton._tickets(x.device).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gather(dtype: torch.dtype) -> None:
    weight = TritonLinear.pack(matrix(33, 7, dtype=dtype, seed=1))
    ids = torch.tensor([0, 32, 5, 5], device=DEVICE)
    assert torch.equal(TritonLinear.gather(ids, weight), weight.data[ids])
    assert torch.equal(TritonLinear.gather(ids.int(), weight), weight.data[ids])
