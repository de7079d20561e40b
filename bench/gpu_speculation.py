"""Speculative decoding on one GPU with an imposed acceptance: tokens a second beside those without drafts.

usage: python bench/gpu_speculation.py [--shape llama8b] [--batches 1,8,32,128,256] [--output FILE.json]

The weights are random, so no draft would ever be right. The verifier is told instead to keep each draft with a given
probability, a function of (row, position); everything else runs as it does in service: the draft model (one layer of the shape,
as wide as an EAGLE head), its cache, verification, overlap and graphs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fixed import SHAPES, write
from penstock.cli.bench.offline import seconds_for
from penstock.core.plan import StepPlan
from penstock.engine.llm import LLM
from penstock.scheduler.drafting import Adaptive, DraftPolicy
from penstock.worker.sampler import LogitsRows
from penstock.worker.verify import Verified, Verifier

PROMPT, OUTPUT = 64, 256


class Imposed:
    """Keeps drafts by chance, whatever they are."""

    def __init__(self, verifier: Verifier, probability: float) -> None:
        self._verify = verifier.verify
        self.probability = probability

    def __call__(self, plan: StepPlan, rows: LogitsRows, drafts: torch.Tensor, chosen: torch.Tensor) -> Verified:
        noise = (rows.position.long() * 7919 + rows.row.long() * 104729) % 1009
        return self._verify(plan, rows, torch.where(noise < 1009 * self.probability, chosen, -1), chosen)


def expected(probability: float, drafts: int) -> float:
    """Tokens a step."""
    return sum(probability ** place for place in range(drafts + 1))


def seconds(llm: LLM, batch: int) -> float:
    asks = [(np.random.default_rng(i).integers(10, 1000, PROMPT).tolist(), OUTPUT) for i in range(batch)]
    found = []
    for _ in range(3):
        llm.reset_prefix_cache()
        found.append(seconds_for(llm, asks))
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batches.split(",")]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write(SHAPES[args.shape], folder / args.shape)
        draft = write({**SHAPES[args.shape], "num_hidden_layers": 1}, folder / "draft")
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": max(batches)}
        with LLM(str(target), **options) as llm:
            plain = {batch: seconds(llm, batch) for batch in batches}
        with LLM(str(target), speculative_model=str(draft), num_speculative_tokens=args.drafts, **options) as llm:
            verifier = llm.engine.rank.worker.verifier  # type: ignore[attr-defined]
            verifier.verify = imposed = Imposed(verifier, 0.0)
            for probability in (0.8, 0.6, 0.0):
                imposed.probability = probability
                for kind in ("fixed", "adaptive") if probability else ("adaptive",):
                    scheduler = llm.engine.scheduler
                    policy = Adaptive(args.drafts, scheduler.times) if kind == "adaptive" else DraftPolicy(args.drafts)
                    scheduler.drafts.policy = policy
                    for batch in batches:
                        before = llm.engine.stats().drafted_tokens
                        took = seconds(llm, batch)
                        lines.append({"acceptance": probability, "policy": kind, "batch": batch,
                                      "plain_s": round(plain[batch], 4), "s": round(took, 4),
                                      "speedup": round(plain[batch] / took, 3),
                                      "bound": round(expected(probability, args.drafts), 2),
                                      "drafted": llm.engine.stats().drafted_tokens - before})
                        print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
