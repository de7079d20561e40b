"""Numbers of JSON stay within a double: no token may make one overflow, and nothing else is excluded."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.core.plan import Ints
from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar import definition
from penstock.grammar.numbers import Numbers

VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"<end>", *(str(n).encode() for n in range(10, 1000)), b"e3", b"e999",
                                                       b"1e400", b"E+30", b": 1", b"9,", b"9}", b"999999999999"]


def bound(numbers: Numbers, tokens: list[int], line: Ints, first: int = 0) -> None:
    """Bounds one mask."""
    numbers.bound([(0, tokens, first)], line[None])


def allowed(text: list[bytes], *candidates: bytes) -> list[bool]:
    """For each candidate, whether it may follow the tokens of a text outside of strings, if the grammar allows every token of
    a number."""
    bits = np.zeros(-(-len(VOCABULARY) // 32) * 32, np.uint8)
    bits[[at for at, token in enumerate(VOCABULARY) if token.strip(b"0123456789.eE+-,}: ") == b""]] = 1
    line = np.packbits(bits, bitorder="little").view(np.int32)
    bound(Numbers(VOCABULARY), [VOCABULARY.index(token) for token in text], line)
    left = np.unpackbits(line.view(np.uint8), bitorder="little")
    return [bool(left[VOCABULARY.index(token)]) for token in candidates]


def test_no_token_makes_a_number_overflow() -> None:
    assert allowed([b": 1", b"e"], b"3", b"30", b"308", b"+", b"-", b"9}") == [True] * 6
    assert allowed([b": 1", b"e"], b"309", b"999") == [False, False]
    assert allowed([b"551", b".", b"9", b"E", b"30"], b"5", b"6", b"10") == [True, False, False]
    assert allowed([b"1", b"e", b"30"], b"8", b"9", b"9,", b"9}", b",") == [True, False, False, False, True]
    assert allowed([b"[", b"1", b"E+30"], b"8", b"9") == [True, False]
    assert allowed([b"-", b"2", b"e3", b"0"], b"7", b"8") == [True, False]


def test_small_numbers_grow_freely() -> None:
    assert allowed([b"1", b"e", b"-", b"999"], b"999", b"9") == [True, True]
    assert allowed([b"0", b"e", b"999"], b"999") == [True], "zero times anything is zero"
    assert allowed([b"4", b"2"], b"999999999999", b"e", b"e3", b".") == [True] * 4


def test_long_numbers_end() -> None:
    assert allowed([b"999999999999"] * 25, b"9", b"999", b"e", b".", b",") == [True] * 5
    # 308 nines are a double, and 309 are not.
    assert allowed([b"999999999999"] * 25 + [b"9"] * 7, b"9", b"99", b".", b",") == [True, False, True, True]


def test_tokens_with_a_large_exponent_are_excluded_outside_of_strings() -> None:
    assert allowed([b"4"], b"e999", b"1e400", b"e3") == [False, False, True]
    assert allowed([b":"], b"1e400", b"1") == [False, True]


def test_strings_are_left_alone() -> None:
    everything = np.full(-(-len(VOCABULARY) // 32), -1, np.int32)
    bound(Numbers(VOCABULARY), [VOCABULARY.index(token) for token in (b'"', b"1", b"e", b"30")], everything)
    assert (everything == -1).all()


def test_a_number_of_the_prompt_is_no_part_of_the_answer() -> None:
    line = np.zeros(-(-len(VOCABULARY) // 32), np.int32)
    line[1] = 0x3FF1000  # digits and the comma
    before, known = line.copy(), [VOCABULARY.index(token) for token in (b"1", b"e", b"30")]
    bound(Numbers(VOCABULARY), known, line, first=3)
    assert (line == before).all()
    bound(Numbers(VOCABULARY), known, line)
    assert (line != before).any()


def test_a_mask_is_never_emptied() -> None:
    line = np.zeros(-(-len(VOCABULARY) // 32), np.int32)
    line.view(np.uint32)[ord("9") // 32] = 1 << ord("9") % 32
    before = line.copy()
    bound(Numbers(VOCABULARY), [ord("1"), ord("e"), VOCABULARY.index(b"30")], line)
    assert (line == before).all()


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "integer"}, {"type": "number", "minimum": 1}, {}],
                         ids=json.dumps)
def test_random_numbers_are_finite(schema: dict[str, object]) -> None:
    """Walks through the grammar that write as many digits as they can."""
    numbers, rng = Numbers([bytes([byte]) for byte in range(256)]), random.Random(1)
    first = LLMatcher(definition._bytes_tokenizer(), definition.define(StructuredOutputsParams(json=schema)), log_level=0)
    for _ in range(6):
        matcher, known, letters = first.deep_copy(), [], 0
        while len(known) < 400:
            line = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            line = np.pad(line, (0, -len(line) % 4)).view(np.int32).copy()
            bound(numbers, known, line)
            bits = np.unpackbits(line.view(np.uint8), bitorder="little")
            digits = [byte for byte in b"0123456789" if bits[byte]]
            marks = [byte for byte in b"eE." if bits[byte] and letters < 2 and len(known) > 2]
            choices = marks if marks and rng.random() < 0.05 else digits
            if not choices:
                break
            known.append(rng.choice(choices))
            letters += known[-1] in b"eE."
            assert matcher.consume_token(known[-1])
        else:
            assert b"e" in bytes(known).lower() or b"." in bytes(known), "digits of an integer must end"
        if not bytes(known[-1:]).isdigit():
            known.append(ord("0"))
        assert math.isfinite(float(bytes(known))), bytes(known)
