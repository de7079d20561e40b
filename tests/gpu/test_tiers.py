"""Pages that leave the GPU and come back, from host memory and disk, while steps run: the same tokens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.system.test_tiers import figures, slab_bytes, start, talk

MODEL = "stories260k"


@pytest.fixture(scope="module")
def said() -> list[list[int]]:
    """Answers where nothing is reused."""
    with closing(start(MODEL, device="cuda", enable_prefix_caching=False, kv_cache_memory_bytes=64 * slab_bytes(MODEL)[1],
                       enforce_eager=True)) as engine:
        return talk(engine)


@pytest.mark.parametrize("write", ["through", "evict"])
@pytest.mark.parametrize("eager", [True, False])
def test_host(said: list[list[int]], write: str, eager: bool) -> None:
    with closing(start(MODEL, device="cuda", host_slabs=200, cache_write=write, cache_load="always",
                       enforce_eager=eager)) as engine:
        for _ in range(2):
            assert talk(engine) == said
        assert figures(engine)["host"].hit_tokens > 300


def test_disk_and_restart(said: list[list[int]], tmp_path: Path) -> None:
    for restart in (False, True):
        with closing(start(MODEL, device="cuda", host_slabs=12, cache_disk=str(tmp_path), cache_load="always",
                           enforce_eager=True)) as engine:
            assert talk(engine) == said
            disk = figures(engine)["disk"]
            assert disk.failures == 0 and (disk.hit_tokens > 300 or not restart)
