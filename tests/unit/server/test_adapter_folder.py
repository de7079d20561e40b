"""The folder of adapters follows its model through unloading and loading again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.checkpoint.adapter import CONFIG, WEIGHTS
from penstock.server.fleet import Slot
from penstock.server.models import Folder


def model(loaded: bool = True) -> Any:
    """Notes which adapters it was told to load."""
    found: Any = SimpleNamespace(options=SimpleNamespace(enable_lora=True), info=object() if loaded else None, dead=None,
                                 names=[])

    async def load_adapter(name: str, folder: str, replace: bool) -> None:
        assert found.info is not None, "nobody asks a model that is not there"
        found.names.append(name)

    found.load_adapter = load_adapter
    return found


def test_a_model_that_is_loaded_again_gets_its_adapters_again(tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "pirate").mkdir(exist_ok=True)
        (tmp_path / "pirate" / name).write_text("{}")
    absent, first, second = model(loaded=False), model(), model()
    slot = Slot(["base"], absent)
    folder = Folder(str(tmp_path), slot, several=False)

    async def run() -> None:
        await folder._look()
        for one in (first, second):
            slot.llm = one
            await folder._look()
            await folder._look()

    asyncio.run(run())
    assert absent.names == [] and first.names == second.names == ["pirate"]
