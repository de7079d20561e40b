"""Hostile uploads to /v1/files: forms of huge names, many parts, parts without end. None is large and right at once, so that
what a server stores stays small."""

from __future__ import annotations

from collections.abc import Iterator

from tests.hostile.bodies import Case

PATH = "/v1/files"
MARK = "mark"
HEAD = b"--mark\r\nContent-Disposition: form-data; "
PURPOSE = HEAD + b'name="purpose"\r\n\r\nbatch\r\n'
FILE = HEAD + b'name="file"; filename="a.jsonl"\r\n\r\n{}\r\n'
END = b"--mark--\r\n"
SIZES = (100, 4096, 5000, 100_000)


def forms(factor: int = 1) -> Iterator[Case]:
    """The uploads; the largest repeats its pattern 100,000 times `factor`."""
    for size in (*SIZES, 100_000 * factor):
        for name, body in _bodies(size):
            yield Case(PATH, f"{name} x {size}", body, f"multipart/form-data; boundary={MARK}")
    for more in ("", "; boundary=", "; boundary=" + "b" * 5000, "; boundary=a", '; boundary="mark', "; boundary=\xff"):
        yield Case(PATH, f"the type{more[:20]}", (b"\r\n--a" * 20_000 * factor) + FILE + END, f"multipart/form-data{more}")


def _bodies(size: int) -> Iterator[tuple[str, bytes]]:
    long = b"n" * size
    yield "a file name", PURPOSE + HEAD + b'name="file"; filename="' + long + b'"\r\n\r\n{}\r\n' + END
    yield "a field name", PURPOSE + FILE + HEAD + b'name="' + long + b'"\r\n\r\n{}\r\n' + END
    yield "names in one head", PURPOSE + HEAD + b'name="file"; ' * size + b"\r\n\r\n{}\r\n" + END
    yield "open quotes", PURPOSE + HEAD + b'name="file'[:9] * size + b"\r\n\r\n{}\r\n" + END
    yield "a head without end", PURPOSE + FILE + HEAD + b'name="more"; ' + long
    yield "a part without end", PURPOSE + HEAD + b'name="file"\r\n\r\n' + long
    yield "parts", PURPOSE + FILE * size + END
    yield "parts without a name", (PURPOSE + FILE + b"--mark\r\n\r\n\r\n\r\n" * size + END)
    yield "marks", b"\r\n--mark" * size
    yield "ends", PURPOSE + FILE + END * size
    yield "a purpose", FILE + HEAD + b'name="purpose"\r\n\r\n' + long + b"\r\n" + END
    yield "a purpose of bytes", FILE + HEAD + b'name="purpose"\r\n\r\n' + b"\xff" * size + b"\r\n" + END
    for digits in (b"9" * size, "\u00b2".encode("latin-1") * min(size, 5), b"-" + b"1" * size, b"3600.0"):
        yield "an age", PURPOSE + FILE + HEAD + b'name="expires_after[seconds]"\r\n\r\n' + digits + b"\r\n" + END
    yield "bytes", bytes(place * 37 % 251 for place in range(min(size, 4096)))
