"""Scores and their intervals, the packaged model's name, and `penstock eval` against a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import canary
from penstock.canary.suite import Score, graded, prompts, table
from penstock.checkpoint import resolve_folder
from penstock.cli.eval import body, room
from penstock.cli.main import main
from penstock.config.schema import EngineOptions
from penstock.core.errors import ModelError
from tests.unit.cli.fake import FakeApi, served


@pytest.mark.parametrize(("right", "asked", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611),
                                                             (200, 200, 0.9812, 1.0), (1, 1, 0.2065, 1.0)])
def test_wilsons_interval(right: int, asked: int, low: float, high: float) -> None:
    """At the ends z²/(n + z²) away from them; 8 of 10 as the formula gives it by hand."""
    assert Score("add", right, asked).interval == pytest.approx((low, high), abs=1e-4)


def test_what_did_not_fit_is_not_counted_and_said() -> None:
    items = prompts("add", 4)
    score = graded(items, [(items[0].answer, [], True), ("wrong", [], True), (items[2].answer, [], False), None])
    assert (score.right, score.asked, score.left_out) == (1, 3, 1)
    assert "1 of 3" in table([score]) and "(1 did not fit)" in table([score])
    assert Score("add", 0, 0).interval == (0.0, 1.0)


def test_the_default_model_is_canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert EngineOptions().model == canary.NAME
    monkeypatch.setattr(canary, "MODEL", tmp_path)
    with pytest.raises(ModelError, match="Name another model"):
        resolve_folder("canary")
    assert main(["info"]) == 1
    assert "no weights of canary" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "canary").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("canary") == tmp_path  # and not the folder of that name
    assert resolve_folder("./canary") == Path("canary")


class Knowing(FakeApi):
    """Answers graded prompts rightly, but for those that hold a text of `misled`, and refuses long ones."""

    def __init__(self, skills: list[str], count: int) -> None:
        super().__init__()
        self.items = {json.dumps(body(item, "fake"), sort_keys=True): item
                      for skill in skills for item in prompts(skill, count)}

    async def _answer(self, body: dict[str, Any], chat: bool, receive: Any, send: Any) -> None:
        self.bodies.append(body)
        item = self.items[json.dumps(body, sort_keys=True)]
        if len(item.messages[-1]["content"]) > 9000:
            await self._json(send, 400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
            return
        message: dict[str, Any] = {"role": "assistant", "content": item.answer}
        reason = "stop"
        if item.skill == "tool-call":
            call = json.loads(item.answer.split("\n")[1])
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            message = {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
            reason = "tool_calls"
        if item.skill == "compare":
            reason = "length"
        await self._json(send, 200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}]})


def test_a_server_is_graded(capsys: pytest.CaptureFixture[str]) -> None:
    skills = ["add", "compare", "tool-call", "think", "retrieve-4k"]
    app = Knowing(skills, 12)
    with served(app) as url:
        assert main(["eval", "canary", "--base-url", url, "--prompts", "12", "--skills", ",".join(skills), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = {score["skill"]: score for score in found["scores"]}
    assert list(scores) == skills
    assert [scores[name]["right"] for name in ("add", "compare", "tool-call", "think")] == [12, 0, 12, 12]
    assert 0 < scores["retrieve-4k"]["left_out"] < 12
    assert scores["retrieve-4k"]["right"] == scores["retrieve-4k"]["asked"] == 12 - scores["retrieve-4k"]["left_out"]
    asked = [request for request in app.bodies if request.get("chat_template_kwargs")]
    assert asked and all(request["temperature"] == 0 for request in app.bodies)
    assert all(room(item) > len(item.answer) for item in prompts("add", 3))


def test_a_skill_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "canary", "--skills", "add,revers"]) == 1
    assert "did you mean reverse?" in capsys.readouterr().err
    assert main(["eval", "canary", "--prompts", "0"]) == 1
    assert main(["eval", "canary", "--skills", ","]) == 1
    with pytest.raises(SystemExit):
        main(["eval", "canary", "a", "--model", "b"])
    assert "name one" in capsys.readouterr().err
