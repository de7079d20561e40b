"""The trained models say what an independent implementation in float32 says."""

from __future__ import annotations

import json

import pytest
import torch

from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.data import MODELS, TRAINED, need
from tests.models.harness import Runner, open_model, reference


@pytest.mark.parametrize("kernels", ["reference", "default"])
@pytest.mark.parametrize("name", TRAINED)
def test_golden(name: str, kernels: str) -> None:
    folder = need(MODELS / name)
    bound = reference() if kernels == "reference" else bind(detect("cpu"), torch.float32)
    decoder = open_model(folder, kernels=bound, max_model_len=512)
    cases = json.loads((folder / "greedy_golden.json").read_text())["cases"]
    assert cases
    found = Runner(decoder, rows=len(cases), length=512, page=16).together(
        [(case["prompt_ids"], len(case["greedy_ids"])) for case in cases])
    for case, (ids, logprobs) in zip(cases, found, strict=True):
        assert ids == case["greedy_ids"], case["prompt"]
        assert torch.tensor(logprobs) == pytest.approx(torch.tensor(case["logprobs"]), abs=1e-3)
