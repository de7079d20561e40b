"""The fixed GPU workloads, the shapes that they run on, and what other engines and the card itself make of them.

Weights and tokens are random and outputs have set lengths, so that nothing but speed differs between engines.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    "qwen14b": _COMMON | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 48, "num_attention_heads": 40, "vocab_size": 152064, "max_position_embeddings": 131072,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "bos_token_id": 151643, "eos_token_id": 151645},
    "qwen30b_a3b": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "bos_token_id": 151643, "eos_token_id": 151645},
    "dsv2lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 102400, "max_position_embeddings": 163840, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "bos_token_id": 100000, "eos_token_id": 100001,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}},
}
SHAPES["llama70b"] = SHAPES["llama8b"] | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
SHAPES["llama8b-fp8"] = SHAPES["llama8b"] | {"quantization_config": {
    "quant_method": "fp8", "activation_scheme": "dynamic"}}
SHAPES["llama8b-awq"] = SHAPES["llama8b"] | {"quantization_config": {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}}
"""Config files of the shapes of Llama 3.1 8B (in bf16, FP8 and INT4; the floors of all are bf16's) and 70B, Qwen3 0.6B, Qwen2.5
14B (for long prompts only), Qwen3 30B-A3B and DeepSeek V2 Lite."""

PEER: dict[str, dict[str, float]] = {
    "llama8b": {"decode_b1": 1.254, "decode_b8": 0.7386, "decode_b32": 1.088, "decode_b128": 2.545, "decode_b256": 4.677,
                "prefill_8k": 0.2130, "prefill_16x2k": 0.7579, "offline_mix1000": 28.28, "prefix_64x4k": 0.7735},
    "qwen06b": {"decode_b1": 0.4286, "decode_b8": 0.2525, "decode_b32": 0.3341, "decode_b128": 0.7025, "decode_b256": 1.193,
                "prefill_8k": 0.0342, "prefill_16x2k": 0.0881, "offline_mix1000": 9.968, "prefix_64x4k": 0.5072},
    "qwen30b_a3b": {"decode_b1": 1.076, "decode_b8": 1.255, "decode_b32": 2.293, "decode_b128": 3.412, "decode_b256": 4.747,
                    "prefill_8k": 0.1537, "prefill_16x2k": 0.477, "offline_mix1000": 35.6},
    "dsv2lite": {"decode_b1": 0.891, "decode_b8": 0.662, "decode_b32": 0.810, "decode_b128": 1.441, "decode_b256": 2.423,
                 "prefill_8k": 0.1015, "prefill_16x2k": 0.380},
    "llama8b-fp8": {"decode_b1": 0.896, "decode_b8": 0.533, "decode_b32": 0.870, "decode_b128": 1.853, "decode_b256": 3.351,
                    "prefill_8k": 0.1437, "prefill_16x2k": 0.4865, "offline_mix1000": 22.2},
    "llama8b-awq": {"decode_b1": 1.021, "decode_b8": 0.617, "decode_b32": 0.974, "decode_b128": 2.414, "decode_b256": 4.333,
                    "prefill_8k": 0.1937, "prefill_16x2k": 0.682},
}
"""Seconds of vLLM 0.25.1 on one H200, its defaults, gpu_memory_utilization 0.85, median of 3 (measured 2026-11-21)."""

TARGET: dict[str, dict[str, float]] = {
    "llama8b": {"decode_b1": 1.07, "decode_b8": 0.68, "decode_b32": 1.02, "decode_b128": 2.45, "decode_b256": 4.50,
                "prefill_8k": 0.205, "prefill_16x2k": 0.74, "offline_mix1000": 24.5, "prefix_64x4k": 0.70},
    "qwen06b": {"decode_b1": 0.235, "decode_b8": 0.17, "decode_b32": 0.24, "decode_b128": 0.60, "decode_b256": 1.05,
                "prefill_8k": 0.030, "prefill_16x2k": 0.083, "offline_mix1000": 7.5, "prefix_64x4k": 0.35},
    "qwen30b_a3b": {"decode_b1": 0.62, "decode_b8": 0.95, "decode_b32": 1.85, "decode_b128": 2.4, "decode_b256": 3.2,
                    "prefill_8k": 0.11, "prefill_16x2k": 0.37, "offline_mix1000": 22.0},
    "dsv2lite": {"decode_b1": 0.42, "decode_b8": 0.36, "decode_b32": 0.55, "decode_b128": 1.1, "decode_b256": 1.9,
                 "prefill_8k": 0.07, "prefill_16x2k": 0.25},
    "llama8b-fp8": {"decode_b1": 0.60, "decode_b8": 0.40, "decode_b32": 0.70, "decode_b128": 1.60, "decode_b256": 2.95,
                    "prefill_8k": 0.130, "prefill_16x2k": 0.44, "offline_mix1000": 17.5},
    "llama8b-awq": {"decode_b1": 0.46, "decode_b8": 0.36, "decode_b32": 0.80, "decode_b128": 2.2, "decode_b256": 4.1,
                    "prefill_8k": 0.19, "prefill_16x2k": 0.66, "offline_mix1000": 23},
}
"""Targets of Penstock on the same card."""



class Long(NamedTuple):
    """A long prompt, or decode steps behind long contexts."""

    context: int
    batch: int
    target: float
    peer: float
    """vLLM 0.25.1 with FlashAttention 3 on one H200, as of 2026-11-22."""


LONG_PROMPTS: dict[str, tuple[Long, ...]] = {
    "llama8b": (Long(32768, 1, 1.05, 1.200), Long(122880, 1, 7.9, 8.93)),
    "qwen14b": (Long(32768, 1, 2.0, 2.23),),
}
"""Seconds from the request to the first token."""

LONG_STEPS: dict[str, tuple[Long, ...]] = {"llama8b": (Long(32768, 8, 12.6, 13.48), Long(32768, 1, 5.98, 5.98))}
"""Milliseconds of a decode step. For one sequence the peer is the target."""


class Answers(NamedTuple):
    """A server's figures under a closed loop; times in milliseconds. None: not asked for."""

    tokens_per_second: float | None = None
    ttft_p50: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None


LOAD = (512, 128)
"""Tokens in and out of every request over HTTP."""

HTTP_PEER: dict[str, dict[int, Answers]] = {
    "llama8b": {1: Answers(199.6, 17.78, 4.91, 5.86), 32: Answers(3647.7, 340.23, 5.81, 13.68),
                256: Answers(6786.7, 792.49, 13.97, 201.55)},
    "qwen06b": {1: Answers(583.0, 10.71, 1.6, 3.07), 32: Answers(11224.5, 79.96, 2.11, 7.32),
                256: Answers(19632.3, 294.14, 9.09, 28.44)},
}
"""vLLM 0.25.1's server on the same card and day, by requests at once."""

HTTP_TARGET: dict[str, dict[int, Answers]] = {
    "llama8b": {1: Answers(ttft_p50=15.0, itl_p50=4.2), 32: Answers(4000, itl_p99=10.0), 256: Answers(7400, itl_p99=60.0)},
    "qwen06b": {1: Answers(1050), 32: Answers(16000), 256: Answers(27000)},
}

READY_PEER = {"llama8b": 80.6, "qwen06b": 78.5}
READY_TARGET = 12.0
"""Seconds from exec until the server is ready, its kernels in the cache."""

FIRST_TOKEN_TARGET = {"empty": 20.0, "filled": 10.0}
"""Seconds from exec to the first token of an offline engine with random weights, by what is in the kernel cache."""

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


class Sizes(NamedTuple):
    """The numbers of a shape that its floors depend on."""

    layers: int
    layer: int
    """Weights of a layer that a token takes; of a mixture, with its picked experts."""
    weights: int
    """All that a step of one token reads: the layers' and the head's."""
    queries: int
    """Width of all query heads."""
    entry: int
    """Bytes of a position in the cache, in bf16."""
    experts: int = 0
    picks: int = 0
    expert: int = 0
    """Weights of one expert, in all layers."""

    def read(self, rows: float) -> float:
        """Weights that a step of so many tokens reads, if routers send them anywhere alike."""
        if not self.experts:
            return self.weights
        picked: float = self.experts * (1 - (1 - self.picks / self.experts) ** rows)
        return self.weights + (picked - self.picks) * self.expert


def sizes(config: dict[str, Any]) -> Sizes:
    """Of a llama-like config.json, with latent attention or not, with experts or not."""
    width, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rank, rope, nope, value = (config[name] for name in names)
        queries, entry = heads * (nope + rope), 2 * (rank + rope)
        attention = width * (queries + rank + rope) + rank * heads * (nope + value) + heads * value * width
    else:
        queries, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        attention, entry = width * (queries + 2 * keys) + queries * width, 2 * keys * 2
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    picks, dense = config.get("num_experts_per_tok", 0), config.get("first_k_dense_replace", 0)
    inner = 3 * width * config.get("moe_intermediate_size", 0)
    mixed = (layers - dense) * (inner * (picks + config.get("n_shared_experts", 0)) + width * experts) if experts else 0
    plain = (dense if experts else layers) * 3 * width * config["intermediate_size"]
    layer = attention + (mixed + plain) // layers
    return Sizes(layers, layer, layers * layer + config["vocab_size"] * width, queries, entry * layers, experts, picks,
                 inner * (layers - dense))


def floor(shape: str, asks: list[Ask], rows: int) -> float:
    """Seconds that no engine can beat on this card: for all requests together, products at the product's rate, attention at its
    own; and at every step of decoding, all weights and the cache of all running requests at the copy's rate."""
    size = sizes(SHAPES[shape])
    # The common beginning of all prompts is in the cache from the run before, and read once for all of a step's rows.
    shared = _shared([ask.prompt for ask in asks])
    prefill = sum(2 * size.layers * size.layer * (len(ask.prompt) - shared) / PRODUCT
                  + 2 * (len(ask.prompt) ** 2 - shared ** 2) * size.queries * size.layers / ATTENTION for ask in asks)
    steps = max(max(ask.output for ask in asks) - 1, sum(ask.output - 1 for ask in asks) / rows)
    cache = sum((ask.output - 1) * (len(ask.prompt) - shared + ask.output / 2) for ask in asks) + steps * shared
    reading = (steps * size.read(min(rows, len(asks))) * 2 + cache * size.entry) / COPY
    computing = sum(2 * size.weights * (ask.output - 1) for ask in asks) / PRODUCT
    return prefill + max(reading, computing)


def step_bytes(shape: str, batch: int, context: int) -> float:
    """Bytes that a step of `batch` rows with so many positions each must read: weights and cache."""
    size = sizes(SHAPES[shape])
    return size.read(batch) * 2 + batch * context * size.entry


def step_floor(shape: str, batch: int, context: int) -> float:
    """Seconds that no decode step can beat on this card, as in `floor`."""
    return max(step_bytes(shape, batch, context) / COPY, 2 * sizes(SHAPES[shape]).weights * batch / PRODUCT)


def write(config: dict[str, Any], folder: Path) -> Path:
    """A model folder of a shape: config.json alone, for load_format dummy and skip_tokenizer_init."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _shared(prompts: list[list[int]]) -> int:
    """Tokens that all of several prompts begin with."""
    if len(prompts) == 1:
        return 0
    columns = zip(*prompts, strict=False)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(map(len, prompts)))


@contextmanager
def as_peer() -> Iterator[None]:
    """Random weights that are loaded in this context are as vLLM's dummy ones are at work, for times beside vLLM's.

    vLLM draws floats from +-0.001 and leaves integers as they are, which is zero: codes of 4 bits and their scales are zero
    here, and cards multiply zeros faster (788 and 894 TFLOP/s of an H200 in bfloat16). A router's logits of 1e-5 are all the
    same probability in bfloat16, so that each token's picks are the same experts."""
    import torch

    from penstock.models import weights
    from penstock.ops.coded_forms import CodedWeight

    keep = weights._keep

    def zeroed(values: Any, parameter: Any, placed: Any, away: Any) -> None:
        if isinstance(placed, CodedWeight) and placed.four:
            for part in (placed.data.view(torch.int32), placed.words):
                if part is not None:
                    part.zero_()
        elif ".router" in parameter.name:
            placed.data.zero_()
        keep(values, parameter, placed, away)

    weights._keep = zeroed
    try:
        yield
    finally:
        weights._keep = keep
