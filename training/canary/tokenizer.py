"""The family's tokenizer: byte-level BPE of 4,096 entries, every digit its own token, trained on the training data itself.

    python -m training.canary.tokenizer --text build/canary/text --out training/canary/tokenizer

Owns the tokenizer's files. They are committed, so that training does not repeat this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from training.canary import documents

from penstock.canary.skills import WORDS

HERE = Path(__file__).parent
FOLDER = HERE / "tokenizer"
VOCABULARY = 4096

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Never part of a text."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>")
"""Single tokens too, but part of the text: what reads tool calls and thoughts must see them."""

# Letters with the space before them; single digits; runs of other signs; whitespace, the last space left to the next word.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def corpus(texts: documents.Texts, count: int) -> Iterator[str]:
    """The tokenizer's training data: documents of every kind, and each word of the prompts' vocabulary with and without
    space.
    """
    rng = Random(0)
    for _ in range(count):
        for bucket in documents.BUCKETS[:2]:
            yield documents.document(rng, bucket, texts).text
    for _ in range(30):
        yield from (f"{word} {word}" for word in WORDS)


def train(texts: documents.Texts, count: int = 15000) -> Tokenizer:
    """The trained tokenizer. The same on every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.train_from_iterator(corpus(texts, count), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer as Hugging Face folders hold it."""
    template = (HERE / "chat_template.jinja").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)  # a link to the packaged model's, which is not to be written to
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
              "pad_token": "<|endoftext|>", "model_max_length": documents.CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(template)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="the folder that prepare.py made")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    save(train(documents.Texts.load(args.text)), args.out)


if __name__ == "__main__":
    main()
