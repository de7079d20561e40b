"""Not a dialect of checkpoints: a plain checkpoint that is quantized while it is loaded, as `--quantization` asks.

`requested` puts the request where a quantized checkpoint has its own `quantization_config`, so that all else follows."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import ConfigError
from penstock.quant.form import FLOATS, Form, Given, Reader, named, outside_linears
from penstock.quant.fp8 import FP8
from penstock.quant.gguf import ENCODERS, GGUF
from penstock.quant.integer import Grouped, Int8
from penstock.quant.microscaling import MXFP4, MXFP8, NVFP4
from penstock.quant.normal import Table4
from penstock.quant.scheme import Scheme

PLAIN = "plain"


def _blocks(*schemes: Scheme) -> Callable[[int], Scheme | None]:
    """The first scheme whose blocks fill rows of k columns: short last ones are what other programs do not read."""
    return lambda k: next((scheme for scheme in schemes if k % scheme.grain[1] == 0), None)


def _grouped(bits: int, zeros: str = "") -> Callable[[int], Scheme | None]:
    return _blocks(*(Grouped(bits, group, zeros) for group in (128, 64, 32)))


_ENDS = re.compile(r"(output|.*\boutput_layer|.*\brouter\.(layer|proj)|.*\bgate\.wg)")
"""Heads and routers by names that only some families have. Other programs quantize a few of these."""
_SMALLER = {"q4_k": "q5_0", "q6_k": "q8_0"}
"""llama.cpp's own choice for rows that superblocks of 256 do not fill."""
SCHEMES: dict[str, Callable[[int], Scheme | None]] = {
    "fp8": lambda _: FP8("token"), "fp8_block": lambda _: FP8("group", (128, 128)), "fp8_weights": lambda _: FP8(),
    "int8": lambda _: Int8("token"), "int8_weights": lambda _: Int8(), "int4": _grouped(4), "int4_zeros": _grouped(4, "uint8"),
    "int3": _grouped(3), "int2": _grouped(2, "uint8"), "mxfp4": _blocks(MXFP4()), "mxfp8": _blocks(MXFP8()),
    "nvfp4": _blocks(NVFP4(divides=True)), "nf4": _blocks(Table4("nf4")), "fp4": _blocks(Table4("fp4")),
    **{kind: _blocks(GGUF(kind), GGUF(_SMALLER.get(kind, kind))) for kind in ENCODERS}}
"""By the names of the option: the scheme for rows of k columns, or None where it has no whole blocks of them."""
_LAYERS = "num_hidden_layers", "num_layers", "n_layers", "n_layer"


def requested(config: dict[str, Any], scheme: str | None, rules: Mapping[str, str]) -> dict[str, Any]:
    """A model's config with what the options ask for. ConfigError for an unknown scheme, or a model quantized otherwise."""
    given = config.get("quantization_config")
    if scheme is None:
        if rules:
            raise ConfigError("quantization_rules are given without quantization; name a scheme, or leave them out")
        return config
    if given:
        method = given.get("quant_method")
        if str(scheme).replace("_", "-") == str(method).replace("_", "-"):
            return config
        raise ConfigError(f"quantization is {scheme!r}, but the model is quantized already, by {method!r}. Leave the option "
                          "out, or take the model's unquantized folder")
    for name in (scheme, *rules.values()):
        if name not in SCHEMES and name != PLAIN:
            raise ConfigError(f"quantization: {name!r} is not known; possible are {', '.join(SCHEMES)}, and {PLAIN} in rules")
    return {**config, "quantization_config": {"quant_method": AtLoad.methods[0], "scheme": scheme, "rules": dict(rules),
                                              "layers": next(filter(None, map(config.get, _LAYERS)), 0)}}


class AtLoad(Reader):
    methods = ("at-load",)
    suffixes = ("weight",)
    bare = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._scheme: str = config["scheme"]
        self._rules: Mapping[str, str] = config["rules"]
        self._layers = int(config["layers"])
        self._asked: list[str] = []

    def form(self, module: str, n: int, k: int) -> Form | None:
        self._asked.append(module)
        usual = PLAIN if outside_linears(module) or _ENDS.fullmatch(module) else self._scheme
        name = next((name for pattern, name in self._rules.items() if self._fits(module, pattern)), usual)
        scheme = None if name == PLAIN else SCHEMES[name](k)
        if scheme is None:
            return None
        return Form(scheme, (Given("weight", FLOATS, ((n, k),)),), lambda raw: scheme.encode(raw["weight"].float()), plain=True)

    def check(self, *, stored: bool) -> None:
        """ConfigError: a rule fits none of the modules that `form` was asked for, or no matrix is `stored` but as plain."""
        if unused := [pattern for pattern in self._rules if not any(self._fits(module, pattern) for module in self._asked)]:
            names = sorted({re.sub(r"(?<=[.])[0-9]+(?=[.]|$)", "*", module) for module in self._asked})
            raise ConfigError(f"quantization rules: {', '.join(map(repr, unused))} fits no matrix of this model; possible are "
                              f"{', '.join(names)}, parts of these names, first and last")
        if not stored:
            raise ConfigError(f"no matrix of this model is stored as {self._scheme}: its blocks do not fill rows, or rules "
                              "leave all plain, or transformers' modules run it")

    def _fits(self, module: str, pattern: str) -> bool:
        if pattern in ("first", "last"):
            layer = re.search(r"\b(?:layers|h|blocks)\.([0-9]+)\.", module)
            return layer is not None and int(layer[1]) == (0 if pattern == "first" else self._layers - 1)
        return named(module, [pattern])
