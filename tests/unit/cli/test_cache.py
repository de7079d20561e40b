"""`penstock cache`: what it says of a folder is true, and it removes what it was told to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.stores.disk import DiskStore
from penstock.stores.folder import INCOMING, SUBFOLDER, claim
from penstock.stores.record import HEADER_BYTES
from tests.unit.stores.pages import get, name, page, path_of, put, version

SIZE = 3000 + HEADER_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pages of one version, two of another; page i was last used i hours ago."""
    one, other = version(model="one"), version(model="other", dtype="bfloat16", computation="other")
    for found, numbers in ((one, range(6)), (other, range(6, 8))):
        store = DiskStore(claim(str(tmp_path)), found)
        for i in numbers:
            put(store, found, i)
            then = time.time() - 3600 * i - 10
            os.utime(path_of(store, name(i)), (then, then))
    return tmp_path


def cache(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    assert main(["cache", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = cache(capsys, "ls", str(folder))
    assert (one["model"], one["pages"], one["bytes"], one["page_size"]) == ("one", 6, 6 * SIZE, 16)
    assert (other["model"], other["dtype"], other["pages"]) == ("other", "bfloat16", 2)
    assert one["version"] == version().id.hex()
    pages = cache(capsys, "ls", str(folder), "--pages", "--version", one["version"][:6])
    assert [found["page"] for found in pages] == [f"{name(i).key.hex()}-0" for i in range(6)]
    assert main(["cache", "ls", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "6 pages" in out and "bfloat16  other" in out and "6h ago" in out


def test_stat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / SUBFOLDER / INCOMING / "1-2-3").write_bytes(b"123")
    found = cache(capsys, "stat", str(folder))
    assert found == {"versions": 2, "pages": 8, "bytes": 8 * SIZE, "tokens": 128, "incoming_files": 1, "incoming_bytes": 3,
                     "used_within": {"hour": 1, "day": 8, "week": 8}}
    assert main(["cache", "stat", str(folder)]) == 0
    assert "1 in the last hour" in capsys.readouterr().out


def test_rm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "rm", str(folder)]) == 1
    assert "--unused AGE" in capsys.readouterr().err
    other = version(dtype="bfloat16", computation="other").id.hex()
    assert cache(capsys, "rm", str(folder), "--version", other, "--unused", "6.5h")["removed_pages"] == 1
    assert cache(capsys, "rm", str(folder), "--version", other)["removed_pages"] == 1
    assert cache(capsys, "rm", str(folder), "--keep-bytes", str(4 * SIZE)) == {
        "removed_pages": 2, "removed_bytes": 2 * SIZE, "bytes": 4 * SIZE}
    store = DiskStore(claim(str(folder)), version())
    assert {entry.name for entry in store.changes()[0] if not isinstance(entry.name, str)} == {name(i) for i in range(4)}
    assert cache(capsys, "rm", str(folder), "--unused", "150m")["removed_pages"] == 1
    assert cache(capsys, "rm", str(folder), "--all")["bytes"] == 0


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(capsys, "verify", str(folder)) == {"checked": 8, "broken": []}
    store = DiskStore(claim(str(folder)), version())
    flipped = bytearray(path_of(store, name(1)).read_bytes())
    flipped[200] ^= 1
    path_of(store, name(1)).write_bytes(flipped)
    path_of(store, name(2)).write_bytes(b"")
    os.replace(path_of(store, name(3)), path_of(store, name(4)))
    (path_of(store, name(4)).parent / "README").write_text("hello")
    found = cache(capsys, "verify", str(folder), "--remove", status=1)
    assert found["checked"] == 7 and len(found["broken"]) == 3
    assert {one["fault"].split(",")[0] for one in found["broken"]} == {
        "its checksum is wrong", "it ends after 0 bytes", "it is another page"}
    assert (path_of(store, name(4)).parent / "README").read_text() == "hello"
    assert cache(capsys, "verify", str(folder)) == {"checked": 4, "broken": []}
    assert get(store, version(), 0) == page(0)


@pytest.mark.parametrize("words", [["ls", "/nowhere"], ["stat", "."], ["ls", "FOLDER", "--version", "zz"],
                                   ["rm", "FOLDER", "--unused", "5"]])
def test_what_means_nothing_is_refused(folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["cache", *[str(folder) if word == "FOLDER" else word for word in words]])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status in (1, 2)
    assert capsys.readouterr().err
