"""With how many rows products are computed: few numbers, all of whose kernels are loaded before the first request comes."""

from __future__ import annotations

from collections.abc import Iterator

_MULTIPLES = ((64, 1), (256, 16), (512, 32), (1024, 64), (8192, 128))
"""(up to, multiple of). Tiles have such sizes, so that a product of a few rows more takes no longer."""


def fitted(count: int) -> int:
    """The number of rows that is computed in place of `count`, the least that is not below. A library picks one of many kernels
    by it, and one that is used for the first time is loaded only once all that is enqueued on the device is done."""
    multiple = next((multiple for most, multiple in _MULTIPLES if count <= most), 512)
    return -(-count // multiple) * multiple


def fitted_sizes(most: int) -> Iterator[int]:
    """All that `fitted` gives for 1 to `most`."""
    size = fitted(1)
    while size < fitted(most):
        yield size
        size = fitted(size + 1)
    yield size
