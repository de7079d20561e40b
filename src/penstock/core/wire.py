"""The messages between the engine and ranks in other processes: msgpack by msgspec, typed on both sides, never pickled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

_ARRAY = 1
"""The msgpack extension of an array: its dtype and shape, then its bytes."""


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        head = msgspec.msgpack.encode((array.dtype.str, array.shape))
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(1, "little") + head + array.tobytes())
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _extension(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"extension {code} of a message is not known")
    end = 1 + data[0]
    dtype, shape = msgspec.msgpack.decode(data[1:end], type=tuple[str, tuple[int, ...]])
    # A copy: the array may be changed, and the message's memory be reused.
    return np.frombuffer(bytearray(data[end:]), dtype).reshape(shape)


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_encoded).encode


def decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda kind, value: Path(value) if kind is Path else value,
                                   ext_hook=_extension).decode
