"""Tokenizers in GGUF files give the tokens that llama.cpp gives: its own test vectors, for every vocabulary that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.checkpoint import gguf
from penstock.checkpoint.gguf_text import files_of
from penstock.core.errors import ModelError
from penstock.text import Tokenizer
from tests.data import DATA, need

NAMES = ("deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact", "starcoder")


def vectors(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, ids, strict=False)]


def written(folder: Path, metadata: dict[str, object]) -> Tokenizer:
    for name, content in files_of(metadata).items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_llama_cpps(name: str, tmp_path: Path) -> None:
    folder = need(DATA / "tokenizers" / "gguf")
    tokenizer = written(tmp_path, gguf.read(folder / f"ggml-vocab-{name}.gguf").metadata)
    found = vectors(folder, name)
    assert len(found) > 40
    for text, ids in found:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize(("name", "folder", "pre"), [("llama-bpe", "llama-3.1", "llama-bpe"), ("qwen2", "qwen2.5", "qwen2")])
def test_vocabularies_from_hugging_face(name: str, folder: str, pre: str, tmp_path: Path) -> None:
    """Those whose GGUF file is too large for the test data, as a converter would write it."""
    given = json.loads((need(DATA / "tokenizers" / folder) / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {token: text for text, token in given["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, 1)
    for entry in given["added_tokens"]:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], 3 if entry["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in given["model"]["merges"]]
    tokenizer = written(tmp_path, {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges,
                                   "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
                                   "tokenizer.ggml.token_type": [types[i] for i in range(len(tokens))]})
    own = Tokenizer.load(need(DATA / "tokenizers" / folder))
    for text, ids in vectors(need(DATA / "tokenizers" / "gguf"), name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids == own.encode(text, add_special_tokens=False), text


def test_ends_and_settings(tmp_path: Path) -> None:
    metadata = gguf.read(need(DATA / "tokenizers" / "gguf") / "ggml-vocab-phi-3.gguf").metadata
    tokenizer = written(tmp_path, metadata)
    assert tokenizer.encode("Hello")[0] == 1 and tokenizer.decode(tokenizer.encode("Hello  world")) == "Hello  world"
    assert "assistant" in json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends[0] == 32000 and tokenizer.token_id("<|end|>") in ends


def test_unknown_tokenizers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model is 'bert'; possible are 'gpt2'"):
        files_of({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is 'newest'; possible are .*qwen2"):
        files_of({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "newest", "tokenizer.ggml.tokens": ["a"]})
