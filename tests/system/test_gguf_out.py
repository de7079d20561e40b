"""`penstock quantize MODEL OUT.gguf`: files that the gguf package reads, and that answer as folders quantized at load do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.checkpoint import resolve_folder
from penstock.cli.main import main
from penstock.models.gguf_out import write
from penstock.quant.gguf import GGUF
from penstock.text import Tokenizer
from tests.data import MODELS, need
from tests.system.random_models import saved_random


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def greedy(model: str | Path, text: str, **options: Any) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of the answer."""
    asked = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(model), device="cpu", dtype="float32", max_model_len=128, **options) as llm:
        [output] = llm.generate([text], asked, use_tqdm=False)
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


@pytest.mark.parametrize(("model", "scheme"), [("canary", "q8_0"), ("canary", "q4_0"), ("stories260k", "q8_0"),
                                               ("babyllama-tok105", "q4_1")])
def test_a_file_answers_as_its_folder(model: str, scheme: str, tmp_path: Path) -> None:
    folder = resolve_folder(model) if model == "canary" else need(MODELS / model)
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(folder), str(out), "--scheme", scheme]) == 0
    text = "Once upon a time, there was a little girl. 12 plus 30 is"
    assert greedy(out, text) == greedy(folder, text, quantization=scheme)
    reader = gguf.GGUFReader(out)
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == scheme and kinds["blk.0.attn_norm.weight"] == "f32"
    assert set(kinds.values()) <= {scheme, "f32", "bf16", "f16"}
    assert gguf.GGUFReader(out).fields["general.architecture"].contents() == ("qwen3" if model == "canary" else "llama")


def test_the_chat_template_and_special_tokens_are_kept(tmp_path: Path) -> None:
    folder, out = resolve_folder("canary"), tmp_path / "canary.gguf"
    write(folder, out, "q8_0", {}, "bfloat16")
    made, own = Tokenizer.load(resolve_folder(str(out))), Tokenizer.load(folder)
    for text in ("<|im_start|>user\nHello 1234<|im_end|>\n", " a  b\n\n c'll ü 日本"):
        assert made.encode(text) == own.encode(text)
    fields = gguf.GGUFReader(out).fields
    assert fields["tokenizer.chat_template"].contents() == (folder / "chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.eos_token_id"].contents() == json.loads((folder / "config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize(("kind", "most"), [("q4_k", 0.08), ("q6_k", 0.02)])
def test_superblocks_are_rounded_to_what_the_package_reads(kind: str, most: float) -> None:
    torch.manual_seed(3)
    matrix = torch.randn(16, 512) * torch.rand(16, 1) + 0.1
    matrix[3] = 0.0
    data = GGUF(kind).encode(matrix)["weight"]
    read = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind.upper()]).astype(np.float32))
    assert torch.equal(read, GGUF(kind).decode({"weight": data}, torch.float32))
    assert (read - matrix).norm() < most * matrix.norm() and not read[3].any()


def test_the_medium_mixture_gives_some_matrices_more_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=128, rope_parameters=scaling))
    folder, out = saved_random(model, tmp_path / "folder", 0.1), tmp_path / "out.gguf"
    (folder / "tokenizer.json").write_bytes((need(MODELS / "stories260k") / "tokenizer.json").read_bytes())
    write(folder, out, "q4_k_m", {}, "float32")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert kinds["blk.2.attn_v.weight"] == kinds["output.weight"] == "Q6_K" and kinds["blk.0.attn_v.weight"] == "Q4_K"
    rules = {f"layers.2.{part}": "q6_k" for part in ("self_attn.v_proj", "mlp.down_proj")} | {"lm_head": "q6_k"}
    assert greedy(out, "One day")[1] == greedy(folder, "One day", quantization="q4_k", quantization_rules=rules)[1]


def random_folder(kind: str, folder: Path, **config: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
             "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, **config}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    saved_random(model, folder, 0.1)
    (folder / "tokenizer.json").write_bytes((need(MODELS / "stories260k") / "tokenizer.json").read_bytes())
    return folder


HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(("kind", "config", "said"), [
    ("Llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, "sliding_window 9"),
    ("Qwen3", {"head_dim": 32, **HALF}, "partial_rotary_factor 0.5")], ids=lambda one: one if isinstance(one, str) else "")
def test_what_a_file_cannot_say_is_refused(kind: str, config: dict[str, Any], said: str, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    folder = random_folder(kind, tmp_path / "folder", **config)
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf"), "--scheme", "q8_0"]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_values_that_a_config_leaves_out_are_written(tmp_path: Path) -> None:
    folder = random_folder("Qwen3", tmp_path / "folder", num_attention_heads=32, num_key_value_heads=32, head_dim=128)
    config = json.loads((folder / "config.json").read_text())
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_parameters"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    write(folder, tmp_path / "out.gguf", "q8_0", {}, "float32")
    assert greedy(tmp_path / "out.gguf", "One day")[1] == greedy(folder, "One day", quantization="q8_0")[1]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(resolve_folder("canary"))
    for words, said in (((folder, str(tmp_path / "a.gguf"), "--scheme", "int4"), "GGUF has no int4"),
                        (("tests/assets/canary-moe", str(tmp_path / "b.gguf"), "--scheme", "q8_0"), "is not written as GGUF")):
        assert main(["quantize", *words]) != 0
        assert said in capsys.readouterr().err
