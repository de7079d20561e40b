"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.answer import json_response
from penstock.server.state import State


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(TypedDict):
    object: str
    data: list[Model]


class Models:
    """The two endpoints. They answer while the model still loads."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def list(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self._describe(name) for name in self.state.names]})

    async def one(self, http: Request) -> Response:
        name = http.path_params["model"]
        self.state.check_name(name)
        return json_response(self._describe(name))

    def _describe(self, name: str) -> Model:
        info = self.state.llm.info
        return {"id": name, "object": "model", "created": self.state.created, "owned_by": "penstock",
                "root": self.state.model, "parent": None, "max_model_len": info.max_model_len if info else None}
