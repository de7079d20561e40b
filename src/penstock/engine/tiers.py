"""Sets up what is behind the device: the bookkeeping of the engine's half, and what the worker's half needs to move pages."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cache.tiers.hierarchy import Hierarchy, Policy
from penstock.config.resolve import EngineConfig
from penstock.config.schema import EngineOptions
from penstock.config.tiers import plan_tiers
from penstock.core.layout import CacheLayout
from penstock.stores.opening import open_stores
from penstock.stores.version import Version
from penstock.worker.movers import Behind


@dataclass(frozen=True)
class Tiers:
    """Both halves; nothing where there is nothing behind the device."""

    hierarchy: Hierarchy | None = None
    behind: Behind | None = None

    def close(self) -> None:
        """Ends the bookkeeping; the worker ends its own half."""
        if self.hierarchy is not None:
            self.hierarchy.close()


def set_up(options: EngineOptions, config: EngineConfig, layout: CacheLayout, weights: str,
           kernels: list[tuple[str, str]]) -> Tiers:
    """Opens the stores, once for each half. `weights` is the fingerprint of the weights. Raises ConfigError for what cannot be
    had."""
    plan = plan_tiers(options, layout)
    if not plan.host_slabs:
        return Tiers()
    exact = ",".join(f"{operation}={kernel}" for operation, kernel in kernels) if options.batch_invariant else ""
    version = Version(options.model, weights, config.dtype, layout, kernels=exact)
    # Only the disk's size is ours to bound.
    bounds = {"disk": plan.disk_bytes}
    stores = open_stores(plan.disk, plan.remote, version, plan.adopt)
    policy = Policy(through=options.cache_write == "through", always=options.cache_load == "always")
    hierarchy = Hierarchy(layout, plan.host_slabs, [(store, bounds.get(store.tier)) for store in stores], policy)
    return Tiers(hierarchy, Behind(plan.host_slabs, open_stores(plan.disk, plan.remote, version, plan.adopt), version.id))
