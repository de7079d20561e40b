"""Host memory that can be pinned, whatever lies beside it."""

from __future__ import annotations

import mmap

import torch

from penstock.worker.arena import own_pages


def test_no_page_is_shared() -> None:
    """Small tensors of the usual kind lie side by side on one page; these do not, and are as long as asked."""
    found = [own_pages(size) for size in (1, 100, mmap.PAGESIZE, 5000, 300_000, 0)]
    taken: set[int] = set()
    for tensor in found:
        first = tensor.data_ptr()
        pages = {(first + at) // mmap.PAGESIZE for at in range(tensor.nbytes)}
        assert not tensor.nbytes or first % mmap.PAGESIZE == 0
        assert not taken & pages
        taken |= pages
    assert [len(tensor) for tensor in found] == [1, 100, mmap.PAGESIZE, 5000, 300_000, 0]


def test_it_lives_as_long_as_its_views() -> None:
    view = own_pages(4 * mmap.PAGESIZE).view(torch.float32)[10:]
    view.fill_(1.5)
    assert view.sum().item() == 1.5 * len(view)
