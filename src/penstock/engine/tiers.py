"""Sets up the tiers behind the device: the engine's bookkeeping, and the stores and memory that the worker needs."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from penstock.cache.tiers.hierarchy import Hierarchy, TierPolicy
from penstock.checkpoint import Fingerprint, sample
from penstock.config.tiers import TierPlan
from penstock.core.state import CacheLayout
from penstock.core.steptime import StepTime
from penstock.stores.opening import Opening, open_stores
from penstock.stores.version import Version


@dataclass(frozen=True)
class Tiers:
    """Both halves of the tiers; None where there are no tiers behind the device."""

    hierarchy: Hierarchy | None = None
    behind: Opening | None = None

    def close(self) -> None:
        """Ends the bookkeeping; the worker ends its own half."""
        if self.hierarchy is not None:
            self.hierarchy.close()


@dataclass(frozen=True)
class Weights:
    """Where weights come from: a model folder, or random numbers by `seed` where `load_format` says so."""

    model: str
    """The model's name, as the user gives it."""
    folder: Path
    load_format: str
    seed: int

    def sample(self) -> str:
        """A digest of some of the bytes, at once."""
        return sample(self.folder, self.load_format, self.seed)


def set_up(plan: TierPlan, weights: Weights, dtype: str, layout: CacheLayout, computation: str, times: StepTime) -> Tiers:
    """Opens the engine's stores. `computation` is `Decoder.computation`, `times` what computing takes. ConfigError: why not."""
    if not plan.host_slabs:
        return Tiers()
    stored = plan.disk is not None or plan.remote is not None
    version = Version(weights.model, dtype, weights.sample() if stored else "", computation, layout, ranks=plan.ranks)
    # Only the disk store's size is bounded by the engine.
    bounds = {"disk": plan.disk_bytes}
    policy = TierPolicy(through=plan.through, always=plan.always)
    with ExitStack() as undo:
        stores = open_stores(plan.disk, plan.remote, version, plan.adopt)
        for store in stores:
            undo.callback(store.close)
        hierarchy = Hierarchy(layout, plan.host_slabs, [(store, bounds.get(store.tier)) for store in stores], policy, times)
        undo.pop_all()
    return Tiers(hierarchy, Opening(plan.host_slabs, plan.disk, plan.remote, plan.adopt, version))


_SMALL_BYTES, _SMALL_SECONDS = 1 << 28, 0.5
"""Up to this many bytes of weights are hashed before the engine is ready, for at most this many seconds."""


class Naming:
    """Computes the cache's identity of the weights in the background, because hashing takes longer than a start should."""

    def __init__(self, weights: Weights, leave: bool) -> None:
        """Must be created before the weights are loaded. `leave`: keys are seen outside the process."""
        self._weights = Fingerprint(weights.folder, weights.load_format, weights.seed) if leave else None
        self._sample = "" if leave else weights.sample()
        self._computation = ""

    @property
    def pending(self) -> bool:
        """True if the name is not known yet and may still become known."""
        return self._weights is not None

    def start(self, computation: str) -> str | None:
        """Call after the weights are loaded; `computation` is `Decoder.computation`. Returns the name if it is known already.
        If nothing outside the process sees keys, the name is derived from a sample of the weights."""
        self._computation = computation
        if self._weights is None:
            return self._name(self._sample)
        self._weights.start()
        until = time.monotonic() + (_SMALL_SECONDS if self._weights.nbytes <= _SMALL_BYTES else 0.0)
        while (name := self.poll()) is None and self.pending and time.monotonic() < until:
            time.sleep(0.001)
        return name

    def poll(self) -> str | None:
        """The name, at the first call after it has become known; None at all other calls."""
        weights = self._weights
        if weights is None or (weights.value is None and not weights.failed):
            return None
        self._weights = None
        return self._name(weights.value) if weights.value else None

    def _name(self, weights: str) -> str:
        return blake2b(f"{self._computation} {weights}".encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
