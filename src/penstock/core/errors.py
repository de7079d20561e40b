"""The one exception hierarchy. A message says what was asked, what is possible, and what to change.

Raised only where a user can still do something about it: in `config`, in `models` while loading, in `server`, and in
`engine.submit`. Below those, a broken invariant is an `AssertionError`."""


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError):
    """An option or a combination of options cannot be honoured."""


class ModelError(PenstockError):
    """A model folder cannot be used: missing, corrupt, of an unknown architecture, or with tensors that do not fit."""


class RequestError(PenstockError):
    """One request is refused; the engine and every other request go on.

    `param` names the request field at fault (OpenAI's name for it), `code` is a stable machine-readable word (by default
    invalid_value for a field), `status` is the HTTP status that fits. `retry`: seconds until a try may succeed."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
                 retry: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None or param is None else "invalid_value"
        self.status = status
        self.retry = retry


class UnsupportedError(RequestError):
    """The request asks for what this model or this server cannot do."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code="unsupported_parameter")


class EngineDeadError(PenstockError):
    """The engine has stopped and cannot take or finish requests; the message holds the reason."""


class RankLostError(EngineDeadError):
    """The same, but ranks that live can keep what they have loaded (`engine/engine.py::Engine.again`)."""


def first_line(error: BaseException) -> str:
    """The words of a library's error, as part of a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
