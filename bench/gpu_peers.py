"""The time of exchanging a short message between GPUs, by our own kernel in both forms and by NCCL, and whether sums agree.

usage: python bench/gpu_peers.py [--ranks 2]

One-shot sends each rank's message to all; two-shot sends it to the ranks that add up shares of it, and the sums to all. The
same for sums with their residual and norm, by one kernel. Each figure is the mean of exchanges in a CUDA graph, as steps have
them. NCCL's result is the reference for two ranks.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

SIZES = (2 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20)
_IN_GRAPH, _REPLAYS = 100, 20


def _microseconds(run: Callable[[], object]) -> float:
    """Of one of the exchanges that a graph holds."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_IN_GRAPH):
            run()
        graph.capture_end()
        graph.replay()
        stream.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(_REPLAYS):
            graph.replay()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) * 1e3 / (_IN_GRAPH * _REPLAYS)


def _forms(peers: Any, run: Callable[[], object]) -> tuple[float, float]:
    """Microseconds in one shot and in two."""
    found = []
    for shares in (math.inf, 0.0):
        peers.shares = shares
        found.append(_microseconds(run))
    peers.shares = math.inf
    return found[0], found[1]


def norms(index: int, group: Any, norm: Callable[..., Any]) -> None:
    """Sums of rows of 4096 with their norm: by one kernel in both forms, and by two after each other; whether bits agree."""
    import torch

    peers = group._peers
    generator = torch.Generator(peers._places[0][0].device).manual_seed(index)
    wrong = 0
    for turn in range(200):
        rows = (1, 3, 8, 64, 128)[turn % 5]
        x, residual = (torch.randn(rows, 4096, device=generator.device, generator=generator).bfloat16() for _ in range(2))
        residual, weight = group.gather(residual)[0].clone(), torch.ones(4096, device=generator.device).bfloat16()
        wanted = norm(group.reduce(x.clone()), residual.clone(), weight, 1e-6)
        peers.shares = (math.inf, 0.0)[turn // 5 % 2]
        found = group.add_norm(x, residual, weight, 1e-6, 0.0, norm)
        peers.shares = math.inf
        wrong += not torch.equal(found[1], wanted[1]) or not torch.allclose(found[0], wanted[0], rtol=1e-2)
    if index == 0:
        print(f"200 sums with their norms: {wrong} differ from a sum and a norm", flush=True)
        print(f"{'rows':>9} {'one-shot':>8} {'two-shot':>8} {'apart us':>8}", flush=True)
    for rows in (1, 8, 32, 64, 128, 256):
        x, residual = (torch.zeros(rows, 4096, device=generator.device).bfloat16() for _ in range(2))
        one, shares = _forms(peers, lambda x=x, r=residual: group.add_norm(x, r, weight, 1e-6, 0.0, norm))
        apart = _microseconds(lambda x=x, r=residual: norm(group.reduce(x), r, weight, 1e-6))
        if index == 0:
            print(f"{rows:9} {one:8.2f} {shares:8.2f} {apart:8.2f}", flush=True)


def rank(index: int, ranks: int, folder: str) -> None:
    """One process's part."""
    import torch
    import torch.distributed as dist

    from penstock.ops.rows_triton import add_rms_norm
    from penstock.parallel.axis import Place
    from penstock.parallel.group import Group, joined

    device = torch.device(f"cuda:{index}")
    torch.cuda.set_device(device)
    joined(Place(index, ranks, folder), device)
    group = Group(index, ranks, dist.group.WORLD, device)
    peers = group._peers
    if peers is not None:
        norms(index, group, add_rms_norm)
    if index == 0:
        print("own kernel: yes" if peers is not None else "own kernel: not here", flush=True)
    wrong = 0
    generator = torch.Generator(device).manual_seed(index)
    for turn in range(400):
        count = (1, 5, 1024, 4096, 5000, 40000, 400000)[turn % 7]
        x = torch.randn(count, device=device, generator=generator).to((torch.bfloat16, torch.float32)[turn % 2])
        wanted = x.clone()
        dist.all_reduce(wanted)
        if peers is not None:
            peers.shares = (math.inf, 0.0)[turn // 7 % 2]
        found = group.reduce(x.clone()) if peers is None else peers.reduce(x)
        wrong += not (torch.equal(found, wanted) if ranks == 2 else torch.allclose(found, wanted, rtol=2e-2))
        gathered = group.gather(x)
        wrong += not torch.equal(gathered[index], x)
        assert torch.equal(group.gather(gathered[0])[0], group.gather(gathered[0])[-1]), "ranks have different bits"
    if index == 0:
        print(f"400 sums and gathers of 7 sizes: {wrong} differ from NCCL's", flush=True)
        print(f"{'bytes':>9} {'one-shot':>8} {'two-shot':>8} {'NCCL us':>8} {'gather':>8}", flush=True)
    for size in SIZES:
        x = torch.randn(size // 2, device=device).bfloat16()
        one, two = (math.nan, math.nan) if peers is None else _forms(peers, lambda x=x: peers.reduce(x))
        nccl = _microseconds(lambda x=x: dist.all_reduce(x))
        gather = _microseconds(lambda x=x: peers.gather(x)) if peers is not None and peers.takes(x, gather=True) else math.nan
        if index == 0:
            print(f"{size:9} {one:8.2f} {two:8.2f} {nccl:8.2f} {gather:8.2f}", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.ranks, args.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--folder", folder]
        processes = [subprocess.Popen([*command, "--rank", str(one)]) for one in range(args.ranks)]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
