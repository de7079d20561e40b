"""Real tokenizers for the tests, each loaded once, beside the library's own object as the oracle."""

from __future__ import annotations

import functools
from pathlib import Path

import sentencepiece
import tokenizers

from penstock.text import Tokenizer
from tests.data import DATA, need

SMALL = ("models/stories260k", "models/babyllama-tok105", "models/babyllama-tok361")
FULL = ("tokenizers/gpt2", "tokenizers/qwen2.5", "tokenizers/llama-3.1", "tokenizers/qwen3", "tokenizers/o200k-harmony")
SENTENCEPIECE = ("llama2.model", "mistral/tokenizer.model.v1", "mistral/mistral_instruct_tokenizer_240323.model.v3",
                 "mistral/mistral_instruct_tokenizer_241114.model.v7")

TEXTS = (
    "", " ", "  ", "\n", "\t\n  x", "Hello, world!", " leading", "trailing ", "a  b   c", "don't can't I'LL we've",
    "naïve café ﬁ Å A\u030a", "日本語のテキスト、漢字。", "한국어 텍스트", "😀 👩\u200d👩\u200d👧 🇨🇭",
    "अनुच्छेद ไทย עברית العربية", "12345678901234567890 3.14159 1,000",
    "def f(x):\n    return {'a': [x ** 2]}  # comment\n\n\n", "<html>&amp;</html>", "x" * 300,
    "\u0000\u0001\u007f\u00a0\u200b\ufeff", "\r\n\r\n", "\u0300combining first", "🅰" * 7, "ÿþ\ufffd", "a\u2581b",
    "<0x41> <0xE2>",
)


def folder(name: str) -> Path:
    return need(DATA / name)


@functools.cache
def load(name: str) -> Tokenizer:
    """Ours, from a folder or a sentencepiece file."""
    return Tokenizer.load(folder(name))


@functools.cache
def library(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder(name) / "tokenizer.json"))


@functools.cache
def sentencepiece_library(name: str) -> sentencepiece.SentencePieceProcessor:
    core = sentencepiece.SentencePieceProcessor()
    core.Load(str(folder("tokenizers/" + name)))
    return core


def special_text(tokenizer: Tokenizer) -> str:
    """A text in which some of the special tokens are spelled out, with and without space around."""
    names = [tokenizer.token_name(token) or "" for token in sorted(tokenizer.special_ids)[:4]]
    return "go" + "".join(f"{name} on {name}\n{name}" for name in names)
