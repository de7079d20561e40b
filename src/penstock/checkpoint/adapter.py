"""Adapter folders as PEFT writes them: adapter_config.json, checked, and the digest of their contents."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError
from penstock.core.files import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_REFUSED: dict[str, tuple[Any, ...]] = {"bias": ("none", None), "lora_bias": (False, None)}
"""Keys whose other values change the arithmetic in ways that are not supported."""


@dataclass(frozen=True)
class AdapterConfig:
    """The parts of adapter_config.json that say what the matrices mean."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    scaled: bool
    """Whether its modules have magnitudes (DoRA)."""
    saved: tuple[str, ...]
    """Modules that it holds whole (`modules_to_save`), by the ends of their names."""
    invocation: tuple[int, ...] = ()
    """Tokens from whose last occurrence in a prompt on it computes (aLoRA, Greenewald et al. 2025); empty: from the first."""

    def scale(self, module: str) -> tuple[int, float]:
        """The rank of a module's matrices, and their product's factor: alpha / rank, or alpha / sqrt(rank) (rsLoRA, 2023)."""
        rank = int(_of(self.rank_pattern, module, self.rank))
        alpha = float(_of(self.alpha_pattern, module, self.alpha))
        return rank, alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _of(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that the module's name ends with, as PEFT matches them."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def read_adapter(folder: Path) -> AdapterConfig:
    """ModelError if the folder holds no LoRA adapter, or one that uses what is not supported, which it names."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; an adapter is a folder that PEFT wrote (save_pretrained)")
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{folder / CONFIG}: peft_type is {kind!r}; possible is LORA")
    for key, possible in _REFUSED.items():
        if config.get(key) not in possible:
            raise ModelError(f"{folder / CONFIG}: {key} is {config[key]!r}, which is not supported; merge the adapter into the "
                             "model (PEFT's merge_and_unload), or train it without")
    if not (folder / WEIGHTS).is_file():
        others = ", ".join(sorted(path.name for path in folder.glob("adapter_model.*")))
        raise ModelError(f"{folder} has no {WEIGHTS}" + (f" (it has {others}; pickle files are never read)" if others else "")
                         + "; save the adapter with safe_serialization=True")
    for key in ("r", "lora_alpha"):
        if not isinstance(value := config.get(key), int | float) or isinstance(value, bool) or not value > 0:
            raise ModelError(f"{folder / CONFIG}: {key} is {value!r}; it must be a number above 0")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(one, str) for one in saved):
        raise ModelError(f"{folder / CONFIG}: modules_to_save is {saved!r}; it must be a list of modules' names")
    patterns = {key: config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    for key, value in patterns.items():
        if not isinstance(value, dict) or not all(isinstance(one, int | float) and one > 0 for one in value.values()):
            raise ModelError(f"{folder / CONFIG}: {key} must map names of modules to numbers above 0")
    invocation = config.get("alora_invocation_tokens") or []
    if not isinstance(invocation, list) or not all(type(one) is int and one >= 0 for one in invocation):
        raise ModelError(f"{folder / CONFIG}: alora_invocation_tokens is {invocation!r}; it must be a list of token ids")
    return AdapterConfig(int(config["r"]), float(config["lora_alpha"]), patterns["rank_pattern"], patterns["alpha_pattern"],
                         bool(config.get("use_rslora")), bool(config.get("use_dora")), tuple(saved), tuple(invocation))


def digest(folder: Path, weights: bytes) -> str:
    """Names an adapter's contents: equal for folders that compute the same. `weights`: the SHA-256 of the file of weights."""
    return hashlib.sha256(hashlib.sha256((folder / CONFIG).read_bytes()).digest() + weights).hexdigest()[:32]
