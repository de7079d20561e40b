"""`penstock chat` over the fake API: history, commands, faults, piped input, and Ctrl-C in a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.unit.cli.fake import FakeApi, served


def chat(app: FakeApi, text: str, *flags: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with served(app) as url:
        return main(["chat", "--url", url, *flags])


def test_a_conversation_has_a_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApi()
    script = "hello\nhow are you\n/undo\n//slash\n/system Be terse.\n/reset\nanew\n/retry\n/quit\nnever\n"
    assert chat(app, script, "--temperature", "0", "--max-tokens", "1k", "--api-key", "k", monkeypatch=monkeypatch) == 0
    assert [[m["content"] for m in body["messages"]] for body in app.bodies] == [
        ["hello"], ["hello", "hello", "how are you"], ["hello", "hello", "/slash"], ["Be terse.", "anew"],
        ["Be terse.", "anew"]]
    assert [m["role"] for m in app.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert app.bodies[0]["temperature"] == 0
    assert app.bodies[0]["max_tokens"] == 1000
    assert "seed" not in app.bodies[0]
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["hello", "how are you", "/slash", "(system prompt: Be terse.)", "anew", "anew"]
    assert set(app.keys) == {"Bearer k"}


def test_a_refused_question_is_forgotten_and_said(monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApi()
    assert chat(app, "broken\n/rest\nfine\n", "--system", "S", "--stats", monkeypatch=monkeypatch) == 1
    out, err = capsys.readouterr()
    assert "the prompt is broken" in err
    assert "no command /rest; did you mean /reset?" in err
    assert "(7 tokens in, 1 out, first after" in out
    assert [m["content"] for m in app.bodies[-1]["messages"]] == ["S", "fine"]


def test_plain_lines_are_continued_without_a_conversation(monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApi()
    assert chat(app, "Once upon\na time\n", "--plain", monkeypatch=monkeypatch) == 0
    assert [body["prompt"] for body in app.bodies] == ["Once upon", "a time"]
    assert capsys.readouterr().out == "Once upon\na time\n"


def test_a_model_without_a_template_is_continued_line_by_line(monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, and not refused again and again."""
    app = FakeApi()
    app.template_missing = True
    assert chat(app, "Once upon\na time\n", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "Once upon\na time\n"
    assert err.count("has no chat template, so it continues each line by itself") == 1 and err.count("\n") == 1
    assert [body["prompt"] for body in app.bodies if "prompt" in body] == ["Once upon", "a time"]


@pytest.mark.parametrize(("typed", "asked"), [
    ('"""\none\n\n  two\n"""\nthree\n', ["one\n\n  two", "three"]), ('"""one\ntwo"""\n', ["one\ntwo"]),
    ("one\\\ntwo\nthree\n", ["one\ntwo", "three"]), ('"""all"""\n', ["all"]), ('"""\none\n', []), ("\n\none\n", ["one"])])
def test_questions_of_several_lines(typed: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app = FakeApi()
    chat(app, typed, "--plain", monkeypatch=monkeypatch)
    assert [body["prompt"] for body in app.bodies] == asked


TOOLS = [{"type": "function", "function": {"name": "count"}}]


def test_calls_are_shown_and_their_results_sent_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    app = FakeApi()
    assert chat(app, "call it\n{\"found\": 3}\nbye\n", "--tools", str(tmp_path / "tools.json"), monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == ['count({"n": 1})', '{"found": 3}', "bye"]
    assert all(body["tools"] == TOOLS for body in app.bodies)
    assert app.bodies[1]["messages"] == [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"found": 3}'}]
    assert [message["role"] for message in app.bodies[2]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]


def test_a_call_without_a_result_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    assert chat(FakeApi(), "call it\n", "--tools", str(tmp_path / "tools.json"), monkeypatch=monkeypatch) == 1
    assert "its call has no result" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [(None, "cannot read the tools"), ("{", "is not JSON"),
                                               ("{}", "a JSON list of tools"), ("[]", "a JSON list of tools")])
def test_tools_that_are_none(content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "tools.json").write_text(content)
    assert main(["chat", "--url", "http://127.0.0.1:9", "--tools", str(tmp_path / "tools.json")]) != 0
    assert said in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "is the server running there?" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_not_the_program() -> None:
    app = FakeApi()
    with served(app) as url:
        terminal, child = pty.openpty()
        command = [sys.executable, "-m", "penstock", "chat", "--url", url, "--stats"]
        process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # not inherited as ignored
        os.close(child)
        screen = Screen(terminal)
        screen.wait_for("> ")
        os.write(terminal, b"drip\n")
        screen.wait_for("drip\r\n")  # the terminal's own echo of the question
        screen.wait_for("drip drip")
        process.send_signal(signal.SIGINT)
        screen.wait_for("(stopped)")
        screen.wait_for("(stopped after about ")  # it used to say "(no tokens)"
        screen.wait_for("tokens/s)")
        screen.wait_for("> ")
        os.write(terminal, b"hello\n")
        screen.wait_for("hello\r\n")
        screen.wait_for("> ")
        os.write(terminal, b"\x04")
        assert process.wait(10) == 0
        os.close(terminal)
    assert app.aborted == 1
    partial = app.bodies[1]["messages"][1]["content"]
    assert partial.startswith("drip drip")
    assert len(partial) < 400


class Screen:
    """The output of a program on a pseudo terminal; each wait goes on where the one before it ended."""

    def __init__(self, terminal: int) -> None:
        self.terminal, self.unread = terminal, ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 15
        while text not in self.unread:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.unread!r}"
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.unread += os.read(self.terminal, 4096).decode()
        self.unread = self.unread.partition(text)[2]
