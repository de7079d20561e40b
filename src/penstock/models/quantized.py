"""Writes a plain model's folder quantized: module by module, in shards, with everything else of the folder beside them."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.checkpoint.tensors import INDEX, SINGLE
from penstock.core.errors import ConfigError
from penstock.layers.spec import ModelSpec
from penstock.models.registry import checkpoint_of, configured, describe, family_of
from penstock.models.rules import usual
from penstock.models.translated import Translated
from penstock.models.weights import Progress
from penstock.quant.dialects import compressed_tensors
from penstock.quant.integer import gptq, serves
from penstock.quant.scheme import Scheme

# Scales of a projection's inputs that make its matrix (AWQ) or its activations (SmoothQuant) easier to round. Products stay as
# they were: columns are multiplied by what the preceding norm or matrix is divided by.

_STEPS = 20
"""Exponents from 0 up to below 1 that AWQ tries."""
_LEAST = 1e-4


def awq(scheme: Scheme, matrices: Sequence[torch.Tensor], moments: torch.Tensor) -> torch.Tensor:
    """Scales [k] for matrices [n, k] of the same inputs, whose second moments are [k, k]: powers of the inputs' root mean
    square (Lin et al. 2023 take the mean magnitude), with the exponent whose rounded matrices change the products least."""
    size = moments.diagonal().double().clamp_min(0).sqrt().clamp_min(_LEAST)
    best, least = torch.ones_like(size), float("inf")
    for step in range(_STEPS):
        scale = size ** (step / _STEPS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).float()
        off = [scheme.decode(scheme.encode(matrix * scale), torch.float32) / scale - matrix for matrix in matrices]
        error = sum(float(((one @ moments) * one).sum()) for one in off)
        if error < least:
            best, least = scale.double(), error
    return best.float()


def smooth(matrices: Sequence[torch.Tensor], peaks: torch.Tensor) -> torch.Tensor:
    """Scales [k] by the inputs' largest magnitudes [k] (Xiao et al. 2022): the roots of peaks / largest weights."""
    weights = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
    return (peaks.clamp_min(_LEAST) ** 0.5 / weights.clamp_min(_LEAST) ** 0.5).clamp_min(_LEAST)


_FOLDED = (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
           ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")), ("mlp.up_proj", ("mlp.down_proj",)))
"""Matrices of the same inputs, and the norm or matrix before them that takes the reciprocals of their scales."""
_FOLDING = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Families of which that is true."""


def plain(folder: Path, scheme: str, rules: Mapping[str, str], dtype: str) -> tuple[dict[str, Any], Translated]:
    """A plain model's config with what is asked of its weights, and its checkpoint. ConfigError: none can be stored so."""
    given = configured(folder, scheme, rules)
    if given["quantization_config"].get("quant_method") != "at-load":
        raise ConfigError(f"{folder} is quantized already; take the model's unquantized folder")
    checkpoint = checkpoint_of(folder, given, describe(given), dtype)
    assert isinstance(checkpoint, Translated)
    return given, checkpoint


def write(folder: Path, out: Path, scheme: str, rules: Mapping[str, str], dtype: str, progress: Progress = lambda *_: None,
          begin: Callable[[], None] = lambda: None, moments: Any = None, method: str = "gptq") -> int:
    """Writes compressed-tensors, calibrated if `moments` (`worker/calibration.py`) are given; returns all bytes. ConfigError
    or ModelError: why not. `begin` is called when nothing is left to refuse, before anything is written."""
    given, checkpoint = plain(folder, scheme, rules, dtype)
    modules = checkpoint.modules()
    schemes = {name: compressed_tensors.writable(form.scheme, dtype) for name, form in modules.items()}
    if unusual := [name for name in modules if checkpoint.rearranged(name)]:
        raise ConfigError(f"{unusual[0]} is not stored as a matrix [outputs, inputs], which compressed-tensors needs; quantize "
                          "this model while it is loaded, with --quantization")
    paths = projections(describe({name: value for name, value in given.items() if name != "quantization_config"}), given)
    begin()
    out.mkdir(parents=True, exist_ok=True)
    files = _Files(out)
    with checkpoint.mapped():
        done, raw = 0, checkpoint.raw
        columns, rows = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        if moments is not None and method != "gptq":
            columns, rows = _scaled(checkpoint, given, schemes, paths, moments, method)
        total = sum(stored.nbytes for stored in raw.values())
        for name, stored in raw.items():
            module = name.removesuffix(".weight")
            tensor = checkpoint.view(stored)
            if name in columns or name in rows:
                by = rows.get(name, torch.ones(1))
                scaled = tensor.float() * columns.get(name, 1.0) / (by[:, None] if tensor.dim() == 2 else by)
                tensor = scaled.to(tensor.dtype)
            if module in schemes:
                known = None
                if moments is not None and method == "gptq" and serves(schemes[module]):
                    known = moments.of(paths[module])
                parts = schemes[module].encode(tensor.float()) if known is None else gptq(
                    schemes[module], tensor.float().to(known.device), known)
                parts = {name: part.cpu() for name, part in parts.items()}
                found = compressed_tensors.tensors(schemes[module], parts, getattr(torch, dtype), tensor.shape[-1])
                files.add({f"{module}.{suffix}": part for suffix, part in found.items()})
            else:
                files.add({name: tensor.clone()})
            del tensor
            checkpoint.release(stored)
            done += stored.nbytes
            progress(done, total)
    files.close()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = compressed_tensors.config(schemes, sorted(set(checkpoint.linears) - schemes.keys()))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in folder.iterdir():
        if path.suffix in (".json", ".model", ".jinja", ".txt") and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, out / path.name)
    return files.nbytes


def _scaled(checkpoint: Translated, config: Mapping[str, Any], schemes: Mapping[str, Scheme], paths: Mapping[str, str],
            moments: Any, method: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """By names of tensors: what their columns are multiplied by, and what their rows (or elements) are divided by."""
    if (family := (config.get("architectures") or [None])[0]) not in _FOLDING:
        raise ConfigError(f"scales cannot be folded into the norms of {family}; possible are {', '.join(_FOLDING)}, "
                          "or --method gptq")
    raw, columns, rows = checkpoint.raw, dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    layers = {stem.split(".self_attn.")[0] for stem in schemes if ".self_attn." in stem}
    for layer in sorted(layers, key=lambda stem: int(stem.rpartition(".")[2])):
        for before, names in _FOLDED:
            mine = [f"{layer}.{name}" for name in names]
            if any(name not in schemes for name in mine):
                continue
            matrices = [checkpoint.view(raw[f"{name}.weight"]).float() for name in mine]
            known = moments.of(paths[mine[0]]) if method == "awq" else moments.peaks(paths[mine[0]])
            assert known is not None, mine
            known = known.cpu()
            scale = awq(schemes[mine[0]], matrices, known) if method == "awq" else smooth(matrices, known)
            columns |= {f"{name}.weight": scale for name in mine}
            given = [f"{layer}.{before}.{suffix}" for suffix in ("weight", "bias")]
            rows |= {name: scale for name in given if name in raw}
    return columns, rows


def projections(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, str]:
    """The paths of the projections that modules of a checkpoint are part of."""
    rules, found = family_of(config)[1].RULES, dict[str, str]()
    for parameter in spec.parameters():
        for one in (parameter.name, *(piece.name for piece in parameter.pieces)):
            if parameter.scheme is not None and (name := usual(rules, one)) is not None:
                found[name.removesuffix(".weight")] = parameter.stem
    return found


class _Files:
    def __init__(self, out: Path) -> None:
        self._out = out
        self._waiting: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self.nbytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._waiting |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= 4 << 30:  # a file's bytes
            self._flush()

    def _flush(self) -> None:
        save_file(self._waiting, self._out / f"part-{len(self._shards)}.safetensors", {"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting = {}

    def close(self) -> None:
        """Writes the rest, and names the files as an index or a single file wants them."""
        if self._waiting:
            self._flush()
        count = len(self._shards)
        if count == 1:
            (self._out / "part-0.safetensors").rename(self._out / SINGLE)
            return
        places: dict[str, Any] = {}
        for at, names in enumerate(self._shards):
            target = f"model-{at + 1:05}-of-{count:05}.safetensors"
            (self._out / f"part-{at}.safetensors").rename(self._out / target)
            places |= dict.fromkeys(names, target)
        (self._out / INDEX).write_text(json.dumps({"metadata": {"total_size": self.nbytes}, "weight_map": places}))
