"""The fixed GPU workloads, offline: seconds, beside the floor, the target and the peer; long contexts; traces.

Each shape runs in this process, one after another: `penstock bench gpu` is the record behind every GPU figure in the docs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.bench.fixed import COPY, PEER, SHAPES, TARGET, Ask, floor, workloads
from penstock.config.flags import from_args
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams

LONG = ((32768, 1), (32768, 8), (131000, 1), (131000, 8))
"""(context, batch) of the long-context decodes."""
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of the decode curve."""


def measure_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """All that was asked for; a table goes to the standard error as it grows."""
    unknown = [name for name in args.shape if name not in SHAPES]
    if unknown:
        raise ConfigError(f"shape {unknown[0]!r} is not known; possible are {', '.join(SHAPES)}")
    names = [name for name, _ in workloads("qwen06b")]
    unknown = [name for name in args.workload if name not in names]
    if unknown:
        raise ConfigError(f"workload {unknown[0]!r} is not known; possible are {', '.join(names)}")
    return {"shapes": {name: _Shape(name, args).measure() for name in args.shape}}


class _Shape:
    """One shape's engine and what is measured on it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from penstock.engine.llm import LLM  # brings torch, which `penstock bench --help` must not

        self.name, self.args = name, args
        folder = Path(tempfile.gettempdir()) / "penstock-shapes" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[name]))
        options = asdict(from_args(args, EngineOptions, model=str(folder), skip_tokenizer_init=True))
        # As the peer was run; a longer context only for the measurements that need it.
        options["max_model_len"] = options["max_model_len"] or (None if args.long else 16384)
        start = time.perf_counter()
        self.llm = LLM(**options)
        self.start_seconds = time.perf_counter() - start

    def measure(self) -> dict[str, Any]:
        info = self.llm.info
        result: dict[str, Any] = {"start_seconds": round(self.start_seconds, 2), "kv_tokens": info.kv_tokens,
                                  "memory": {"weights": info.weight_bytes, "step": info.step_bytes, "graphs": info.graph_bytes,
                                             "kv": info.kv_bytes},
                                  "graphs": info.graphs, "kernels": dict(info.kernels), "workloads": {}}
        _say(f"{self.name}: ready in {self.start_seconds:.1f} s, {info.kv_tokens:,} KV tokens, {info.graphs} graphs")
        _say(f"  {'workload':16} {'seconds':>8} {'floor':>8} {'target':>8} {'peer':>8}   of peer")
        for name, asks in workloads(self.name):
            if not self.args.workload or name in self.args.workload:
                result["workloads"][name] = self._workload(name, asks)
        if self.args.curve:
            result["curve"] = [self._decode(512, batch) for batch in CURVE]
        if self.args.long:
            longest = info.max_model_len - 40
            result["long"] = [self._decode(min(context, longest), batch) for context, batch in LONG
                              if min(context, longest) * batch < info.kv_tokens]
        if self.args.profile:
            result["profile"] = self._profile(self.args.profile)
        self.llm.close()
        return result

    def _run(self, asks: list[Ask], fresh: bool = True) -> float:
        prompts: list[Any] = [{"prompt_token_ids": ask.prompt} for ask in asks]
        params = [SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True, detokenize=False) for ask in asks]
        if fresh:
            self.llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == ask.output for output, ask in zip(outputs, asks, strict=True))
        return elapsed

    def _workload(self, name: str, asks: list[Ask]) -> dict[str, Any]:
        """Median seconds: of one run after a short one for the long workload, else of `repeats` after one that warms up."""
        keeps_prefix = name.startswith("prefix")
        if name.startswith("offline"):
            self._run(asks[:32])
            seconds = [self._run(asks)]
        else:
            seconds = [self._run(asks, not keeps_prefix) for _ in range(self.args.repeats + 1)][1:]
        median = statistics.median(seconds)
        least = floor(self.name, asks, self.llm.info.max_num_seqs)
        target, peer = TARGET[self.name][name], PEER[self.name][name]
        mark = "" if median <= target else "  over the target"
        _say(f"  {name:16} {median:8.4f} {least:8.4f} {target:8.3f} {peer:8.4f}   {median / peer:6.3f}{mark}")
        return {"seconds": median, "all": seconds, "floor": least, "target": target, "peer": peer}

    def _decode(self, context: int, batch: int) -> dict[str, Any]:
        """Milliseconds of a decode step at a context length, from two runs of different output lengths."""
        vocab = SHAPES[self.name]["vocab_size"]
        # Equal prompts but for a first token each: what is computed once serves the second run.
        asks = [[Ask([100 + row, *((i * 7919) % (vocab - 1200) + 100 for i in range(context - 1))], output)
                 for row in range(batch)] for output in (2, 34)]
        self._run(asks[0])
        short, long = (min(self._run(each, fresh=False) for _ in range(2)) for each in asks)
        step = (long - short) / 32
        entry = 4 * 128 * SHAPES[self.name]["num_key_value_heads"] * SHAPES[self.name]["num_hidden_layers"]
        moved = self.llm.info.weight_bytes + batch * (context + 17) * entry
        _say(f"  decode at {context:7,} x {batch:3}: {step * 1e3:8.3f} ms, {moved / step / 1e9:6.0f} GB/s, "
             f"{moved / step / COPY:5.1%} of the copy's rate")
        return {"context": context, "batch": batch, "milliseconds": step * 1e3, "bytes": moved, "of_copy": moved / step / COPY}

    def _profile(self, folder: Path) -> dict[str, Any]:
        """Chrome traces of decoding at batch 1 and 32, and the share of time in which the GPU had nothing to do."""
        from penstock.cli.bench.profile import idle_share, traced

        folder.mkdir(parents=True, exist_ok=True)
        found = {}
        for batch in (1, 32):
            asks = [Ask([100 + i, *range(200, 327)], 40) for i in range(batch)]
            self._run(asks)
            trace = folder / f"{self.name}-decode-{batch}.json"
            traced(lambda asks=asks: self._run(asks), trace)
            found[f"decode_b{batch}"] = share = idle_share(trace)
            _say(f"  profile of decoding at batch {batch}: GPU idle {share:.1%} of the time between the first and last kernel")
        return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
