"""The stream's concatenation is the text of the whole, and the text is the tokenizer library's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from penstock.text import Detokenizer
from penstock.text.detokenize import LONGEST_RUN, EachCharacter, WholeRun
from penstock.text.fast import BYTE_OF_CHARACTER
from tests.unit.text import real


def stream(detokenizer: Detokenizer, ids: list[int], cuts: random.Random) -> list[str]:
    """The text when `ids` go in by ones, and sometimes by several."""
    parts, place = [], 0
    while place < len(ids):
        size = 1 if cuts.random() < 0.7 else cuts.randrange(5)
        parts.append(detokenizer.push(ids[place:place + size]))
        place += size
    return [*parts, detokenizer.flush()]


def random_ids(cuts: random.Random, size: int, specials: list[int]) -> list[int]:
    """A mix: anything, ids beyond the vocabulary, special tokens, and the low ids where bytes usually are."""
    kinds = (lambda: cuts.randrange(size + 20), lambda: cuts.choice(specials), lambda: cuts.randrange(min(size, 600)),
             lambda: cuts.randrange(size))
    return [cuts.choice(kinds)() for _ in range(cuts.randrange(1, 40))]


@pytest.mark.parametrize("name", real.SMALL + real.FULL)
@pytest.mark.parametrize("skip", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["skip", "show"])
def test_random_ids_stream_as_the_library_decodes(name: str, skip: bool) -> None:
    tokenizer, oracle, cuts = real.load(name), real.library(name), random.Random(7)
    for _ in range(600):
        ids = random_ids(cuts, tokenizer.vocab_size, sorted(tokenizer.special_ids))
        whole = oracle.decode(ids, skip_special_tokens=skip)
        parts = stream(tokenizer.detokenizer(skip), ids, cuts)
        assert "".join(parts) == whole
        assert tokenizer.decode(ids, skip) == whole


@pytest.mark.parametrize("name", real.SENTENCEPIECE)
def test_random_ids_stream_as_sentencepiece_decodes(name: str) -> None:
    tokenizer, oracle, cuts = real.load("tokenizers/" + name), real.sentencepiece_library(name), random.Random(8)
    for _ in range(600):
        # Special tokens are taken out before decoding, as transformers does; sentencepiece shows <unk> as a sign.
        ids = random_ids(cuts, tokenizer.vocab_size, sorted(tokenizer.special_ids))
        ids = [token for token in ids if token < tokenizer.vocab_size]
        whole = oracle.decode([token for token in ids if token not in tokenizer.special_ids])
        assert "".join(stream(tokenizer.detokenizer(), ids, cuts)) == whole
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join(stream(tokenizer.detokenizer(False), ids, cuts)) == shown


@pytest.mark.parametrize("name", ["models/stories260k", "models/babyllama-tok361", "tokenizers/gpt2", "tokenizers/qwen2.5"])
def test_texts_come_back_one_character_at_a_time_and_never_broken(name: str) -> None:
    tokenizer = real.load(name)
    for text in real.TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = tokenizer.detokenizer()
        parts = [detokenizer.push([token]) for token in ids]
        # The texts hold one replacement character of their own.
        assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
        assert "".join(parts) + detokenizer.flush() == real.library(name).decode(ids)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    for name in ("models/stories260k", "tokenizers/gpt2", "tokenizers/llama2.model"):
        tokenizer = real.load(name)
        outside = [-1, tokenizer.vocab_size, 2**31, 2**40]
        assert tokenizer.decode(outside) == tokenizer.decode(outside, skip_special_tokens=False) == ""
        assert [tokenizer.token_text(token) for token in outside] == [""] * 4
        assert [tokenizer.token_name(token) for token in outside] == [None] * 4


def test_a_flushed_stream_starts_anew() -> None:
    detokenizer = real.load("models/stories260k").detokenizer()
    once = [403, 407]
    assert detokenizer.push(once) + detokenizer.flush() == "Once upon"
    assert detokenizer.push(once) + detokenizer.flush() == "Once upon"


def byte_ids(text: str) -> list[int]:
    """The byte tokens of the small Llama vocabularies: <0x00> has id 3."""
    return [3 + byte for byte in text.encode()]


def test_output_continues_the_prompt() -> None:
    tokenizer = real.load("models/stories260k")
    prompt = tokenizer.encode("Lily went")
    assert tokenizer.detokenizer(after=prompt).push([403]) == " Once"
    assert tokenizer.detokenizer(after=[1]).push([403]) == "Once", "nothing is shown of bos, so this is the front"
    assert tokenizer.detokenizer(False, after=[1]).push([403]) == " Once"
    euro, smile = byte_ids("€"), byte_ids("😀")
    after = tokenizer.detokenizer(after=[*prompt, *euro[:1]])
    assert after.push(euro[1:]) + after.push([403]) == "€ Once"
    whole = tokenizer.detokenizer(after=[*prompt, *smile])
    assert whole.push([403]) + whole.flush() == " Once", "a character of the prompt is not told again"


def test_output_continues_the_prompts_bytes() -> None:
    tokenizer = real.load("tokenizers/gpt2")
    smile = tokenizer.encode("😀")
    assert len(smile) > 1
    assert tokenizer.detokenizer(after=smile[:1]).push(smile[1:]) == "😀"
    assert tokenizer.detokenizer(after=smile).push(smile) == "😀"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode)), max_size=6).map(b"".join))
def test_runs_of_bytes(run: bytes) -> None:
    whole, each = WholeRun(), EachCharacter()
    told = "".join([*(whole.add(byte) for byte in run), whole.end()])
    try:
        expected = run.decode()
    except UnicodeDecodeError:
        expected = "\ufffd" * len(run) if len(run) < LONGEST_RUN else told
    assert told == expected
    singly = "".join([*(each.add(byte) for byte in run), each.end()])
    kept = run.decode("utf-8", "ignore")
    assert singly.replace("\ufffd", "") == kept.replace("\ufffd", "")


def test_a_long_run_of_bytes_is_not_held_for_ever() -> None:
    run, text = WholeRun(), "ญี่ปุ่น" * 20
    told = held = 0
    for byte in text.encode():
        part = len(run.add(byte).encode())
        told, held = told + part, held + 1 - part
        assert held < LONGEST_RUN
    assert told > 0
    assert text.encode()[told:].decode() == run.end()


def test_a_broken_run_is_told_at_once() -> None:
    run = WholeRun()
    assert [run.add(byte) for byte in b"\xe2\x82\xff\x41"] == ["", "", "\ufffd" * 3, "\ufffd"]
    assert run.end() == ""
    assert run.add(0x41) == ""
    assert run.end() == "A"


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "tokenizers/qwen2.5", "models/stories260k", "models/babyllama-tok361"])
def test_a_character_that_the_prompt_begins_is_completed(name: str) -> None:
    """However many of its bytes the prompt has, and whatever comes before them."""
    tokenizer = real.load(name)
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    for text in ("\U0001f170", "\u20ac", "\u00e9"):
        raw = text.encode()
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") or tokenizer.token_id(spelled[byte]) for byte in raw]
        assert None not in ids
        for cut in range(1, len(raw)):
            for before in ([], tokenizer.encode("Hello", False), ids, ids + ids):
                stream = tokenizer.detokenizer(True, [*before, *ids[:cut]])
                assert stream.push(ids[cut:]) + stream.flush() == text, (text, cut, before)
