"""GET /v1/models and /v1/models/{model}."""

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.answer import json_response, utc
from penstock.server.state import StateRoutes


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    type: str
    """This and the next two are Anthropic's, whose clients ask the same route."""
    display_name: str
    created_at: str


class ModelList(TypedDict):
    object: str
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class Models(StateRoutes):
    """The two endpoints. They answer while the model still loads."""

    async def list(self, http: Request) -> Response:
        names = self.state.names
        return json_response({"object": "list", "data": [self._describe(name) for name in names], "first_id": names[0],
                              "last_id": names[-1], "has_more": False})

    async def one(self, http: Request) -> Response:
        return json_response(self._describe(http.path_params["model"]))

    def _describe(self, name: str) -> Model:
        slot = self.state.fleet.named(name)
        info, adapter = slot.llm.info, slot.llm.adapters.get(name)
        root = slot.llm.model if adapter is None else adapter.folder
        parent = slot.names[0] if slot.adapts(name) else None
        return {"id": name, "object": "model", "created": self.state.created, "owned_by": "penstock",
                "root": root, "parent": parent, "max_model_len": info.max_model_len if info else None,
                "type": "model", "display_name": name, "created_at": utc(self.state.created)}
