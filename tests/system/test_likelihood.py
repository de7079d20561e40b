"""The log probability of right answers shows faults that change hardly an answer, and does not mind rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock import canary
from penstock.canary.likelihood import FILE, PROMPTS, Comparison, Record, compare, score
from penstock.canary.suite import prompts
from penstock.cli.eval import here
from penstock.cli.main import main
from penstock.engine.llm import LLM
from tests.system.served import Served

WINDOW = Path(__file__).resolve().parents[1] / "assets" / "canary-window"
SKILLS = ("count", "sort", "think", "recall", "tool-call", "stop")


def compared(folder: Path, model: Path, every: int = 4, skills: tuple[str, ...] = SKILLS, **options: Any) -> Comparison:
    """A part of the items, which is enough here, against the record of `model`."""
    chosen = {skill: [item if place % every == 0 else None for place, item in enumerate(prompts(skill, PROMPTS))]
              for skill in skills}
    with LLM(str(folder), max_num_seqs=16, device="cpu", **options) as llm:
        return compare({skill: here(llm, items) for skill, items in chosen.items()}, Record.load(model / FILE), llm.info.dtype)


def broken(folder: Path, model: Path, weights: Callable[[dict[str, Any]], None] | None = None, **changes: Any) -> Path:
    """A copy of a model with a fault."""
    shutil.copytree(model, folder)
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_rounding_is_no_difference(dtype: str) -> None:
    found = compared(canary.MODEL, canary.MODEL, dtype=dtype)
    assert not found.differs, found


def test_a_lost_norm_weight_shows(tmp_path: Path) -> None:
    def lose(tensors: dict[str, Any]) -> None:
        tensors["model.layers.3.self_attn.k_norm.weight"].fill_(1)

    found = compared(broken(tmp_path / "model", canary.MODEL, lose), canary.MODEL)
    assert found.differs and found.ratio.mean > 5, found


def test_attention_scaled_by_a_twentieth_shows(tmp_path: Path) -> None:
    def scale(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("q_norm.weight"):
                tensors[name] *= 1.05

    found = compared(broken(tmp_path / "model", canary.MODEL, scale), canary.MODEL)
    assert found.differs, found


def test_a_window_off_by_16_shows(tmp_path: Path) -> None:
    """On long contexts, and in float32: it changes less than rounding to bfloat16 does."""
    def look(folder: Path) -> Comparison:
        return compared(folder, WINDOW, every=5, skills=("retrieve-4k",), dtype="float32")

    width = json.loads((WINDOW / "config.json").read_text())["sliding_window"]
    assert not look(WINDOW).differs
    found = look(broken(tmp_path / "model", WINDOW, sliding_window=width - 16))
    assert found.differing == ["retrieve-4k"], found


def test_the_command_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "canary", "--prompts", "2", "--skills", "sort,stop"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "log probability of the right answer" in said and "agrees with the record; right answers are" in said
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"][0]["logprob"]["count"] == PROMPTS and found["scores"][0]["logprob"]["mean"] < 0
    assert found["reference"]["differs"] is False and found["reference"]["ratio"]["count"] == 2 * PROMPTS
    record = tmp_path / "record.json"
    assert main(["eval", "canary", "--skills", "stop", "--record", str(record)]) == 0
    written, kept = Record.load(record), Record.load(canary.MODEL / FILE)
    assert written.exact["stop"] == pytest.approx(kept.exact["stop"], abs=1e-4)
    assert main([*words, "--no-logprobs"]) == 0
    assert "log probability" not in capsys.readouterr().out
    record.write_text("{}")
    assert main([*words, "--reference", str(record)]) == 1
    assert "--record FILE" in capsys.readouterr().err


@pytest.mark.xdist_group("canary")
def test_a_server_is_scored_as_well(shared: Callable[..., Served], capsys: pytest.CaptureFixture[str]) -> None:
    """By /tokenize and echo with logprobs, which vLLM has, too."""
    server = shared("canary", "--max-model-len", "4096")
    words = ["eval", "canary", "--base-url", server.url, "--prompts", "2", "--skills", "tool-call", "--json",
             "--reference", str(canary.MODEL / FILE)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reference"]["differs"] is False and found["reference"]["ratio"]["count"] == PROMPTS
    exact = score(Record.load(canary.MODEL / FILE).exact["tool-call"])
    assert found["scores"][0]["logprob"]["mean"] == pytest.approx(exact.mean, abs=5e-3)
