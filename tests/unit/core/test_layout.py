"""How the arena is cut: groups never overlap, and what a sequence needs is what it takes."""

from __future__ import annotations

import random

import pytest

from penstock.core.state import ALIGN, Everything, Field, StateSpec, Window, lay_out


def _state(heads: int, size: int, window: int = 0) -> StateSpec:
    fields = (Field("k", (heads, size), "bfloat16"), Field("v", (heads, size), "bfloat16"))
    return StateSpec(fields, Window(window) if window else Everything())


@pytest.mark.parametrize("seed", range(50))
def test_pages_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    states = [_state(rng.randint(1, 8), rng.choice([16, 20, 64, 128]), rng.choice([0, 0, 100, 512]))
              for _ in range(rng.randint(1, 40))]
    layout = lay_out(states, rng.choice([1, 8, 16, 32]), 1 << 24)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(states)))
    for group in layout.groups:
        ends = [*group.offsets[1:], group.page_bytes]
        for layer, start, end in zip(group.layers, group.offsets, ends, strict=True):
            assert start % ALIGN == 0 and end - start >= states[layer].page_bytes(layout.page)
            assert states[layer].keep == group.keep
        assert group.page_bytes <= group.stride and group.stride % ALIGN == 0
        assert group.stride * group.per_slab == layout.slab_bytes, "page addresses have one stride through all slabs"


def test_one_group_wastes_nothing() -> None:
    layout = lay_out([_state(8, 128)] * 32, 16, 2 << 30)
    assert layout.slab_bytes == 32 * 16 * 2 * 8 * 128 * 2 and len(layout.groups) == 1


def test_longest_is_the_largest_that_fits() -> None:
    layout = lay_out([_state(4, 64), _state(4, 64, 100), _state(4, 64, 100)], 16, 1 << 22)
    longest = layout.longest(64)
    assert layout.slabs_for(longest, 64) <= layout.slabs < layout.slabs_for(longest + 1, 64)


def test_a_window_needs_no_more_than_itself_and_a_chunk() -> None:
    layout = lay_out([_state(4, 64, 100)], 16, 1 << 22)
    (group,) = layout.groups
    assert layout.pages_for(group, 10_000, 32) == -(-(99 + 32) // 16) + 1
    assert layout.pages_for(group, 50, 32) == 4
    assert layout.longest(32) > 1 << 30, "a window alone never runs out"
