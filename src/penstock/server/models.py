"""The operator's routes for models: which there are, loading, unloading, sleeping, waking, and new weights.

/models and those below have llama.cpp's names, /sleep and /wake_up vLLM's, /update_weights_from_disk SGLang's."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import PenstockError, RequestError
from penstock.server.answer import json_response
from penstock.server.dialect import Route
from penstock.server.state import State

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
            Route("POST", "/update_weights_from_disk", self.update, "Switch to other weights while it runs", NewWeights),
        )

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
