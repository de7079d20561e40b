"""Pages, versions and layouts for tests of stores."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.core.plan import PageName
from penstock.core.state import CacheLayout, Everything, Field, StateSpec, Window, lay_out
from penstock.stores import Store, record
from penstock.stores.disk import DiskStore
from penstock.stores.version import Version


def layout(page: int = 16, slabs: int = 8) -> CacheLayout:
    """Three layers of full attention and one with a window."""
    fields = (Field("k", (2, 8), "float32"), Field("v", (2, 8), "float32"))
    states = [StateSpec(fields, Everything())] * 3 + [StateSpec(fields, Window(32))]
    return lay_out(states, page, lay_out(states, page, 0).slab_bytes * slabs)


def version(**changes: object) -> Version:
    return Version(**{"model": "m", "weights": "w", "dtype": "float32", "computation": "c", "layout": layout(), **changes})  # type: ignore[arg-type]


def name(number: int, group: int = 0) -> PageName:
    return PageName(group, number.to_bytes(32, "big"))


def path_of(store: DiskStore, name: PageName) -> Path:
    return Path(store.files([name])[0])


def page(number: int, nbytes: int = 3000) -> bytes:
    return random.Random(number).randbytes(nbytes)


def put(store: Store, found: Version, number: int, nbytes: int = 3000) -> None:
    """Writes page `number` as the worker does."""
    data = memoryview(page(number, nbytes))
    store.write(name(number), [memoryview(record.header(found.id, name(number), data)), data])


def get(store: Store, found: Version, number: int, nbytes: int = 3000) -> bytes | str:
    """Page `number`, or what is wrong with it."""
    head, data = memoryview(bytearray(record.HEADER_BYTES)), memoryview(bytearray(nbytes))
    if store.read(name(number), [head, data]) < len(head) + nbytes:
        return "short"
    return record.fault(found.id, name(number), head, data) or bytes(data)
