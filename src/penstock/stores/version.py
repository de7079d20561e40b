"""Which pages are interchangeable: those of one model, dtype, codec and layout. Everything else is another version.

A version is a folder or a name space of its own in a store, and part of every page's header: a page of a wrong version is
never read, whatever happens to names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from penstock.core.layout import CacheLayout

FORMAT = 2
"""The version of the rules in `stores/`; changes when old pages must not be read any more."""


@dataclass(frozen=True)
class Version:
    """What the bytes of a page depend on besides its name."""

    model: str
    """Says which weights; as the user called them."""
    weights: str
    """Fingerprint of the weights themselves: other weights in the same folder are another version."""
    dtype: str
    layout: CacheLayout
    codec: str = "plain"
    """How entries are encoded; plain: as the layers write them."""
    kernels: str = ""
    """By what they were computed, where their very bits matter (option batch_invariant)."""

    @property
    def facts(self) -> dict[str, object]:
        """All of it as plain data; what is stored beside the pages for people to read."""
        groups = [{"layers": list(group.layers), "keep": {"kind": type(group.keep).__name__, **_fields(group.keep)},
                   "offsets": list(group.offsets), "page_bytes": group.page_bytes} for group in self.layout.groups]
        return {"format": FORMAT, "model": self.model, "weights": self.weights, "dtype": self.dtype, "codec": self.codec,
                "kernels": self.kernels, "page_size": self.layout.page, "groups": groups}

    @property
    def id(self) -> bytes:
        """16 bytes: equal if and only if everything but the model's name is."""
        facts = {name: value for name, value in self.facts.items() if name != "model"}
        return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()


def _fields(keep: object) -> dict[str, object]:
    return asdict(keep)  # type: ignore[call-overload, no-any-return]
