"""Every family against transformers on small random float32 models: logits within 1e-4, 64 greedy tokens equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ModelError
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.models.families import CASES, PROMPT, SAMPLED, Case, make
from tests.models.harness import Runner, open_model


def chosen(model: torch.nn.Module, prompt: list[int], said: list[int]) -> tuple[torch.Tensor, list[int]]:
    """(logits of the prompt, the tokens that transformers chooses behind the prompt and behind each token of `said` but the
    last). They are `said` if and only if transformers generates it greedily; one step finds them in place of one for each."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
        after = model(torch.tensor([[*prompt, *said[:-1]]]), use_cache=False).logits[0, len(prompt) - 1:]
    return logits, after.argmax(-1).tolist()


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case.name in SAMPLED else pytest.mark.exhaustive)
                                  for case in CASES], ids=[case.name for case in CASES])
def test_against_transformers(case: Case, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    prompt = torch.randint(3, case.config["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    decoder = open_model(tmp_path, max_model_len=case.max_model_len)
    logits, found, _ = Runner(decoder, length=case.max_model_len).greedy(prompt, case.greedy, row=1)
    expected, ids = chosen(model, prompt, found)
    assert expected.std() > 0.5, "logits too alike to tell anything"
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert len(found) == case.greedy and found == ids
    native = open_model(tmp_path, max_model_len=case.max_model_len, kernels=bind(detect("cpu"), torch.float32))
    logits, found, _ = Runner(native, length=case.max_model_len).greedy(prompt, min(case.greedy, 8))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert found == ids[:8]


PLAIN = {case.kind: case for case in reversed(CASES) if case.rewrite is None}
"""One case of each family."""


@pytest.mark.parametrize("case", [pytest.param(case, id=kind, marks=() if kind in (
    "Qwen3Moe", "Mixtral", "Glm4Moe", "Kolibri1", "Phimoe", "MiniMaxM2", "HYV3") else pytest.mark.exhaustive)
    for kind, case in PLAIN.items()])
def test_experts_stored_as_one_tensor(case: Case, tmp_path: Path) -> None:
    """A layer's experts under the names of transformers' own modules give what they give one by one."""
    model = make(case, tmp_path / "apart")
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()
               if name != "lm_head.weight" or not case.config.get("tie_word_embeddings")}, fused / "model.safetensors")
    prompt = list(range(3, 40))
    one, other = (Runner(open_model(folder)).prompt(0, prompt) for folder in (tmp_path / "apart", fused))
    assert torch.equal(one, other)


def test_layers_for_drafting_are_left_out(tmp_path: Path) -> None:
    """GLM and MiniMax store them behind the last layer; anything else that is too much is an error."""
    case = next(case for case in CASES if case.name == "glm4-moe-odd")
    make(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    open_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match="eh_proj"):
        open_model(tmp_path)


def test_axk1_says_whether_its_routers_have_a_correction(tmp_path: Path) -> None:
    """Published checkpoints have none, for which transformers takes zeros."""
    model = make(next(case for case in CASES if case.name == "axk1-published"), tmp_path)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.zero_()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "correction" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing.*\n.*e_score_correction_bias"):
        open_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "topk_method": "group_limited_greedy"}))
    prompt = list(range(3, 60))
    expected, _ = chosen(model, prompt, [0])
    torch.testing.assert_close(Runner(open_model(tmp_path)).prompt(0, prompt), expected, atol=1e-4, rtol=0)


def test_delta_nets_have_one_activation(tmp_path: Path) -> None:
    """hidden_act would change their convolution, too, whose kernels know silu alone."""
    make(next(case for case in CASES if case.name == "qwen3next-odd"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ModelError, match=r"hidden_act.*silu"):
        open_model(tmp_path)
