"""State that all routes share: the engine's frontend, the served names, limits, tenants, and whether the server is draining."""

import time

from penstock.config.schema import ServerOptions
from penstock.core.errors import RequestError, UnsupportedError
from penstock.engine.async_llm import AsyncLLM
from penstock.server.connections import Counts
from penstock.server.dialect import UnavailableError
from penstock.server.fleet import Fleet, Slot
from penstock.server.keys import Key
from penstock.server.limits import Limits
from penstock.server.promise import LOWEST
from penstock.server.store import Store
from penstock.server.tenants import Tenants


class State:
    """One server's state. `draining` is set once and for good."""

    def __init__(self, models: AsyncLLM | Fleet, options: ServerOptions) -> None:
        """A single model's names are `served_model_name`, or what it was given as."""
        self.fleet = models if isinstance(models, Fleet) else Fleet(
            [Slot(options.served_model_name or [models.model], models, state="loading")])
        self.options = options
        llm = self.llm
        self.created = int(time.time())
        self.tenants = Tenants(options, llm.options.cache_disk, llm.options.cache_disk_adopt)
        self.limits = Limits(options)
        self.store = Store(options.store, options.store_bytes, options.store_days)
        self.draining = False
        self.connections = Counts()
        """Counts of connections for /metrics; all 0 where the application runs without a server."""

    @property
    def llm(self) -> AsyncLLM:
        """The engine's frontend for the request that this task serves, else that of the default model."""
        return self.fleet.current.llm

    @property
    def name(self) -> str:
        """The model's first name, which answers carry."""
        return self.fleet.current.names[0]

    def adapter(self, model: str | None) -> str:
        """The digest of the adapter that a request's model names; "" for the model itself."""
        found = self.llm.adapters.get(model or "")
        return "" if found is None else found.digest

    def not_ready(self) -> str | None:
        """The reason why no requests are accepted now; None if they are."""
        return "the server is shutting down" if self.draining else self.fleet.unhealthy()

    def admit(self, model: str | None) -> str:
        """The served name that a request refers to. RequestError 404 for another model, 503 while no requests are accepted."""
        if self.draining:
            raise UnavailableError("the server is shutting down", "shutting_down")
        if self.llm.dead is not None:
            raise UnavailableError(f"the engine has stopped: {self.llm.dead}", "engine_dead")
        if self.llm.info is None:
            slot = self.fleet.current
            raise UnavailableError(slot.absent, "loading" if slot.state == "loading" else "not_loaded")
        if (stuck := self.llm.unhealthy()) is not None:
            raise UnavailableError(stuck, "engine_stuck")
        if not model:
            return self.name
        self.fleet.named(model)
        if model in self.fleet.current.offered and model not in self.llm.adapters:
            raise UnavailableError(f"the adapter {model!r} is still being loaded", "loading")
        return model

    def admit_bare(self, model: str | None) -> str:
        """The same for work that adapters do not do. RequestError 400 for one of them."""
        name = self.admit(model)
        if self.adapter(name):
            raise UnsupportedError(f"{name!r} is an adapter, and adapters only generate; use {self.name!r}", "model")
        return name

    def priority(self, wanted: int | None, admin: bool, key: Key | None = None) -> int:
        """A request's priority, for a `key` of the class background the lowest. RequestError 403 for one it may not have."""
        if key is not None and key.kind == "background":
            return LOWEST
        if wanted is None or wanted >= 0 or admin or self.options.allow_priority == "all":
            return wanted or 0
        raise RequestError(f"priority is {wanted}, which would be served before others; that is for holders of an "
                           "--admin-api-key, or for everybody with --allow-priority all", param="priority",
                           code="priority_not_allowed", status=403)


class StateRoutes:
    def __init__(self, state: State) -> None:
        self.state = state
