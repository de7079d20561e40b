"""Groups of ranks in processes, over gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_RANK = textwrap.dedent("""
    import sys
    import torch
    import torch.distributed as dist
    from penstock.parallel.axis import Place
    from penstock.parallel.group import Group, joined

    torch.set_num_threads(1)
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    joined(Place(rank, ranks, folder), torch.device("cpu"))
    group = Group(rank, ranks, dist.group.WORLD, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        everyones = torch.randn(ranks, 4 * ranks, 6, generator=torch.Generator().manual_seed(7)).to(dtype)
        total = everyones.float().sum(0) if ranks < 3 else sum(everyones.float().unbind())
        runs = [(0, 2 * ranks), (2 * ranks, 4 * ranks)]
        for share in (False, True):
            begun = [group.begin(everyones[rank, first:last].clone(), share) for first, last in runs]
            for (first, last), wait in zip(runs, begun):
                wanted = total[first:last].to(dtype)
                own = wanted.chunk(ranks)[rank] if share else wanted
                assert torch.equal(wait(), own), (dtype, share)
        begun = [group.begin_gather(everyones[rank, at]) for at in range(3)]
        for at, wait in enumerate(begun):
            assert torch.equal(wait(), everyones[:, at].flatten(0, 1))
        # Long enough that each rank adds up a share for all, if it can be divided.
        for count in (500_000 * ranks, 500_000 * ranks + 1):
            parts = torch.randn(ranks, count, generator=torch.Generator().manual_seed(8)).to(dtype)
            assert torch.equal(group.reduce(parts[rank].clone()), sum(parts.float().unbind()).to(dtype))
    dist.destroy_process_group()
    print("equal")
""")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_messages_that_travel_while_ranks_compute(ranks: int, tmp_path: Path) -> None:
    """They arrive in the order in which they are waited for, with the bits of those that are waited for at once."""
    found = [subprocess.Popen([sys.executable, "-c", _RANK, str(rank), str(ranks), str(tmp_path)], text=True,
                              stdout=subprocess.PIPE) for rank in range(ranks)]
    assert [one.communicate(timeout=100)[0].split()[-1:] for one in found] == [["equal"]] * ranks
