"""llama.cpp's side of bench/cpu_peer.py, by llama-cpp-python: python cpu_peer_llama.py FILE.gguf [THREADS].

Prompts of 128 tokens for 1, 4, 8 and 16 sequences, then decode steps of all together, as the other side does them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import llama_cpp as lc

PROMPT = 128
STEPS = {1: 48, 4: 24, 8: 24, 16: 12}


def main() -> None:
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    lc.llama_log_set(_quiet, None)
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(sys.argv[1].encode(), lc.llama_model_default_params())
    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16 * 256, 2048, 512, 16
    params.n_threads = params.n_threads_batch = threads
    context = lc.llama_init_from_model(model, params)
    for batch, steps in STEPS.items():
        lc.llama_memory_clear(lc.llama_get_memory(context), True)
        begin = time.perf_counter()
        _run(context, [(300 + (i * 131 + p * 7) % 30000, p, i, p == PROMPT - 1) for i in range(batch) for p in range(PROMPT)])
        prefill = batch * PROMPT / (time.perf_counter() - begin)
        times = []
        for step in range(steps):
            begin = time.perf_counter()
            _run(context, [(400 + i, PROMPT + step, i, True) for i in range(batch)])
            times.append(time.perf_counter() - begin)
        median = statistics.median(times)
        print(json.dumps({"batch": batch, "prefill_tok_s": round(prefill, 1), "step_ms": round(median * 1e3, 1),
                          "decode_tok_s": round(batch / median, 1)}), flush=True)


def _run(context: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
    """Computes (token, position, sequence, whether its logits are wanted)."""
    for first in range(0, len(tokens), 2048):
        some = tokens[first:first + 2048]
        batch = lc.llama_batch_init(len(some), 0, 1)
        batch.n_tokens = len(some)
        for at, (token, position, sequence, wanted) in enumerate(some):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, position, 1, int(wanted)
            batch.seq_id[at][0] = sequence
        if lc.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        lc.llama_get_logits(context)
        lc.llama_batch_free(batch)


@lc.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: Any) -> None:
    pass


if __name__ == "__main__":
    main()
