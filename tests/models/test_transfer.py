"""Weights on their way to a device: the same as those that the host puts together, whatever is changed; and what breaks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import penstock
from penstock.checkpoint import read_config
from penstock.core.errors import ModelError
from penstock.models import describe, weights
from penstock.models.registry import checkpoint_of, family_of
from penstock.models.transfer import Bytes, Transfer
from penstock.models.translated import Checkpoint
from penstock.ops.linear import StoredWeight, Weight
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.models.families import CASES, make
from tests.sampling import sampled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ASSETS = Path(__file__).parent.parent / "assets" / "quantized"
KINDS = list({case.kind: case for case in CASES}.values())


def values(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    config = read_config(folder)
    kernels = bind(detect("cpu"), dtype, {"*": "reference"})
    found = weights.stream(describe(config), family_of(config)[1].RULES, Checkpoint(folder), dtype=dtype, device=device,
                           kernels=kernels, progress=None)
    return {name: (value.data if isinstance(value, Weight) else value).cpu() for name, value in found.items()}


@pytest.mark.parametrize("case", sampled(KINDS, 3, name=lambda case: case.kind))
def test_the_same_on_either_way(case: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case a family, so that every change of order comes up; read as stored and into another type."""
    make(case, tmp_path)  # type: ignore[arg-type]
    wanted = {dtype: values(tmp_path, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.bfloat16)}
    monkeypatch.setattr(weights, "_to_host", weights._to_device)
    monkeypatch.setattr("penstock.models.transfer._CHUNK", 1000)  # most matrices then come in several chunks
    monkeypatch.setattr(weights, "_WAITING", 5000)
    for dtype, expected in wanted.items():
        found = values(tmp_path, dtype, DEVICE)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", ["auto-awq", "auto-gptq", "bnb-nf4-nested", "ct-nvfp4"])
def test_tensors_that_are_converted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of other layouts are sent before their conversion asks for them, each once, and are the same."""
    folder, sent = ASSETS / name, list[str]()
    config = read_config(folder)

    def parts(device: torch.device) -> dict[str, torch.Tensor]:
        spec = describe(config)
        found = weights.stream(spec, family_of(config)[1].RULES, checkpoint_of(folder, config, spec, "float32", device),
                               dtype=torch.float32, device=device, progress=None,
                               kernels=bind(detect("cpu"), torch.float32, {"*": "reference"}))
        return {f"{name}.{suffix}": part.cpu() for name, value in found.items() if isinstance(value, StoredWeight)
                for suffix, part in value.parts.items()}

    wanted, send = parts(torch.device("cpu")), weights._Ahead._send
    monkeypatch.setattr(weights, "_to_host", weights._to_device)
    monkeypatch.setattr(weights, "_AHEAD", 20_000)
    monkeypatch.setattr(weights._Ahead, "_send", lambda self, stored: (sent.append(stored.name), send(self, stored)))
    found = parts(DEVICE)
    assert found.keys() == wanted.keys() and all(torch.equal(found[at], wanted[at]) for at in found)
    assert len(sent) == len(set(sent)) > 7


def test_progress_ends_at_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(KINDS[0], tmp_path)
    monkeypatch.setattr(weights, "_to_host", weights._to_device)
    config, seen = read_config(tmp_path), list[tuple[int, int]]()
    weights.stream(describe(config), family_of(config)[1].RULES, Checkpoint(tmp_path), dtype=torch.float32, device=DEVICE,
                   kernels=bind(detect("cpu"), torch.float32, {"*": "reference"}),
                   progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_a_file_that_shrinks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked at start, cut off while it is read: an error that names it, at once, though much else is under way."""
    make(KINDS[0], tmp_path)
    checkpoint, config = Checkpoint(tmp_path), read_config(tmp_path)
    path = next(iter(checkpoint.tensors.values())).file
    path.write_bytes(path.read_bytes()[:-5000])
    monkeypatch.setattr(weights, "_to_host", weights._to_device)
    with pytest.raises(ModelError, match=rf"{path.name} ends at byte"):
        weights.stream(describe(config), family_of(config)[1].RULES, checkpoint, dtype=torch.float32, device=DEVICE,
                       kernels=bind(detect("cpu"), torch.float32, {"*": "reference"}), progress=None)


def test_many_stretches_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.transfer._CHUNK", 4096)
    data = torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    cuts = [(start, 1 + start * 7 % 20_000) for start in range(0, 270_000, 1_001)]
    with Transfer(DEVICE) as transfer:
        targets = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _, size in cuts]
        for arrival in [transfer.send(tmp_path / "file", Bytes.of(start, target), target)
                        for (start, _), target in zip(cuts, targets, strict=True)]:
            arrival.wait()
        for (start, size), target in zip(cuts, targets, strict=True):
            assert torch.equal(target.cpu(), data[start:start + size])


def test_an_empty_tensor_is_there_at_once(tmp_path: Path) -> None:
    with Transfer(DEVICE) as transfer:
        empty = torch.empty(0, 3, device=DEVICE)
        transfer.send(tmp_path / "no file", Bytes.of(0, empty), empty).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_repeat_a_stretch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as if they were written one by one from the stretch, beginning where the name says."""
    monkeypatch.setattr(weights, "_RANDOM", 97)
    stretch = torch.arange(97, dtype=torch.float32)
    for count in (1, 96, 97, 98, 500):
        out = torch.empty(count)
        weights._repeat(stretch.roll(-13), out)
        assert out.tolist() == [(13 + i) % 97 for i in range(count)]
    spec = describe(read_config(Path(penstock.__file__).parent / "canary" / "model"))
    spec = dataclasses.replace(spec, blocks=spec.blocks[:1])
    made = [weights.dummy(spec, dtype=dtype, device=DEVICE, kernels=bind(detect("cpu"), dtype, {"*": "reference"}), seed=seed,
                          progress=None) for seed in (1, 1, 2)]
    first, again, other = ({n: v.data if isinstance(v, Weight) else v for n, v in m.items()} for m in made)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_columns_are_read_without_what_lies_between(tmp_path: Path) -> None:
    """A rank's part of a tensor along any axis, in chunks of whole runs."""
    whole = torch.arange(6 * 50 * 8, dtype=torch.int16).view(6, 50, 8)
    (tmp_path / "file").write_bytes(b"head" + whole.numpy().tobytes())
    with Transfer(DEVICE) as transfer:
        for axis, first, count in ((0, 2, 3), (1, 7, 20), (2, 5, 3), (1, 0, 50)):
            target = torch.empty_like(whole.narrow(axis, first, count).contiguous()).to(DEVICE)
            transfer.send(tmp_path / "file", Bytes.cut(4, whole.shape, 2, axis, first, count), target).wait()
            assert torch.equal(target.cpu(), whole.narrow(axis, first, count))
