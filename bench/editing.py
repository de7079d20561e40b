"""Prompt lookup where answers repeat most of their prompt: edited passages of real books, one sequence, beside no drafts.

usage: python bench/editing.py [--target canary] [--method ngram] [--drafts 4,8] [--passages 4] [--output FILE.json]

    python bench/editing.py --device cpu                                   # canary, with its own tokenizer
    python bench/editing.py --target llama8b --tokenizer FOLDER --output editing.json

No small model edits text, and shapes have random weights. So the edits are known: the answer to each request is the passage
itself, changed by a rule (`EDITS`), and the token after each position is imposed where tokens are chosen. Nothing else
differs from service: the drafter sees tokens only, drafts are verified as always, and each kept token costs what it costs. Both
engines must answer with exactly the edited passage. A passage is asked once, so that no drafter knows its answer.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from data import data_folder
from fixed import SHAPES, write
from penstock import canary
from penstock.cli.bench.environment import environment
from penstock.core.sampling import SamplingParams
from penstock.engine.llm import LLM
from penstock.worker.sampler import Sampler

BOOK = "george-eliot_middlemarch.txt"
WORDS = 300
"""Of a passage."""
IMPOSED = 3e4
"""A logit above all others of random weights, which bfloat16 and float16 can hold."""


def renamed(words: list[str]) -> tuple[list[str], list[str]]:
    """A name is another one: the most frequent capitalized word of four letters or more."""
    names = Counter(found for word in words for found in re.findall(r"\b[A-Z][a-z]{3,}\b", word))
    name = names.most_common(1)[0][0] if names else words[0]
    return words, [word.replace(name, "Rosalind") for word in words]


def corrected(words: list[str]) -> tuple[list[str], list[str]]:
    """Every fortieth word is misspelt in the prompt: its first two letters have changed places."""
    return [word[1::-1] + word[2:] if place % 40 == 20 else word for place, word in enumerate(words)], words


def shortened(words: list[str]) -> tuple[list[str], list[str]]:
    """Every fifth sentence is left out."""
    sentences = re.split(r"(?<=[.!?;]) ", " ".join(words))
    return words, " ".join(one for place, one in enumerate(sentences) if place % 5 != 4).split(" ")


EDITS: dict[str, tuple[str, Callable[[list[str]], tuple[list[str], list[str]]]]] = {
    "rename": ("Change the name of the person to Rosalind.", renamed),
    "correct": ("Correct the spelling.", corrected),
    "shorten": ("Leave out every fifth sentence.", shortened)}


def cases(text: str, tokenizer: Tokenizer, passages: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """(edit, prompt, answer) of passages that follow one another in the text, each edited by one rule: rules take turns."""
    words = text.split()
    for place in range(passages * len(EDITS)):
        name = list(EDITS)[place % len(EDITS)]
        asked, edit = EDITS[name]
        before, after = (" ".join(part) for part in edit(words[place * WORDS:(place + 1) * WORDS]))
        prompt = tokenizer.encode(f"{asked}\n\n{before}\n\nEdited:\n\n", add_special_tokens=False).ids
        yield name, prompt, tokenizer.encode(after, add_special_tokens=False).ids


@contextmanager
def imposed() -> Iterator[Callable[[list[int]], None]]:
    """While it lasts, engines that are made choose the tokens that the yielded function was given, by their positions."""
    begin, choose = Sampler.__init__, Sampler._choose
    # By sampler; captured steps hold the address.
    own: dict[int, torch.Tensor] = {}

    def made(self: Sampler, ops: Any, rows: Any, *args: Any, **options: Any) -> None:
        begin(self, ops, rows, *args, **options)
        own[id(self)] = torch.zeros_like(rows.tokens)

    def chosen(self: Sampler, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor, *others: Any) -> torch.Tensor:
        table = own[id(self)]
        wanted = table[row.clamp(min=0).long(), position.clamp(0, table.shape[1] - 1).long()]
        return choose(self, logits.scatter_(1, wanted[:, None].long(), IMPOSED), row, position, *others)

    def impose(tokens: list[int]) -> None:
        for table in own.values():
            table[:, :len(tokens)] = torch.tensor(tokens, dtype=table.dtype)
        if torch.cuda.is_available():
            # Steps run on a stream of their own.
            torch.cuda.synchronize()

    Sampler.__init__, Sampler._choose = made, chosen  # type: ignore[method-assign]
    try:
        yield impose
    finally:
        Sampler.__init__, Sampler._choose = begin, choose  # type: ignore[method-assign]


def seconds(llm: LLM, prompt: list[int], answer: list[int]) -> float:
    """Until the whole answer is there, the prompt's time included."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    took = time.perf_counter() - start
    found = list(output.outputs[0].token_ids)
    if found != answer:
        raise ValueError(f"the answer of {len(found)} tokens is not the imposed one of {len(answer)}")
    return took


def measured(off: LLM, on: LLM, impose: Callable[[list[int]], None],
             asked: list[tuple[str, list[int], list[int]]]) -> dict[str, Any]:
    """Speed-ups by edit. The first passage of each warms up."""
    gains, sums = dict[str, list[float]](), [0.0, 0.0]
    before = on.engine.stats()
    steps, drafted, accepted = before.steps, before.drafted_tokens, before.accepted_tokens
    for place, (name, prompt, answer) in enumerate(asked):
        impose(prompt + answer)
        plain, took = seconds(off, prompt, answer), seconds(on, prompt, answer)
        if place >= len(EDITS):
            gains.setdefault(name, []).append(plain / took)
            sums = [sums[0] + plain, sums[1] + took]
    stats = on.engine.stats()
    steps, drafted, accepted = stats.steps - steps, stats.drafted_tokens - drafted, stats.accepted_tokens - accepted
    return {"speedup": round(sums[0] / sums[1], 3),
            "by_edit": {name: round(statistics.median(some), 3) for name, some in gains.items()},
            "plain_s": round(sums[0], 4), "s": round(sums[1], 4),
            "drafted": drafted, "kept": round(accepted / max(1, drafted), 3),
            "tokens_a_step": round(sum(len(answer) for _, _, answer in asked) / max(1, steps), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=canary.NAME,
                        help=f"{canary.NAME}, or a shape with random weights: {', '.join(SHAPES)}")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json; canary has its own")
    parser.add_argument("--text", type=Path, help="a text file; by default a book of the test data")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--drafts", default="4,8")
    parser.add_argument("--policies", default="adaptive,fixed")
    parser.add_argument("--passages", type=int, default=4, help="of each edit; the first one warms up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    real = args.target == canary.NAME
    tokenizer = Tokenizer.from_file(str((args.tokenizer or canary.MODEL) / "tokenizer.json"))
    if args.text is not None:
        text = args.text.read_text()
    else:
        with tarfile.open(data_folder() / "text" / "standardebooks.tar.gz") as books:
            book = books.extractfile(f"standardebooks/{BOOK}")
            assert book is not None
            text = book.read(1 << 20).decode(errors="ignore")
    asked, lines = list(cases(text, tokenizer, args.passages)), list[dict[str, Any]]()
    options = {"skip_tokenizer_init": True, "max_num_seqs": 1, "device": args.device,
               "max_model_len": max(len(prompt) + len(answer) for _, prompt, answer in asked) + 16}
    if args.threads:
        options["threads"] = args.threads
    with tempfile.TemporaryDirectory() as name, imposed() as impose:
        target = str(canary.MODEL if real else write(SHAPES[args.target], Path(name) / args.target))
        options |= {} if real else {"load_format": "dummy"}
        with LLM(target, gpu_memory_utilization=0.45, **options) as off:
            for drafts in map(int, args.drafts.split(",")):
                for policy in args.policies.split(","):
                    config = {"method": args.method, "num_speculative_tokens": drafts,
                              **({"draft_policy": "fixed"} if policy == "fixed" else {})}
                    # The share of a GPU's memory is that of all its users.
                    with LLM(target, gpu_memory_utilization=0.9, speculative_config=config, **options) as on:
                        found = measured(off, on, impose, asked)
                    lines.append({"method": args.method, "drafts": drafts, "policy": policy, **found})
                    print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment(), "target": args.target, "goal": 2.0, "lines": lines},
                                          indent=1))


if __name__ == "__main__":
    main()
