"""The operator's routes for models: which there are, loading, unloading, sleeping, waking, and new weights.

/models and those below have llama.cpp's names, /sleep and /wake_up vLLM's, /update_weights_from_disk SGLang's. For adapters
/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form, and the folder that --lora-dir watches."""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.checkpoint.adapter import CONFIG, WEIGHTS
from penstock.core.errors import ConfigError, PenstockError, RequestError
from penstock.observe.log import LOG
from penstock.server.dialect import Route, json_response
from penstock.server.fleet import Slot
from penstock.server.state import State, StateRoutes

PARTS = {"weights", "kv_cache"}
"""The parts of a model that vLLM wakes one by one."""


class ModelName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str = msgspec.field(name="model")
    """A served name. The attribute is not called `model`, by which a body's reader chooses and loads one."""


class NewWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's fields."""

    model_path: str
    """A folder or hub id whose model has the same tokenizer and API."""
    model: str | None = None
    """The served name whose weights are replaced; by default the first."""


class ModelRoutes:
    """GET /models, /is_sleeping; POST /models/load, /models/unload, /sleep, /wake_up, /update_weights_from_disk."""

    def __init__(self, state: State, patience: float) -> None:
        """`patience` is how many seconds running requests get before their model goes."""
        self.state = state
        self.patience = patience

    def routes(self) -> Sequence[Route]:
        return (
            Route("GET", "/models", self.models, "The models of this server, and which are loaded", answer=dict[str, Any]),
            Route("POST", "/models/load", self.load, "Load a model now", ModelName),
            Route("POST", "/models/unload", self.unload, "Unload a model once its requests have ended", ModelName),
            Route("POST", "/sleep", self.sleep, "Give a model's memory back until /wake_up"),
            Route("POST", "/wake_up", self.wake_up, "Load a model that sleeps"),
            Route("GET", "/is_sleeping", self.is_sleeping, "Whether a model sleeps"),
            Route("POST", "/update_weights_from_disk", self.update, "Switch to other weights while it runs", NewWeights))

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": self.state.fleet.describe()})

    async def load(self, request: Request, body: ModelName) -> Response:
        await self.state.fleet.load(self.state.fleet.named(body.name))
        return json_response({"success": True})

    async def unload(self, request: Request, body: ModelName) -> Response:
        slot = self.state.fleet.named(body.name)
        await self.state.fleet.unload(slot, "unloaded" if self.state.fleet.several else "sleeping", self.patience)
        return json_response({"success": True})

    async def sleep(self, request: Request) -> Response:
        """Ends the engine: all of its memory is free, and the weights' files stay in the system's page cache as far as there is
        room. vLLM's levels 1 and 2 are therefore one. `mode` abort ends running requests at once, wait lets them finish."""
        query = request.query_params
        level, mode = query.get("level", "1"), query.get("mode", "wait")
        if level not in ("0", "1", "2") or mode not in ("abort", "wait"):
            raise RequestError(f"level is {level!r} and mode {mode!r}; possible are level 1 or 2 and mode abort or wait",
                               param="level")
        slot = self.state.fleet.current
        if slot.state == "ready":
            slot.level, slot.woken = level, frozenset()
            await self.state.fleet.unload(slot, "sleeping", self.patience if mode == "wait" else 0.0)
        return json_response({"is_sleeping": slot.state == "sleeping"})

    async def wake_up(self, request: Request) -> Response:
        """Loads the model. It wakes as a whole: of vLLM's `tags` one alone leaves it asleep until the other comes."""
        slot, tags = self.state.fleet.current, {*request.query_params.getlist("tags")} or PARTS
        if tags - PARTS:
            raise RequestError(f"tags are {sorted(tags)}; possible are {' and '.join(sorted(PARTS))}", param="tags")
        slot.woken |= tags
        if slot.woken == PARTS:
            await self.state.fleet.load(slot)
        return json_response({"is_sleeping": slot.state == "sleeping"})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self.state.fleet.current.state == "sleeping"})

    async def update(self, request: Request, body: NewWeights) -> Response:
        """Loads the new weights beside the old ones, switches, and lets running requests finish with the old."""
        try:
            await self.state.fleet.replace(self.state.fleet.named(body.model or ""), body.model_path, self.patience)
        except RequestError:
            raise
        except PenstockError as error:
            raise RequestError(f"the weights of {body.model_path!r} could not be loaded, so the old ones stay: {error}",
                               param="model_path", code="loading_failed") from None
        return json_response({"success": True, "message": f"serving the weights of {body.model_path}"})


_SECONDS = 2.0
"""Between two looks at a watched folder."""


class Folder:
    """A folder whose subfolders are served as adapters of a model, by their names, as they come, change and go."""

    def __init__(self, path: str, slot: Slot, several: bool) -> None:
        """Of `several` models each has the adapters that were trained for it. ConfigError if the folder cannot be served."""
        if not slot.llm.options.enable_lora or not Path(path).is_dir():
            raise ConfigError(f"lora_dir is {path!r}; it must be a folder, and needs enable_lora")
        self._path = Path(path)
        self._slot = slot
        self._bases = {Path(name).name for name in (*slot.names, slot.llm.model)} if several else None
        """The last parts of its names."""
        self._llm = slot.llm
        self._seen: dict[str, list[int]] = {}
        """The state of the files of each subfolder when it was looked at last."""
        self._broken: dict[str, list[int]] = {}
        """The state in which one could not be loaded."""
        self._looking = asyncio.Lock()
        slot.offered = frozenset(self._stamps())
        slot.prepare = self._look

    async def watch(self) -> None:
        """Follows the folder until it is cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(_SECONDS)

    async def _look(self) -> None:
        async with self._looking:
            found = await asyncio.to_thread(self._stamps)
            self._broken = {name: stamp for name, stamp in self._broken.items() if found.get(name) == stamp}
            self._slot.offered = found.keys() - self._broken.keys()
            if self._slot.llm is not self._llm:
                # The model was loaded again: its new engine has no adapters.
                self._llm, self._seen, self._broken = self._slot.llm, {}, {}
            if self._llm.info is None or self._llm.dead is not None:
                return
            for name in self._seen.keys() - found.keys():
                del self._seen[name]
                await self._try(name, self._llm.unload_adapter(name))
            for name, stamp in found.items():
                if self._seen.get(name) != stamp:
                    loaded = self._llm.load_adapter(name, str(self._path / name), replace=name in self._seen)
                    self._seen[name] = stamp
                    if not await self._try(name, loaded):
                        self._broken[name] = stamp
                        self._slot.offered -= {name}

    async def _try(self, name: str, change: Awaitable[None]) -> bool:
        try:
            await change
        except RequestError as error:
            LOG.warning("the adapter %s of %s: %s", name, self._path, error.message)
            return False
        return True

    def _stamps(self) -> dict[str, list[int]]:
        """Time and size of an adapter's two files, by the name of its folder."""
        stamps = {}
        for folder in sorted(self._path.iterdir()):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                files = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
                config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
                if self._bases is None or Path(str(config.get("base_model_name_or_path"))).name in self._bases:
                    stamps[folder.name] = [number for file in files for number in (file.st_mtime_ns, file.st_size)]
        return stamps

class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """A folder that PEFT wrote, or a hub id."""
    load_inplace: bool = False
    """Replace an adapter of this name."""


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes(StateRoutes):
    """For operators: with several API keys they need an admin key."""

    def routes(self) -> Sequence[Route]:
        return (Route("POST", "/v1/load_lora_adapter", self.load, "Serve a LoRA adapter", LoadAdapter),
                Route("POST", "/v1/unload_lora_adapter", self.unload, "Serve a LoRA adapter no longer", UnloadAdapter))

    async def load(self, http: Request, body: LoadAdapter) -> Response:
        """200 once requests may name the adapter."""
        self.state.admit(None)
        if body.lora_name in self.state.fleet.names and body.lora_name not in self.state.llm.adapters:
            raise RequestError(f"{body.lora_name!r} is the model's own name", param="lora_name", code="adapter_exists")
        # The engine counts it even if the client goes away.
        await asyncio.shield(self.state.llm.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, http: Request, body: UnloadAdapter) -> Response:
        """200 at once; requests that have been taken in finish."""
        self.state.admit(None)
        await self.state.llm.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
