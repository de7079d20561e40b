"""States that no model has yet: what they take in the arena, and their fields by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from penstock.core.state import CacheLayout, Everything, Field, Snapshot, StateSpec, Window, lay_out
from penstock.layers.step import StateView
from penstock.worker.arena import Arena

PAGE = 16
LATENT = StateSpec((Field("latent", (576,), "bfloat16"),), Everything())
SNAPSHOT = StateSpec((Field("state", (32, 128, 128), "float32", per="page"),), Snapshot())
CODES = StateSpec((Field("k", (8, 128), "float8_e4m3fn"), Field("v", (8, 128), "float8_e4m3fn"),
                   Field("k_scale", (8,), "float32"), Field("v_scale", (8,), "float32"),
                   Field("peak", (), "float16", per="page")), Everything())
PLAIN = StateSpec((Field("k", (2, 6), "float16"), Field("v", (2, 6), "float16")), Window(40))


def views(states: Sequence[StateSpec], slabs: int = 2) -> tuple[CacheLayout, list[StateView]]:
    layout = lay_out(states, PAGE, lay_out(states, PAGE, 0).slab_bytes * slabs)
    return layout, Arena(layout, torch.device("cpu")).views(states)


def test_a_latent_is_one_field() -> None:
    layout, [view, _] = views([LATENT] * 2)
    assert layout.groups[0].page_bytes == 2 * 576 * 2 * PAGE
    assert view["latent"].shape == (2, PAGE, 576) and view["latent"].stride()[1:] == (576, 1)


def test_a_page_of_snapshots_holds_one() -> None:
    """2 MiB a layer: a slab of 36 layers is 72 MiB, whatever the page."""
    assert SNAPSHOT.page_bytes(PAGE) == 2 << 20
    for page in (1, 16, 64):
        assert lay_out([SNAPSHOT] * 36, page, 0).slab_bytes == 72 << 20
    _, [view] = views([SNAPSHOT])
    assert view["state"].shape == (2, 32, 128, 128) and view["state"].is_contiguous()
    assert (view.group, view.page) == (0, PAGE)


def test_codes_lie_beside_their_scales() -> None:
    layout, [view] = views([CODES])
    assert view["k"].shape == (2, 8, PAGE, 128) and view["k"].dtype == torch.float8_e4m3fn
    assert view["k_scale"].shape == (2, PAGE, 8) and view["peak"].shape == (2,)
    assert layout.groups[0].page_bytes == PAGE * (2 * 8 * 128 + 2 * 8 * 4) + 64, "the last field takes a cache line"
    # A float32 must not begin between two.
    assert all(field.data_ptr() % 16 == 0 for field in view.fields.values())


@pytest.mark.parametrize("states", [[LATENT, SNAPSHOT, LATENT], [CODES, PLAIN, SNAPSHOT, LATENT, CODES], [PLAIN]], ids=len)
def test_no_byte_is_two_fields(states: list[StateSpec]) -> None:
    """Every field of every state gets a number of its own; pages of different groups never are the same slab's."""
    layout, found = views(states, 3)
    for g in range(len(layout.groups)):
        mine = [(state, view) for state, view in zip(states, found, strict=True) if view.group == g]
        for number, field in enumerate(field for _, view in mine for field in view.fields.values()):
            field.view(torch.uint8).fill_(number) if field.dtype.itemsize == 1 else field.fill_(number)
        for number, field in enumerate(field for _, view in mine for field in view.fields.values()):
            assert bool(((field.view(torch.uint8) if field.dtype.itemsize == 1 else field) == number).all())


def test_a_snapshot_per_position_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="must be per page"):
        StateSpec((Field("state", (4,), "float32"),), Snapshot())
    with pytest.raises(AssertionError, match="must be unique"):
        StateSpec((Field("k", (4,), "float32"), Field("k", (4,), "float32")), Everything())
