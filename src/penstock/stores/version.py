"""Which pages may be mistaken for each other: those computed and laid out in the same way, of the same shard.

A version is a folder or a name space of its own in a store, and part of every page's header: a page of a wrong version is
never read, whatever happens to names. That pages of equal version have equal weights follows from their keys, whose root is the
hash of all bytes of the weights (`cache/keys.py::root`); it is not known yet when stores are opened.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from penstock.core.layout import CacheLayout

FORMAT = 3
"""The version of the rules in `stores/`; changes when old pages must not be read any more."""


@dataclass(frozen=True)
class Version:
    """Everything that a page's bytes depend on besides its name."""

    model: str
    """As the user called it: for people to read, not part of the id."""
    dtype: str
    """For people to read, too: it is in `computation`."""
    weights: str
    """A digest of a sample of the weights (`checkpoint/identity.py::sample`), so that models have folders of their own."""
    computation: str
    """The digest of all that decides how an entry is computed and stored (`layers/identity.py::computation`)."""
    layout: CacheLayout
    rank: int = 0
    """Whose shard of every entry the pages hold, of `ranks` that compute together."""
    ranks: int = 1

    @property
    def facts(self) -> dict[str, object]:
        """All of it as plain data; stored beside the pages for people to read."""
        # How many pages there are, and how they are cut from slabs, differs between engines and changes no page.
        groups = [{**asdict(group), "keep": {"kind": type(group.keep).__name__, **asdict(group.keep)}}  # type: ignore[call-overload]
                  for group in self.layout.groups]
        for group in groups:
            del group["per_slab"], group["stride"]
        return {"format": FORMAT, "model": self.model, "dtype": self.dtype, "weights": self.weights,
                "computation": self.computation, "page_size": self.layout.page, "groups": groups, "rank": self.rank,
                "ranks": self.ranks}

    @property
    def id(self) -> bytes:
        """16 bytes: equal if and only if everything but `model` and `dtype` is."""
        facts = {name: value for name, value in self.facts.items() if name not in ("model", "dtype")}
        return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()
