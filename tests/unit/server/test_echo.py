"""Echoed prompts on real tokenizers: text, offsets and tokens agree, whatever is special, cut off or incomplete."""

from __future__ import annotations

import pytest

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.server.openai.echo import Echo, Offsets, echo
from penstock.text import Tokenizer
from tests.unit.text import real

NAMES = ("models/stories260k", "tokenizers/gpt2", "tokenizers/qwen2.5", "tokenizers/llama-3.1", "tokenizers/o200k-harmony")
TEXTS = [text for text in real.TEXTS if text and "\u0000" not in text]


def shown(tokenizer: Tokenizer, prompt: str | list[int], kept: int | None = None, *, skip: bool = True, special: bool = True,
          final: bool = False) -> tuple[list[int], Echo]:
    ids = tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
    ids = ids if kept is None else ids[-kept:]
    request = Request("r", ids, SamplingParams(skip_special_tokens=skip))
    return ids, echo(tokenizer, prompt, request, special, kept is not None, final)


def check(tokenizer: Tokenizer, ids: list[int], found: Echo, hidden: int = 0) -> None:
    """Every token's own text is found where its offset says, but for `hidden` ones in front."""
    assert len(found.offsets) == len(ids)
    assert found.offsets == sorted(found.offsets) and found.offsets[-1] <= len(found.text)
    for place, token in enumerate(ids[hidden:], hidden):
        text = tokenizer.token_text(token)
        offset = found.offsets[place]
        if "\ufffd" not in text:
            # Vocabularies of the sentencepiece kind cut the space that they put in front of the whole.
            exact = found.text.startswith(text, offset)
            assert exact or (offset == 0 and found.text.startswith(text.lstrip(" "))), (place, text, offset, found.text)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_shown_as_they_were_sent(name: str) -> None:
    tokenizer = real.load(name)
    added = len(tokenizer.encode("", True))
    for text in TEXTS:
        for special in (True, False):
            ids, found = shown(tokenizer, text, special=special)
            assert found.text == text
            if tokenizer.decode(ids[added if special else 0:], False) == text:
                check(tokenizer, ids, found, added if special else 0)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens(name: str) -> None:
    """Those that a text spells out are shown and counted; the ones that the tokenizer adds are not; ids are as wanted."""
    tokenizer = real.load(name)
    word = tokenizer.token_name(min(tokenizer.special_ids)) or ""
    text = f"{word}Hello{word}"
    added = len(tokenizer.encode("", True))
    ids, found = shown(tokenizer, text)
    assert found.text == text
    if tokenizer.decode(ids[added:], False) == text:
        check(tokenizer, ids, found, added)
    for skip in (True, False):
        _, found = shown(tokenizer, ids, skip=skip)
        assert found.text == tokenizer.decode(ids, skip)
        assert (word in found.text) is not skip
        if not skip:
            check(tokenizer, ids, found)


@pytest.mark.parametrize("name", NAMES)
def test_what_truncation_leaves(name: str) -> None:
    tokenizer = real.load(name)
    text = "Once upon a time, there was a little dog"
    whole = tokenizer.encode(text)
    for kept in range(1, len(whole) + 1):
        ids, found = shown(tokenizer, text, kept)
        assert ids == whole[-kept:] and text.endswith(found.text.lstrip()) and found.text
        if kept < len(whole) - len(tokenizer.encode("")):
            assert len(found.text) < len(text)
            check(tokenizer, ids, found)
    assert shown(tokenizer, text, len(whole))[1].text == text


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_end_inside_a_character(name: str) -> None:
    """The answer completes the character, so the prompt does not show it; if no answer follows, it is U+FFFD."""
    tokenizer = real.load(name)
    for text in ("zero 🅰🅰🅰", "日本語 \U0001f9ff", "a\U0001f9ff\U0001f9ff b"):
        whole = tokenizer.encode(text, False)
        for cut in range(1, len(whole)):
            prompt, answer = whole[:cut], whole[cut:]
            _, found = shown(tokenizer, prompt)
            rest = tokenizer.detokenizer(True, prompt)
            told = rest.push(answer) + rest.flush()
            assert found.text + told == text, (cut, found.text, told)
            offsets = Offsets(tokenizer.detokenizer(True, prompt), len(found.text)).of(answer)
            last = tokenizer.token_text(answer[-1])
            if "\ufffd" not in last:
                assert text[offsets[-1]:] == last
            assert shown(tokenizer, prompt, final=True)[1].text == tokenizer.decode(prompt)


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert echo(None, [1, 2], Request("r", [1, 2], SamplingParams()), True, False, False) == Echo("", [0, 0])
    assert Offsets(None, 3).of([1, 2]) == [3, 3]
