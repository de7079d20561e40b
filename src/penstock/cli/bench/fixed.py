"""The fixed GPU workloads, the two shapes that they run on, and what other engines and the card itself make of them.

Weights and tokens are random and outputs have set lengths, so that nothing but speed differs between engines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_COMMON = {"head_dim": 128, "num_key_value_heads": 8, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False}

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "mlp_bias": False,
        "bos_token_id": 128000, "eos_token_id": 128001},
    "qwen06b": _COMMON | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "bos_token_id": 151643, "eos_token_id": 151645},
}
"""Config files of the shapes of Llama 3.1 8B and Qwen3 0.6B."""

PEER: dict[str, dict[str, float]] = {
    "llama8b": {"decode_b1": 1.254, "decode_b8": 0.7386, "decode_b32": 1.088, "decode_b128": 2.545, "decode_b256": 4.677,
                "prefill_8k": 0.2130, "prefill_16x2k": 0.7579, "offline_mix1000": 28.28, "prefix_64x4k": 0.7735},
    "qwen06b": {"decode_b1": 0.4286, "decode_b8": 0.2525, "decode_b32": 0.3341, "decode_b128": 0.7025, "decode_b256": 1.193,
                "prefill_8k": 0.0342, "prefill_16x2k": 0.0881, "offline_mix1000": 9.968, "prefix_64x4k": 0.5072},
}
"""Seconds of vLLM 0.25.1 on one H200, its defaults, gpu_memory_utilization 0.85, median of 3 (measured 2026-11-21)."""

TARGET: dict[str, dict[str, float]] = {
    "llama8b": {"decode_b1": 1.07, "decode_b8": 0.68, "decode_b32": 1.02, "decode_b128": 2.45, "decode_b256": 4.50,
                "prefill_8k": 0.205, "prefill_16x2k": 0.74, "offline_mix1000": 24.5, "prefix_64x4k": 0.70},
    "qwen06b": {"decode_b1": 0.235, "decode_b8": 0.17, "decode_b32": 0.24, "decode_b128": 0.60, "decode_b256": 1.05,
                "prefill_8k": 0.030, "prefill_16x2k": 0.083, "offline_mix1000": 7.5, "prefix_64x4k": 0.35},
}
"""What Penstock is out to reach on the same card."""

COPY, PRODUCT, ATTENTION = 4247e9, 800e12, 667e12
"""An H200's ceilings as measured: bytes/s of a copy, FLOP/s of a bf16 product, FLOP/s of causal attention by cuDNN."""


@dataclass(frozen=True)
class Ask:
    """One request: random tokens in, and how many come out."""

    prompt: list[int]
    output: int


def workloads(shape: str) -> Iterator[tuple[str, list[Ask]]]:
    """Each workload's name and requests; the same every time, and the same that the peer was measured on."""
    draw = random.Random(0)
    vocab = SHAPES[shape]["vocab_size"]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, vocab - 1000) for _ in range(count)]

    def log_normal(middle: float, spread: float, most: int) -> int:
        return min(most, max(8, int(draw.lognormvariate(middle, spread))))

    yield "decode_b1", [Ask(tokens(128), 256)]
    for batch in (8, 32, 128, 256):
        yield f"decode_b{batch}", [Ask(tokens(512), 128) for _ in range(batch)]
    yield "prefill_8k", [Ask(tokens(8192), 1)]
    yield "prefill_16x2k", [Ask(tokens(2048), 1) for _ in range(16)]
    mix = []
    for _ in range(1000):
        length, output = log_normal(5.8, 1.0, 4096), log_normal(5.2, 0.8, 1024)
        mix.append(Ask(tokens(length), output))
    yield "offline_mix1000", mix
    shared = tokens(4096)
    yield "prefix_64x4k", [Ask(shared + tokens(128), 64) for _ in range(64)]


def floor(shape: str, asks: list[Ask], rows: int) -> float:
    """Seconds that no engine can beat on this card: for all requests together, products at the product's rate, attention at its
    own; and at every step of decoding, all weights and the cache of all running requests at the copy's rate."""
    config = SHAPES[shape]
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = config["num_attention_heads"] * 128, config["num_key_value_heads"] * 128
    per_layer = width * (queries + 2 * keys) + queries * width + 3 * width * inner
    weights = layers * per_layer + config["vocab_size"] * width
    entry = 2 * keys * 2 * layers
    # What all prompts begin with is in the cache from the run before, and read once for all of a step's rows.
    shared = _shared([ask.prompt for ask in asks])
    prefill = sum(2 * layers * per_layer * (len(ask.prompt) - shared) / PRODUCT
                  + 2 * (len(ask.prompt) ** 2 - shared ** 2) * queries * layers / ATTENTION for ask in asks)
    steps = max(max(ask.output for ask in asks) - 1, sum(ask.output - 1 for ask in asks) / rows)
    cache = sum((ask.output - 1) * (len(ask.prompt) - shared + ask.output / 2) * entry for ask in asks) + steps * shared * entry
    reading = (steps * weights * 2 + cache) / COPY
    computing = sum(2 * weights * (ask.output - 1) for ask in asks) / PRODUCT
    return prefill + max(reading, computing)


def _shared(prompts: list[list[int]]) -> int:
    """Tokens that all of several prompts begin with."""
    if len(prompts) == 1:
        return 0
    columns = zip(*prompts, strict=False)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(map(len, prompts)))
