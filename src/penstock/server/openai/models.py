"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.admin import json_response
from penstock.server.state import State


class Models:
    """The two endpoints. They answer while the model still loads."""

    def __init__(self, state: State) -> None:
        self.state = state

    async def list(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self._describe(name) for name in self.state.names]})

    async def one(self, http: Request) -> Response:
        name = http.path_params["model"]
        if name not in self.state.names:
            raise RequestError(f"the model {name!r} is not served here; possible: {', '.join(self.state.names)}", param="model",
                               code="model_not_found", status=404)
        return json_response(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        info = self.state.llm.info
        return {"id": name, "object": "model", "created": self.state.created, "owned_by": "penstock",
                "root": self.state.llm.options.model, "parent": None, "max_model_len": info.max_model_len if info else None}
