"""Constrained decoding on maskbench, beside peers: what is refused, what is accepted, rightly or wrongly, and its cost.

    python bench/structured.py --engine penstock|xgrammar|outlines --tokenizer DIR [--every N] [--output FILE]

Each instance is written as JSON, tokenized, and offered token by token: a valid one must be accepted to its end, an invalid one
must not. Peers run in environments of their own, without Penstock. Times are one thread's on the processor, waiting left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from data import data_folder

DATA = data_folder()


class Matcher(Protocol):
    def accepts(self, tokens: list[int], times: list[float]) -> bool: ...


class Penstock:
    """Schemas through `define`, then llguidance with the model's vocabulary."""

    def __init__(self, folder: Path) -> None:
        from penstock.grammar.definition import define, limits
        from penstock.grammar.vocabulary import build, texts
        from penstock.text import Tokenizer

        self._define, self._limits = define, limits
        self.tokenizer = Tokenizer.load(folder)
        self.vocabulary = build(self.tokenizer, texts(self.tokenizer, self.tokenizer.vocab_size), [])
        self._words = -(-self.tokenizer.vocab_size // 32)

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.tokenize_str(text)

    def compile(self, schema: Any) -> Any:
        from llguidance import LLMatcher

        from penstock.core.sampling import StructuredOutputsParams

        grammar = self._define(StructuredOutputsParams(json=schema))
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=self._limits())
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def accepts(self, first: Any, tokens: list[int], times: list[float]) -> bool:
        matcher = first.deep_copy()
        for token in tokens:
            began = time.thread_time()
            bits = matcher.compute_bitmask()
            times.append(time.thread_time() - began)
            if not bits[token // 8] >> token % 8 & 1 or not matcher.consume_token(token):
                return False
        return bool(matcher.is_accepting())


class XGrammar:
    """xgrammar's compiler with its strict mode off, as vLLM calls it."""

    def __init__(self, folder: Path) -> None:
        import transformers
        import xgrammar

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer)
        self._size = info.vocab_size
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)

    def accepts(self, first: Any, tokens: list[int], times: list[float]) -> bool:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(first, terminate_without_stop_token=True)
        bits = xgrammar.allocate_token_bitmask(1, self._size)
        for token in tokens:
            began = time.thread_time()
            matcher.fill_next_token_bitmask(bits)
            times.append(time.thread_time() - began)
            if not matcher.accept_token(token):
                return False
        # Terminated, or able to end now.
        return matcher.is_terminated() or bool(matcher.accept_token(self.tokenizer.eos_token_id))


class Outlines:
    """outlines-core: the schema as a regex, the regex as an index over all tokens."""

    def __init__(self, folder: Path) -> None:
        import outlines_core
        import transformers

        self._core = outlines_core
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        pieces: dict[str, list[int]] = {}
        eos = self.tokenizer.eos_token_id
        for name, token in self.tokenizer.get_vocab().items():
            if token != eos and token not in self.tokenizer.all_special_ids:
                pieces.setdefault(self.tokenizer.convert_tokens_to_string([name]), []).append(token)
        self._vocabulary = outlines_core.Vocabulary(eos, pieces)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def compile(self, schema: Any) -> Any:
        regex = self._core.json_schema.build_regex_from_schema(json.dumps(schema))
        return self._core.Index(regex, self._vocabulary)

    def accepts(self, first: Any, tokens: list[int], times: list[float]) -> bool:
        guide = self._core.Guide(first)
        for token in tokens:
            began = time.thread_time()
            allowed = guide.get_tokens()
            times.append(time.thread_time() - began)
            if token not in allowed:
                return False
            guide.advance(token)
        return bool(guide.is_finished() or self.tokenizer.eos_token_id in guide.get_tokens())


ENGINES: dict[str, Any] = {"penstock": Penstock, "xgrammar": XGrammar, "outlines": Outlines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), default="penstock")
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizers" / "llama-3.1")
    parser.add_argument("--schemas", type=Path, default=DATA / "schemas" / "maskbench.jsonl.gz")
    parser.add_argument("--every", type=int, default=1, help="take each Nth schema")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long, and say so")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    engine = ENGINES[given.engine](given.tokenizer)
    with gzip.open(given.schemas, "rt") as lines:
        cases = [json.loads(line) for at, line in enumerate(lines) if at % given.every == 0]
    found = measure(engine, cases, given.seconds)
    record = {"engine": given.engine, "tokenizer": given.tokenizer.name, "every": given.every, **found,
              "environment": environment()}
    text = json.dumps(record, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")


def measure(engine: Any, cases: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Counts and times over the cases, as far as they are done in time."""
    count: Counter[str] = Counter()
    compiles: list[float] = []
    masks: list[float] = []
    wrong: list[str] = []
    until = time.monotonic() + seconds
    for case in cases:
        if time.monotonic() > until:
            break
        count["schemas"] += 1
        began = time.thread_time()
        try:
            first = engine.compile(case["schema"])
        except Exception as error:  # noqa: BLE001 (each engine raises its own)
            count["refused"] += 1
            count[f"refused: {type(error).__name__}"] += 1
            continue
        compiles.append(time.thread_time() - began)
        for at, test in enumerate(case["tests"]):
            accepted = engine.accepts(first, engine.encode(json.dumps(test["data"], ensure_ascii=False)), masks)
            count[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'rejected'}"] += 1
            if accepted and not test["valid"]:
                wrong.append(f"{case['name']}/{at}")
    valid = count["valid accepted"] + count["valid rejected"]
    return {"of": len(cases), "count": dict(count), "refused_share": count["refused"] / max(1, count["schemas"]),
            "valid_accepted_share": count["valid accepted"] / max(1, valid), "invalid_accepted": count["invalid accepted"],
            "invalid_accepted_examples": wrong[:20],
            "compile_ms": _percentiles(compiles, 1e3), "mask_us": _percentiles(masks, 1e6)}


def _percentiles(values: list[float], scale: float) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {name: round(scale * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}


def environment() -> dict[str, Any]:
    """Versions and hardware that the figures depend on."""
    import importlib.metadata

    versions = {}
    for name in ("penstock", "llguidance", "xgrammar", "outlines-core", "transformers", "tokenizers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())
    return {"python": sys.version.split()[0], "cpu": model, "versions": versions}


if __name__ == "__main__":
    main()
