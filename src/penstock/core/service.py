"""Classes of service: what each promises, what it is owed, and how requests name it; `scheduler/promises.py` keeps it."""

import math
from collections.abc import Collection
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError, RequestError

NONE = ""
"""The class of requests that name none outside of a server: nothing is promised, nothing is refused."""
DEFAULT = "standard"
"""The server's class for requests that name none, and whose key names none."""
OPENAI = {"default": DEFAULT, "priority": "interactive", "scale": "interactive", "flex": "batch", "standard_only": DEFAULT}
"""OpenAI's and Anthropic's values of service_tier, as classes. `auto` is the default of the key."""


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class. Times in seconds; infinity promises nothing."""

    ttft: float = math.inf
    """Target of the time to the first token. A prompt that alone takes longer than a quarter of it gets four times its own."""
    tpot: float | None = None
    """Target of the time for each further token. None: as --step-target-ms says; infinity: nobody watches."""
    weight: float = 1.0
    """Share of a tenant's service while its classes are all backlogged, relative to the others'."""
    queue: int = 1 << 30
    """Requests that may wait; more are refused."""
    tenant_queue: int | None = None
    """Requests of one tenant that may wait, where there are tenants; by default half of `queue`."""
    preemptible: bool = False
    """Whether it makes room for classes of more weight."""


BUILT_IN = {
    NONE: Service(weight=10.0),
    "interactive": Service(ttft=2.0, tpot=0.05, weight=20.0, queue=512),
    DEFAULT: Service(ttft=30.0, tpot=0.2, weight=10.0, queue=1024),
    "batch": Service(tpot=math.inf, preemptible=True, queue=1 << 16)}


def read(path: str | None) -> dict[str, Service]:
    """The built-in classes and those of a JSON file: an object of objects, by name. ConfigError for one that cannot be used."""
    if path is None:
        return BUILT_IN
    try:
        found = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=dict[str, Service])
    except OSError as error:
        raise ConfigError(f"cannot read the classes in {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} has no classes: {error}; possible is for example "
                          '{"agents": {"ttft": 5, "tpot": 0.1, "weight": 5, "queue": 100, "preemptible": true}}') from None
    for name, service in found.items():
        if not name or name in OPENAI or name == "auto":
            raise ConfigError(f"{path}: a class cannot be called {name!r}; it has a meaning of its own")
        if min(service.ttft, service.tpot or 1.0, service.weight, service.queue) <= 0:
            raise ConfigError(f"{path}: ttft, tpot, weight and queue of {name!r} must be above 0")
    return {**BUILT_IN, **found}


def named(tier: str | None, classes: Collection[str], default: str = DEFAULT) -> str:
    """The class that a request means by its service_tier. RequestError if there is none of this name."""
    name = OPENAI.get(tier or "auto", tier or "auto")
    name = default if name == "auto" else name
    if name not in classes:
        possible = ", ".join(["auto", *OPENAI, *filter(None, classes)])
        raise RequestError(f"there is no class {tier!r}; possible: {possible}", param="service_tier")
    return name


def shown(name: str) -> str:
    """The service_tier of an answer: OpenAI's name of a class that has one."""
    return next((tier for tier, meant in OPENAI.items() if meant == name), name)
