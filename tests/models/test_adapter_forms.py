"""Adapters whose files have one header are read through the memory of the first: the same bits, the same refusals."""

from __future__ import annotations

import os
import time
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import models
from penstock.canary import model_folder
from penstock.core.errors import ModelError
from penstock.core.files import read_json
from penstock.models import adapters
from penstock.models.adapters import AdapterReader
from penstock.parallel.axis import Place
from tests.system.adapters import made

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def reader(dtype: torch.dtype, place: Place | None = None) -> AdapterReader:
    config = read_json(model_folder() / "config.json")
    return AdapterReader(models.describe(config), place or Place(), models.family_of(config)[1].RULES, dtype, 16,
                         lambda *_: torch.ones(1))


def converted(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Stores an adapter's matrices in another type."""
    found = {name: one.to(dtype) for name, one in load_file(folder / adapters.WEIGHTS).items()}
    save_file(found, folder / adapters.WEIGHTS)
    return found


def refuse(*_: object) -> None:
    raise AssertionError("packed tensor by tensor")


@pytest.mark.parametrize("alpha", [3, 5, 6])
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_known_form_gives_the_same_bits(alpha: int, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (made(tmp_path / str(seed), seed, config={"lora_alpha": alpha}) for seed in (1, 2))
    tensors = [converted(folder, stored) for folder in (first, second)][1]
    alone = reader(dtype).read(second)
    reads = reader(dtype)
    before = reads.read(first)
    if alpha == 3 or dtype is torch.float32 or (alpha == 6 and dtype in (stored, torch.bfloat16)):
        monkeypatch.setattr(adapters._Form, "_packed", refuse)
    for _ in range(2):
        name, found = reads.read(second)
        assert name == alone[0] != before[0]
        assert found.matrices.places == alone[1].matrices.places
        assert torch.equal(found.matrices.facts, alone[1].matrices.facts)
        assert torch.equal(found.matrices.data, alone[1].matrices.data)
        assert not torch.equal(found.matrices.data, before[1].matrices.data)
    # Each element is rounded once.
    target, places = reads.layout.targets["blocks.1.attention.o"], found.matrices.places
    begins = list(accumulate((end - at for at, end in places), initial=0))
    at = next(begin + target.up * 16 - first for begin, (first, end) in zip(begins, places, strict=False)
              if first <= target.up * 16 < end)
    b = tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"].float()
    up = found.matrices.data[at:at + target.rows * 16].view(16, target.rows)
    assert torch.equal(up[:3], (b * (alpha / 3)).to(dtype).t())
    assert not up[3:].any()


def test_a_ranks_share_by_a_known_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = made(tmp_path / "1", 1), made(tmp_path / "2", 2)
    place = Place(1, 2)
    alone, reads = reader(torch.float32, place).read(second), reader(torch.float32, place)
    reads.read(first)
    monkeypatch.setattr(adapters._Form, "_packed", refuse)
    assert torch.equal(reads.read(second)[1].matrices.data, alone[1].matrices.data)


def test_a_file_of_a_known_form_is_still_checked(tmp_path: Path) -> None:
    first, broken = made(tmp_path / "1", 1), made(tmp_path / "2", 2)
    tensors = load_file(broken / adapters.WEIGHTS)
    name = sorted(tensors)[3]
    tensors[name][1, 2] = float("inf")
    save_file(tensors, broken / adapters.WEIGHTS)
    reads = reader(torch.float32)
    good = reads.read(first)
    with pytest.raises(ModelError, match=f"{name} has numbers that are not finite"):
        reads.read(broken)
    assert torch.equal(reads.read(first)[1].matrices.data, good[1].matrices.data)


def test_a_file_that_changes_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reads = made(tmp_path / "1", 1), reader(torch.float32)
    monkeypatch.setattr(time, "time_ns", lambda now=time.time_ns: now() + 2 * 10 ** 9)
    path = folder / adapters.WEIGHTS
    status = path.stat()
    names = [reads.read(folder)[0], reads.read(folder)[0]]
    time.sleep(0.05)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    names.append(reads.read(folder)[0])
    assert names[0] == names[1] != names[2] == reader(torch.float32).read(folder)[0]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reads, state = made(tmp_path / "one", 1), reader(torch.float32), adapters._state
    reads.read(folder)
    path = folder / adapters.WEIGHTS

    def changed_after(file: int) -> tuple[int, ...]:
        found = state(file)
        os.utime(path, ns=(1, found[2] + 1))
        return found

    monkeypatch.setattr(adapters, "_state", changed_after)
    with pytest.raises(ModelError, match="changed while it was read"):
        reads.read(folder)
    monkeypatch.undo()
    reads.read(folder)
