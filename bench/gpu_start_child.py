"""The process that bench/gpu_starts.py times: an engine, a first token, then whatever might still want to be compiled.

usage: python bench/gpu_start_child.py MODEL MAX_MODEL_LEN, which prints a line of JSON; times are time.time()
"""

from __future__ import annotations

import time

MARKS = {"python": time.time()}

import json  # noqa: E402  (the first mark comes before everything that takes time)
import sys  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402, F401

MARKS["torch"] = time.time()

from penstock import models  # noqa: E402
from penstock.core.sampling import SamplingParams  # noqa: E402
from penstock.engine.llm import LLM  # noqa: E402
from penstock.ops import compile as compiling  # noqa: E402
from penstock.worker import rank  # noqa: E402

_STAGES = ((rank, "compilation", "kernels known"), (models, "load", "weights"),
           (compiling.Compilation, "finish", "kernels compiled"), (compiling.Compilation, "load", "kernels loaded"),
           (rank.Rank, "_working", "memory planned"), (rank, "Worker", "graphs captured"))
_LENGTHS = ([1], [2, 3], [17] * 5, [100] * 33, [300, 1, 4000], [9000], [1000] * 9, [16000, 5], [64] * 300)
_FEATURES: tuple[dict[str, Any], ...] = (
    {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1, "top_k": 3}, {"presence_penalty": 1.0}, {"logprobs": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "logprobs": 0}, {"logit_bias": {3: 5.0}}, {"prompt_logprobs": 2},
    {"allowed_token_ids": [5, 6, 7]}, {"min_tokens": 2, "stop_token_ids": [9]})


def marked(owner: Any, name: str, mark: str) -> None:
    """Notes when a function of the engine's start returns."""
    call = getattr(owner, name)

    def timed(*args: Any, **more: Any) -> Any:
        try:
            return call(*args, **more)
        finally:
            MARKS[mark] = time.time()

    setattr(owner, name, timed)


def main() -> None:
    model, max_model_len = sys.argv[1], int(sys.argv[2])
    for stage in _STAGES:
        marked(*stage)
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, max_model_len=max_model_len)
    MARKS["ready"] = time.time()
    ready = compiling.tally.compiled, compiling.tally.loaded

    def run(lengths: list[int], **params: Any) -> None:
        asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False} | params)
        kept = [min(length, max_model_len - 4) for length in lengths]
        llm.generate([{"prompt_token_ids": [7 + length % 90] * length} for length in kept], asked, use_tqdm=False)

    run([16], max_tokens=1)
    MARKS["first token"] = time.time()
    for lengths in _LENGTHS:
        run(lengths)
        run(lengths, temperature=1.0, seed=1)
    for params in _FEATURES:
        for lengths in ([5], [100, 3], [30] * 40):
            run(lengths, temperature=1.0, seed=2, **params)
    print(json.dumps({"marks": MARKS, "at_ready": ready, "after": [compiling.tally.compiled, compiling.tally.loaded],
                      "names": compiling.tally.names}))


if __name__ == "__main__":
    main()
