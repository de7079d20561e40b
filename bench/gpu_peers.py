"""The time of exchanging a short message between GPUs, by our own kernel and by NCCL, and whether the sums agree.

usage: python bench/gpu_peers.py [--ranks 2]

Each figure is the mean of exchanges in a CUDA graph, as steps have them. NCCL's result is the reference for two ranks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable

SIZES = (2 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20)
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


def rank(index: int, ranks: int, folder: str) -> None:
    """One process's part."""
    import torch
    import torch.distributed as dist

    from penstock.parallel.axis import Place
    from penstock.parallel.group import Processes

    device = torch.device(f"cuda:{index}")
    torch.cuda.set_device(device)
    group = Processes(Place(index, ranks, folder), device)
    peers = group._peers
    if index == 0:
        print("own kernel: yes" if peers is not None else "own kernel: not here", flush=True)
    wrong = 0
    generator = torch.Generator(device).manual_seed(index)
    for turn in range(400):
        count = (1, 5, 1024, 4096, 5000, 40000, 400000)[turn % 7]
        x = torch.randn(count, device=device, generator=generator).to((torch.bfloat16, torch.float32)[turn % 2])
        wanted = x.clone()
        dist.all_reduce(wanted)
        found = group.reduce(x.clone())
        wrong += not (torch.equal(found, wanted) if ranks == 2 else torch.allclose(found, wanted, rtol=2e-2))
        gathered = group.gather(x)
        wrong += not torch.equal(gathered[index], x)
        assert torch.equal(group.gather(gathered[0])[0], group.gather(gathered[0])[-1]), "ranks have different bits"
    if index == 0:
        print(f"400 sums and gathers of 7 sizes: {wrong} differ from NCCL's", flush=True)
        print(f"{'bytes':>9} {'own us':>8} {'NCCL us':>8} {'gather':>8}", flush=True)
    for size in SIZES:
        x = torch.randn(size // 2, device=device).bfloat16()
        own = _microseconds(lambda x=x: peers.reduce(x)) if peers is not None and peers.takes(x) else float("nan")
        nccl = _microseconds(lambda x=x: dist.all_reduce(x))
        gather = _microseconds(lambda x=x: peers.gather(x)) if peers is not None and peers.takes(x) else float("nan")
        if index == 0:
            print(f"{size:9} {own:8.2f} {nccl:8.2f} {gather:8.2f}", flush=True)
    group.close()


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
