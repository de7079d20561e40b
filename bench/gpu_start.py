"""From exec to the first token on a GPU, with an empty kernel cache and a filled one; and what is compiled after.

usage: gpu_start.py [--shapes qwen06b,llama8b] [--json FILE]

Weights are random. Each start is a process of its own. After the first token it goes through lengths, batches and every
sampling feature, and counts the kernels that were compiled, or taken from the cache on disk, after the engine was ready.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.cli.bench.environment import environment
from penstock.cli.bench.fixed import SHAPES

CHILD = """
import json, sys, time
marks = {"python": time.time()}
import torch
marks["torch"] = time.time()
from penstock import LLM, SamplingParams
from penstock.ops import compile
from penstock.worker import worker
from penstock.engine import engine
from penstock import models

def marked(module, name, mark):
    call = getattr(module, name)
    def timed(*args, **more):
        marks["before " + mark] = time.time()
        try:
            return call(*args, **more)
        finally:
            marks[mark] = time.time()
    setattr(module, name, timed)

marked(engine, "_compile", "rehearsal")
marked(engine.models, "load", "weights")
marked(engine.Compilation, "finish", "kernels")
marked(engine, "_plan_memory", "memory")
marked(engine, "Worker", "worker")
llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=16384)
marks["ready"] = time.time()
ready = compile.count(), compile.loads()
names = compile.compiled()

def run(lengths, **params):
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False} | params)
    llm.generate([{"prompt_token_ids": [7 + n % 90] * n} for n in lengths], asked, use_tqdm=False)

run([16], max_tokens=1)
marks["first token"] = time.time()
first = compile.count(), compile.loads()
for lengths in ([1], [2, 3], [17] * 5, [100] * 33, [300, 1, 4000], [9000], [1000] * 9, [16000, 5], [64] * 300):
    run(lengths)
    run(lengths, temperature=1.0, seed=1)
for params in (dict(top_k=5), dict(top_p=0.5), dict(min_p=0.1, top_k=3), dict(presence_penalty=1.0), dict(logprobs=3),
               dict(repetition_penalty=1.2, frequency_penalty=0.1, logprobs=0), dict(logit_bias={3: 5.0}),
               dict(prompt_logprobs=2), dict(allowed_token_ids=[5, 6, 7]), dict(min_tokens=2, stop_token_ids=[9])):
    for lengths in ([5], [100, 3], [30] * 40):
        run(lengths, temperature=1.0, seed=2, **params)
print(json.dumps({"marks": marks, "at_ready": ready, "at_first": first, "after": [compile.count(), compile.loads()],
                  "names": compile.compiled()}))
"""


def start(folder: Path, cache: Path) -> dict[str, Any]:
    began = time.time()
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True,
                          env=os.environ | {"TRITON_CACHE_DIR": str(cache)})
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["marks"] = {name: round(at - began, 2) for name, at in found["marks"].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen06b,llama8b")
    parser.add_argument("--json", default=str(Path(os.environ["OUT"]) / "gpu_start.json") if "OUT" in os.environ else "")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(), "starts": []}
    for name in arguments.shapes.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[name]))
            for kind in ("empty", "filled"):
                found = start(Path(scratch), Path(scratch) / "cache")
                record["starts"].append({"shape": name, "cache": kind, **found})
                print(f"{name} {kind} cache:", ", ".join(f"{mark} {at}" for mark, at in found["marks"].items()))
                print(f"  compiled, loaded: at ready {found['at_ready']}, at first token {found['at_first']}, after a sweep "
                      f"{found['after']} {found['names']}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
