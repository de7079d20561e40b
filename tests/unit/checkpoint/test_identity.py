"""The hash of weights: every byte counts, equal files are equal wherever they lie, and the hub's own hashes are taken."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from pathlib import Path

import pytest

from penstock.checkpoint import Fingerprint, identity as module, sample


def write(folder: Path, data: bytes, name: str = "model.safetensors") -> Path:
    """A file of one tensor of these bytes."""
    header = json.dumps({"embedding": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder / name


def hashed(folder: Path) -> str:
    found = Fingerprint(folder, "auto", 0)
    found.start()
    until = time.monotonic() + 10
    while found.value is None and not found.failed and time.monotonic() < until:
        time.sleep(0.001)
    assert found.value is not None, found.failed
    return found.value


def test_any_byte_changes_it(tmp_path: Path) -> None:
    rng = random.Random(3)
    data = bytearray(rng.randbytes(300_000))
    path = write(tmp_path, data)
    first, offset = hashed(tmp_path), path.stat().st_size - len(data)
    assert hashed(tmp_path) == first and sample(tmp_path, "auto", 0) == sample(tmp_path, "auto", 0)
    seen = {first}
    for at in [0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(40))]:
        whole = bytearray(path.read_bytes())
        whole[offset + at] ^= 1 << rng.randrange(8)
        path.write_bytes(whole)
        seen.add(hashed(tmp_path))
    assert len(seen) == 44


def test_it_is_the_files_own_hash_whatever_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", random.Random(1).randbytes(100_001))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    first = hashed(tmp_path / "a")
    assert first == module.combine([path.name], [digest])
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    assert hashed(tmp_path / "a") == first
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert hashed(tmp_path / "b") == first, "a copy elsewhere is the same model"


def test_the_hub_has_hashed_it_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the hub cache is a link to a blob that is named by its SHA-256; the result is as if it had been hashed."""
    path = write(tmp_path / "plain", b"abc" * 1000)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shutil.copy(path, blobs / digest)
    (snapshot / path.name).symlink_to(Path("../../blobs") / digest)
    plain = hashed(tmp_path / "plain")

    def refuse(*_: object) -> str:
        raise AssertionError("hashed although the hub has")

    monkeypatch.setattr(Fingerprint, "_hash", refuse)
    assert hashed(snapshot) == plain and Fingerprint(snapshot, "auto", 0).nbytes == 0


def test_files_that_change_meanwhile_have_no_identity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaded weights may be neither the old bytes nor the new."""
    path = write(tmp_path, b"before")
    found = Fingerprint(tmp_path, "auto", 0)
    write(tmp_path, b"behind")
    found.start()
    until = time.monotonic() + 5
    while not found.failed and time.monotonic() < until:
        assert found.value is None
    assert "changed while they were loaded" in found.failed and "cannot be identified" in caplog.text
    gone = Fingerprint(tmp_path, "auto", 0)
    path.unlink()
    gone.start()
    while not gone.failed and time.monotonic() < until:
        assert gone.value is None
    assert gone.failed


@pytest.mark.serial
def test_nobody_waits_for_it(tmp_path: Path) -> None:
    """Creating and starting take no longer for more bytes; random weights are known by their seed at once."""
    write(tmp_path, bytes(200 << 20))
    began = time.perf_counter()
    found = Fingerprint(tmp_path, "auto", 0)
    found.start()
    assert found.value is None and time.perf_counter() - began < 0.1
    found.close()
    one, two = (Fingerprint(None, "dummy", seed) for seed in (1, 2))
    one.start()
    assert one.value and one.value != two.value
