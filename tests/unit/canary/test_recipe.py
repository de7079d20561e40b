"""The recipe trains on the text that an engine is asked: template, tokens, and the texts' marks."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import pytest
import torch
from training.canary import run, ship
from training.canary.members import MEMBERS
from training.canary.render import render
from training.canary.stories import small_talk, story_chat
from training.canary.tokenizer import FOLDER, VOCABULARY
from transformers import AutoModelForCausalLM

from penstock.canary.suite import SKILLS, prompts
from penstock.text import ChatTemplate, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(FOLDER, None, tokenizer.special_tokens)


@pytest.mark.parametrize("skill", SKILLS)
def test_training_text_is_what_the_template_writes(skill: str, template: ChatTemplate) -> None:
    for item in prompts(skill, 8):
        tools = list(item.tools) or None
        asked = template.render(item.messages, tools, enable_thinking=item.thinking)
        assert asked == render(item.messages, item.tools, item.thinking, generate=True)
        told = [*item.messages, {"role": "assistant", "content": item.answer}]
        assert template.render(told, tools, add_generation_prompt=False) == render(told, item.tools)


def test_stories_and_small_talk_too(template: ChatTemplate) -> None:
    rng = Random(0)
    for _ in range(20):
        for messages in (story_chat(rng), small_talk(rng)):
            assert template.render(messages, add_generation_prompt=False) == render(messages)


def test_the_tokenizer_gives_every_text_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCABULARY
    texts = [item.messages[-1]["content"] for item in prompts("json", 10)]
    for text in ("Add 1234 and 5.", "naïve café, 東京 🙂\n\n  x", *texts):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("98765", add_special_tokens=False)) == 5  # each digit alone: sums are digit by digit
    marks = "<think></think><tool_call></tool_call><tools></tools>"
    ids = tokenizer.encode(marks, add_special_tokens=False)
    assert len(ids) == 6 and tokenizer.decode(ids) == marks  # text, for whoever reads calls and thoughts
    turn = tokenizer.encode("<|im_start|>user\n<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(turn) == "user\n"
    assert tokenizer.eos_id == turn[-1]


def test_most_prompts_for_4k_fit_the_context(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(render(item.messages, generate=True), add_special_tokens=False))
               for item in prompts("retrieve-4k", 40)]
    assert max(lengths) > 3400 and sum(length + 32 <= 4096 for length in lengths) >= 38


@pytest.mark.parametrize("name", ["canary-moe", "canary-mla", "canary-sink", "canary-hybrid"])
def test_experts_compute_as_transformers_own(name: str) -> None:
    """Training computes every expert for every token, and so do the reference's figures; transformers sorts tokens."""
    torch.manual_seed(0)
    mine = MEMBERS[name].build({"end": 2, "padding": 0}).eval()
    theirs = AutoModelForCausalLM.from_config(mine.config, attn_implementation="eager", dtype=torch.float32).eval()
    theirs.load_state_dict(mine.state_dict())
    ids = torch.randint(3, VOCABULARY, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
        for weight in mine.parameters():  # a difference would be seen
            weight.add_(0.01)
        assert not torch.allclose(mine(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-3)


def test_what_is_collected_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round's logs to their round; of what was trained twice, what the second round made."""
    made = {("first", "canary"): "a", ("first", "canary-draft"): "b", ("second", "canary-draft"): "c"}
    for (name, job), text in made.items():
        folder = tmp_path / "work" / name / job
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights").write_text(text)
        (folder / "log.jsonl").write_text(f"log {text}\n")
    run.collect(argparse.Namespace(work=tmp_path / "work", collect=tmp_path / "out", rounds=["first", "second"], wait=0.0,
                                   members=["canary", "canary-draft"]))
    for name, value in (("HERE", tmp_path), ("ASSETS", tmp_path / "assets"), ("MODEL", tmp_path / "package")):
        monkeypatch.setattr(ship, name, value)
    monkeypatch.setattr("sys.argv", ["ship", str(tmp_path / "out")])
    ship.main()
    assert (tmp_path / "package" / "weights").read_text() == "a"
    assert (tmp_path / "assets" / "canary-draft" / "weights").read_text() == "c"
    logs = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in (tmp_path / "logs").rglob("*.jsonl")}
    assert logs == {"first/canary.jsonl": "log a\n", "first/canary-draft.jsonl": "log b\n",
                    "second/canary-draft.jsonl": "log c\n"}
