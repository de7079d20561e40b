"""`penstock train-draft` in miniature: the head learns, is written as published heads are, and drafts for its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, SamplingParams
from penstock.canary import suite
from penstock.cli.main import main
from penstock.models import configured
from penstock.worker.draft_training import DraftTraining, Recipe

ROOT = Path(__file__).parents[2]
CANARY, EAGLE = ROOT / "src/penstock/canary/model", ROOT / "tests/assets/canary-eagle"
SMALL = ["--steps", "3", "--batch", "2", "--window", "64", "--vocabulary", "2048", "--device", "cpu"]


def test_a_head_trained_on_answers_is_read_like_a_published_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "talk.jsonl"
    asked = [{"messages": item.messages} for item in suite.prompts("repeat", 8)]
    text.write_text("".join(json.dumps(line) + "\n" for line in [*asked, {"prompt": "Tell me a story about a fox."}]))
    assert main(["train-draft", "canary", str(text), "--output", str(tmp_path / "head"), *SMALL]) == 0
    card = capsys.readouterr().out
    assert "| token of a draft | right in training | kept in answers |" in card and "tokens per verification" in card
    assert card.strip() == (tmp_path / "head/README.md").read_text().strip()
    found, published = (load_file(folder / "model.safetensors") for folder in (tmp_path / "head", EAGLE))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tensor.shape for name, tensor in published.items()}
    own, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "head", EAGLE))
    assert own.keys() == theirs.keys() and own["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    said = []
    for draft in (None, str(tmp_path / "head")):
        with LLM("canary", threads=1, max_model_len=512, speculative_model=draft, draft_policy="fixed") as llm:
            params = SamplingParams(temperature=0, max_tokens=40)
            outputs = llm.chat([item.messages for item in suite.prompts("json", 3)], params, use_tqdm=False)
            said.append([one.outputs[0].token_ids for one in outputs])
    assert said[0] == said[1]


def test_the_head_learns_from_the_tokens_that_the_target_said() -> None:
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(10, 1000, (4, 48), generator=draw).tolist()
    said = [[place >= 24 for place in range(48)]] * 4
    training = DraftTraining(CANARY, configured(CANARY), "float32", "cpu", windows, said, Recipe(24, 4, 2, 4096, 0.003))
    losses, right = [], []
    loss, agreed = training.losses(torch.arange(4))
    assert [len(one) for one in agreed] == [4 * 24, 4 * 24]

    def progress(step: int, loss: float, shares: list[float]) -> None:
        assert step == len(losses) + 1
        losses.append(loss)
        right.append(shares)

    training.train(progress)
    assert losses[0] == pytest.approx(loss.item(), rel=1e-4) and losses[-1] < 0.6 * losses[0]
    assert right[-1][0] > right[0][0] + 0.1


@pytest.mark.parametrize(("words", "message"), [
    (["--window", "4000"], "gives 0 windows"), (["--steps", "0"], "--steps must be at least 1"),
    (["--output", "."], "exists; give a new folder")])
def test_mistakes_are_named_before_training(words: list[str], message: str, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox. " * 40)
    assert main(["train-draft", "canary", str(tmp_path / "text.txt"), "--output", str(tmp_path / "head"), *SMALL, *words]) == 1
    assert message in capsys.readouterr().err
