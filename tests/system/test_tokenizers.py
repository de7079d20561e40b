"""Real tokenizers against published test vectors: what llama.cpp's makers expect, through our folders and streams."""

from __future__ import annotations

import pytest

from tests.data import DATA, need
from tests.unit.text import real

SEPARATOR = "\n__ggml_vocab_test__\n"

PAIRS = {"tokenizers/qwen2.5": "qwen2", "tokenizers/llama-3.1": "llama-bpe", "tokenizers/gpt2": "gpt-2",
         "tokenizers/llama2.model": "llama-spm"}
"""Our tokenizer, and the vectors made for its vocabulary."""


def vectors(name: str) -> list[tuple[str, list[int]]]:
    path = need(DATA / "tokenizers" / "gguf") / f"ggml-vocab-{name}.gguf"
    texts = need(path.with_name(path.name + ".inp")).read_text(encoding="utf-8").split(SEPARATOR)
    lines = need(path.with_name(path.name + ".out")).read_text(encoding="utf-8").splitlines()
    assert len(texts) == len(lines) + 1 or len(texts) == len(lines)
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", PAIRS)
def test_vectors_encode_exactly(name: str) -> None:
    tokenizer, cases = real.load(name), vectors(PAIRS[name])
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("name", PAIRS)
def test_vectors_stream_exactly(name: str) -> None:
    tokenizer = real.load(name)
    for text, ids in vectors(PAIRS[name]):
        detokenizer = tokenizer.detokenizer()
        parts = [detokenizer.push([token]) for token in ids]
        assert not any("\ufffd" in part for part in parts), "a character in pieces"
        assert "".join(parts) + detokenizer.flush() == text == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["tokenizers/qwen2.5", "tokenizers/llama-3.1", "tokenizers/gpt2", "tokenizers/llama2.model",
                                  "tokenizers/o200k-harmony"])
def test_books_in_many_scripts_come_back(name: str) -> None:
    tokenizer = real.load(name)
    files = sorted(path for path in need(DATA / "text").rglob("*.txt"))[:12]
    assert files
    for path in files:
        # A window well inside the file, without the one special token that some of these texts spell out.
        text = path.read_text(encoding="utf-8", errors="ignore")[2000:6000].lstrip().replace("<unk>", "unk")
        detokenizer = tokenizer.detokenizer()
        told = "".join([detokenizer.push([token]) for token in tokenizer.encode(text, add_special_tokens=False)])
        assert told + detokenizer.flush() == text
