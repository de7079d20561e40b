"""The version of stored pages: identifies how pages were computed and laid out, and of which shard.

Each version has its own folder or namespace in a store and is part of every page's header, so a page of another version is
never used, even if names are mixed up. The version does not cover the weights, whose hash is not known yet when stores are
opened: keys do, because their root includes the hash of all bytes of the weights (`cache/keys.py::root`)."""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

import msgspec

from penstock.core.state import CacheLayout

FORMAT = 3
"""The format version of `stores/`; incremented when old pages must not be read any more."""


@dataclass(frozen=True)
class Version:
    """Everything besides its name that a page's bytes depend on."""

    model: str
    """The user's name of the model; informative, not part of the id."""
    dtype: str
    """Informative too: the dtype is part of `computation`."""
    weights: str
    """A digest of a sample of the weights (`checkpoint/identity.py::sample`), so that models have folders of their own."""
    computation: str
    """The digest of everything that determines how an entry is computed and stored (`layers/decoder.py::computation`)."""
    layout: CacheLayout
    rank: int = 0
    """The rank whose shard of every entry the pages hold, out of `ranks`."""
    ranks: int = 1

    @property
    def facts(self) -> dict[str, object]:
        """The version as plain data; stored beside the pages for people to read."""
        # The number of pages and their division into slabs differ between engines but do not change a page's bytes.
        groups = [{**asdict(group), "keep": {"kind": type(group.keep).__name__, **msgspec.structs.asdict(group.keep)}}
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
