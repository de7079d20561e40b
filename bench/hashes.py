"""Hashes of greedy outputs and of logits, by which two commits are compared: a refactoring changes none of them.

Greedy token ids of every model folder that the commit can run, over several routes (`ROUTES`), and the bits of
the logits of the family tests' random models. One line each: the hash and what it is of, or that the model is refused.

usage: python bench/hashes.py [--only WORD ...]      of this checkout
       cd OTHER; PYTHONPATH=src:. python THIS/bench/hashes.py > other.txt     of another one, for diff
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path.cwd())]

import torch  # noqa: E402

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.core.errors import ModelError  # noqa: E402

CANARY = Path("src/penstock/canary/model")
OUTPUT = 24
PROMPTS = 10

ROUTES: dict[str, dict[str, Any]] = {
    "plain": {},
    "alone": {"max_num_seqs": 1, "depth": 1, "enable_prefix_caching": False},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 8},
    "tight": {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 8, "kv_pages": 20},
    "reference": {"kernels": {"*": "reference"}},
}
"""Options of each route; `kv_pages` is the size of the cache in pages of all layers."""

TEXTS = ("The capital of France is", "Once upon a time there was a small bird", "1 2 3 4 5 6 7",
         "Write a telegram that says: I arrive on Monday. STOP")


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def prompts(folder: Path, vocabulary: int) -> list[list[int]]:
    """The golden prompts where there are some, a few texts where canary's tokenizer is the model's, and random ids."""
    found: list[list[int]] = []
    golden = folder / "greedy_golden.json"
    if golden.exists():
        found += [case["prompt_ids"] for case in json.loads(golden.read_text())["cases"]]
    elif "canary" in str(folder):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(CANARY / "tokenizer.json"))
        found += [tokenizer.encode(text).ids for text in TEXTS]
    draw = random.Random(7)
    lengths = [1, 90, 33, 8, 64, 17, 16, 40, 3, 70]
    return (found + [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths])[:PROMPTS + len(found)]


def outputs(folder: Path, options: dict[str, Any]) -> list[list[int]]:
    options = {"max_model_len": 160, "max_num_seqs": 8, "device": "cpu", "threads": 1, "skip_tokenizer_init": True, **options}
    pages = options.pop("kv_pages", None)
    if pages is not None:
        config = json.loads((folder / "config.json").read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        options["kv_cache_memory_bytes"] = pages * options["block_size"] * config["num_hidden_layers"] * heads * size * 2 * 4
    with LLM(str(folder), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts(folder, llm.info.vocab_size)]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]


def folders() -> Iterator[Path]:
    yield CANARY
    yield from sorted(folder for folder in Path("tests/assets").iterdir() if (folder / "config.json").exists())
    data = Path(os.environ.get("PENSTOCK_TEST_DATA", Path.cwd().parent / "shared" / "data"))
    yield from sorted(folder for folder in (data / "models").iterdir() if (folder / "config.json").exists())


def families() -> Iterator[tuple[str, str]]:
    """The bits of the family tests' logits: a prompt in uneven chunks and a few decoded tokens, with plain PyTorch
    and with the kernels of this machine."""
    from tests.models.families import CASES, PROMPT, make
    from tests.models.harness import Runner, open_model

    from penstock.ops.registry import bind
    from penstock.platform.facts import detect

    torch.set_num_threads(1)
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            make(case, Path(folder))
            prompt = torch.randint(3, case.config["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
            for name, kernels in (("reference", {"*": "reference"}), ("default", {})):
                decoder = open_model(Path(folder), max_model_len=case.max_model_len,
                                     kernels=bind(detect("cpu"), torch.float32, kernels))
                logits, ids, _ = Runner(decoder, length=case.max_model_len).greedy(prompt, min(case.greedy, 8), row=1)
                bits = hashlib.sha256(logits.float().contiguous().numpy().tobytes()).hexdigest()[:16]
                yield f"{bits} {digest(ids)}", f"logits {case.name} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="of what has one of these words in it")
    wanted = parser.parse_args().only

    def say(found: str, name: str) -> None:
        print(f"{found}  {name}", flush=True)

    for folder in folders():
        for route, options in ROUTES.items():
            name = f"greedy {folder.parent.name}/{folder.name} {route}"
            if wanted and not any(word in name for word in wanted):
                continue
            try:
                say(digest(outputs(folder, options)), name)
            except ModelError:
                say("refused", name)
                break
    if not wanted or "logits" in wanted:
        for found, name in families():
            say(found, name)


if __name__ == "__main__":
    main()
