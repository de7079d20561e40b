"""Transfers between the device and the tiers behind it: the requests in plans, and the movers' results.

A page behind the device lies in a slot of the host's arena, which is cut as the device's is (`core/layout.py`), or in a store
under the name of what is in it. Transfers are carried out in the order of plans."""

from typing import NamedTuple

import msgspec


class PageName(NamedTuple):
    """Names a page in every store by its contents: the cache group, and the key of the context that it ends."""

    group: int
    key: bytes


class Save(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Copy a page of the device to a slot of the host, as it is before the plan's own copies, loads and step. The slots of a
    plan's saves share no byte, so these may be carried out in any order."""

    group: int
    page: int
    slot: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Write a slot of the host to a store. Answered by a WriteResult, until which the slot must not change."""

    id: int
    store: int
    """Index of the store, in the order in which the engine was given them."""
    name: PageName
    slot: int


class Piece(NamedTuple):
    """One page of a load."""

    name: PageName
    page: int
    """Destination page on the device."""
    slot: int
    """Source slot on the host, -1 if it comes from a store."""
    store: int
    """Index of the source store, -1 if it is on the host."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Fill pages of the device. Answered by a LoadResult with the ticket, until which its slots must not change."""

    ticket: int
    pieces: list[Piece]
    patience: float
    """Timeout in seconds."""


Transfer = Save | Write | Load


class LoadResult(NamedTuple):
    """The result of a load."""

    ticket: int
    ok: bool
    """All of its pages that are not `lost` hold what was asked for. If not, none of them is used."""
    seconds: float = 0.0
    """Service time of the load in seconds, without queueing."""
    lost: tuple[PageName, ...] = ()
    """Pages that were missing or damaged."""
    missed: tuple[int, ...] = ()
    """The stores that did not answer, or not before the load's patience had run out."""


class WriteResult(NamedTuple):
    """The result of a Write."""

    id: int
    ok: bool
    seconds: float
    """Duration of the write alone."""
