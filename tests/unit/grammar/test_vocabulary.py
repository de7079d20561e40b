"""Asking a model's tokenizer for the text that a grammar forces."""

from __future__ import annotations

from unittest import mock

from llguidance import LLMatcher

from penstock.canary import model_folder
from penstock.grammar.vocabulary import build, texts
from penstock.text import Tokenizer


def test_forced_texts_are_encoded_once() -> None:
    tokenizer = Tokenizer.load(model_folder())
    vocabulary = build(tokenizer, texts(tokenizer, tokenizer.vocab_size), [])
    grammar = LLMatcher(vocabulary, LLMatcher.grammar_from_regex(r'"[a-z]{1,3}": true'), log_level=0)
    start = vocabulary.tokenize_str('"ab"')
    with mock.patch.object(Tokenizer, "encode", autospec=True, side_effect=Tokenizer.encode) as encode:
        counts = []
        for _ in range(3):
            matcher = grammar.deep_copy()
            for token in start:
                matcher.consume_token(token)
                matcher.compute_bitmask()
            counts.append(encode.call_count)
    assert counts[0] > 0 and counts[0] == counts[1] == counts[2]
