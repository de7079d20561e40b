"""GEMM row buckets: steps are padded to few sizes, so that every kernel that cuBLAS may pick is loaded at start."""

from collections.abc import Iterator

_MULTIPLES = ((64, 1), (256, 16), (512, 32), (1024, 64), (8192, 128))
"""(up to, multiple of). GEMM tiles have such sizes, so that a few rows of padding cost nothing."""


def fitted(count: int) -> int:
    """The smallest bucket that holds `count` rows. cuBLAS picks kernels by it, whose first use synchronises the device."""
    multiple = next((multiple for most, multiple in _MULTIPLES if count <= most), 512)
    return -(-count // multiple) * multiple


def fitted_sizes(most: int) -> Iterator[int]:
    """All buckets that `fitted` returns for 1 to `most` rows."""
    size = fitted(1)
    while size < fitted(most):
        yield size
        size = fitted(size + 1)
    yield size
