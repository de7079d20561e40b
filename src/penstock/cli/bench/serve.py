"""Drives a server over HTTP and says what its users saw. The keys of the result are those of vLLM's `bench serve`.

TTFT is from sending a request to its first chunk with text or tokens, ITL between such chunks, E2E until the last of them,
TPOT (E2E - TTFT) / (tokens - 1). Output tokens are what the server's usage says."""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from penstock.cli.api import complaint, first_model
from penstock.cli.bench.figures import spread
from penstock.cli.bench.workload import Item, Workload, make_workload, numbers, poisson_arrivals
from penstock.cli.client import Wire
from penstock.config.flags import at_least
from penstock.core.errors import ConfigError, PenstockError

METRICS = ("ttft", "tpot", "itl", "e2el")


def measure_server(args: argparse.Namespace) -> dict[str, Any]:
    percentiles = _percentiles(args.metric_percentiles)
    limits = numbers(",".join(args.goodput), ":", "--goodput takes NAME:MILLISECONDS") if args.goodput else {}
    for name in limits.keys() - METRICS:
        raise ConfigError(f"--goodput knows {', '.join(METRICS)}, not {name!r}")
    text = (args.prompt or ("text" if args.endpoint == "chat" else "ids")) == "text"
    if args.endpoint == "chat" and not text:
        raise ConfigError("chat requests have no token-id prompts; use --prompt text or --endpoint completions")
    at_least(args, 1, "max_concurrency")
    if not isinstance(args.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object")
    workload = make_workload(args, args.vocab_size, text)
    work: Coroutine[Any, Any, dict[str, Any]] = _measure(args, workload, _arrivals(args, workload), percentiles, limits)
    return uvloop.run(work)


def _arrivals(args: argparse.Namespace, workload: Workload) -> list[float]:
    if args.use_trace_arrivals:
        if not args.trace:
            raise ConfigError("--use-trace-arrivals needs a --trace")
        if args.time_scale <= 0:
            raise ConfigError(f"--time-scale must be above 0, got {args.time_scale}")
        return [item.arrival * args.time_scale for item in workload.items]
    return poisson_arrivals(len(workload.items), args.request_rate, args.burstiness, args.seed)


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--metric-percentiles takes numbers with commas between, got {text!r}") from None
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"percentiles are between 0 and 100, got {text!r}")
    return values


# The fields of a chunk that are read; msgspec skips the others without building them.


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_read_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """The measurements of one request; times in time.perf_counter() seconds."""

    sent: float
    input_len: int
    stamps: list[float] = field(default_factory=list)
    """When each chunk with text or tokens arrived."""
    ended: float = 0.0
    """When the chunk with the reason of the end, or a refusal, arrived; 0 if neither did."""
    pieces: list[str] = field(default_factory=list)
    output_len: int = 0
    error: str = ""
    refused: bool = False
    """The server answered with an error's status."""

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.stamps[-1] - self.sent

    @property
    def itl(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.stamps, self.stamps[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """None for an output of one token, which has no time per further token."""
        return (self.e2el - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether it kept within every limit, in milliseconds; for ITL the mean counts."""
        seen = {"ttft": self.ttft, "e2el": self.e2el, "tpot": self.tpot or 0.0,
                "itl": statistics.fmean(self.itl) if self.itl else 0.0}
        return all(seen[name] * 1e3 <= limit for name, limit in limits.items())


class _Load:
    def __init__(self, args: argparse.Namespace, wire: Wire, model: str) -> None:
        self.args, self.wire, self.model = args, wire, model
        self.path = "/v1/chat/completions" if args.endpoint == "chat" else "/v1/completions"
        self.gate: asyncio.Semaphore | nullcontext[None] = (
            asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else nullcontext())

    def body(self, item: Item) -> bytes:
        chat = self.args.endpoint == "chat"
        prompt = {"messages": [{"role": "user", "content": item.prompt}]} if chat else {"prompt": item.prompt}
        eos = {"ignore_eos": True} if self.args.ignore_eos else {}
        return msgspec.json.encode({"model": self.model, **prompt, "max_tokens": item.output_len, "stream": True,
                                    "stream_options": {"include_usage": True}, "temperature": self.args.temperature, **eos,
                                    **self.args.extra_body})

    async def ask(self, item: Item, body: bytes) -> Record:
        """Sends one request when there is room for it and follows its stream. A failure is recorded, never raised."""
        async with self.gate:
            return await self._ask(item, body)

    async def _ask(self, item: Item, body: bytes) -> Record:
        record = Record(time.perf_counter(), item.input_len)
        try:
            reply = await self.wire.send("POST", self.path, body)
            if reply.status != 200:
                record.error, record.refused = complaint(reply.status, await reply.read()), True
                record.ended = time.perf_counter()
                return record
            async for at, data in reply.events():
                if data != b"[DONE]":
                    self._take(record, at, _read_chunk(data))
        except (PenstockError, msgspec.DecodeError) as error:
            record.error = str(error)
        if not record.stamps and not record.error:
            # An answer of one token may have no text at all: end-of-sequence, or the first byte of a character.
            record.stamps = [record.ended] if record.ended else []
            record.error = "" if record.ended else "the answer had neither text nor an end"
        return record

    def _take(self, record: Record, at: float, chunk: _Chunk) -> None:
        if chunk.error is not None:
            record.error = str(chunk.error)
        if chunk.usage is not None:
            record.input_len = chunk.usage.prompt_tokens or record.input_len
            record.output_len = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                record.ended = at
            delta = choice.delta
            piece = choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)) or ""
            # A completion's chunk counts even if its text is empty: its token may end no character yet.
            if piece or choice.token_ids or (choice.text is not None and choice.finish_reason is None):
                record.stamps.append(at)
                if self.args.save_detailed:
                    record.pieces.append(piece)


async def _measure(args: argparse.Namespace, workload: Workload, arrivals: list[float], percentiles: list[float],
                   limits: dict[str, float]) -> dict[str, Any]:
    key = args.api_key or os.environ.get("PENSTOCK_API_KEY") or os.environ.get("OPENAI_API_KEY")
    async with aclosing(Wire(args.url, key)) as wire:
        model = args.model or await first_model(wire)
        load = _Load(args, wire, model)
        bodies = [load.body(item) for item in workload.items]
        for _ in range(args.num_warmups):
            record = await load.ask(workload.items[0], bodies[0])
            if record.error:
                raise PenstockError(f"the first request failed: {record.error}")
        cpu, start = time.process_time(), time.perf_counter()
        records = await _send_all(load, workload.items, bodies, arrivals, args.quiet)
        duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    result = {"date": time.strftime("%Y%m%d-%H%M%S"), "endpoint_type": "openai-chat" if args.endpoint == "chat" else "openai",
              "backend": "openai-chat" if args.endpoint == "chat" else "openai", "label": None, "model_id": model,
              "tokenizer_id": None, "num_prompts": len(records), "seed": args.seed,
              "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
              "burstiness": args.burstiness, "max_concurrency": args.max_concurrency,
              "trace": str(args.trace) if args.trace else None, "trace_arrivals": args.use_trace_arrivals,
              "clipped_inputs": workload.clipped_inputs, "clipped_outputs": workload.clipped_outputs}
    result |= summary(records, start, duration, percentiles, limits)
    result["client_cpu_share"] = round(cpu / duration, 4)
    return result if not args.save_detailed else result | {
        "input_lens": [r.input_len for r in records], "output_lens": [r.output_len for r in records],
        "ttfts": [r.ttft if r.stamps else None for r in records], "itls": [r.itl for r in records],
        "latencies": [r.e2el if r.stamps else None for r in records], "start_times": [r.sent - start for r in records],
        "generated_texts": ["".join(r.pieces) for r in records], "errors": [r.error for r in records]}


async def _send_all(load: _Load, items: list[Item], bodies: list[bytes], arrivals: list[float], quiet: bool) -> list[Record]:
    """Starts each request at its time, whatever became of those before it, and waits for all."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[Record]] = []
    with tqdm(total=len(items), unit="request", disable=quiet, file=sys.stderr) as bar:
        done: Callable[[Any], Any] = lambda _: bar.update()  # noqa: E731
        for item, body, arrival in zip(items, bodies, arrivals, strict=True):
            delay = start + arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            task = asyncio.create_task(load.ask(item, body))
            task.add_done_callback(done)
            tasks.append(task)
        return await asyncio.gather(*tasks)


def summary(records: list[Record], start: float, duration: float, percentiles: list[float], limits: dict[str, float]
            ) -> dict[str, Any]:
    """The figures over all requests. Failed ones count as failed and in nothing else."""
    good = [record for record in records if not record.error]
    for record in good:
        record.output_len = record.output_len or len(record.stamps)
    n_in, n_out = sum(r.input_len for r in good), sum(r.output_len for r in good)
    result: dict[str, Any] = {
        "duration": duration, "completed": len(good), "failed": len(records) - len(good),
        "total_input_tokens": n_in, "total_output_tokens": n_out, "request_throughput": len(good) / duration,
        "request_goodput": sum(r.meets(limits) for r in good) / duration if limits else None,
        "output_throughput": n_out / duration, "total_token_throughput": (n_in + n_out) / duration,
        "max_output_tokens_per_s": _busiest_second(good, start), "max_concurrent_requests": _most_at_once(good),
        "first_error": next((r.error for r in records if r.error), None)}
    values = {"ttft": [r.ttft for r in good], "tpot": [t for r in good if (t := r.tpot) is not None],
              "itl": [gap for r in good for gap in r.itl], "e2el": [r.e2el for r in good]}
    refusals = [r.ended - r.sent for r in records if r.refused]
    for name, seconds in (values | ({"refusal": refusals} if refusals else {})).items():
        result |= spread(name, [value * 1e3 for value in seconds], percentiles)
    return result


def rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    names = {"ttft": "time to first token", "tpot": "time per further token", "itl": "time between tokens",
             "e2el": "whole answer"}
    ranks = sorted({float(key[1:-8]) for key in result if key.startswith("p") and key.endswith("_ttft_ms")})
    found = [("requests answered", result["completed"]), ("requests failed", result["failed"]), ("seconds", result["duration"]),
             ("tokens in", result["total_input_tokens"]), ("tokens out", result["total_output_tokens"]),
             ("requests/s", result["request_throughput"]), ("output tokens/s", result["output_throughput"]),
             ("requests at once, at most", result["max_concurrent_requests"])]
    if result["request_goodput"] is not None:
        found.append(("requests/s within the limits", result["request_goodput"]))
    for name, words in names.items():
        found.append((f"{words}, mean, ms", result[f"mean_{name}_ms"]))
        found += [(f"{words}, p{rank:g}, ms", result[f"p{rank:g}_{name}_ms"]) for rank in ranks]
    if "mean_refusal_ms" in result:
        found += [(f"refusal, p{rank:g}, ms", result[f"p{rank:g}_refusal_ms"]) for rank in ranks]
    return found + ([("first error", result["first_error"])] if result["first_error"] else [])


def _busiest_second(records: list[Record], start: float) -> float:
    """Output tokens in the busiest whole second of the run; a chunk's share of its request's tokens counts when it arrived."""
    buckets: dict[int, float] = defaultdict(float)
    for record in records:
        weight = record.output_len / len(record.stamps)
        for stamp in record.stamps:
            buckets[int(stamp - start)] += weight
    return max(buckets.values(), default=0.0)


def _most_at_once(records: list[Record]) -> int:
    """The most requests that were in flight at one moment."""
    edges = sorted([(r.sent, 1) for r in records] + [(r.stamps[-1], -1) for r in records])
    return max(accumulate(change for _, change in edges), default=0)
