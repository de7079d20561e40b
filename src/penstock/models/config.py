"""Typed reads of config.json's values, and the parts that Llama-like families describe alike. `checkpoint/config.py` reads it.

Every read is checked: a value that Penstock cannot honour is a ModelError that says what was found and what is possible."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import ModelError
from penstock.layers import rope as ropes

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu"}
"""transformers' names of activations and ours (ops/activation.py)."""

class Config:
    """Typed reads of a config. `defaults` replace values that are absent or null, as in the family's configuration class."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.given = values
        self.values = {**(defaults or {}), **{name: value for name, value in values.items() if value is not None}}

    def changed(self, **values: Any) -> "Config":
        """The same with other values."""
        found = Config({**self.given, **values})
        found.values = {**self.values, **values}
        return found

    def renamed(self, **names: str) -> "Config":
        """The same with the values of some keys under other names."""
        found = Config({names.get(name, name): value for name, value in self.given.items()})
        found.values = {names.get(name, name): value for name, value in self.values.items()}
        return found

    def named(self, architecture: str, model_type: str) -> bool:
        """Whether it is a config of that architecture, or of that type where it names no architecture."""
        architectures = self.values.get("architectures")
        return architecture in architectures if architectures else self.values.get("model_type") == model_type

    def wrong(self, name: str, possible: str) -> ModelError:
        """The error for a value that cannot be honoured."""
        found = f"{name} is {self.values[name]!r}" if name in self.values else f"{name} is missing"
        return ModelError(f"config.json: {found}; possible is {possible}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def nullable_integer(self, name: str, default: int) -> int:
        """0 if the config says null, `default` if it says nothing."""
        return 0 if name in self.given and self.given[name] is None else self.integer(name, default, least=min(default, 1))

    def nullable_number(self, name: str, default: float) -> float:
        """0.0 if the config says null, `default` if it says nothing."""
        null = name in self.given and self.given[name] is None
        return 0.0 if null else self.number(name, default) if name in self.values else default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        """The value, mapped by `choices`."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return choices[value]

    def absent(self, *names: str) -> None:
        """Refuses options that would change the computation: each must be absent, null, false or zero."""
        for name in names:
            if self.values.get(name):
                raise self.wrong(name, "only that it is absent or false: this variant of the architecture is not supported")

    def only(self, name: str, value: Any, possible: str) -> None:
        """Refuses another value than this one, which is also meant where there is none."""
        found = self.values.get(name, value)
        if found != value or isinstance(found, bool) is not isinstance(value, bool):
            raise self.wrong(name, possible)

    def listing(self, name: str, length: int, fits: Callable[[Any], bool], possible: str) -> list[Any] | None:
        """A list of at least `length` fitting values, cut to it, or None if there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length or not all(fits(item) for item in value):
            raise self.wrong(name, f"a list of {length} values, each {possible}")
        return value[:length]

    def layers(self, name: str, other: Any, kind: Any, default: Callable[[int], bool]) -> list[bool]:
        """For each layer, whether it is of a kind, not of the other: by the list `name` if present, else `default(layer)`."""
        count = self.integer("num_hidden_layers")
        kinds = self.listing(name, count, (other, kind).__contains__, f"{other} or {kind}")
        return [default(i) for i in range(count)] if kinds is None else [one == kind for one in kinds]

    def windows(self, default: Callable[[int], bool], width: int) -> list[int]:
        """Each layer's sliding window, 0 for none: by `layer_types` if present, else where `default(layer)`."""
        return [width if one else 0 for one in self.layers("layer_types", "full_attention", "sliding_attention", default)]


def rope(config: Config, head_size: int, *, layer_type: str | None = None, theta: float = 10000.0, fraction: float = 1.0,
         aliases: Mapping[str, str] | None = None, interleaved: bool = False) -> ropes.RopeSpec:
    """The rotation that a config asks for, in today's form (`rope_parameters`) or the older (`rope_theta`, `rope_scaling`).

    `layer_type` picks an entry where `rope_parameters` differ by layer type; `theta` and `fraction` are the family's defaults;
    `aliases` are other names that the family uses for scalings, `interleaved` is the order of its rotated elements."""
    given = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise config.wrong("rope_parameters" if "rope_parameters" in config.values else "rope_scaling", "an object")
    if layer_type is not None and isinstance(given.get(layer_type), dict):
        given = given[layer_type]
    where = Config(given, {"rope_theta": config.values.get("rope_theta", theta),
                           "partial_rotary_factor": config.values.get("partial_rotary_factor", fraction)})
    where.values.setdefault("rope_type", where.values.pop("type", "default"))
    kind = where.values["rope_type"]
    kind = (aliases or {}).get(kind, kind)
    if kind not in _SCALINGS:
        raise where.wrong("rope_type", f"one of {', '.join(_SCALINGS)}")
    dim = head_size if kind == "proportional" else int(head_size * where.number("partial_rotary_factor"))
    if not 2 <= dim <= head_size:
        raise where.wrong("partial_rotary_factor", f"a fraction that rotates 2 to {head_size} dimensions of a head")
    allowed, make = _SCALINGS[kind]
    if unknown := sorted(set(where.values) - set(allowed) - _ROPE_COMMON):
        raise ModelError(f"config.json: rope scaling {kind!r} with {', '.join(unknown)}; what is understood with it is "
                         f"{', '.join(allowed)}")
    return ropes.RopeSpec(where.number("rope_theta"), dim, make(where, config, dim), interleaved)


_ROPE_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "mrope_section", "mrope_interleaved"}
"""Any scaling may have these. The sections of mrope turn by an image's rows and columns; a text has one position for all."""


def _original(where: Config, config: Config) -> int:
    """The context length before scaling. Phi-3 states it outside of the scaling's entry, which takes precedence."""
    for source in (config, where):
        if "original_max_position_embeddings" in source.values:
            return source.integer("original_max_position_embeddings")
    return config.integer("max_position_embeddings")


def _optional(where: Config, name: str) -> float | None:
    return where.number(name) if name in where.values else None


def _yarn(where: Config, config: Config, dim: int) -> ropes.RopeScaling:
    if dim % 2:
        raise ModelError(f"config.json: YaRN with {dim} rotated dimensions of a head; possible is an even number")
    original = _original(where, config)
    factor = where.number("factor", config.integer("max_position_embeddings") / original)
    return ropes.YarnScaling(factor, original, where.number("beta_fast", 32.0),
                             where.number("beta_slow", 1.0), _optional(where, "attention_factor"), _optional(where, "mscale"),
                             _optional(where, "mscale_all_dim"), where.flag("truncate", True))


def _longrope(where: Config, config: Config, dim: int) -> ropes.RopeScaling:
    original, count = _original(where, config), (dim + 1) // 2
    sets = []
    for name in ("short_factor", "long_factor"):
        values = where.listing(name, count, lambda x: isinstance(x, int | float) and x > 0, "a number above 0")
        if values is None or len(where.values[name]) != count:
            raise where.wrong(name, f"a list of {count} numbers, half of the {dim} rotated dimensions of a head")
        sets.append(tuple(float(value) for value in values))
    factor = where.number("factor", config.integer("max_position_embeddings") / original)
    return ropes.LongRopeScaling(sets[0], sets[1], original, factor, _optional(where, "attention_factor"))


_FACTOR = ("factor", "original_max_position_embeddings")
_SCALINGS: dict[str, tuple[tuple[str, ...], Callable[[Config, Config, int], ropes.RopeScaling]]] = {
    "default": (_FACTOR, lambda *_: ropes.RopeScaling()),
    "linear": (_FACTOR, lambda where, *_: ropes.LinearScaling(where.number("factor"))),
    "dynamic": (_FACTOR, lambda where, config, _: ropes.DynamicScaling(where.number("factor"),
                                                                       config.integer("max_position_embeddings"))),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
               lambda where, config, _: ropes.Llama3Scaling(where.number("factor"), where.number("low_freq_factor"),
                                                            where.number("high_freq_factor"), _original(where, config))),
    "proportional": (("factor",), lambda where, *_: ropes.ProportionalScaling(where.number("partial_rotary_factor"),
                                                                              where.number("factor", 1.0))),
    "yarn": (("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
              "mscale_all_dim", "truncate"), _yarn),
    "longrope": (("short_factor", "long_factor", "original_max_position_embeddings", "factor", "attention_factor"), _longrope)}
"""By transformers' names: the keys that a scaling understands, and its reader of (the scaling's entry, the config, dim)."""
