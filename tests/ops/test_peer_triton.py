"""The kernel that exchanges short messages between GPUs, as one rank sees it: its peers have pushed their parts before.

Between real GPUs: bench/gpu_peers.py.
"""

from __future__ import annotations

import pytest
import torch

from penstock.ops.norm import rms_norm
from penstock.parallel.peer import MOST, RUN, Peers
from tests.ops.interpreter import DEVICE, DTYPES

_ROOM = 4 * RUN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rank", "count"), [(2, 1, 5), (3, 0, 2 * RUN + 7)])
def test_sums_and_gathers_what_peers_have_pushed(size: int, rank: int, count: int, dtype: torch.dtype) -> None:
    memories = [torch.zeros(Peers.nbytes(size), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], DEVICE)
    flags = memories[rank][2 * size * MOST * _ROOM:][:4 * size * MOST].view(torch.int32).view(size, MOST)
    data = memories[rank][:2 * size * MOST * _ROOM].view(dtype).view(2, size, MOST, _ROOM // dtype.itemsize)
    for epoch in (1, 2, 3):  # both halves, and one again
        parts = torch.randn(size, count, device=DEVICE).to(dtype)
        for source in range(size):
            if source != rank:
                runs = torch.nn.functional.pad(parts[source], (0, -count % RUN)).view(-1, RUN)
                data[epoch % 2, source, :len(runs), :RUN] = runs
                flags[source] = epoch
        if epoch == 2:
            assert torch.equal(peers.gather(parts[rank].clone()), parts)
        else:
            wanted = parts[0].float()
            for part in parts[1:]:
                wanted = wanted + part.float()
            assert torch.equal(peers.reduce(parts[rank].clone()), wanted.to(dtype))
        other = (rank + 1) % size
        there = memories[other][:2 * size * MOST * _ROOM].view(dtype).view(2, size, MOST, _ROOM // dtype.itemsize)
        pushed = there[epoch % 2, rank, :-(-count // RUN), :RUN].flatten()[:count]
        assert torch.equal(pushed, parts[rank]), "the others were given this rank's part"
        told = memories[other][2 * size * MOST * _ROOM:][:4 * size * MOST].view(torch.int32).view(size, MOST)
        assert told[rank, :-(-count // RUN)].unique().tolist() == [epoch]


def test_only_short_messages_are_taken() -> None:
    peers = Peers(0, 2, [0, 0], torch.device("cpu"))
    assert peers.takes(torch.zeros(4096, dtype=torch.bfloat16))
    assert not peers.takes(torch.zeros(1 << 20, dtype=torch.bfloat16))
    assert not peers.takes(torch.zeros(4, 8).t()) and not peers.takes(torch.zeros(0)) and not peers.takes(torch.zeros(3).byte())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rank", "rows", "width"), [(2, 1, 3, 160), (2, 0, 1, 64), (3, 1, 2, 96)])
def test_a_sum_with_its_norm(size: int, rank: int, rows: int, width: int, dtype: torch.dtype) -> None:
    """Bits are those of the sum and a norm after it; whatever else the memory is used for, it is not disturbed."""
    memories = [torch.zeros(Peers.nbytes(size), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], DEVICE)
    at = 2 * size * MOST * _ROOM + 4 * size * MOST
    data = [memory[at:at + 2 * size * (1 << 21)].view(dtype).view(2, size, -1) for memory in memories]
    flags = [memory[at + 2 * size * (1 << 21):].view(torch.int32).view(size, MOST) for memory in memories]
    weight = torch.randn(width, device=DEVICE).to(dtype)
    for epoch in (1, 2, 3):
        parts = torch.randn(size, rows, width, device=DEVICE).to(dtype)
        residual = torch.randn(rows, width, device=DEVICE).to(dtype)
        for source in range(size):
            if source != rank:
                data[rank][epoch % 2, source, :rows * width] = parts[source].flatten()
                flags[rank][source, :rows] = epoch
        wanted = parts[0].float()
        for part in parts[1:]:
            wanted = wanted + part.float()
        stream = (wanted.to(dtype).float() + residual.float()).to(dtype)
        assert peers.takes_rows(parts[rank], residual)
        out = peers.add_norm(parts[rank].clone(), residual, weight, 1e-6, 1.0)
        assert torch.equal(residual, stream)
        close = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out, rms_norm(stream, weight, 1e-6, 1.0), rtol=close, atol=close)
        for other in {*range(size)} - {rank}:
            assert torch.equal(data[other][epoch % 2, rank, :rows * width], parts[rank].flatten())
            assert flags[other][rank, :rows].tolist() == [epoch] * rows
        assert not data[rank][epoch % 2, rank].any(), "a rank keeps its own part to itself"
        assert not memories[rank][:at].any(), "short messages have memory of their own"
