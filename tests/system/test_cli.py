"""The commands over a real trained model: loaded by the command itself, and behind a server, with the same answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from tests.data import MODELS, TRAINED, need

NAME = TRAINED[0]


@pytest.fixture(scope="module")
def folder() -> Path:
    return need(MODELS / NAME)


@pytest.fixture(scope="module")
def golden(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "greedy_golden.json").read_text())["cases"]


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A served model."""
    command = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", "0", "--served-model-name", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready at (http://\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("the server ended before it was ready")
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(30) == 0
        process.kill()


def completions(golden: list[dict[str, Any]]) -> list[str]:
    lines = []
    for i, case in enumerate(golden):
        body = {"prompt": case["prompt_ids"], "max_tokens": len(case["greedy_ids"]), "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "logprobs": 1}
        lines.append(json.dumps({"custom_id": f"g{i}", "method": "POST", "url": "/v1/completions", "body": body}))
    return lines


def test_generate_gives_the_golden_tokens_here_and_from_a_server(
        folder: Path, url: str, golden: list[dict[str, Any]], tmp_path: Path) -> None:
    """The same bodies both ways: only names, times and ids of answers may differ."""
    (tmp_path / "in.jsonl").write_text("\n".join([*completions(golden), "{broken"]) + "\n")
    found = []
    for where in ([str(folder), "--served-model", "tiny"], ["--url", url]):
        out = tmp_path / f"out{len(found)}.jsonl"
        assert main(["generate", str(tmp_path / "in.jsonl"), str(out), *where, "--quiet"]) == 0
        entries = {entry["custom_id"]: entry for entry in map(json.loads, out.read_text().splitlines())}
        assert len(entries) == len(golden) + 1
        assert entries[None]["error"]["code"] == "invalid_json_line"
        for i, case in enumerate(golden):
            body = entries[f"g{i}"]["response"]["body"]
            assert body["choices"][0]["token_ids"] == case["greedy_ids"]
            del body["id"], body["created"]
        found.append({name: (entry["response"] or {}).get("body") for name, entry in entries.items()})
    assert found[0] == found[1]


def test_chat_here_and_with_a_server(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    flags = ["--temperature", "0", "--max-tokens", "12"]
    shown = []
    for where in ([str(folder), "--chat-template", template], [str(folder), "--plain"], ["--url", url, "--plain"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n"))
        assert main(["chat", *where, *flags]) == 0
        shown.append(capsys.readouterr().out)
    assert all(len(text) > 20 for text in shown)
    assert shown[1] == shown[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n"))
    assert main(["chat", "--url", url, *flags]) == 0
    said = capsys.readouterr()
    assert said.err.count("no chat template") == 1 and said.out == shown[1]


def test_bench_serve(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", url, "--num-prompts", "24", "--max-concurrency", "8", "--random-input-len", "20",
                 "--random-output-len", "16", "--vocab-size", "512", "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["model_id"] == "tiny"
    assert result["total_input_tokens"] == 24 * 20
    assert result["total_output_tokens"] == 24 * 16
    assert 0 < result["median_itl_ms"] < result["median_e2el_ms"]


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_offline(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"latency": ["--batch-size", "4", "--input-len", "10", "--output-len", "8", "--num-iters", "2"],
             "throughput": ["--num-prompts", "12", "--random-input-len", "10", "--random-output-len", "8"]}[kind]
    assert main(["bench", kind, str(folder), *shape, "--load-format", "dummy", "--max-num-seqs", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["output_tokens_per_second"] > 0
    assert result["engine"]["steps"] >= 8
    assert result["engine"]["kernel_ms_per_step"] <= result["engine"]["worker_ms_per_step"]
    assert result["engine_info"]["max_num_seqs"] == 4


def test_an_engine_that_dies_stops_a_batch_that_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    """The engine process is killed in the middle: no line gets an error entry for it, and a second run answers the rest."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}
    lines = [json.dumps({"custom_id": f"r{i}", "url": "/v1/completions", "body": body}) for i in range(40)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "penstock", "generate", str(tmp_path / "in.jsonl"), str(out), str(folder), "--quiet",
               "--window", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True)
    for child in children.stdout.split():
        os.kill(int(child), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "run the same command to go on" in said
    answered = [json.loads(line) for line in out.read_text().splitlines()]
    assert 3 <= len(answered) < 40
    assert all(entry["response"]["status_code"] == 200 for entry in answered)
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    names = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert sorted(names) == sorted(f"r{i}" for i in range(40))


def test_loading_a_model_leaves_no_process_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", str(folder)]) == 0
    time.sleep(0.2)
    mine = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False)
    assert "penstock.engine.process" not in mine.stdout
