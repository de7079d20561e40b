"""Architectures of GGUF files: random models as llama.cpp's converter writes them, against transformers' logits.

Of most files llama.cpp's logits (llama-cpp-python 0.3.36) were compared with the same ones when this was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.checkpoint.hub import resolve_folder
from tests.models.families import PROMPT, make
from tests.models.gguf_files import GEMMAS, KINDS, case_of, convert
from tests.models.harness import Runner, open_model

SAMPLED = {"llama", "llama mixtral", "mistral3", "llama4", "qwen2moe", "gemma3", "phi2", "phi3", "phimoe", "granitemoe shared",
           "olmo2 windows", "starcoder", "glm4moe", "chatglm", "cohere2", "gptneox serial", "bloom", "falcon", "mpt clamped",
           "stablelm normed", "internlm2", "baichuan", "minicpm", "minicpm3", "deepseek2", "deepseek2 sigmoids",
           "deepseek2 lite", "gpt-oss", "dots1", "hunyuan-moe", "ernie4_5-moe", "nemotron", "exaone4", "exaone-moe", "afmoe",
           "apertus", "falcon two", "glm-dsa", "qwen3next", "qwen3next input", "qwen35", "qwen35moe",
           "deepseek32", "hy_v3", "mellum", "cohere2moe", *(case.name for case in GEMMAS)}
"""CI runs these; `make test-all` runs all."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize(("kind", "blocks", "absorbed"), [
    ("deepseek2 wide", "Q8_0", True), ("deepseek2 wide", "Q4_0", False), ("gpt-oss wide", "MXFP4", True),
    ("qwen3next wide", "Q8_0", True), ("qwen35 wide", "Q4_0", True), ("qwen35 halves", "Q8_0", True),
    ("gemma3n wide", "Q8_0", True), ("gemma4 wide", "Q4_0", True), ("gemma4 experts", "Q8_0", True)])
def test_blocks_are_what_they_decode_to(kind: str, blocks: str, absorbed: bool, tmp_path: Path) -> None:
    """Latents in halves, and experts with biases, in blocks."""
    make(case_of(kind), tmp_path)
    found = []
    for decoded in (False, True):
        path = tmp_path / f"{decoded}.gguf"
        convert(tmp_path, kind, path, absorbed=absorbed, blocks=blocks, decoded=decoded)
        decoder = open_model(resolve_folder(str(path)))
        schemes = {scheme.name for _, scheme in decoder.spec.schemes}
        assert (blocks.lower() in schemes) != decoded
        if kind.startswith("gemma"):
            stored = {one.stem: one.scheme.name for one in decoder.spec.parameters() if one.scheme and not one.decoded}
            assert (stored["blocks.5.attention.q" if kind.endswith("wide") else "blocks.5.attention.qkv"] == "plain") == decoded
        found.append(Runner(decoder).prompt(0, list(range(3, 40))))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in SAMPLED else pytest.mark.exhaustive)
                                  for kind in KINDS])
def test_an_architecture(kind: str, tmp_path: Path) -> None:
    case = case_of(kind)
    model = make(case, tmp_path)
    prompt = torch.randint(3, case.config["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    for absorbed in (True, False) if kind in ("deepseek2", "deepseek2 lite") else (True,):
        path = tmp_path / f"{absorbed}.gguf"
        convert(tmp_path, kind, path, absorbed=absorbed)
        decoder = open_model(resolve_folder(str(path)), max_model_len=case.max_model_len)
        logits = Runner(decoder, length=case.max_model_len).prompt(0, prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


