"""Train an EAGLE-3 head that drafts for MODEL, from its own hidden states on a text: plain text, or conversations (.jsonl,
{"messages": [...]} or {"prompt": ...} a line), which the model answers first. Writes --output DIR in the format of published
heads, with a card of how often its drafts are kept: penstock serve MODEL --speculative-model DIR"""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock.checkpoint import dtype_of, read_config, resolve_folder
from penstock.config.flags import at_least, integer, number
from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams

_HELD_OUT = 0.05
"""Share of the text, at its end, that only the card sees."""
_MOST_HELD = 32
"""Windows or conversations of it at most."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder or a hub id; canary is the small model that comes with Penstock")
    parser.add_argument("text", type=Path, help="a text file, or conversations as .jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder for the head")
    parser.add_argument("--steps", type=integer, default=1000, metavar="N", help="training steps (default: 1000)")
    parser.add_argument("--batch", type=integer, default=8, metavar="N", help="windows of a step (default: 8)")
    parser.add_argument("--window", type=integer, default=512, metavar="N", help="tokens of a window (default: 512)")
    parser.add_argument("--drafts", type=integer, default=4, metavar="N", help="tokens of a draft (default: 4)")
    parser.add_argument("--vocabulary", type=integer, default=32000, metavar="N",
                        help="tokens that the head can draft, the most frequent ones (default: 32000)")
    parser.add_argument("--answer-tokens", type=integer, default=256, metavar="N",
                        help="tokens of an answer to a conversation at most (default: 256)")
    parser.add_argument("--learning-rate", type=number, metavar="X", help="of AdamW (default: by the model's width)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def run(args: argparse.Namespace) -> int:
    """Writes the folder and prints the card. ConfigError or ModelError says what cannot be done."""
    if not args.text.is_file():
        raise ConfigError(f"there is no file {args.text}")
    if args.output.exists():
        raise ConfigError(f"--output {args.output} exists; give a new folder")
    for name, least in (("steps", 1), ("batch", 1), ("window", 16), ("drafts", 1), ("vocabulary", 2), ("answer_tokens", 1)):
        at_least(args, least, name)
    folder = resolve_folder(args.model)
    ids, said, prompts = _conversations(args) if args.text.suffix == ".jsonl" else _text(folder, args)
    windows = _cut(ids, args.window)
    if len(windows) < args.batch:
        raise ConfigError(f"{args.text} gives {len(windows)} windows of {args.window} tokens, and a step takes --batch "
                          f"{args.batch}; give a longer text, or a smaller --window")
    trained = _trained(folder, windows, None if said is None else _cut(said, args.window), args)
    card = _card(args, len(windows), trained, _kept(args, prompts))
    (args.output / "README.md").write_text(card)
    print(card)
    return 0


def _text(folder: Path, args: argparse.Namespace) -> tuple[list[int], None, list[list[int]]]:
    """(tokens to train on, all alike; prompts for the card) of a plain text."""
    from penstock.text import Tokenizer

    ids = Tokenizer.load(folder).encode(args.text.read_text("utf-8"))
    held = min(_MOST_HELD, max(1, int(len(ids) * _HELD_OUT) // args.window)) * args.window
    return ids[:-held], None, [window[:args.window // 2] for window in _cut(ids[-held:], args.window)]


def _conversations(args: argparse.Namespace) -> tuple[list[int], list[bool], list[list[int]]]:
    """(tokens to train on, which of them the model said, prompts for the card) of conversations, which the model answers."""
    # Late: torch.
    from penstock.engine.llm import LLM

    asked = []
    for number_, line in enumerate(filter(str.strip, args.text.read_text("utf-8").splitlines()), 1):
        try:
            found = json.loads(line)
            asked.append(found["messages"] if "messages" in found else [{"role": "user", "content": found["prompt"]}])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{args.text}, line {number_}: expected an object with messages or prompt") from None
    params = SamplingParams(temperature=0, max_tokens=args.answer_tokens)
    with LLM(args.model, device=args.device) as llm:
        answered = llm.chat(asked, params)
    gc.collect()
    held = min(_MOST_HELD, max(1, int(len(answered) * _HELD_OUT)))
    turns = [(tokens, said) for one in answered[:-held]
             for tokens, said in ((one.prompt_token_ids or (), False), (one.outputs[0].token_ids, True))]
    ids = [token for tokens, _ in turns for token in tokens]
    own = [said for tokens, said in turns for _ in tokens]
    return ids, own, [list(one.prompt_token_ids or ()) for one in answered[-held:]]


def _cut(ids: list[Any], size: int) -> list[list[Any]]:
    return [ids[at:at + size] for at in range(0, len(ids) - size + 1, size)]


def _trained(folder: Path, windows: list[list[int]], said: list[list[bool]] | None, args: argparse.Namespace) -> list[float]:
    """Trains the head and writes it. Returns the last steps' shares of right tokens, by their place in a draft."""
    from penstock.models import configured
    from penstock.worker.draft_training import DraftTraining, Recipe

    recipe = Recipe(args.steps, args.batch, args.drafts, args.vocabulary, args.learning_rate)
    training = DraftTraining(folder, configured(folder), dtype_of(folder, read_config(folder)), args.device, windows, said,
                             recipe)
    shares: list[float] = []
    with tqdm(total=args.steps, desc="train-draft", unit="step", leave=False) as bar:
        def progress(_step: int, loss: float, agreed: list[float]) -> None:
            shares[:] = agreed if not shares else [0.9 * old + 0.1 * new for old, new in zip(shares, agreed, strict=True)]
            bar.set_postfix_str(f"loss {loss:.2f}, right " + " ".join(f"{share:.0%}" for share in shares))
            bar.update()

        training.train(progress)
    training.head.save(args.output)
    return shares


def _kept(args: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[float], float]:
    """The shares of drafts kept, by place, and tokens per verification, while the model answers prompts not trained on."""
    from penstock.engine.llm import LLM

    config: dict[str, Any] = {"method": "eagle3", "model": str(args.output), "num_speculative_tokens": args.drafts,
                              "draft_policy": "fixed"}
    with LLM(args.model, device=args.device, speculative_config=config) as llm:
        params = SamplingParams(temperature=0, max_tokens=64)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        stats = llm.stats()
    drafts = max(1, stats.drafts)
    return [count / drafts for count in stats.accepted_by_place], 1 + stats.accepted_tokens / drafts


def _card(args: argparse.Namespace, windows: int, trained: list[float], kept: tuple[list[float], float]) -> str:
    shares, length = kept
    lines = [f"# An EAGLE-3 head for {args.model}", "",
             f"Trained by `penstock train-draft` on {windows:,} windows of {args.window} tokens of {args.text.name}: "
             f"{args.steps:,} steps of {args.batch} windows, drafts of {args.drafts} tokens.", "",
             f"    penstock serve {args.model} --speculative-model DIR", "",
             "| token of a draft | right in training | kept in answers |", "|---|---|---|",
             *(f"| {place} | {right:.1%} | {share:.1%} |" for place, (right, share) in enumerate(
                 zip(trained, [*shares, *[0.0] * len(trained)], strict=False), 1)), "",
             "Right in training: the target's choice, the tokens before given. Kept in answers: in greedy answers to prompts "
             f"that training has not seen, with the tokens before it; {length:.2f} tokens per verification.", ""]
    return "\n".join(lines)
