"""Quantized checkpoints at shapes and settings drawn at random: matrices as the formats' own documentation computes them, and
configs with values that no program writes, which are read or refused by a message."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint import read_config
from penstock.config.resolve import CacheAsked
from penstock.core.errors import ConfigError, ModelError
from penstock.models import configured, describe, load, quantized
from penstock.models.caching import requested, stated
from penstock.quant.dialects import reader
from penstock.quant.form import Form
from tests.models.families import CASES, make
from tests.models.harness import CPU, Runner, open_model, reference
from tests.models.test_dialects import FORMULAS, LLAMA, Writer, compressed, gptq, greedy, matrices, packed_int4, written
from tests.models.test_hub_forms import READ, Q

MANY = [pytest.param(seed, marks=() if seed < 2 else pytest.mark.exhaustive) for seed in range(12)]


def decoded(form: Form, tensors: dict[str, torch.Tensor], n: int, k: int) -> torch.Tensor:
    """A module's matrix, whose tensors have the types and shapes that the form asks for."""
    known = {given.suffix: given for given in form.given}
    tensors = {suffix if suffix in known else f".{suffix}": tensor for suffix, tensor in tensors.items()}
    for suffix, tensor in tensors.items():
        assert str(tensor.dtype).removeprefix("torch.") in known[suffix].dtypes, suffix
        assert not known[suffix].shapes or tuple(tensor.shape) in known[suffix].shapes, suffix
    parts = {**form.parts(tensors), **{part: tensors[suffix] for part, suffix in form.same.items()}}
    for part in form.scheme.parts(n, k, "float32"):
        assert parts[part.suffix].shape == part.shape
    return form.scheme.decode(parts, torch.float32)


def words(codes: np.ndarray, bits: int, each: int = 0) -> torch.Tensor:
    """Codes along the last axis in words of 32 bits: as one stream of bits, or `each` in a word."""
    count = codes.shape[1]
    found = np.zeros((len(codes), -(-count // each) if each else -(-count * bits // 32)), np.uint32)
    for at in range(count):
        for bit in range(bits):
            word, place = (at // each, at % each * bits + bit) if each else divmod(at * bits + bit, 32)
            found[:, word] |= (codes[:, at].astype(np.uint32) >> bit & 1) << np.uint32(place)
    return torch.from_numpy(found.view(np.int32))


def packed(bits: int, group: int, symmetric: bool, older: bool) -> Writer:
    """compressed-tensors' integers: words are one stream of bits; in files of older versions a word has ten codes of 3 bits."""
    def write(_name: str, shape: tuple[int, int], draw: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        n, k = shape
        each, groups = 32 // bits if older else 0, k // group if group else 1
        codes, scales = draw.integers(0, 1 << bits, shape), draw.uniform(0.01, 0.03, (n, groups)).astype(np.float16)
        zeros = np.full((n, groups), 1 << bits - 1) if symmetric else draw.integers(0, 1 << bits, (n, groups))
        tensors = {"weight_packed": words(codes, bits, each), "weight_scale": torch.from_numpy(scales),
                   "weight_shape": torch.tensor(shape)}
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits, each).t().contiguous()
        wide = (one.repeat(k // groups, 1) for one in (zeros, scales.astype(np.float32)))
        return tensors, ((codes - next(wide)) * next(wide)).astype(np.float32)
    return write


def drawn(choose: random.Random) -> tuple[dict[str, Any], Writer, tuple[int, int]]:
    """A config, its writer, and the shape of a matrix that the format can store."""
    bits, symmetric, kind = choose.choice([2, 3, 4, 8]), choose.random() < 0.5, choose.choice(["packed", "gptq", "rest"])
    group = choose.choice([0, 8, 24, 32, 64, 128])
    n, k, older = 32 * choose.randint(1, 5), (group or 8) * choose.randint(6, 9), choose.random() < 0.5
    if kind == "packed":
        given = compressed("pack-quantized", num_bits=bits, type="int", group_size=group or -1, symmetric=symmetric)
        # Of fewer than 160 numbers the two layouts of 3 bits may fill as many words; with multiples of 32 they never do.
        return given, packed(bits, group, symmetric, older and k % 32 == 0), (n if older else n + 5, k)
    if kind == "gptq":
        ordered = group > 0 and choose.random() < 0.5
        given = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": ordered,
                 "checkpoint_format": "gptq" if older else "gptq_v2"}
        return given, gptq(bits, group or -1, older, ordered, symmetric), (n, 4 * k)
    name = choose.choice(["awq", "fp8-static", "modelopt-fp8-rows", "modelopt-nvfp4", "quark-mxfp4", "compressed-int8-groups",
                          "torchao-int4", "bitsandbytes-int8", "compressed-mxfp8"])
    return *FORMULAS[name], (n, 64 * choose.randint(1, 5))


@pytest.mark.parametrize("seed", MANY)
def test_matrices_of_any_shape_are_what_the_formula_gives(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(20):
        given, write, (n, k) = drawn(choose)
        tensors, expected = write(Q, (n, k), np.random.default_rng(choose.randrange(1 << 30)))
        form = reader({"model_dtype": "float16", **given}).form(Q, n, k)
        assert form is not None
        assert np.array_equal(decoded(form, tensors, n, k).numpy(), expected), (given, n, k)


BAD: list[Any] = [None, "", "x", "4", -1, 0, -2, 7, 3.5, True, [], {}, [1], ["x"], [None], {"a": None}, [{}], 1e400, 10**30,
                  ["re:("], [-1, 128], [128], [64, 64]]
"""Replacements of a value."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


@pytest.mark.parametrize("seed", MANY)
def test_configs_with_values_of_another_kind_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    """No other exception comes out, from wherever a config is asked."""
    choose, bases = random.Random(seed), [given for given, *_ in (*READ.values(), *FORMULAS.values())]
    refused = 0
    for _ in range(60):
        whole: Any = {"quantization_config": copy.deepcopy(choose.choice(bases))}
        *at, last = choose.choice(list(places(whole))[1:])
        inner = whole
        for key in at:
            inner = inner[key]
        inner[last] = choose.choice(BAD)
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **whole}))
        for ask in (describe, stated):
            try:
                ask(read_config(tmp_path))
            except ModelError as error:
                refused += 1
                assert len(str(error)) > 20
    assert refused > 10


@pytest.mark.parametrize("given", [["fp8"], "fp8", 8, True])
def test_a_config_that_is_no_object_is_refused(given: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": given}))
    with pytest.raises(ModelError, match=r"quantization_config is .*; possible is an object with a quant_method"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "text_config": [1], "quantization_config": {}}))
    assert read_config(tmp_path)["hidden_size"] == 128


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "x"])
def test_scales_of_a_cache_are_numbers_above_zero(value: str, tmp_path: Path) -> None:
    asked = CacheAsked("fp8", (), (("k", "0.1"), ("v", value)))
    with pytest.raises(ConfigError, match="it takes two numbers above 0"):
        requested(dict(LLAMA), tmp_path, asked)


def test_a_strategy_that_the_size_of_groups_says() -> None:
    """compressed-tensors fills in a strategy that is not given."""
    for size, name in ((64, "int4g64"), (-1, "int4row")):
        form = reader(compressed("pack-quantized", num_bits=4, type="int", group_size=size)).form(Q, 128, 128)
        assert form is not None and form.scheme.name == name


def test_heads_that_lists_of_plain_modules_leave_out() -> None:
    """bitsandbytes and Quark quantize a head unless it is listed; transformers lists it where there is no list."""
    for skipped, stays in ((None, True), (["lm_head"], True), (["model.vision_tower"], False), ([], False)):
        read = reader({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": skipped})
        assert (read.form("lm_head", 128, 128) is None) == stays
    assert reader({**FORMULAS["quark-fp8"][0], "exclude": []}).form("lm_head", 128, 128) is not None
    assert reader({**FORMULAS["quark-fp8"][0], "exclude": ["lm_head"]}).form("lm_head", 128, 128) is None


def test_zero_points_of_symmetric_groups_are_zero(tmp_path: Path) -> None:
    written(tmp_path, *FORMULAS["compressed-int8-groups"])
    tensors, at = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.o_proj"
    save_file({**tensors, f"{at}.weight_zero_point": torch.zeros(128, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    greedy(tmp_path, [5], 1)
    save_file({**tensors, f"{at}.weight_zero_point": torch.ones(128, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{at}: .*zero points differ from 0"):
        greedy(tmp_path, [5], 1)


def test_a_plain_matrix_beside_a_quantized_one_is_refused(tmp_path: Path) -> None:
    """One of the two would be left out in silence."""
    written(tmp_path, FORMULAS["compressed-int4"][0], packed_int4)
    tensors, at = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.o_proj"
    save_file({**tensors, f"{at}.scale": torch.ones(128, 2).half()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{at}\.scale is there; int4g64 has no such tensor"):
        open_model(tmp_path)


def small(case: str, folder: Path) -> Path:
    make(next(one for one in CASES if one.name == case), folder)
    return folder


def logits(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    decoder = load(folder, config, dtype=torch.float32, device=CPU, kernels=reference(), max_model_len=128)
    return Runner(decoder, length=128).prompt(0, list(range(3, 20)))


@pytest.mark.parametrize(("case", "rules"), [
    ("gpt-oss-yarn", {"*experts*": "plain"}), ("minimax-odd", {"*block_sparse_moe.gate": "int8_weights"}),
    ("llama-plain", {"lm_head": "int8_weights", "*": "plain"})])
def test_folders_that_are_written_with_exceptions_are_read(case: str, rules: dict[str, str], tmp_path: Path) -> None:
    """Experts that stay plain in one tensor are listed; heads and routers that do not are named."""
    folder = small(case, tmp_path / "plain")
    quantized.write(folder, tmp_path / "out", "int8_weights", rules, "float32")
    expected = logits(folder, configured(folder, "int8_weights", rules))
    assert torch.equal(logits(tmp_path / "out", read_config(tmp_path / "out")), expected)
    if "gpt" not in case:
        assert any(name.endswith(("lm_head.weight", "gate.weight")) for name in matrices(tmp_path / "out", torch.float32))


@pytest.mark.parametrize("case", ["mpt-plain", "chatglm-plain", "exaone3-published", "gpt-neo-plain", "llama-plain"])
def test_first_and_last_layers_of_any_family(case: str, tmp_path: Path) -> None:
    """Whatever families call their layers and the count of them."""
    spec = describe(configured(small(case, tmp_path), "int8_weights", {"first": "plain", "last": "plain"}))
    stored: dict[int, set[str]] = {}
    for one in spec.parameters():
        if one.scheme is not None and one.name.startswith("blocks."):
            stored.setdefault(int(one.name.split(".")[1]), set()).add(one.scheme.name)
    assert stored[0] == stored[max(stored)] == {"plain"} and "int8" in stored[1]


@pytest.mark.parametrize("pattern", ["re:.*linear_attn.*", "*in_proj_qkv", "re:.*self_attn.*", "*.out_proj"])
def test_layers_of_two_kinds_are_asked_for_by_their_own_names(pattern: str, tmp_path: Path) -> None:
    """Qwen3.5: lists of plain modules name `linear_attn.in_proj_qkv` or `self_attn.o_proj`, each in layers that have one."""
    folder = small("qwen3.5-even", tmp_path)
    config = configured(folder, "int8_weights", {pattern: "plain"})
    stored = {one.stem: one.scheme.name for one in describe(config).parameters() if one.scheme is not None}
    linear = {"re:.*linear_attn.*": ("plain", "plain"), "*in_proj_qkv": ("plain", "int8"), "*.out_proj": ("int8", "plain"),
              "re:.*self_attn.*": ("int8", "int8")}[pattern]
    assert (stored["blocks.0.attention.input"], stored["blocks.0.attention.out"]) == linear
    assert stored["blocks.1.attention.o"] == ("plain" if "self_attn" in pattern else "int8")
    assert logits(folder, config).isfinite().all()
