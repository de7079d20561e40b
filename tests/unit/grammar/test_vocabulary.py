"""Asking a model's tokenizer for the text that a grammar forces."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
from llguidance import LLMatcher

from penstock.canary import model_folder
from penstock.grammar import vocabulary as vocabularies
from penstock.grammar.vocabulary import build, texts
from penstock.text import Tokenizer
from tests.data import DATA, need

SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "many": {"type": "integer"},
             "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}},
             "required": ["name", "many", "tags"], "additionalProperties": false}"""


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


def test_llguidances_own_reading_gives_the_same_masks() -> None:
    """Of a vocabulary whose added tokens are all special; the model has more ids than the vocabulary."""
    tokenizer = Tokenizer.load(need(DATA / "tokenizers" / "llama-3.1"))
    tokens = texts(tokenizer, tokenizer.vocab_size + 7)
    with mock.patch.object(Tokenizer, "encode", autospec=True, side_effect=Tokenizer.encode) as encode:
        own = build(tokenizer, tokens, [])
        with mock.patch.object(vocabularies, "_equal", return_value=False):
            ours = build(tokenizer, tokens, [])
        for seed in range(8):
            draw = random.Random(seed)
            one, other = (LLMatcher(found, LLMatcher.grammar_from_json_schema(SCHEMA), log_level=0) for found in (own, ours))
            for _ in range(60):
                asked = encode.call_count
                mask, forced = one.compute_bitmask(), one.compute_ff_tokens()
                assert encode.call_count == asked
                assert (mask, forced) == (other.compute_bitmask(), other.compute_ff_tokens())
                if one.is_stopped():
                    break
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
                token = draw.choice(np.flatnonzero(bits)[:2000].tolist())
                one.consume_token(token)
                other.consume_token(token)


def test_added_tokens_that_are_not_special_are_ours_to_read() -> None:
    """canary's <think> may stand in a text; llguidance would exclude it there."""
    tokenizer = Tokenizer.load(model_folder())
    found = build(tokenizer, texts(tokenizer, tokenizer.vocab_size), [])
    assert not found.is_special_token(tokenizer.encode("<think>", add_special_tokens=False)[0])
