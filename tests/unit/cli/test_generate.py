"""`penstock generate` over the fake API: every line answered once, whatever interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import generate
from penstock.cli.main import main
from tests.unit.cli.fake import FakeApi, served


def line(custom_id: str, text: str, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **more})


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def generate_all(folder: Path, lines: list[str], app: FakeApi, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    with served(app) as url:
        code = main(["generate", str(folder / "in.jsonl"), str(folder / "out.jsonl"), "--url", url, "--quiet", *flags])
    return code, answers(folder / "out.jsonl")


def test_answers_every_line_and_a_bad_one_fails_alone(tmp_path: Path) -> None:
    completion = json.dumps({"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "x y", "model": "mine"}})
    lines = [line("a", "hello there"), "{not json", line("b", "broken"), "", line("a", "again"), line("c", "busy"), completion,
             line("e", "x", url="/v1/files"), line("f", "x", body={"messages": [], "stream": True}), "[1]",
             line("g", "x", method="GET")]
    app = FakeApi()
    code, found = generate_all(tmp_path, lines, app)
    assert code == 0
    by_id = {entry["custom_id"]: entry for entry in found if entry["response"]}
    assert by_id["a"]["response"]["status_code"] == 200
    assert by_id["a"]["response"]["body"]["choices"][0]["message"]["content"] == "hello there"
    assert by_id["a"]["response"]["request_id"] == "x-1"
    assert by_id["a"]["error"] is None
    assert by_id["b"]["response"]["status_code"] == 400
    assert "the prompt is broken" in by_id["b"]["error"]["message"]
    assert by_id["c"]["response"]["status_code"] == 200  # asked again until the queue had room
    assert by_id["d"]["response"]["body"]["choices"][0]["text"] == "x y"
    codes = [entry["error"]["code"] for entry in found if not entry["response"]]
    assert sorted(codes) == ["duplicate_custom_id", "invalid_body", "invalid_json_line", "invalid_json_line", "invalid_method",
                             "invalid_url"]
    assert len({entry["id"] for entry in found}) == 10
    assert {body["model"] for body in app.bodies} == {"fake", "mine"}

    again = FakeApi()
    code, found = generate_all(tmp_path, lines, again)
    assert (code, len(found), again.bodies) == (0, 10, [])


def test_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    lines = [line(f"r{i}", f"word{i}") for i in range(20)]
    _, found = generate_all(tmp_path, lines, FakeApi())
    whole = (tmp_path / "out.jsonl").read_bytes()
    cut = whole.index(b"\n", len(whole) // 2) + 30
    (tmp_path / "out.jsonl").write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    app = FakeApi()
    _, found = generate_all(tmp_path, lines, app)
    assert sorted(entry["custom_id"] for entry in found) == sorted(f"r{i}" for i in range(20))
    assert len(app.bodies) == 20 - kept


def test_never_appends_to_a_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(line("a", "x") + "\n")
    (tmp_path / "out.jsonl").write_text("my diary\n")
    assert main(["generate", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--url", "http://127.0.0.1:9"]) == 1
    assert "line 1 of" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "my diary\n"


def test_window_bounds_what_is_in_flight(tmp_path: Path) -> None:
    app = FakeApi()
    _, found = generate_all(tmp_path, [line(f"r{i}", "x") for i in range(40)], app, "--window", "3")
    assert len(found) == 40
    assert app.most_running == 3


def test_stops_when_the_server_is_gone_and_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generate, "PAUSES", (0.01, 0.01))
    (tmp_path / "in.jsonl").write_text(line("a", "x") + "\n")
    arguments = ["generate", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--served-model", "fake", "--quiet"]
    assert main([*arguments, "--url", "http://127.0.0.1:9"]) == 1
    assert "run the same command to go on" in capsys.readouterr().err
    with served(FakeApi()) as url:
        assert main([*arguments, "--url", url]) == 0
    assert answers(tmp_path / "out.jsonl")[0]["response"]["status_code"] == 200


def test_survives_kill_9(tmp_path: Path) -> None:
    count = 300
    (tmp_path / "in.jsonl").write_text("\n".join(line(f"r{i}", f"w{i}") for i in range(count)) + "\n")
    out = tmp_path / "out.jsonl"
    with served(FakeApi()) as url:
        command = [sys.executable, "-m", "penstock", "generate", str(tmp_path / "in.jsonl"), str(out), "--url", url, "--quiet",
                   "--window", "4"]
        process = subprocess.Popen(command)
        while not out.exists() or out.stat().st_size < 2000:
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        interrupted = out.read_bytes().count(b"\n")
        assert 0 < interrupted < count
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert sorted(entry["custom_id"] for entry in answers(out)) == sorted(f"r{i}" for i in range(count))


def test_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "none"), "out", "--url", "x"]) == 1
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text(line("a", "x") + "\n")
    assert main(["generate", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--quiet"]) == 1
    assert "either a MODEL to load or the --url" in capsys.readouterr().err


def test_an_interrupt_is_one_line(tmp_path: Path) -> None:
    """With a model loaded here: each of the requests in flight used to print a traceback."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    lines = [json.dumps({"custom_id": f"r{i}", "url": "/v1/completions", "body": body}) for i in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "penstock", "generate", str(tmp_path / "in.jsonl"), str(out), "canary", "--window", "48",
               "--max-num-seqs", "4", "--max-model-len", "512", "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # not inherited as ignored
    until = time.monotonic() + 60
    while not out.exists() or not out.stat().st_size:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "penstock: interrupted; what is answered is kept, run the same command to go on\n"


def test_progress_starts_when_the_model_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines answered before and the time of loading are no part of the rate."""
    made: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            made.append(options)
            self.count = 0

        def update(self) -> None:
            self.count += 1

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            made[-1]["updates"] = self.count

    monkeypatch.setattr(generate, "tqdm", Bar)
    opened: list[int] = []
    monkeypatch.setattr(generate, "open_api", lambda args, real=generate.open_api: (opened.append(len(made)), real(args))[1])
    generate_all(tmp_path, [line(f"r{i}", "x") for i in range(3)], FakeApi())
    generate_all(tmp_path, [line(f"r{i}", "x") for i in range(5)], FakeApi())
    assert opened == [0, 1], "no bar before the API is open"
    assert [(bar["total"], bar["initial"], bar["updates"]) for bar in made] == [(3, 0, 3), (5, 3, 2)]
