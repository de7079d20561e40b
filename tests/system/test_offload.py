"""Weights beyond the device (`--offload-weights`): greedy tokens do not depend on where matrices are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import models
from penstock.canary import model_folder
from penstock.checkpoint import read_config
from penstock.config.schema import EngineOptions, checked
from penstock.core.errors import ConfigError
from penstock.engine.engine import Engine
from penstock.models.away import PLACES, Away
from penstock.models.registry import describe
from penstock.ops import registry
from penstock.platform.facts import detect
from penstock.worker import memory
from tests.system.ranks import Threaded
from tests.system.test_layouts import ASSETS, greedy, options

PLACED = [("canary", {}), (ASSETS / "canary-moe", {}), (ASSETS / "canary-mla", {}), ("canary", {"quantization": "q8_0"}),
          (ASSETS / "canary-moe", {"quantization": "int4"}), ("canary", {"kernels": {"*": "reference"}}),
          ("canary", {"speculate": "ngram"})]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Away]:
    """Every Away that engines make."""
    found: list[Away] = []

    class Watched(Away):
        def __init__(self, device: torch.device, folder: str | None, turns: bool) -> None:
            super().__init__(device, folder, turns)
            found.append(self)

    monkeypatch.setattr(models, "Away", Watched)
    return found


@pytest.mark.parametrize(("model", "more"), PLACED, ids=str)
def test_mapped_on_a_cpu(model: Path | str, more: dict[str, Any], made: list[Away], tmp_path: Path) -> None:
    wanted = greedy(Engine(options(model, **more)))
    engine = Engine(options(model, offload_weights="0.6", offload_folder=str(tmp_path), **more))
    assert made and made[0].saved > 100_000 and not list(tmp_path.iterdir())
    assert greedy(engine) == wanted


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(("model", "more"), PLACED, ids=str)
def test_by_turns(model: Path | str, more: dict[str, Any], on_disk: bool, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with places on a CPU: each block is in its place when it runs."""
    monkeypatch.setattr(models, "Away", lambda device, _folder, _turns: Away(device, str(tmp_path) if on_disk else None, True))
    wanted = greedy(Engine(options(model, **more)))
    for share in ("0.5", 1):
        assert greedy(Engine(checked(options(model, offload_weights=share, **more)))) == wanted


def test_by_turns_on_ranks_and_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "Away", lambda device, _folder, _turns: Away(device, None, True))
    asked = options("canary", tensor_parallel_size=2, pipeline_parallel_size=2, offload_weights="1")
    assert greedy(Engine(asked, rank=Threaded(asked))) == greedy(Engine(options("canary")))


def test_a_block_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's reader may ask for any matrix between steps; the next step finds the places as it left them."""
    monkeypatch.setattr(models, "Away", lambda device, _folder, _turns: Away(device, None, True))
    plain, turned = (Engine(options("canary", **more)) for more in ({}, {"offload_weights": "1"}))
    for block in (0, PLACES, 5, 1):
        path = f"blocks.{block}.mlp.down"
        one, other = (engine.rank._model.rows(path, 3, 9) for engine in (plain, turned))  # type: ignore[attr-defined]
        assert torch.equal(one, other)
    assert greedy(turned) == greedy(plain)


def test_memory_decides_by_itself() -> None:
    """Auto takes as few blocks as leave a fifth of the room to the cache."""
    spec, facts = describe(read_config(model_folder())), detect("cpu")
    kernels = registry.bind(facts, torch.float32, {}, batch_invariant=False)
    size = spec.nbytes("float32")
    found = [memory.away("auto", spec, torch.float32, kernels, facts, int(room * size)) for room in (1.3, 1.2, 0.9, 0.6)]
    assert found[0] == 0 < found[1] < found[2] < found[3] <= 8
    for room, blocks in zip((1.2, 0.9, 0.6), found[1:], strict=True):
        held = [memory.on_host(replace(spec, away=count), "float32") for count in (blocks, blocks - 1)]
        assert held[0] <= 0.8 * room * size < held[1]
    with pytest.raises(ConfigError, match="all 8 layers away"):
        memory.away("auto", spec, torch.float32, kernels, facts, size // 10)


@pytest.mark.parametrize(("given", "message"), [
    ({"offload_weights": "2"}, "a share of the layers above 0"), ({"offload_weights": "some"}, "possible are auto"),
    ({"offload_folder": "/tmp"}, "offload_folder needs offload_weights"),
    ({"offload_weights": "0.5", "speculate": "layer_skip"}, "not possible with speculate layer_skip"),
    ({"offload_weights": "0.5", "speculative_config": {"method": "layer_skip"}}, "not possible with speculate layer_skip"),
    ({"offload_weights": "0.5", "experts_on_device": "4"}, "not possible with experts_on_device"),
    ({"offload_weights": "0.5", "enable_expert_parallel": True, "data_parallel_size": 2}, "data_parallel_size with")])
def test_options_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(EngineOptions(**given))


def test_a_folder_that_cannot_hold_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold a file"):
        Engine(options("canary", offload_weights="0.5", offload_folder=str(tmp_path / "file")))
