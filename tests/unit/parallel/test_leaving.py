"""A rank leaves its step when others are lost, with stand-ins for the GPU: on cards it was measured (decision 0271)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.parallel import peer
from penstock.parallel.mesh import Mesh
from penstock.parallel.peer import Memory, Shared


def test_graphs_are_dropped_once_kernels_have_ended_and_before_the_abort_has(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    aborting, dropped = threading.Event(), threading.Event()

    def abort() -> None:
        aborting.set()
        # NCCL waits so for graphs that hold its kernels.
        assert dropped.wait(10)
        said.append("aborted")

    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", abort)

    class Stream:
        def query(self) -> bool:
            return aborting.is_set() and said[-4:] == [0, 1, 2, 3]

    def drop() -> None:
        said.append("dropped")
        dropped.set()

    group: Any = SimpleNamespace(release=said.append, close=lambda: said.append("closed"))
    mesh = Mesh(tensor=group, end=lambda: said.append("ended as if all lived"))
    stream: Any = Stream()
    mesh.leave(stream, drop)
    assert said == [0, 1, 2, 3, "dropped", "aborted", "closed"]


class Driver:
    """CUDA's driver, whose memory is numbers."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[str] = []
        self.refuses = refuses

    def __call__(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == self.refuses:
            raise RuntimeError(f"{name} failed with CUDA's error 201")
        if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
            arguments[0]._obj.value = 4096 * len(self.calls)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(peer, "_call", found)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(Memory, "_left", {})
    return found


def test_memory_is_kept_for_the_next_group_of_its_size(driver: Driver) -> None:
    device = torch.device("cpu")
    first = Memory.of(1000, device)
    addresses = first.open(1, [bytes([1] * 64), first.handle, bytes([3] * 64)])
    assert len(set(addresses)) == 3 and addresses[1] == first.address.value
    assert driver.calls.count("cuIpcOpenMemHandle_v2") == 2, "its own is not mapped"
    other = Memory.of(1000, device)
    assert other is not first
    first.close()
    assert driver.calls.count("cuIpcCloseMemHandle") == 2 and "cuMemFree_v2" not in driver.calls
    assert Memory.of(2000, device) is not first and Memory.of(1000, device) is first
    assert driver.calls[-1] == "cuMemsetD8_v2", "it is cleared again"


@pytest.mark.parametrize("refused", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", ""])
def test_no_rank_uses_memory_that_one_cannot_map(driver: Driver, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`refused`: by this rank's GPU; else another rank cannot. All ranks agree, and none waits for one that has given up."""
    driver.refuses = refused
    said: list[bytes] = []

    def gathered(own: bytes, size: int, _device: torch.device, _group: Any) -> list[bytes]:
        said.append(own)
        return [own, bytes(own) if refused else bytes(len(own))] if len(said) > 1 else [own, bytes([9] * 64)]

    monkeypatch.setattr(peer, "_gathered", gathered)
    with pytest.raises(RuntimeError, match=f"{refused} failed" if refused else "another rank's GPU cannot"):
        Shared(0, 2, torch.device("cpu"), None)
    assert said[1:] == [bytes([not refused])]
    assert "cuIpcCloseMemHandle" not in driver.calls or not refused
