"""Workloads: prompts and output lengths, random or from recorded traces, and when each request arrives.

Everything is a function of the seed. The trace formats are those of the Azure LLM inference traces (TIMESTAMP,
ContextTokens, GeneratedTokens), Vidur's length files (num_prefill_tokens, num_decode_tokens) and Mooncake's (timestamp in
ms, input_length, output_length, hash_ids: one id for each 512 tokens, equal ids being equal tokens)."""

import argparse
import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.flags import at_least
from penstock.core.errors import ConfigError

FIRST_ID = 3
"""Lower token ids are unknown, begin and end of text in most vocabularies."""

BLOCK = 512
"""Tokens that one of the hashes of a Mooncake trace stands for."""

WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work number night point home water room mother area money
    story fact month lot right study book eye job word business issue side kind head house service friend father power
    hour game line end member law car city name team minute idea body back parent face level door reason morning
    moment air
""".split()  # noqa: SIM905


class Lengths(NamedTuple):
    """One request of a workload before it has a prompt. `arrival` in seconds from the first one's; blocks as in Mooncake."""

    arrival: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    tier: str = ""
    tenant: str = ""
    deadline: float = 0.0
    """Seconds after the arrival; 0: none."""


@dataclass(frozen=True)
class Item:
    """One request. `prompt` is token ids, or words of which each is roughly a token."""

    arrival: float
    prompt: list[int] | str
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Workload:
    """Requests in the order of arrival, and how many lengths the caps changed."""

    items: list[Item]
    clipped_inputs: int = 0
    clipped_outputs: int = 0


def make_workload(args: argparse.Namespace, vocab_size: int, text: bool = False) -> Workload:
    """The workload that the flags of `_add_workload` describe. Raises ConfigError for one that makes no sense."""
    _check(args, vocab_size)
    source = _scaled(read_trace(args.trace), args) if args.trace else _random_lengths(args)
    chosen = [lengths for lengths, _ in zip(source, range(args.num_prompts), strict=False)]
    if len(chosen) < args.num_prompts:
        raise ConfigError(f"{args.trace} has {len(chosen)} requests, fewer than --num-prompts {args.num_prompts}")
    items, clipped = [], [0, 0]
    for index, lengths in enumerate(chosen):
        n_in, n_out = lengths.input_len, lengths.output_len
        if args.max_input_len and n_in > args.max_input_len:
            n_in, clipped[0] = args.max_input_len, clipped[0] + 1
        if args.max_output_len and n_out > args.max_output_len:
            n_out, clipped[1] = args.max_output_len, clipped[1] + 1
        ids = list(_prompt(args, index, n_in, lengths.blocks, len(WORDS) if text else vocab_size, 0 if text else FIRST_ID))
        prompt = " ".join(WORDS[i] for i in ids) if text else ids
        items.append(Item(lengths.arrival - chosen[0].arrival, prompt, n_in, n_out))
    return Workload(items, *clipped)


def _check(args: argparse.Namespace, vocab_size: int) -> None:
    at_least(args, 1, "num_prompts", "random_input_len", "random_output_len", "max_input_len", "max_output_len")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio}")
    if args.length_scale <= 0:
        raise ConfigError(f"--length-scale must be above 0, got {args.length_scale}")
    if vocab_size <= FIRST_ID:
        raise ConfigError(f"--vocab-size must be above {FIRST_ID}, got {vocab_size}")


def _random_lengths(args: argparse.Namespace) -> Iterator[Lengths]:
    dice = random.Random(args.seed)

    def around(mean: int) -> int:
        low, high = round(mean * (1 - args.random_range_ratio)), round(mean * (1 + args.random_range_ratio))
        return max(1, dice.randint(low, high))

    while True:
        yield Lengths(0.0, around(args.random_input_len), around(args.random_output_len))


def _scaled(source: Iterator[Lengths], args: argparse.Namespace) -> Iterator[Lengths]:
    for item in source:
        yield item._replace(input_len=max(1, round(item.input_len * args.length_scale)),
                            output_len=max(1, round(item.output_len * args.length_scale)))


def _prompt(args: argparse.Namespace, index: int, length: int, blocks: tuple[int, ...], vocab: int,
            first: int) -> Iterator[int]:
    """Token ids: the shared prefix or the trace's blocks, then tokens of this request's own."""
    block, shared = max(1, round(BLOCK * args.length_scale)), min(args.random_prefix_len, length)
    runs = [(f"prefix {args.seed}", shared), (f"{args.seed} {index}", length - shared)] if not blocks else [
        (f"block {args.seed} {blocks[min(at // block, len(blocks) - 1)]}", min(block, length - at))
        for at in range(0, length, block)]
    for seed, count in runs:
        dice = random.Random(seed)
        for _ in range(count):
            yield dice.randrange(first, vocab)


def read_trace(path: Path) -> Iterator[Lengths]:
    """The requests of a trace file. Raises ConfigError for a file of none of the known formats."""
    try:
        with path.open() as file:
            start = file.read(1)
            file.seek(0)
            rows: Iterator[dict[str, Any]] = map(json.loads, file) if start == "{" else csv.DictReader(file)
            for number, row in enumerate(rows):
                yield _trace_row(row, float(number))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a trace that is known (Azure or Vidur CSV, Mooncake JSONL): {error!r}") from None


def numbers(text: str, sign: str, usage: str) -> dict[str, float]:
    """Names and their numbers, of which commas separate pairs, and the sign the two. ConfigError, with the `usage`."""
    try:
        return {name: float(value) for name, _, value in (part.partition(sign) for part in text.split(","))}
    except ValueError:
        raise ConfigError(f"{usage}, got {text!r}") from None


def _trace_row(row: dict[str, Any], number: float) -> Lengths:
    whose = row.get("class") or "", row.get("tenant") or "", float(row.get("deadline") or 0.0)
    if "ContextTokens" in row:
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        return Lengths(moment, int(row["ContextTokens"]), int(row["GeneratedTokens"]), (), *whose)
    if "num_prefill_tokens" in row:
        return Lengths(number, int(float(row["num_prefill_tokens"])), int(float(row["num_decode_tokens"])), (), *whose)
    return Lengths(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), tuple(row.get("hash_ids", ())),
                   *whose)


def poisson_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds, the first at 0; all 0 for an infinite rate.

    Gaps are gamma distributed with mean 1/rate and shape `burstiness`."""
    if rate <= 0 or burstiness <= 0:
        raise ConfigError(f"--request-rate and --burstiness must be above 0, got {rate} and {burstiness}")
    if rate == float("inf"):
        return [0.0] * count
    dice = random.Random(f"arrivals {seed}")
    gaps = (dice.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
    return list(accumulate(gaps, initial=0.0))[:count]
