"""Throughput of constrained streams beside unconstrained ones, in turns in one process, and the host's time for masks.

    python bench/structured_cost.py [MODEL] [--rows 64] [--rounds 6] [--schema plain|forced|text] [--dummy]

Both kinds of stream write exactly `--tokens` tokens: the schemas describe arrays that are longer. Tokens a second of a loaded
machine vary; the seconds of the processor vary less. Ratios are of the medians, and of each pair of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import pstats
import resource
import statistics
import time
from typing import Any

from penstock import LLM, SamplingParams
from penstock.core.sampling import StructuredOutputsParams

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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--schema", choices=list(SCHEMAS), default="plain")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--tokenizer")
    parser.add_argument("--profile", action="store_true", help="print where one constrained round spends its time")
    given = parser.parse_args()
    options: dict[str, Any] = {"max_num_seqs": given.rows, "max_model_len": 1024}
    if given.dummy:
        options["load_format"] = "dummy"
    if given.tokenizer:
        options["tokenizer"] = given.tokenizer
    llm = LLM(given.model, **options)
    prompts = [f"{at} is the number of a question. Write a list about it." for at in range(given.rows)]
    schema = {"type": "array", "items": SCHEMAS[given.schema], "minItems": 100}
    kinds = {"free": None, "constrained": StructuredOutputsParams(json=schema)}
    for structured in kinds.values():
        _round(llm, prompts, structured, 16)
    if given.profile:
        profile = cProfile.Profile()
        profile.runcall(_round, llm, prompts, kinds["constrained"], given.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        for kind, structured in kinds.items():
            found[kind].append(_round(llm, prompts, structured, given.tokens))
    llm.close()
    print(json.dumps(_record(given, found), indent=1))


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
