"""Tokenizers in GGUF files give the tokens that llama.cpp gives: its own test vectors, for every vocabulary that has them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import regex
from tokenizers import AddedToken, Regex, Tokenizer as Core, models, normalizers, pre_tokenizers, trainers

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


@pytest.mark.parametrize(("name", "given"), [
    ("merges", None), ("merges", 3.5), ("merges", "a b"), ("token_type", [1]), ("token_type", 1), ("scores", [0.5]),
    ("scores", "x")])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_lists_that_do_not_fit_the_tokens_are_refused(kind: str, name: str, given: object) -> None:
    """Without merges every text would be cut into bytes, without types no token would be special."""
    metadata: dict[str, object] = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a", "b", "ab"],
                                   "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1, 1, 1]}
    assert files_of(metadata)
    metadata[f"tokenizer.ggml.{name}"] = given
    if given is None:
        del metadata[f"tokenizer.ggml.{name}"]
        if kind == "llama":
            assert files_of(metadata)
            return
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{name} is .*; possible is a list"):
        files_of(metadata)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    entry = struct.pack("<Q1sIQIQ", 1, b"a", 1, 8, 0, 0)
    for count in (1, 2):
        (tmp_path / "m.gguf").write_bytes((b"GGUF" + struct.pack("<IQQ", 3, count, 0) + entry * count).ljust(160, b"\0"))
        if count == 1:
            assert list(gguf.read(tmp_path / "m.gguf").tensors) == ["a"]
    with pytest.raises(ModelError, match="tensor a is there twice"):
        gguf.read(tmp_path / "m.gguf")


def test_unknown_tokenizers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model is 'bert'; possible are 'gpt2'"):
        files_of({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is 'newest'; possible are .*qwen2"):
        files_of({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "newest", "tokenizer.ggml.tokens": ["a"],
                  "tokenizer.ggml.merges": []})


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HAN = r"&&[^\p{Han}]"


def _cased(less: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (rf"{start}[{_UPPER}{less}]*[{_LOWER}{less}]+{_CONTRACTIONS}?|"
            rf"{start}[{_UPPER}{less}]+[{_LOWER}{less}]*{_CONTRACTIONS}?")


PUBLISHED = {
    "kimi-k2": [rf"[\p{{Han}}]+|{_cased(_HAN)}|\p{{N}}{{1,3}}|{_REST}"],
    "seed-coder": [_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "exaone-moe": [_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
                   r"|\s*[\r\n]|\s+(?!\S)|\s+"],
    "jais-2": [_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)"
               r"|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"],
    "bloom": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "bailingmoe2": [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                    r"|\s*[\r\n]|\s+(?!\S)|\s+"],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)",
                 rf"{_cased('')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "minicpm5": [r"\p{N}{1,3}", rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_REST}"],
    "youtu": ["[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
              rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "ufakzeka": [r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "k2-horizon": [rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}|\p{{M}}|\u200c|\u200d)+|\p{{N}}{{1,3}}|{_REST}"],
    "spark2_5": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                 r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
                 r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"],
}
"""Expressions of the models' own tokenizers, or llama.cpp's, as they are published."""

ODD = ["东京Tokyo2024年は第123456回。한국어 띄어쓰기 ㅋㅋㅋ، مرحبا بالعالم", "I'VE we'll HeLLo wORLD don'T x'Re",
       "1234567890 12 1234 ٣٤٥٦٧", "a\n\n\r\n b \t c   \n   d", " " * 700 + "x" + " " * 13,
       "नमस्ते दुनिया। ñandú e\u0301te\u0301 ﬁn",
       "(a|b) f(x)... what?! :// /\n//\n", "", "می\u200cخواهم क\u094d\u200dष 12\u200d3 -\u200cx", "...\n\n?!\r\n(x)\n",
       "日本語のテキストとカタカナ、ひらがな。", "ⅣⅤ½ x² 10⁶", "<sentinel:12>"]


def pieces(text: str, expressions: list[str]) -> list[str]:
    """A text cut by one expression after another, by Python's regex package."""
    found = [text]
    for one in expressions:
        cut = []
        for piece in found:
            at = 0
            for match in regex.compile(one, regex.V1).finditer(piece):
                cut += [piece[at:match.start()], match[0]]
                at = match.end()
            cut.append(piece[at:])
        found = [piece for piece in cut if piece]
    return found


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_cut_as_models_cut_them(pre: str, tmp_path: Path) -> None:
    folder = need(DATA / "tokenizers" / "gguf")
    given = gguf.read(folder / "ggml-vocab-gpt-2.gguf").metadata
    tokenizer = written(tmp_path, {**given, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    (tmp_path / "whole").mkdir()
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["pre_tokenizer"]["pretokenizers"] = vocabulary["pre_tokenizer"]["pretokenizers"][-1:]
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / "whole" / name).write_bytes((tmp_path / name).read_bytes())
    (tmp_path / "whole" / "tokenizer.json").write_text(json.dumps(vocabulary))
    whole = Tokenizer.load(tmp_path / "whole")
    texts = [text for text, _ in vectors(folder, "gpt-2")] + ODD
    texts += [next((DATA / "text").rglob("*.txt")).read_text(encoding="utf-8", errors="replace")[:20000]]
    for text in texts:
        expected = [token for piece in pieces(text, PUBLISHED[pre]) for token in whole.encode(piece, add_special_tokens=False)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text[:80]


@pytest.mark.parametrize("how", [{"tokenizer.ggml.model": "gemma4"},
                                 {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "sarvam-moe"}], ids=str)
def test_merges_of_characters(how: dict[str, str], tmp_path: Path) -> None:
    """Gemma 4's: a vocabulary as its converter writes it gives the tokens of transformers' GemmaTokenizer."""
    transformers = pytest.importorskip("transformers")
    texts = [text for text, _ in vectors(need(DATA / "tokenizers" / "gguf"), "gpt-2")] + ODD
    shakespeare = (need(DATA / "text") / "tinyshakespeare.txt").read_text()
    core = Core(models.BPE(byte_fallback=True))
    core.normalizer, core.pre_tokenizer = normalizers.Replace(" ", "▁"), pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|channel>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core.train_from_iterator([shakespeare[:200_000], *texts[:20], *["\n\n", "\n\n\n"] * 3000], trainers.BpeTrainer(
        vocab_size=900, special_tokens=first, show_progress=False))
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    assert "\n \n" in merges and "\n\n \n" in merges
    types = [3 if i < 5 or i == 6 else 4 if i == 5 else 6 if i < len(first) else 1 for i in range(len(tokens))]
    tokenizer = written(tmp_path, {
        **how, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": [0.0] * len(tokens), "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    own = transformers.GemmaTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    own.add_tokens([AddedToken("<|channel>", normalized=False), AddedToken("<turn|>", normalized=False, special=True)])
    for text in (*texts, shakespeare[200_000:230_000], "a<|channel>b <turn|>\n\n\n\n c", "\U0001f9ff 中文 \n \n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == own.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
    assert (tokenizer.encode("x")[0] == 2) == (how["tokenizer.ggml.model"] == "gemma4")
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [1, 6]


def test_digits_in_threes_from_the_right(tmp_path: Path) -> None:
    """Trinity's (afmoe): groups of three digits that end where the number does."""
    given = gguf.read(need(DATA / "tokenizers" / "gguf") / "ggml-vocab-gpt-2.gguf").metadata
    tokenizer = written(tmp_path, {**given, "tokenizer.ggml.pre": "afmoe", "tokenizer.ggml.add_bos_token": False})
    numbers = ("1", "12", "123", "234", "345", "567", "890")
    plain = {number: tokenizer.encode(number, add_special_tokens=False) for number in numbers}
    for text, parts in (("1234", ("1", "234")), ("12345", ("12", "345")), ("1234567890", ("1", "234", "567", "890")),
                        ("123", ("123",))):
        assert tokenizer.encode(text, add_special_tokens=False) == [token for part in parts for token in plain[part]]
