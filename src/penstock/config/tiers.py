"""Sizes of the cache tiers behind the device, from the options and the page layout. Pure."""

from dataclasses import dataclass

from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.state import CacheLayout

_WAY_BYTES = 1 << 30
"""Default of cache_host_bytes with a disk or remote store, whose pages pass through host memory."""
_LEAST_SLABS = 4
"""With less host memory nothing could be written while something is read."""


@dataclass(frozen=True)
class TierPlan:
    """The tiers behind the device, of each rank. With 0 host slabs there are none."""

    host_slabs: int
    disk: str | None
    adopt: bool
    disk_bytes: int
    remote: str | None
    through: bool
    """Whether pages are written to stores as soon as they are kept, not when they are evicted."""
    always: bool
    """Whether cached pages are loaded even where computing them is faster."""
    ranks: int = 1


def plan_tiers(options: EngineOptions, layout: CacheLayout) -> TierPlan:
    """Raises ConfigError for sizes that could not hold a page, and for settings of tiers that are not there."""
    stores = options.cache_disk is not None or options.cache_remote is not None
    least = _LEAST_SLABS * layout.slab_bytes
    asked = max(_WAY_BYTES, least) if stores else 0
    if options.cache_host_bytes is not None:
        asked = options.cache_host_bytes // options.ranks
    if asked < 0 or (stores and not asked):
        raise ConfigError(f"cache_host_bytes is {asked}; it must be above 0 where there is a disk or a remote store, because "
                          "pages reach them by way of host memory")
    if not asked and options.kv_cache_dtype == "aged":
        raise ConfigError("kv_cache_dtype is 'aged', which stores pages behind the device in fewer bits, but nothing is behind "
                          "it; set cache_host_bytes, cache_disk or cache_remote")
    if 0 < asked < least:
        raise ConfigError(f"cache_host_bytes is {asked:,}, but a page of this model takes {layout.slab_bytes:,} bytes and "
                          f"{_LEAST_SLABS} are the least; raise it to {least:,} or more, or leave it out")
    if options.cache_disk is not None and options.cache_disk_bytes < least:
        raise ConfigError(f"cache_disk_bytes is {options.cache_disk_bytes:,}; the least for this model is {least:,}")
    # The ranks' pages are of equal size, and what one holds, all hold.
    return TierPlan(asked // layout.slab_bytes, options.cache_disk, options.cache_disk_adopt,
                    options.cache_disk_bytes // options.ranks, options.cache_remote, options.cache_write == "through",
                    options.cache_load == "always", options.ranks)
