"""Encoding equals transformers' AutoTokenizer, and a bad tokenizer or text says what to do."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ModelError, RequestError
from penstock.text import Tokenizer
from tests.unit.text import real


def peer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def assert_same_encoding(ours: Tokenizer, theirs: Any) -> None:
    texts = [*real.TEXTS, real.special_text(ours)]
    for special in (True, False):
        expected = [theirs.encode(text, add_special_tokens=special) for text in texts]
        assert [ours.encode(text, special) for text in texts] == expected
        assert ours.encode_batch(texts, special) == expected


@pytest.mark.parametrize("name", real.SMALL + real.FULL)
def test_encodes_as_transformers(name: str) -> None:
    ours, theirs = real.load(name), peer(real.folder(name))
    assert_same_encoding(ours, theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.special_ids


HOW = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("models/stories260k", {"add_bos_token": False, "add_prefix_space": True}),
    ("models/stories260k", {"add_bos_token": True, "add_eos_token": True}),
    ("models/stories260k", {"add_eos_token": True, "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}),
    ("models/stories260k", {"pad_token": "<|new pad|>", "additional_special_tokens": ["<|a|>", "<|b|>"]}),
    ("models/stories260k", {"added_tokens_decoder": {
        "512": {"content": "<tool>", "special": False, **HOW, "rstrip": True},
        "513": {"content": "<|x|>", "special": True, **HOW, "lstrip": True}}}),
]


@pytest.mark.parametrize(("name", "changes"), SETTINGS, ids=[", ".join(changes) for _, changes in SETTINGS])
def test_tokenizer_config_counts(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = copy(name, tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(folder), peer(folder)
    assert_same_encoding(ours, theirs)
    text = "a <tool> b<|x|> c <|a|><|b|><|new pad|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert set(theirs.all_special_ids) <= ours.special_ids


@pytest.mark.parametrize(("wanted", "expected"), [({"add_bos_token": False}, [403]), ({"add_eos_token": True}, [403, 2]),
                                                  ({"add_bos_token": True, "add_eos_token": True}, [1, 403, 2])])
def test_llama_classes_obey_their_switches(wanted: dict[str, bool], expected: list[int], tmp_path: Path) -> None:
    folder = copy("models/stories260k", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"} | wanted
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).encode("Once") == expected
    assert Tokenizer.load(folder).encode("Once", add_special_tokens=False) == [403]


def test_tokenizer_config_wins_over_special_tokens_map(tmp_path: Path) -> None:
    """As in transformers: the older file only says what tokenizer_config.json leaves open."""
    folder = copy("models/stories260k", tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "additional_special_tokens": ["<unk>"]}))
    (folder / "special_tokens_map.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "<unk>", "additional_special_tokens": ["<s>"]}))
    found = Tokenizer.load(folder)
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<unk>"]}
    assert (found.bos_id, found.eos_id) == (found.token_id("<s>"), found.token_id("</s>"))


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    folder = copy("models/stories260k", tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    folder = copy("models/stories260k", tmp_path)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert len(Tokenizer.load(folder).encode("Once upon a time there was a dog")) > 4


@pytest.mark.parametrize("name", real.SENTENCEPIECE)
def test_sentencepiece_files(name: str) -> None:
    ours, core = real.load("tokenizers/" + name), real.sentencepiece_library(name)
    for text in real.TEXTS:
        assert ours.encode(text, add_special_tokens=False) == core.encode(text)
        assert ours.encode(text) == [core.bos_id(), *core.encode(text)]
        assert ours.decode(core.encode(text)) == core.decode(core.encode(text))
    assert (ours.bos_id, ours.eos_id) == (core.bos_id(), core.eos_id())


@pytest.mark.parametrize(("legacy", "after"), [(False, "\u2581there"), (True, "\u2581")])
def test_sentencepiece_folder(legacy: bool, after: str, tmp_path: Path) -> None:
    shutil.copyfile(real.folder("tokenizers/llama2.model"), tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True, "legacy": legacy,
        "added_tokens_decoder": {"32000": {"content": "<|end|>", "special": True}}}))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("hi</s> there<|end|>")
    names = [tokenizer.token_name(token) for token in ids]
    assert names[:4] == ["<s>", "\u2581hi", "</s>", after]
    assert names[-2:] == ["<|end|>", "</s>"]
    assert tokenizer.vocab_size == 32001
    assert 32000 in tokenizer.special_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<s> hi</s>")


def test_token_bytes_join_to_the_text() -> None:
    for name in ("tokenizers/qwen2.5", "tokenizers/llama-3.1", "models/stories260k", "tokenizers/llama2.model"):
        tokenizer = real.load(name)
        for text in real.TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
            assert joined in (tokenizer.decode(ids), " " + tokenizer.decode(ids))
    assert real.load("models/stories260k").token_text(403) == " Once"
    assert real.load("models/stories260k").token_bytes(3 + 0xE2) == b"\xe2"
    assert real.load("tokenizers/gpt2").token_text(10**6) == ""


def test_lone_surrogates_are_the_requests_fault() -> None:
    for name in ("models/stories260k", "tokenizers/llama2.model"):
        with pytest.raises(RequestError, match=r"lone surrogate \(U\+D83D\)"):
            real.load(name).encode("half a \ud83d smile")


def test_eight_thousand_tokens_are_a_matter_of_milliseconds() -> None:
    tokenizer = real.load("tokenizers/qwen2.5")
    text = "The quick brown fox jumps over 13 lazy dogs; naïve café.\n" * 500
    times = []
    for _ in range(3):
        start = time.process_time()
        count = len(tokenizer.encode(text))
        times.append(time.process_time() - start)
    assert count >= 8000
    assert min(times) < 0.1, "10 ms are usual"


def test_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        Tokenizer.load(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"neither tokenizer.json nor tokenizer.model.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tekken.json alone"):
        Tokenizer.load(tmp_path)


def test_corrupt_files_are_named(tmp_path: Path) -> None:
    folder = copy("models/stories260k", tmp_path)
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[:1000])
    with pytest.raises(ModelError, match=r"tokenizer.json is not a usable tokenizer.*Download it again"):
        Tokenizer.load(folder)
    other_decoder = json.loads(whole) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}
    (folder / "tokenizer.json").write_text(json.dumps(other_decoder))
    with pytest.raises(ModelError, match="decodes by BPEDecoder"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text(whole)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json cannot be read as JSON"):
        Tokenizer.load(folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="not a usable sentencepiece model"):
        Tokenizer.load(other)


def copy(name: str, to: Path) -> Path:
    """A writable copy of the tokenizer's files."""
    folder = to / "model"
    folder.mkdir()
    for path in real.folder(name).glob("*token*.json"):
        shutil.copyfile(path, folder / path.name)
    shutil.copyfile(real.folder(name) / "config.json", folder / "config.json")
    return folder
