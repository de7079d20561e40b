"""Hostile messages for gRPC: broken ones, and texts, tensors and names that are huge or many."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.server.kserve.messages import METHODS, SERVICE, message


class Call(NamedTuple):
    """One message to one method."""

    method: str
    name: str
    data: bytes

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.method}"


def good(texts: list[bytes], **parameters: Any) -> Any:
    """A request for one token."""
    request = message("ModelInferRequest")()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)]).contents.bytes_contents.extend(texts)
    for name, value in {"max_tokens": 1, **parameters}.items():
        kind = {int: "int64_param", float: "double_param", str: "string_param", bool: "bool_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def calls(size: int = 100_000) -> Iterator[Call]:
    """Messages whose grown part has about `size` entries or bytes."""
    draw = random.Random(1)
    whole = good([b"Once"]).SerializeToString()
    for place in range(1, len(whole), 3):
        yield Call("ModelInfer", f"cut at {place}", whole[:place])
    for place in range(60):
        broken = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        yield Call("ModelInfer", f"changed {place}", bytes(broken))
    for method in METHODS:
        yield Call(method, "bytes", draw.randbytes(1000))
        yield Call(method, "nothing", b"")
        yield Call(method, "a length of 2**63", b"\x0a" + b"\xff" * 9 + b"\x01")
        yield Call(method, "groups", b"\x0b" * min(size, 100_000))
    for method in ("ModelReady", "ModelMetadata"):
        kind = message(f"{method}Request")
        for name in ("n" * size, "../../metrics", "x?y#z", "stories@\u00b2", "stories@" + "9" * 5000, "\x00", "\n" * 1000):
            yield Call(method, f"name {name[:20]!r}", kind(name=name).SerializeToString())
        yield Call(method, "a version", kind(name="stories", version="v" * size).SerializeToString())
    yield Call("ModelInfer", "a text", good([b"many words " * (size // 10)]).SerializeToString())
    yield Call("ModelInfer", "a text of broken UTF-8", good([b"\xff" * size]).SerializeToString())
    for text in (b"", b"a"):
        yield Call("ModelInfer", f"texts of {len(text)}", good([text] * size).SerializeToString())
        raw = good([])
        raw.raw_input_contents.append((struct.pack("<I", len(text)) + text) * size)
        yield Call("ModelInfer", f"raw texts of {len(text)}", raw.SerializeToString())
    for lengths in (b"\xff\xff\xff\xff", b"\x01", b"\x05\x00\x00\x00a"):
        raw = good([])
        raw.raw_input_contents.append(lengths)
        yield Call("ModelInfer", f"raw lengths {lengths!r}", raw.SerializeToString())
    many = good([b"Once"])
    many.inputs[0].shape.extend([1] * size)
    yield Call("ModelInfer", "dimensions", many.SerializeToString())
    many = good([b"Once"])
    for place in range(min(size, 20_000)):
        many.inputs.add(name=f"input{place}", datatype="BYTES")
    yield Call("ModelInfer", "inputs", many.SerializeToString())
    yield Call("ModelInfer", "parameters", good([b"Once"], **{f"field{place}": 1 for place in range(min(size, 20_000))})
               .SerializeToString())
    for value in (float("nan"), float("inf"), -1.0, 2**62, "9" * size, True):
        for name in ("temperature", "max_tokens", "stop", "n", "seed", "p" * min(size, 5000)):
            yield Call("ModelInfer", f"{name[:12]} {str(value)[:12]}", good([b"Once"], **{name: value}).SerializeToString())
