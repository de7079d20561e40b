"""The layout that is chosen by itself: by size, memory and heads, with its reason."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.engine import layout
from penstock.parallel.layout import Model, chosen, shares_from, sum_seconds

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
    assert sizes(Model(weights * GIB, heads), gpus) == (*layout[:2], 1, layout[2])


def sizes(model: Model, gpus: list[int], link: str = "NVLink") -> tuple[int, ...]:
    """(tensors, stages, contexts, replicas)"""
    found = chosen(model, [one * GIB for one in gpus], 0.9, link)[0]
    asked = tuple(found.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline", "context", "data"))
    assert math.prod(asked) == max(1, len(gpus)), "no GPU is idle"
    return asked


def test_shares_of_a_sum_pay_sooner_for_more_ranks_and_never_for_two() -> None:
    assert shares_from(2) == math.inf and shares_from(4) == pytest.approx(480e3)
    for ranks in range(3, 9):
        border = shares_from(ranks)
        assert border < shares_from(ranks - 1)
        assert sum_seconds(border, ranks) == pytest.approx(sum_seconds(border - 1, ranks), rel=1e-5), "equal at the border"


LARGE = Model(140 * GIB, 64, 8, 80, 8192, 4 * 80 * 8 * 128)
SMALL = Model(16 * GIB, 32, 8, 32, 4096, 4 * 32 * 8 * 128)
MIXED = Model(60 * GIB, 32, 4, 48, 2048, 4 * 48 * 4 * 128, 768)


@pytest.mark.parametrize(("link", "layout"), [("NVLink", (4, 1, 1, 1)), ("PCIe", (2, 2, 1, 1)), ("the host", (1, 4, 1, 1))])
def test_sums_are_left_to_fast_links(link: str, layout: tuple[int, ...]) -> None:
    """70B on four GPUs of 80 GiB: over slow links the stream travels less often in stages than sums do."""
    assert sizes(LARGE, [80] * 4, link) == layout
    _, why = chosen(LARGE, [80 * GIB] * 4, 0.9, link)
    faster = re.search(rf"over {link} that is predicted ([0-9.]+) times as fast as [0-9] ranks in [0-9] stages", why)
    assert faster and float(faster[1]) > 1, why


@pytest.mark.parametrize(("model", "gpus", "context", "layout"), [
    (SMALL, [80] * 8, 131072, (1, 1, 1, 8)),
    (SMALL, [141] * 8, 1 << 20, (2, 1, 1, 4)),
    (SMALL, [80] * 4, 1 << 20, (4, 1, 1, 1)),
    (SMALL, [80] * 32, 1 << 23, (4, 1, 4, 2)),
    (SMALL._replace(keys=1, entry=SMALL.entry // 8), [80] * 4, 1 << 22, (1, 1, 2, 2)),
], ids=str)
def test_one_context_of_full_length_fits(model: Model, gpus: list[int], context: int, layout: tuple[int, ...]) -> None:
    asked = model._replace(context=context)
    found = sizes(asked, gpus)
    ranks = len(gpus) // found[3]
    held = model.weights / found[0] / found[1] + context * model.entry / (min(found[0], model.keys) * found[1] * found[2])
    assert held <= 0.95 * 0.9 * min(gpus) * GIB
    assert ranks == 1 or f"and a context of {context} tokens need {ranks} of {len(gpus)} GPUs" in chosen(
        asked, [one * GIB for one in gpus], 0.9)[1]
    assert found == layout


def test_a_context_that_fits_nowhere_is_left_to_the_start() -> None:
    """It names the room that there is, in tokens."""
    assert sizes(SMALL._replace(context=1 << 24), [80] * 2) in [(2, 1, 1, 1), (1, 1, 2, 1)]


@pytest.mark.parametrize(("gpus", "channels", "whole"), [([80] * 2, 768, False), ([24] * 4, 768, False), ([24] * 4, 256, True),
                                                         ([141], 64, False)], ids=str)
def test_narrow_parts_of_experts_are_not_cut(gpus: list[int], channels: int, whole: bool) -> None:
    found, why = chosen(MIXED._replace(channels=channels), [one * GIB for one in gpus], 0.9)
    assert found["enable_expert_parallel"] is whole
    assert ("each has whole experts" in why) is whole


def test_a_model_that_is_too_large_says_by_how_much() -> None:
    with pytest.raises(ConfigError, match=r"140\.0 GiB of weights need 3 GPUs with room for 57\.6 GiB each, but there are 2"):
        chosen(Model(140 * GIB, 64), [80 * GIB] * 2, 0.9)


@pytest.mark.parametrize(("table", "link"), [
    ("\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tPIX\nNIC0\tSYS\tPIX\t X\n", "NVLink"),
    ("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X\n", "PCIe"),
    ("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV4\tSYS\nGPU1\tNV4\t X\tSYS\nGPU2\tSYS\tSYS\t X\n", "the host"), ("", "NVLink")])
def test_the_slowest_link_decides(table: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_told", lambda *_words: table)
    assert layout._link() == link


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
