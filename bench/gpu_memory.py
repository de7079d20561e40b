"""Memory on a GPU: what an engine predicts at start against what the driver says is gone, and loads of random lengths.

Any way of running out of memory, or of losing tokens, raises.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fixed import SHAPES, write
from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.engine.llm import LLM

_GIB = 1 << 30
_LLAMA: dict[str, Any] = SHAPES["llama8b"] | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "tie_word_embeddings": True}
_GEMMA: dict[str, Any] = _LLAMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "vocab_size": 256000,
    "layer_types": ["sliding_attention", "full_attention"] * 4}
CONFIGURATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (_LLAMA, {}), (_LLAMA, {"max_num_seqs": 32}), (_LLAMA, {"max_num_batched_tokens": 2048, "max_num_seqs": 64}),
    (_LLAMA, {"max_model_len": 2048}), (_LLAMA, {"dtype": "float16", "block_size": 32}), (_LLAMA, {"enforce_eager": True}),
    (_LLAMA, {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 16384}), (_LLAMA, {"batch_invariant": True}),
    (_GEMMA, {}), (_GEMMA, {"max_num_seqs": 16, "enforce_eager": True}), (_GEMMA, {"max_model_len": 1024}),
]
"""(config.json, options): windows and none, heads of 64 and 256, large and small steps."""
_FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 20}, {"logprobs": 5},
    {"repetition_penalty": 1.1, "presence_penalty": 0.3}, {"prompt_logprobs": 1})
_BURST = 1 << 17
"""Tokens, prompts and outputs together, that a burst of the soak has at most."""


def free() -> int:
    """Bytes that the driver has left on the GPU."""
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def table(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every configuration's prediction and measurement."""
    found = []
    for number, (config, options) in enumerate(CONFIGURATIONS):
        found.append(entry := predicted(config, options, number))
        say(f"memory {entry['model']} {options}: predicted {entry['predicted'] / _GIB:.3f} GiB, measured "
            f"{entry['measured'] / _GIB:.3f} GiB, {entry['error']:+.2%}")
    return found


def predicted(config: dict[str, Any], options: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Weights, working memory, graphs and cache as an engine counts them, against the most that is gone from the GPU: after the
    start, and after many short requests, a few of the longest, and some between."""
    before, rng = free(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        given = {"gpu_memory_utilization": 0.3, "load_format": "dummy", "skip_tokenizer_init": True, **options}
        with LLM(str(write(config, Path(folder) / "model")), **given) as llm:
            info, least = llm.info, free()
            for count, longest in ((300, 200), (3, info.max_model_len - 40), (40, info.max_model_len // 2)):
                _answer(llm, [(rng.randint(1, longest), rng.randint(1, 20)) for _ in range(count)], [{"temperature": 0.0}], rng)
                least = min(least, free())
    total = info.weight_bytes + info.step_bytes + info.graph_bytes + info.kv_bytes
    return {"model": config["model_type"], "options": options, "predicted": total, "measured": before - least,
            "error": (before - least) / total - 1}


def soaked(seconds: float, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A soak of the 8B shape at the defaults."""
    with (tempfile.TemporaryDirectory() as folder,
          LLM(str(write(SHAPES["llama8b"], Path(folder) / "model")), load_format="dummy", skip_tokenizer_init=True) as llm):
        found = soak(llm, seconds, seed)
    say("soak: " + ", ".join(f"{value:,.0f} {name}" for name, value in found.items()))
    return found


def soak(llm: LLM, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Bursts of requests of random lengths and features until the time is over: what came through.

    ConfigError if a request does not get the tokens that it asked for, or if pages are still held at rest; running out of
    memory raises by itself.
    """
    rng, began = random.Random(seed), time.monotonic()
    done = {"bursts": 0, "requests": 0, "prompt_tokens": 0, "output_tokens": 0}
    longest = llm.info.max_model_len
    while time.monotonic() - began < seconds:
        lengths: list[tuple[int, int]] = []
        most = rng.randint(1, 2 * llm.info.max_num_seqs)
        while len(lengths) < most and sum(map(sum, lengths)) < _BURST:
            prompt = int(math.exp(rng.uniform(0, math.log(longest - 1))))
            lengths.append((prompt, rng.randint(1, min(256, longest - prompt))))
        _answer(llm, lengths, _FEATURES, rng)
        held = llm.stats().pages_used
        if held:
            raise ConfigError(f"{held} pages are held after all requests have ended")
        for name, count in zip(done, (1, len(lengths), sum(p for p, _ in lengths), sum(o for _, o in lengths)), strict=True):
            done[name] += count
    return done | {"preemptions": llm.stats().preemptions, "seconds": time.monotonic() - began}


def _answer(llm: LLM, lengths: list[tuple[int, int]], features: Any, rng: random.Random) -> None:
    """Requests of (prompt, output) tokens, all at once, each with one of the features."""
    last = llm.info.vocab_size - 1
    prompts: list[Any] = [{"prompt_token_ids": [rng.randint(min(3, last), last) for _ in range(length)]}
                          for length, _ in lengths]
    params = [SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, seed=i, **rng.choice(features))
              for i, (_, output) in enumerate(lengths)]
    for (prompt, output), answer in zip(lengths, llm.generate(prompts, params, use_tqdm=False), strict=True):
        found = answer.outputs[0]
        if len(found.token_ids) != output or found.finish_reason != "length":
            raise ConfigError(f"a request of {prompt} + {output} tokens got {len(found.token_ids)} and ended by "
                              f"{found.finish_reason} ({found.error})")
