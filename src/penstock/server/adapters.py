"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.core.errors import RequestError
from penstock.server.body import BodyReader
from penstock.server.dialect import Route
from penstock.server.state import State


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


class AdapterRoutes:
    """For operators: with several API keys they need an admin key."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.bodies = BodyReader(state.limits, state.llm.work, lambda _where, text: text, (), state.lenient)

    def routes(self) -> Sequence[Route]:
        return (Route("POST", "/v1/load_lora_adapter", self.load, "Serve a LoRA adapter", LoadAdapter),
                Route("POST", "/v1/unload_lora_adapter", self.unload, "Serve a LoRA adapter no longer", UnloadAdapter))

    async def load(self, http: Request) -> Response:
        """200 once requests may name the adapter."""
        body = await self.bodies.read(http, LoadAdapter)
        self.state.admit(None)
        if body.lora_name in self.state.names and body.lora_name not in self.state.llm.adapters:
            raise RequestError(f"{body.lora_name!r} is the model's own name", param="lora_name", code="adapter_exists")
        await self.state.llm.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, http: Request) -> Response:
        """200 at once; requests that have been taken in finish."""
        body = await self.bodies.read(http, UnloadAdapter)
        self.state.admit(None)
        await self.state.llm.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
