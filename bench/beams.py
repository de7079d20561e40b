"""The cost of beam search beside drawing as many sequences, and beside transformers: time, and positions computed a round.

usage: beams.py [--model canary] [--tokens 48] [--threads 1] [--output bench/results/beams.jsonl]

Beams are requests of one token that find their beginnings in the prefix cache. If that works, a round of `width` beams computes
`width` positions whatever the prompt's length, and costs a decode step of as many sequences and some planning.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.checkpoint import resolve_folder
from penstock.cli.bench.environment import environment

TEXT = "Lily liked to play in the park. Tom had a red ball, and the dog ran after it. "


def once(llm: LLM, ids: list[int], params: SamplingParams) -> dict[str, float]:
    """Time and work of one request whose prompt is cached."""
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    stats = llm.stats()
    before = {name: getattr(stats, name) for name in ("steps", "plan_seconds", "worker_seconds")}
    start = time.perf_counter()
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    seconds, stats = time.perf_counter() - start, llm.stats()
    steps = stats.steps - before["steps"]
    return {"seconds": round(seconds, 4), "steps": steps, "step_ms": round(1e3 * seconds / steps, 3),
            "plan_ms": round(1e3 * (stats.plan_seconds - before["plan_seconds"]) / steps, 3),
            "worker_ms": round(1e3 * (stats.worker_seconds - before["worker_seconds"]) / steps, 3)}


def theirs(model: Any, ids: list[int], width: int, tokens: int) -> float:
    """Seconds that transformers takes, prompt included."""
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), num_beams=width,
                       max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="canary")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "beams.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    peer = AutoModelForCausalLM.from_pretrained(resolve_folder(args.model, None), dtype=torch.float32).eval()
    lines = []
    with LLM(args.model, dtype="float32", max_num_seqs=16, threads=args.threads) as llm:
        source = llm.get_tokenizer().encode(TEXT * 200)
        for length in (100, 1000):
            for width in (4, 8):
                ids = source[:length]
                beams = once(llm, ids, SamplingParams(temperature=0, beam_width=width, n=width, max_tokens=args.tokens,
                                                      ignore_eos=True))
                drawn = once(llm, ids, SamplingParams(n=width, max_tokens=args.tokens, ignore_eos=True, seed=1))
                line = {"prompt": length, "width": width, "beams": beams, "drawn": drawn,
                        "over_drawn": round(beams["seconds"] / drawn["seconds"], 3),
                        "transformers_seconds": round(theirs(peer, ids, width, args.tokens), 3)}
                print(json.dumps(line))
                lines.append(line)
    with args.output.open("a") as file:
        file.write(json.dumps({"environment": environment(), "model": args.model, "tokens": args.tokens,
                               "threads": args.threads, "beams": lines}) + "\n")


if __name__ == "__main__":
    main()
