"""`penstock info`: what it says is what the engine then does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.data import MODELS, TRAINED, need


@pytest.mark.parametrize("name", TRAINED)
def test_the_plan_is_what_the_engine_measures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = need(MODELS / name)
    found = []
    for more in ([], ["--load"]):
        assert main(["info", str(folder), "--json", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "4M", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    planned, measured = (each["memory"] for each in found)
    assert (planned["measured"], measured["measured"]) == (False, True)
    for key in ("step_bytes", "kv_bytes", "kv_tokens", "max_model_len"):
        assert planned[key] == measured[key], key
    assert 0.9 < measured["weight_bytes"] / planned["weight_bytes"] < 1.3  # packing may round up
    config = json.loads((folder / "config.json").read_text())
    model = found[0]["model"]
    assert model["layers"] == config["num_hidden_layers"]
    assert model["context"] == config["max_position_embeddings"]
    assert model["parameters"] * 4 <= found[0]["files"]["bytes"]
    assert found[0]["kernels"]["linear"]["serves"]


def test_what_becomes_of_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(need(MODELS / TRAINED[0]))
    tiers = ["--cache-host-bytes", "64M", "--cache-disk", str(tmp_path), "--cache-disk-bytes", "1G"]
    assert main(["info", folder, *tiers, "--cache-tenant-share", "0.2"]) == 0
    found = re.search(r"found again on the device, in (\S+) MiB of host memory, in up to 1.0 GiB of (\S+); at most 20 %",
                      capsys.readouterr().out)
    assert found is not None and 63 < float(found[1]) <= 64 and found[2] == str(tmp_path)
    assert main(["info", folder, "--no-enable-prefix-caching"]) == 0
    assert "prefixes     not kept" in capsys.readouterr().out
    assert main(["info", folder, "--cache-tenant-share", "2"]) == 1
    assert "--cache-tenant-share is" in capsys.readouterr().err


def test_text_and_refused_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(need(MODELS / TRAINED[0]))
    assert main(["info", folder, "--kernels", "*=reference"]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM" in text
    assert "linear" in text and "reference" in text
    assert "KV cache" in text
    assert main(["info", folder, "--kernels", "attention=wrong"]) == 1
    assert "wrong" in capsys.readouterr().err


def test_a_model_that_cannot_be_served_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = need(MODELS / TRAINED[0])
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    copy.chmod(0o755)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    assert main(["info", str(copy)]) == 1
    assert "layers.5" in capsys.readouterr().err  # the missing tensors by name
    assert main(["info", str(folder), "--max-model-len", "1M"]) == 1
    assert "--max-model-len is" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "nothing")]) == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err


def test_the_plan_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for ranks in ("1", "2"):
        assert main(["info", "canary", "--tensor-parallel-size", ranks, "--json", "--device", "cpu"]) == 0
        found.append(json.loads(capsys.readouterr().out)["memory"])
    assert found[1]["ranks"] == 2 and 0.5 < found[1]["weight_bytes"] / found[0]["weight_bytes"] < 0.55
    assert found[1]["groups"][0]["page_bytes"] * 2 == found[0]["groups"][0]["page_bytes"]
    assert main(["info", "canary", "--tensor-parallel-size", "2", "--device", "cpu"]) == 0
    assert "of each of 2 ranks" in capsys.readouterr().out
