"""Throughput of constrained streams beside free ones, in turns in one process; and what new schemas do to others.

    python bench/structured_cost.py [MODEL] [--rows 64] [--rounds 6] [--schema plain|forced|text]
    python bench/structured_cost.py --shape llama8b --rows 128 --measure throughput intervals

A `--shape` has random weights and a vocabulary made up for it. For the throughput both kinds of stream write exactly `--tokens`
tokens: the schemas describe arrays that are longer. Tokens a second of a loaded machine vary; the seconds of the processor vary
less. Ratios are medians over pairs of neighbouring rounds, of p99 too. Intervals are those between the tokens of half of the
rows, while in the other half short requests come and go that are free, or constrained by one schema, or each by a schema of its
own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import cProfile
import itertools
import json
import pstats
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.core.request import Request
from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.definition import define
from shapes import SHAPES, write

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0,
                                                                                               "maximum": 120},
                                           "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]},
                                                    "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}
LONG = "description_of_the_present_state_of_the_matter"
SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": PERSON,
    "forced": {"type": "object", "properties": {LONG: {"type": "boolean"}, LONG + "_before": {"type": "boolean"}},
               "required": [LONG, LONG + "_before"], "additionalProperties": False},
    "text": {"type": "string", "minLength": 400},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="canary")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="half as many for intervals")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--schema", choices=list(SCHEMAS), default="plain")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--measure", nargs="+", choices=["throughput", "intervals"], default=["throughput"])
    parser.add_argument("--profile", action="store_true", help="print where one constrained round spends its time")
    parser.add_argument("--breakdown", action="store_true",
                        help="print milliseconds a step in the parts of a free and a constrained round, one after the other")
    given = parser.parse_args()
    options: dict[str, Any] = {"max_num_seqs": given.rows, "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as folder:
        if given.shape is not None:
            given.model = str(write(given.shape, Path(folder)))
            made_up_tokenizer(SHAPES[given.shape]["vocab_size"], Path(given.model))
            options["load_format"] = "dummy"
        with LLM(given.model, **options) as llm:
            for measured in given.measure:
                found = _throughput(llm, given) if measured == "throughput" else _intervals(llm, given)
                print(json.dumps(found, indent=1), flush=True)


def _throughput(llm: LLM, given: argparse.Namespace) -> dict[str, Any]:
    prompts = [f"{at} is the number of a question. Write a list about it." for at in range(given.rows)]
    schema = {"type": "array", "items": SCHEMAS[given.schema], "minItems": 100}
    kinds = {"free": None, "constrained": StructuredOutputsParams(json=schema)}
    for structured in kinds.values():
        _round(llm, prompts, structured, 16)
    if given.profile:
        profile = cProfile.Profile()
        profile.runcall(_round, llm, prompts, kinds["constrained"], given.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if given.breakdown:
        for kind, structured in kinds.items():
            print(json.dumps({kind: _breakdown(llm, prompts, structured, given.tokens)}, indent=1), flush=True)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        for kind, structured in kinds.items():
            found[kind].append(_round(llm, prompts, structured, given.tokens))
    return _record(given, found)


def _round(llm: LLM, prompts: list[str], structured: StructuredOutputsParams | None, tokens: int) -> dict[str, float]:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, structured_outputs=structured)
    before, began, used = copy.copy(llm.engine.stats()), time.perf_counter(), _processor()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, processor = time.perf_counter() - began, _processor() - used
    after = llm.engine.stats()
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"tokens_per_second": written / seconds, "processor_us_per_token": 1e6 * processor / written, "tokens": written,
            "steps": after.steps - before.steps, "forced": after.forced_tokens - before.forced_tokens,
            "mask_us_per_row_and_step": 1e6 * (after.mask_seconds - before.mask_seconds) / max(1, after.masks - before.masks)}


def _breakdown(llm: LLM, prompts: list[str], structured: StructuredOutputsParams | None, tokens: int) -> dict[str, Any]:
    """Milliseconds a step on the host by part, parts within others counted in both; taking results is waiting for the device.
    Timing each call adds a little."""
    worker = getattr(llm.engine.rank, "worker", None)
    parts: list[tuple[Any, str]] = [
        (llm.engine, "turn"), (llm.engine, "_mask"), (llm.engine, "_take_results"), (llm.engine.scheduler, "plan"),
        (llm.engine.scheduler, "apply"), (llm.engine.constraints.masker, "masks"), (llm.engine.constraints.masker, "_advance"),
        (llm.engine.constraints.masker, "_fill"), (llm.engine.constraints.masker, "_find_forced"), (llm._outputs, "push")]
    if worker is not None:
        parts += [(worker, "launch"), (worker, "_choose"), (worker.sampler, "_mask"), (worker.sampler, "_choose"),
                  (worker.runner, "forward"), (worker.graphs, "forward"), (worker.graphs, "decode")]
    seconds: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()

    def timed(owner: Any, name: str) -> Callable[..., Any]:
        plain, label = getattr(owner, name), f"{type(owner).__name__}.{name}"

        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*given, **named)
            finally:
                seconds[label] += time.perf_counter() - began
                if label == "Worker.launch":
                    plan = given[0]
                    sizes[f"{int(plan.counts.sum())} tokens, {len(plan.rows)} segments, {len(plan.masked)} masked"] += 1
        return call

    changed = []
    for owner, name in parts:
        with contextlib.suppress(AttributeError):
            setattr(owner, name, timed(owner, name))
            changed.append((owner, name))
    found = _round(llm, prompts, structured, tokens)
    for owner, name in changed:
        delattr(owner, name)
    each = 1e3 / found["steps"]
    return {"ms_per_step": round(each * found["tokens"] / found["tokens_per_second"], 3), "steps": found["steps"],
            "parts_ms": {name: round(each * value, 3) for name, value in seconds.most_common()},
            "most_common_steps": dict(sizes.most_common(6))}


def _intervals(llm: LLM, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds between the tokens of the streams that stay, by kind of the requests beside them."""
    kinds: dict[str, Callable[[int], str | None]] = {
        "free": lambda _: None, "one schema": lambda _: _grammar(0), "unique schemas": _grammar}
    made = (_grammar(at) for at in itertools.count())
    ready = collections.deque(itertools.islice(made, (given.rounds // 2 + 1) * given.rows // 2 * (given.tokens // 16 + 1)))
    kinds["unique schemas"] = lambda _: ready.popleft() if ready else next(made)
    rounds: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    compiled = dict.fromkeys(kinds, 0)
    for round_at in range(given.rounds // 2 + 1):
        # Each order in turn, so that a machine that becomes slower favours neither.
        for kind, grammar in list(kinds.items())[::-1 if round_at % 2 else 1]:
            before = llm.engine.stats().grammars_compiled
            seconds = _others(llm, given.rows // 2, given.tokens, grammar)
            if round_at:
                rounds[kind].append(sorted(seconds))
                compiled[kind] += llm.engine.stats().grammars_compiled - before

    def at(kind: str, part: float) -> list[float]:
        return [1e3 * seconds[int(part * len(seconds))] for seconds in rounds[kind]]

    def pairs(one: str, other: str) -> list[float]:
        return [round(a / b, 3) for a, b in zip(at(one, 0.99), at(other, 0.99), strict=True)]

    unique = pairs("unique schemas", "one schema")
    return {"model": given.shape or given.model, "rows": given.rows, "compiled": compiled,
            "p50_ms": {kind: round(statistics.median(at(kind, 0.5)), 3) for kind in kinds},
            "p99_ms": {kind: round(statistics.median(at(kind, 0.99)), 3) for kind in kinds},
            "unique_to_one": statistics.median(unique), "unique_to_one_by_round": unique,
            "unique_to_free": statistics.median(pairs("unique schemas", "free"))}


def _grammar(at: int) -> str:
    """A grammar that no other number has, of a service's usual schema."""
    fields = {f"{name}_{at}": schema for name, schema in PERSON["properties"].items()}
    return define(StructuredOutputsParams(json={**PERSON, "properties": fields, "required": list(fields)}))


def _others(llm: LLM, count: int, tokens: int, grammar: Callable[[int], str | None]) -> list[float]:
    """Seconds between tokens of `count` free streams, beside as many short requests that follow one another."""
    engine, numbers, last, found = llm.engine, itertools.count(), dict[str, float](), list[float]()

    def submit(name: str, length: int, constraint: str | None) -> None:
        engine.submit(Request(name, [5 + next(numbers) % 200, 7, 9], SamplingParams(
            max_tokens=length, seed=1, ignore_eos=constraint is None, grammar=constraint), eos_ids=list(llm.inputs.eos_ids)))

    for at in range(count):
        submit(f"stays {at}", tokens, None)
        submit(f"short {at}", 8 + at % 24, grammar(at))
    staying = count
    while engine.busy:
        updates = engine.turn()
        now = time.perf_counter()
        for update in updates:
            if update.request_id.startswith("stays"):
                if update.request_id in last and update.token_ids:
                    found.append(now - last[update.request_id])
                last[update.request_id] = now
                staying -= update.finish_reason is not None
            elif update.finish_reason is not None and staying:
                submit(f"short {next(numbers)}", 8 + next(numbers) % 24, grammar(next(numbers)))
    return found


def made_up_tokenizer(size: int, folder: Path) -> None:
    """Writes a byte-level BPE tokenizer of about `size` tokens: words of this repository and made-up ones, with all their
    beginnings, so that each token is its longest beginning and a character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = dict(zip(alphabet, range(len(alphabet)), strict=True))
    merges: list[tuple[str, str]] = []
    root = Path(__file__).resolve().parents[1]
    files = sorted([*root.glob("docs/**/*.md"), *root.glob("src/**/*.py")])
    texts = " ".join(path.read_text() for path in files)
    draw = random.Random(0)
    syllables = ["ab", "con", "de", "er", "for", "in", "ma", "nor", "pre", "ra", "sti", "tu", "ver", "wy"]
    words: Iterator[str] = itertools.chain(
        (" " + word for word in dict.fromkeys(texts.split())), dict.fromkeys(texts.split()),
        (" " * draw.randint(0, 1) + "".join(draw.choices(syllables, k=draw.randint(2, 6))) for _ in itertools.count()))
    for word in words:
        spelled = "".join(found for found, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word))[:24]
        for end in range(2, len(spelled) + 1):
            if len(vocab) >= size - 8:
                break
            if spelled[:end] not in vocab:
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[:end - 1], spelled[end - 1]))
        if len(vocab) >= size - 8:
            break
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    config = json.loads((folder / "config.json").read_text())
    ends = {"bos_token_id": made.token_to_id("<s>"), "eos_token_id": made.token_to_id("</s>")}
    (folder / "config.json").write_text(json.dumps(config | ends))


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _record(given: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    medians = {kind: {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
               for kind, rounds in found.items()}
    pairs = [constrained["tokens_per_second"] / free["tokens_per_second"]
             for free, constrained in zip(found["free"], found["constrained"], strict=True)]
    processor = [constrained["processor_us_per_token"] / free["processor_us_per_token"]
                 for free, constrained in zip(found["free"], found["constrained"], strict=True)]
    return {"model": given.model, "rows": given.rows, "schema": given.schema, "medians": medians,
            "throughput_ratio": round(statistics.median(pairs), 3), "pairs": [round(pair, 3) for pair in pairs],
            "processor_ratio": round(statistics.median(processor), 3)}


if __name__ == "__main__":
    main()
