"""A digest of everything that cached entries depend on besides tokens and weights, of the model as it was built.

It is derived from the whole resolved description, not from a list of fields: every field of every dataclass in the spec and the
states enters by itself, rotary embeddings as the frequencies that they have at this `max_model_len`, and the kernels by name,
because two implementations of an operation agree within a tolerance only. A new field is in it the day it appears; a value of a
kind that is not known here is an error, never left out."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from penstock.core.state import StateSpec
from penstock.layers.rope import RopeSpec
from penstock.layers.spec import ModelSpec


def computation(spec: ModelSpec, states: Sequence[StateSpec], kernels: Sequence[tuple[str, str]], dtype: str,
                max_model_len: int) -> str:
    """Hex digits that differ if anything differs that may change a key or a value, or how they are stored.

    `max_positions` is left out, because it changes neither and differs between engines that should share: it is the limit that
    a config states for `max_model_len`, which itself enters through the frequencies."""
    described = {"spec": dataclasses.replace(spec, max_positions=0), "states": list(states), "kernels": sorted(kernels),
                 "dtype": dtype}
    return hashlib.sha256(json.dumps(_plain(described, max_model_len), sort_keys=True).encode()).hexdigest()


def _plain(value: Any, max_model_len: int) -> Any:
    """A value as JSON, with the types of dataclasses and structs named. TypeError for what is none of the kinds below."""
    if isinstance(value, RopeSpec):
        frequencies, amplitude = value.resolve(max_model_len)
        return ["rope", value.dim, value.interleaved, [frequency.hex() for frequency in frequencies.tolist()],
                float(amplitude).hex()]
    if isinstance(value, Struct):
        return [type(value).__name__, {name: _plain(one, max_model_len) for name, one in asdict(value).items()}]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name), max_model_len) for field in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(one, max_model_len) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, max_model_len) for one in value]
    raise TypeError(f"{type(value).__name__} in a model's description: say in layers/identity.py how it enters the identity")
