"""The layout that is chosen by itself: by size, memory and heads, with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.parallel.layout import chosen

GIB = 1 << 30


@pytest.mark.parametrize(("weights", "heads", "gpus", "layout"), [
    (16, 32, [], (1, 1, 1)),
    (16, 32, [80], (1, 1, 1)),
    (16, 32, [80] * 8, (1, 1, 8)),
    (140, 64, [80] * 8, (4, 1, 2)),
    (140, 64, [80, 80, 80], (1, 3, 1)),
    (140, 0, [80, 80, 80], (3, 1, 1)),
    (300, 64, [80] * 6, (2, 3, 1)),
    (140, 64, [141] * 2, (2, 1, 1)),
    (16, 32, [80, 24], (1, 1, 2)),
    (16, 32, [80, 16], (2, 1, 1)),
], ids=str)
def test_the_smallest_group_that_holds_the_weights(weights: int, heads: int, gpus: list[int],
                                                   layout: tuple[int, int, int]) -> None:
    found = chosen(weights * GIB, heads, [one * GIB for one in gpus], 0.9)
    assert found[:3] == layout
    assert found.tensors * found.stages * found.replicas == max(1, len(gpus)), "no GPU is idle"


def test_a_model_that_is_too_large_says_by_how_much() -> None:
    with pytest.raises(ConfigError, match=r"140\.0 GiB of weights need 3 GPUs with room for 57\.6 GiB each, but there are 2"):
        chosen(140 * GIB, 64, [80 * GIB] * 2, 0.9)


def test_a_command_looks_at_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo \"$i, GPU-$i, 81559\"; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["info", "canary", "--layout", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "0.0 GiB of weights fit on each GPU; 4 replicas, which exchange nothing"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-3")
    assert main(["info", "canary", "--layout", "auto"]) == 0
    assert "2 replicas, which exchange nothing" in capsys.readouterr().out
    assert main(["info", "canary", "--layout", "auto", "--device", "cpu"]) == 0
    assert "one process, because there is no GPU" in capsys.readouterr().out
    assert main(["info", "canary", "--layout", "auto", "--tensor-parallel-size", "2"]) == 1
    assert "layout auto decides --tensor-parallel-size" in capsys.readouterr().err
