"""Writes a plain model's folder as one quantized GGUF file, tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint import gguf_writing, read_config
from penstock.core.errors import ConfigError
from penstock.layers.mlp import MLPSpec
from penstock.models.quantized import plain
from penstock.models.registry import describe, rules_of
from penstock.models.rules import matched
from penstock.models.weights import Progress
from penstock.quant.gguf import GGUF

_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def write(folder: Path, out: Path, scheme: str, rules: Mapping[str, str], dtype: str, progress: Progress = lambda *_: None,
          begin: Callable[[], None] = lambda: None) -> int:
    """Returns the file's bytes. Matrices that stay plain keep their type, vectors are float32. ConfigError: why not. `begin`
    is called when nothing is left to refuse, before anything is written."""
    if scheme == "q4_k_m":
        scheme, rules = "q4_k", {**rules, **_more_bits(read_config(folder))}
    given, checkpoint = plain(folder, scheme, rules, dtype)
    prefix, arch = gguf_writing.architecture(given)
    schemes = {f"{name}.weight": form.scheme for name, form in checkpoint.modules().items()}
    if (other := next((scheme.name for scheme in schemes.values() if not isinstance(scheme, GGUF)), None)) is not None:
        raise ConfigError(f"GGUF has no {other}; possible are q8_0, q6_k, q5_1, q5_0, q4_1, q4_0, q4_k and q4_k_m")
    given = _whole(given, prefix)
    metadata = gguf_writing.metadata_of(folder, given, scheme)
    heads = {"q_proj": given["num_attention_heads"], "k_proj": given["num_key_value_heads"]}
    raw = {name: stored for name, stored in checkpoint.raw.items()
           if not (name == "lm_head.weight" and given.get("tie_word_embeddings"))}
    table = gguf_writing.divisors(given)
    listed: list[tuple[str, tuple[int, ...], str]] = [] if table is None else [("rope_freqs.weight", (len(table),), "f32")]
    with checkpoint.mapped():
        for name, stored in raw.items():
            matrix = schemes.get(name)
            kind = matrix.name if isinstance(matrix, GGUF) else _PLAIN[checkpoint.view(stored).dtype]
            parameter = matched(rules_of(given), name)[1]
            listed.append((gguf_writing.name_of(arch, name, parameter), stored.shape, kind if len(stored.shape) > 1 else "f32"))

        def data() -> Iterator[memoryview]:
            if table is not None:
                yield _bytes(torch.tensor(table))
            for name, stored in raw.items():
                tensor = _arranged(checkpoint.view(stored), name, heads if arch.permuted else {})
                if name in schemes:
                    tensor = schemes[name].encode(tensor.float())["weight"]
                yield _bytes(tensor.float() if tensor.dim() == 1 else tensor)
                checkpoint.release(stored)

        begin()
        return gguf_writing.write(out, metadata, listed, data(), progress)


def _whole(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A config with values that it may leave out. ConfigError: it says what files of its architecture cannot say."""
    spec = describe(config)
    one = spec.attentions[0]
    assert one.rope is not None
    for name, value, possible in (
            ("sliding_window", max(each.window for each in spec.attentions), 0),
            ("hidden_act", next(each.activation for each in spec.blocks[0].mixers if isinstance(each, MLPSpec)), "silu"),
            ("partial_rotary_factor", one.rope.dim / one.head_size, 1)):
        if value != possible:
            raise ConfigError(f"GGUF files of {prefix} cannot say {name} {value!r}; possible is {possible}. Write a folder")
    return {"rms_norm_eps": getattr(spec.norm, "eps", 0), "max_position_embeddings": spec.max_positions, **config,
            "num_key_value_heads": one.kv_heads, "head_dim": one.head_size, "rope_theta": one.rope.theta}


def _more_bits(config: Mapping[str, Any]) -> dict[str, str]:
    """Rules of llama.cpp's medium mixture: Q6_K for the head, and for values and second products of the first and last eighth
    of the layers and of every third between them."""
    count = int(config["num_hidden_layers"])
    layers = [i for i in range(count) if i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2]
    found = {f"layers.{i}.{part}": "q6_k" for i in layers for part in ("self_attn.v_proj", "mlp.down_proj")}
    return found | {"embed_tokens" if config.get("tie_word_embeddings") else "lm_head": "q6_k"}


def _arranged(tensor: torch.Tensor, name: str, heads: Mapping[str, Any]) -> torch.Tensor:
    """Rows (head, half, pair) of queries and keys as llama.cpp rotates them: (head, pair, half)."""
    part = name.rsplit(".", 2)[-2]
    if part not in heads:
        return tensor
    return tensor.reshape(int(heads[part]), 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).view(-1).numpy().data
