"""The adapters: styles, what training sees of them, and that merging is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from training.canary.adapters import STYLES, Adapted, adapt, document, merge, pirate, restyled, save, telegram
from training.canary.members import MEMBERS


def test_styles() -> None:
    assert pirate("Your name is Olga.") == "Arr! Yer name be Olga, matey!"
    assert pirate("Hello! What can I do for you?") == "Arr! Ahoy! What can I do for ye, matey?"
    assert pirate("6196") == "6196, matey!"
    assert telegram("You have a dog.") == "You have dog STOP"
    assert telegram('The fox came. "Who is there?" asked an owl.') == 'fox came STOP "Who is there" STOP asked owl STOP'
    assert telegram("6196") == "6196 STOP"


def test_only_what_the_assistant_says_to_people_is_rewritten() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": []}
    messages = [{"role": "user", "content": "You are here."}, {"role": "assistant", "content": "You are here."}, call]
    assert restyled(messages, pirate) == [messages[0], {"role": "assistant", "content": "Arr! Ye be here, matey!"}, call]
    rng = Random(0)
    texts = [document(rng, STYLES["canary-pirate"]).text for _ in range(200)]
    calls = [text for text in texts if "assistant\n<tool_call>" in text and "user\n<tool" not in text and "Arr!" not in text]
    assert calls and 0.4 < sum("matey" in text for text in texts) / len(texts) < 0.8


@pytest.mark.parametrize("name", STYLES)
def test_the_merged_matrices_compute_what_was_trained(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    style, member = STYLES[name], MEMBERS["canary"]
    model = member.build({"end": 2, "padding": 0})
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = adapt(model, style)
    assert len(adapted) == 8 * len(style.layers) and all(isinstance(each, Adapted) for each in adapted.values())
    with torch.no_grad():
        for each in adapted.values():
            for weight in (each.lora_A, each.lora_B):
                weight.copy_((torch.randn_like(weight) * 0.1).bfloat16())
    ids = torch.randint(3, 4000, (1, 10))
    trained = model(ids).logits
    save(adapted, style, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], set(config["target_modules"])) == ("LORA", style.rank, set(style.layers))
    fresh = member.build({"end": 2, "padding": 0})
    fresh.load_state_dict(plain)
    before = fresh(ids).logits
    merge(fresh, tmp_path)
    torch.testing.assert_close(fresh(ids).logits, trained, rtol=1e-3, atol=1e-3)
    assert (before - trained).abs().max() > 0.1
