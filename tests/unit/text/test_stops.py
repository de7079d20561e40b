"""Stop strings: any cutting of a text gives what one look after every character gives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from penstock.text import StopStrings


def one_shot(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first prefix of `text` that ends in a stop string, and of several such strings the longest."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[:end if include else end - len(found)], found
    return text, None


def in_pieces(text: str, stops: list[str], include: bool, cuts: random.Random) -> tuple[str, str | None]:
    watch, shown, place = StopStrings(stops, include), "", 0
    while place < len(text):
        size = cuts.randrange(0, 4)
        safe, found = watch.push(text[place:place + size])
        shown, place = shown + safe, place + size
        if found is not None:
            assert watch.push("more") == ("", None)
            assert watch.flush() == ""
            return shown, found
    return shown + watch.flush(), None


@settings(max_examples=800, deadline=None)
@given(st.text("ab<|é", max_size=40), st.lists(st.text("ab<|é", min_size=1, max_size=5), min_size=1, max_size=4), st.booleans(),
       st.randoms(use_true_random=False))
def test_pieces_equal_one_look(text: str, stops: list[str], include: bool, cuts: random.Random) -> None:
    assert in_pieces(text, stops, include, cuts) == one_shot(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_nothing_more_is_held_back_than_could_be_a_stop(text: str, stops: list[str]) -> None:
    watch, shown = StopStrings(stops), ""
    for end, character in enumerate(text, 1):
        safe, found = watch.push(character)
        if found is not None:
            return
        shown += safe
        held = text[len(shown):end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_include_and_cut() -> None:
    assert StopStrings(["END"]).push("the END of it") == ("the ", "END")
    assert StopStrings(["END"], include=True).push("the END of it") == ("the END", "END")


def test_of_two_ending_together_the_longer_counts() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")
    watch = StopStrings(["b", "ab"])
    assert watch.push("xa") == ("x", None)
    assert watch.push("b") == ("", "ab")


def test_unarmed_stops_pass_but_what_may_become_one_is_held() -> None:
    watch = StopStrings(["ab"])
    assert watch.push("ab a", armed=False) == ("ab ", None)
    assert watch.push("b") == ("", "ab")


@pytest.mark.parametrize("length", [10_000])
def test_long_stop_strings_are_cheap(length: int) -> None:
    watch = StopStrings(["a" * length + "b"])
    shown = "".join(watch.push("a")[0] for _ in range(3000))
    assert shown == ""
    assert watch.push("c") == ("a" * 3000 + "c", None)
