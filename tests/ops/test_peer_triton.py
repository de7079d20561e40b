"""The kernel that exchanges short messages between GPUs: as one rank sees it, whose peers have pushed their parts before, and
between processes that share memory.

Between real GPUs: bench/gpu_peers.py.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from penstock.ops.norm import rms_norm
from penstock.parallel.peer import MOST, ROOM, RUN, Peers
from tests.ops.interpreter import DEVICE, DTYPES


def parts_of(memory: torch.Tensor, size: int, dtype: torch.dtype, rows: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's places [2, size, elements] and flags [size, MOST] for messages in runs, or in rows."""
    half = memory.chunk(2)[rows]
    data, flags = half.split([2 * size * ROOM, 4 * size * MOST])
    return data.view(dtype).view(2, size, -1), flags.view(torch.int32).view(size, MOST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rank", "count"), [(2, 1, 5), (3, 0, 2 * RUN + 7)])
def test_sums_and_gathers_what_peers_have_pushed(size: int, rank: int, count: int, dtype: torch.dtype) -> None:
    memories = [torch.zeros(Peers.nbytes(size), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], DEVICE)
    data, flags = parts_of(memories[rank], size, dtype)
    for epoch in (1, 2, 3):  # both halves, and one again
        parts = torch.randn(size, count, device=DEVICE).to(dtype)
        for source in range(size):
            if source != rank:
                data[epoch % 2, source, :count] = parts[source]
                flags[source] = epoch
        if epoch == 2:
            assert torch.equal(peers.gather(parts[rank].clone()), parts)
        else:
            wanted = parts[0].float()
            for part in parts[1:]:
                wanted = wanted + part.float()
            assert torch.equal(peers.reduce(parts[rank].clone()), wanted.to(dtype))
        there, told = parts_of(memories[(rank + 1) % size], size, dtype)
        assert torch.equal(there[epoch % 2, rank, :count], parts[rank]), "the others were given this rank's part"
        assert told[rank, :-(-count // RUN)].unique().tolist() == [epoch]


def test_only_short_messages_are_taken() -> None:
    peers = Peers(0, 2, [0, 0], torch.device("cpu"))
    assert peers.takes(torch.zeros(4096, dtype=torch.bfloat16))
    assert not peers.takes(torch.zeros(1 << 20, dtype=torch.bfloat16))
    assert not peers.takes(torch.zeros(4, 8).t()) and not peers.takes(torch.zeros(0)) and not peers.takes(torch.zeros(3).byte())
    half = torch.zeros(1 << 20, dtype=torch.bfloat16)
    four = Peers(0, 4, [0] * 4, torch.device("cpu"))
    assert four.takes(half) and not four.takes(half, gather=True) and not four.takes(torch.zeros(1 + (1 << 19)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "count"), [(0, 5), (2, 3 * RUN + 7)])
def test_sums_in_shares(rank: int, count: int, dtype: torch.dtype) -> None:
    """A rank gets the others' values of its runs and gives the sums to all; those of other runs it gives to their ranks."""
    size = 3
    memories = [torch.zeros(Peers.nbytes(size), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], DEVICE)
    peers.shares = 0
    data, flags = zip(*(parts_of(memory, size, dtype) for memory in memories), strict=True)
    data = [one.view(2, size, -1, RUN) for one in data]
    runs = -(-count // RUN)
    for epoch in (1, 2, 3):
        parts = torch.randn(size, count, device=DEVICE).to(dtype)
        total = sum(parts.float().unbind()).to(dtype)  # type: ignore[union-attr]
        padded, sums = (torch.nn.functional.pad(one, (0, -count % RUN)).unflatten(-1, (runs, RUN)) for one in (parts, total))
        for run in range(runs):
            adds = run % size
            for source in {*range(size)} - {rank} if adds == rank else {adds}:
                data[rank][epoch % 2, source, run] = padded[source, run] if adds == rank else sums[run]
                flags[rank][source, run] = epoch
        assert torch.equal(peers.reduce(parts[rank].clone()), total)
        for run in range(runs):
            adds = run % size
            for other in {*range(size)} - {rank}:
                told = adds in (rank, other)
                assert (flags[other][rank, run] == epoch) == told
                if told:
                    assert torch.equal(data[other][epoch % 2, rank, run], sums[run] if adds == rank else padded[rank, run])


_RANK = textwrap.dedent("""
    import math
    import sys
    import torch
    import tests.ops.interpreter
    from penstock.ops.norm import rms_norm
    from penstock.parallel.peer import Peers

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    memories = [torch.from_file(f"{folder}/{one}", shared=True, size=Peers.nbytes(size), dtype=torch.uint8)
                for one in range(size)]
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], torch.device("cpu"))
    drawn = torch.Generator().manual_seed(size)
    for turn in range(30):
        # All ranks draw the same: forms in any order, of messages of any length, over the same places.
        count, kind, shares = (int(torch.randint(most, (), generator=drawn)) for most in (4000, 3, 2))
        parts = torch.randn(size, 1 + count, generator=drawn).half()
        peers.shares = math.inf if shares else 0.0
        if kind == 0:
            assert torch.equal(peers.gather(parts[rank].clone()), parts), turn
        elif kind == 1:
            assert torch.equal(peers.reduce(parts[rank].clone()), sum(parts.float().unbind()).half()), (turn, shares)
        else:
            rows = parts.repeat(1, 160)[:, :160 * (1 + count % 7)].view(size, -1, 160).contiguous()
            residual = torch.randn(rows.shape[1:], generator=drawn).half()
            stream = (sum(rows.float().unbind()).half().float() + residual.float()).half()
            out = peers.add_norm(rows[rank].clone(), residual, torch.ones(160).half(), 1e-6, 0.0)
            assert torch.equal(residual, stream), (turn, shares)
            torch.testing.assert_close(out, rms_norm(stream, torch.ones(160).half(), 1e-6), rtol=2e-3, atol=2e-3)
    print("equal")
""")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="processes share memory of the host")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_share_memory(size: int, tmp_path: Path) -> None:
    """Sums and gathers in one shot and in two, in any order, with the same bits on every rank."""
    for rank in range(size):
        with (tmp_path / str(rank)).open("wb") as file:
            file.truncate(Peers.nbytes(size))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "OMP_NUM_THREADS": "1"}
    found = [subprocess.Popen([sys.executable, "-c", _RANK, str(rank), str(size), str(tmp_path)], text=True, env=environment,
                              stdout=subprocess.PIPE) for rank in range(size)]
    try:
        assert [one.communicate(timeout=100)[0].split()[-1:] for one in found] == [["equal"]] * size
    finally:
        for one in found:
            one.kill()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a thread of the host writes to memory")
@pytest.mark.parametrize("shares", [0.0, math.inf])
def test_a_wait_for_lost_ranks_is_ended(shares: float) -> None:
    """By flags that the host writes. Parts that never came count as zeros, so that tokens of a step to discard are tokens."""
    size, rank, count = 3, 0, RUN + 5
    memories = [torch.full((Peers.nbytes(size),), 0x7F, dtype=torch.uint8) for _ in range(size)]
    flags = [parts_of(memories[rank], size, torch.float32, rows)[1] for rows in (False, True)]
    for one in flags:
        one.zero_()
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], DEVICE)
    peers.shares = shares

    def end() -> None:
        time.sleep(0.3)
        for one in flags:
            one.fill_(1 << 30)

    thread = threading.Thread(target=end)
    thread.start()
    x = torch.randn(count)
    began = time.monotonic()
    total = peers.reduce(x.clone())
    assert time.monotonic() - began > 0.2
    thread.join()
    assert torch.equal(total[:RUN], x[:RUN])
    assert torch.equal(total[RUN:], x[RUN:] if shares else torch.zeros(count - RUN))
    gathered = peers.gather(torch.arange(7, dtype=torch.int32))
    assert gathered.tolist() == [[*range(7)], [0] * 7, [0] * 7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rank", "rows", "width"), [(2, 1, 3, 160), (2, 0, 1, 64), (3, 1, 2, 96)])
def test_a_sum_with_its_norm(size: int, rank: int, rows: int, width: int, dtype: torch.dtype) -> None:
    """Bits are those of the sum and a norm after it; whatever else the memory is used for, it is not disturbed."""
    memories = [torch.zeros(Peers.nbytes(size), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    peers = Peers(rank, size, [memory.data_ptr() for memory in memories], DEVICE)
    data, flags = zip(*(parts_of(memory, size, dtype, rows=True) for memory in memories), strict=True)
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
        assert not memories[rank].chunk(2)[0].any(), "short messages have memory of their own"
