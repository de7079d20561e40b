"""GGUF files alone: every architecture as llama.cpp's converter writes it (tests/assets/make_gguf.py), quantized files, split
files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.canary.suite import SKILLS
from penstock.checkpoint.gguf import config_of, read
from penstock.checkpoint.hub import resolve_folder
from penstock.cli.info import survey
from penstock.config.schema import EngineOptions
from penstock.core.errors import ModelError
from tests.data import DATA, MODELS, need

ASSETS = Path(__file__).parent.parent / "assets" / "gguf"
NAMES = sorted(path.stem for path in ASSETS.glob("*.gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def greedy(model: Path, prompt: list[int] | str, count: int, **options: Any) -> list[int]:
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    with LLM(str(model), **{"device": "cpu", "dtype": "float32", "max_model_len": 64, **options}) as llm:
        [output] = llm.generate([prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}], asked, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_answers_as_transformers(name: str) -> None:
    expected = json.loads((ASSETS / f"{name}.json").read_text())
    assert greedy(ASSETS / f"{name}.gguf", expected["prompt"], 24) == expected["greedy"]


def written(path: Path, kind: str, story: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A story model as a GGUF file by the `gguf` package, matrices in blocks of a type; what they decode to, by our names."""
    config, tensors = json.loads((story / "config.json").read_text()), load_file(story / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama", **changes)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    vocabulary(writer, story)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    found = {}
    for name, tensor in tensors.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        number = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        if tensor.ndim > 1 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[number][0]:
            number = gguf.GGMLQuantizationType.F16
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        data = gguf.quants.quantize(tensor.astype(np.float32), number)
        plain = gguf.quants.dequantize(data, number)
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                plain = plain.reshape(count, -1, 2, plain.shape[1]).swapaxes(1, 2).reshape(plain.shape)
        found[name] = plain
        writer.add_tensor(target, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def vocabulary(writer: gguf.GGUFWriter, story: Path) -> None:
    """Names only: these tests run on token ids."""
    given = json.loads((story / "tokenizer.json").read_text())
    tokens = sorted(given["model"]["vocab"], key=given["model"]["vocab"].get)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *([1] * (len(tokens) - 3))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16"])
def test_a_quantized_file_answers_as_its_decoded_matrices(kind: str, tmp_path: Path) -> None:
    story = need(MODELS / "babyllama-tok105")
    decoded = written(tmp_path / "model.gguf", kind, story)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((story / "config.json").read_bytes())
    save_file({name: np.ascontiguousarray(tensor.astype(np.float32)) for name, tensor in decoded.items()},
              plain / "model.safetensors")
    prompt = json.loads((story / "greedy_golden.json").read_text())
    ids = (prompt["cases"] if isinstance(prompt, dict) else prompt)[0].get("prompt_ids", [1, 5, 9, 20])
    expected = greedy(plain, ids, 24, skip_tokenizer_init=True)
    assert greedy(tmp_path / "model.gguf", ids, 24, skip_tokenizer_init=True) == expected
    if kind != "F16":
        found = survey(EngineOptions(model=str(tmp_path / "model.gguf"), device="cpu", max_model_len=64))
        assert kind.lower() in {one["scheme"] for one in found["weights"]}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_llama_cpp_answers_the_same(kind: str) -> None:
    """canary-256 by llama.cpp's quantizer, against llama.cpp's greedy tokens (tests/assets/make_canary_gguf.py)."""
    folder = ASSETS.parent / "gguf-canary-256"
    asked = json.loads((folder / "expected.json").read_text())["asked"]
    wanted = SamplingParams(temperature=0, max_tokens=48, stop_token_ids=[2], include_stop_str_in_output=True)
    with LLM(str(folder / f"{kind}.gguf"), device="cpu", dtype="float32", max_model_len=2048) as llm:
        found = llm.generate([{"prompt_token_ids": one["prompt"]} for one in asked], wanted, use_tqdm=False)
    assert {one["skill"] for one in asked} == {*SKILLS} - {"retrieve-4k"} and len(asked) == 2 * (len(SKILLS) - 1)
    for one, output in zip(asked, found, strict=True):
        assert list(output.outputs[0].token_ids) == one[kind], one["skill"]


def test_split_files(tmp_path: Path) -> None:
    story = need(MODELS / "babyllama-tok105")
    written(tmp_path / "whole.gguf", "Q8_0", story)
    written(tmp_path / "part.gguf", "Q8_0", story, split_max_tensors=20)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) > 1
    assert greedy(parts[1], [1, 5, 9], 12, skip_tokenizer_init=True) == greedy(tmp_path / "whole.gguf", [1, 5, 9], 12,
                                                                              skip_tokenizer_init=True)
    parts[0].rename(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"lacks part-00001-of-0000. *\.gguf|lacks part-00001"):
        resolve_folder(str(parts[1]))


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes((ASSETS / "qwen2.gguf").read_bytes())
    assert (resolve_folder(str(tmp_path)) / "config.json").is_file()
    (tmp_path / "b.gguf").write_bytes((ASSETS / "qwen2.gguf").read_bytes())
    with pytest.raises(ModelError, match=r"has 2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        resolve_folder(str(tmp_path))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    data, path = (ASSETS / "llama.gguf").read_bytes(), tmp_path / "bad.gguf"
    cases = ((data[:-100], "cut short"), (b"GGML" + data[4:], "does not begin with GGUF"), (data[:40], "is not a whole"),
             (data[:4] + b"\x09" + data[5:], "its version is 9"), (data[:16] + b"\xff" * 8 + data[24:], "long"))
    for content, said in cases:
        path.write_bytes(content)
        with pytest.raises(ModelError, match=said):
            resolve_folder(str(path))


def test_metadata_of_other_types_is_refused() -> None:
    """Heads by layer, and texts for numbers, as a ModelError that names the keys."""
    for name, key, given in (("qwen2", "attention.head_count", [4, 2]), ("llama", "rope.dimension_count", "x"),
                             ("phi3", "embedding_length", [32, 64]), ("qwen3", "attention.key_length", "x")):
        file = read(ASSETS / f"{name}.gguf")
        assert f"{name}.{key}" in file.metadata
        with pytest.raises(ModelError, match=rf"the metadata .*{key}.* is \[.*possible is one whole number each"):
            config_of([replace(file, metadata={**file.metadata, f"{name}.{key}": given})])


def test_metadata_that_an_architecture_needs(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_block_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"bare\.gguf: the metadata lacks a number that deepseek2 needs"):
        resolve_folder(str(path))


def test_other_architectures_and_vocabularies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rwkv.gguf"
    length = (5).to_bytes(8, "little")
    path.write_bytes((ASSETS / "llama.gguf").read_bytes().replace(length + b"llama", length + b"rwkv9", 1))
    with pytest.raises(ModelError, match=r"general.architecture is 'rwkv9', which .* it reads afmoe, apertus, arcee, baichuan"):
        resolve_folder(str(path))
    with pytest.raises(ModelError, match=r"no token_embd.weight: it holds no language model"):
        resolve_folder(str(need(DATA / "tokenizers" / "gguf" / "ggml-vocab-llama-spm.gguf")))
    with pytest.raises(ModelError, match=r"is not of the form hf:OWNER/REPOSITORY:FILE\.gguf"):
        resolve_folder("hf:somebody/model")
