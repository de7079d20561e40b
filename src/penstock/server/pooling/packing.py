"""Vectors as bytes, in the number formats that vLLM's pooling routes offer. Without torch: 8-bit formats by tables."""

import functools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]

_SMALL = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}
"""Bits of the mantissa, bias of the exponent, code of the largest finite number (OCP's 8-bit formats, revision 1.0)."""


def packed(vector: Floats, dtype: DType, endianness: str) -> bytes:
    """Finite numbers rounded to nearest, ties to even; beyond an 8-bit format's range its largest."""
    order = {"native": "=", "little": "<", "big": ">"}[endianness]
    if dtype in _SMALL:
        return _codes(np.abs(vector), dtype, np.signbit(vector)).tobytes()
    if dtype != "bfloat16":
        return vector.astype(f"{order}f{4 if dtype == 'float32' else 2}").tobytes()
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(f"{order}u2").tobytes()


def _codes(sizes: Floats, dtype: str, negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    middles = _middles(dtype)
    codes = np.searchsorted(middles, sizes)
    # In the middle of two the even code is meant.
    codes += (codes & 1) & (middles[np.minimum(codes, len(middles) - 1)] == sizes)
    return (codes | negative * 0x80).astype(np.uint8)


@functools.cache
def _middles(dtype: str) -> npt.NDArray[Any]:
    """The middles between each two neighbours of a format's numbers that are not negative, in the order of their codes."""
    mantissa, bias, largest = _SMALL[dtype]
    codes = np.arange(largest + 1)
    exponent, fraction = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    numbers = np.where(exponent > 0, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))
    return (numbers[1:] + numbers[:-1]) / 2
