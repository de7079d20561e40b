"""Measures the engine in this process, without HTTP: seconds for one batch, tokens per second over many requests.

The keys of the results are those of vLLM's `bench latency` and `bench throughput`, and with them what the engine itself
counted: steps, and the time of a step that is not spent in kernels."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.api import model_or_canary
from penstock.cli.bench.figures import percentile
from penstock.cli.bench.workload import Item, make_workload
from penstock.config.flags import at_least, from_args
from penstock.config.schema import EngineOptions
from penstock.config.speculation import speculation
from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.platform.profile import traced

PERCENTILES = (10, 25, 50, 75, 90, 99)


def measure_latency(args: argparse.Namespace) -> dict[str, Any]:
    """One batch of equal requests, again and again."""
    at_least(args, 1, "batch_size", "input_len", "output_len", "num_iters")
    run = _Run(args)
    seconds = _batches(run, args)
    mean = statistics.fmean(seconds)
    report = run.report()
    run.profile(args.profile, "latency", _batch(run, args, args.num_iters_warmup + args.num_iters))
    report |= _beside_off(run, args, mean, lambda off: statistics.fmean(_batches(off, args)))
    return {"batch_size": args.batch_size, "input_len": args.input_len, "output_len": args.output_len, "avg_latency": mean,
            "latencies": seconds, "percentiles": {str(p): percentile(seconds, p) for p in PERCENTILES},
            "output_tokens_per_second": args.batch_size * args.output_len / mean, **report}


def _batches(run: "_Run", args: argparse.Namespace) -> list[float]:
    seconds: list[float] = []
    for turn in range(args.num_iters_warmup + args.num_iters):
        if turn == args.num_iters_warmup:
            run.begin()
        elapsed = run.generate(_batch(run, args, turn))
        if turn >= args.num_iters_warmup:
            seconds.append(elapsed)
    return seconds


def _batch(run: "_Run", args: argparse.Namespace, turn: int) -> list[Item]:
    """New prompts each time: a cache of prefixes must not answer for the engine."""
    shape = argparse.Namespace(num_prompts=args.batch_size, random_input_len=args.input_len, random_output_len=args.output_len,
                               random_range_ratio=0.0, random_prefix_len=0, trace=None, length_scale=1.0, max_input_len=None,
                               max_output_len=None, seed=args.seed + turn)
    return make_workload(shape, run.vocab_size).items


def measure_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Many requests at once, as many in flight as the engine takes."""
    run = _Run(args)
    workload = make_workload(args, run.vocab_size)

    def measured(run: _Run) -> float:
        run.generate([Item(0.0, [3, 4, 5], 3, 4)])  # the first step pays for pages and threads that the others find ready
        run.begin()
        return run.generate(workload.items)

    elapsed = measured(run)
    report = run.report()
    run.profile(args.profile, "throughput", workload.items)
    report |= _beside_off(run, args, elapsed, measured)
    n_in, n_out = sum(item.input_len for item in workload.items), sum(item.output_len for item in workload.items)
    return {"elapsed_time": elapsed, "num_requests": len(workload.items), "total_num_tokens": n_in + n_out,
            "requests_per_second": len(workload.items) / elapsed, "tokens_per_second": (n_in + n_out) / elapsed,
            "total_input_tokens": n_in, "total_output_tokens": n_out, "output_tokens_per_second": n_out / elapsed,
            "clipped_inputs": workload.clipped_inputs, "clipped_outputs": workload.clipped_outputs, **report}


def latency_rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("batch size", result["batch_size"]), ("tokens in, out", f"{result['input_len']}, {result['output_len']}"),
            ("latency of a batch, mean, s", result["avg_latency"]),
            *((f"latency of a batch, p{p}, s", result["percentiles"][str(p)]) for p in (50, 90, 99)),
            ("output tokens/s", result["output_tokens_per_second"]), *_engine_rows(result)]


def throughput_rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("requests", result["num_requests"]), ("seconds", result["elapsed_time"]),
            ("tokens in", result["total_input_tokens"]), ("tokens out", result["total_output_tokens"]),
            ("requests/s", result["requests_per_second"]), ("tokens/s, in and out", result["tokens_per_second"]),
            ("output tokens/s", result["output_tokens_per_second"]), *_engine_rows(result)]


def _engine_rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    engine = result["engine"]
    return [("steps", engine["steps"]), ("preemptions", engine["preemptions"]),
            ("a step, ms", engine["plan_ms_per_step"] + engine["worker_ms_per_step"]),
            ("of it not in kernels, ms", engine["overhead_ms_per_step"]), *_speculation_rows(result)]


def _speculation_rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    found = result.get("speculation")
    return [] if found is None else [("tokens per verification", found["acceptance_length"]),
                                     ("drafted tokens kept", found["acceptance_rate"]),
                                     ("speed-up against no drafts", found["speedup"])]


def _beside_off(run: "_Run", args: argparse.Namespace, seconds: float, measured: "Callable[[_Run], float]") -> dict[str, Any]:
    """The gain by drafts: the same requests without any, after `run`'s engine is closed. Nothing if `run` drafted nothing."""
    if speculation(run.options) is None:
        return {}
    before, after = run.before, msgspec.structs.replace(run.llm.stats())
    drafts, drafted, accepted = (getattr(after, name) - getattr(before, name)
                                 for name in ("drafts", "drafted_tokens", "accepted_tokens"))
    run.llm.close()
    off = _Run(args, speculate="off", speculative_model=None, speculative_config={})
    plain = measured(off)
    off.llm.close()
    return {"speculation": {"drafts": drafts, "drafted_tokens": drafted, "accepted_tokens": accepted,
                            "acceptance_rate": accepted / max(1, drafted), "acceptance_length": 1 + accepted / max(1, drafts),
                            "seconds_off": plain, "speedup": plain / seconds}}


def seconds_for(llm: Any, requests: Sequence[tuple[Any, int]]) -> float:
    """Seconds until all of (token ids, tokens of output), asked at once, are answered in full; ConfigError if one is not."""
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False) for _, output in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    for output, (prompt, length) in zip(outputs, requests, strict=True):
        answer = output.outputs[0]
        if len(answer.token_ids) != length:
            raise ConfigError(f"a request of {len(prompt)} + {length} tokens ended after {len(answer.token_ids)} "
                              f"({answer.finish_reason}), so its time would mean nothing; the context is "
                              f"{llm.info.max_model_len} tokens")
    return elapsed


class _Run:
    """A loaded model and what its engine counts between `begin` and `report`."""

    def __init__(self, args: argparse.Namespace, **changed: Any) -> None:
        """`changed`: options that are not as the arguments say."""
        from penstock.engine.llm import LLM  # brings torch, which `penstock bench --help` must not

        self.options = from_args(args, EngineOptions, model=model_or_canary(args), skip_tokenizer_init=True, **changed)
        start = time.perf_counter()
        self.llm = LLM(**asdict(self.options))
        self.load_seconds = time.perf_counter() - start
        self.vocab_size = self.llm.info.vocab_size
        self.begin()

    def begin(self) -> None:
        """Starts the measurement: `report` covers everything from here on."""
        self.before = msgspec.structs.replace(self.llm.stats())  # a copy: the engine goes on counting in its own

    def generate(self, items: list[Item]) -> float:
        """Seconds until all are answered in full length."""
        return seconds_for(self.llm, [(item.prompt, item.output_len) for item in items])

    def profile(self, folder: Path | None, name: str, items: list[Item]) -> None:
        """Writes a Chrome trace of answering these, if there is a folder for it."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.llm.reset_prefix_cache()
            traced(lambda: self.generate(items), folder / f"{name}.json")

    def report(self) -> dict[str, Any]:
        """Facts about the engine, and its counters since `begin`; milliseconds per step."""
        before, after = self.before, self.llm.stats()
        steps = max(1, after.steps - before.steps)
        worker, kernels = after.worker_seconds - before.worker_seconds, after.kernel_seconds - before.kernel_seconds
        plan = after.plan_seconds - before.plan_seconds
        return {"load_seconds": self.load_seconds,
                "engine": {"steps": after.steps - before.steps, "preemptions": after.preemptions - before.preemptions,
                           "plan_ms_per_step": plan / steps * 1e3, "worker_ms_per_step": worker / steps * 1e3,
                           "kernel_ms_per_step": kernels / steps * 1e3,
                           "overhead_ms_per_step": (plan + worker - kernels) / steps * 1e3},
                "engine_info": msgspec.to_builtins(self.llm.info)}
