"""Identity of cached entries: a change anywhere in a resolved model is another identity, and what changes no entry is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from penstock.layers.decoder import computation
from penstock.layers.rope import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling
from penstock.layers.spec import ModelSpec
from penstock.models import describe
from tests.models.families import CASES, Case

KERNELS = [("attention", "cpu"), ("linear", "cpu"), ("rms_norm", "reference")]


def described(case: Case) -> ModelSpec:
    config = getattr(transformers, case.kind + "Config")(**case.config).to_dict()
    return describe({**config, "architectures": [case.model]})


def identity(spec: ModelSpec, kernels: list[tuple[str, str]] = KERNELS, dtype: str = "float32", length: int = 256) -> str:
    return computation(spec, spec.states(dtype), kernels, dtype, length)


def changes(value: Any) -> Iterator[Any]:
    """The same value with one leaf of it changed, for every leaf: of dataclasses, tuples, numbers, texts and choices."""
    if isinstance(value, RopeSpec):
        yield dataclasses.replace(value, theta=value.theta * 1.01)
        if not isinstance(value.scaling, LongRopeScaling):
            yield dataclasses.replace(value, dim=value.dim - 2)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name != "max_positions":
                for changed in changes(getattr(value, field.name)):
                    yield dataclasses.replace(value, **{field.name: changed})
    elif isinstance(value, tuple):
        for i, one in enumerate(value):
            for changed in changes(one):
                yield (*value[:i], changed, *value[i + 1:])
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value * 1.0001 + 1e-9
    elif isinstance(value, str):
        yield value + "x"


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma2-grouped", "gemma4-shared", "gemma3n-shared", "phi3-long",
                                  "gpt2-plain"])
def test_every_leaf_of_a_description_counts(name: str) -> None:
    spec = described(next(case for case in CASES if case.name == name))
    states, seen, count = spec.states("float32"), {identity(spec)}, 0
    for changed in changes(spec):
        # States follow from the spec; here they stay, so that the spec alone must tell.
        seen.add(computation(changed, states, KERNELS, "float32", 256))
        count += 1
    assert len(seen) == count + 1 > 40


def test_dtype_kernels_and_states_count() -> None:
    spec = described(CASES[0])
    states = spec.states("float32")
    fewer = [dataclasses.replace(states[0], fields=states[0].fields[:1]), *states[1:]]
    other = [*KERNELS[:1], ("linear", "triton"), *KERNELS[2:]]
    seen = {identity(spec), identity(spec, dtype="bfloat16"), identity(spec, other),
            computation(spec, fewer, KERNELS, "float32", 256)}
    assert len(seen) == 4
    assert identity(spec, KERNELS[::-1]) == identity(spec)


def with_rope(value: Any, rope: RopeSpec) -> Any:
    """A description with this in the place of every rotary embedding."""
    if isinstance(value, RopeSpec):
        return rope
    if isinstance(value, tuple):
        return tuple(with_rope(one, rope) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: with_rope(getattr(value, field.name), rope) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    return value


SCALINGS: list[RopeScaling] = [
    RopeScaling(), LinearScaling(2.0), DynamicScaling(2.0, 128), YarnScaling(4.0, 128),
    LongRopeScaling(short=(1.0,) * 8, long=(2.0,) * 8, original=128, factor=2.0)]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_the_longest_context_counts_exactly_where_it_turns_keys_differently(scaling: RopeScaling) -> None:
    """The same model at another max_model_len: with dynamic NTK and LongRoPE it rotates differently, else it may share."""
    spec = described(CASES[0])
    rope = RopeSpec(10_000.0, 16, scaling)
    spec = dataclasses.replace(spec, blocks=with_rope(spec.blocks[:1], rope))
    for one, other in ((64, 100), (100, 128), (128, 129), (129, 400), (400, 401)):
        tables = [rope.table(length, torch.device("cpu")) for length in (one, other)]
        same = all(torch.allclose(mine[:one], theirs[:one], rtol=0, atol=1e-6) for mine, theirs in zip(*tables, strict=True))
        assert (identity(spec, length=one) == identity(spec, length=other)) == same, (one, other)
    assert identity(dataclasses.replace(spec, max_positions=7)) == identity(spec), "a limit that a config states changes none"


def test_what_is_not_known_is_an_error() -> None:
    spec = described(CASES[0])
    with pytest.raises(TypeError, match="say in layers/decoder"):
        identity(dataclasses.replace(spec, architecture=object()))  # type: ignore[arg-type]
