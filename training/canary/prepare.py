"""Gathers the readable text that canary learns from: public-domain books for children, and service dialogues (CC-BY-SA).

    python -m training.canary.prepare --data ../shared/data --out build/canary/text

The rest of the training data is generated; this is the only part that is read. Owns which sources are used, no format beyond
`books.txt` (one passage a line) and `talk.jsonl` (one conversation a line, a list of turns).
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import re
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

BOOKS = ("aesop", "beatrix-potter", "just-so", "wizard-of-oz", "ozma", "marvelous-land", "wind-in-the-willows", "alices",
         "secret-garden", "jungle-book", "peter-and-wendy", "anne-of-green", "tom-sawyer", "treasure-island", "little-women",
         "sherlock", "eighty-days")
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u2060": "", "\u00a0": " ", "—": " - ", "…": "..."})
PASSAGE = 1100
"""Characters of one passage, roughly: it must fit a short row."""


def passages(text: str) -> Iterator[str]:
    """Whole paragraphs of a book, gathered to about PASSAGE characters, in plain punctuation."""
    plain = text.translate(PLAIN)
    held: list[str] = []
    for paragraph in plain.split("\n"):
        paragraph = re.sub(r"\s+", " ", paragraph).encode("ascii", "ignore").decode().strip()
        if not paragraph:
            continue
        if len(paragraph) > PASSAGE:
            held = []
            continue
        held.append(paragraph)
        if sum(map(len, held)) > PASSAGE * 0.7:
            yield "\n".join(held)
            held = []


def books(archive: Path) -> list[str]:
    """The passages of BOOKS."""
    found = []
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if any(name in member.name for name in BOOKS):
                file = tar.extractfile(member)
                assert file is not None
                found += passages(file.read().decode())
    return found


def talk(path: Path) -> Iterator[list[str]]:
    """Dialogues as turns of user and assistant in turn, without the tool calls between them."""
    with gzip.open(path, "rt") as file:
        for line in file:
            turns = [(message["role"], message.get("content")) for message in json.loads(line)["messages"]]
            spoken = [(role, text) for role, text in turns if role in ("user", "assistant") and text]
            roles = [role for role, _ in spoken]
            if roles[:2] == ["user", "assistant"] and all(a != b for a, b in pairwise(roles)):
                yield [text for _, text in spoken][: len(spoken) // 2 * 2]


def prepare(data: Path, out: Path) -> list[str]:
    """Writes `out`'s two files from `data`'s; the books' passages. SystemExit with what is missing and where it comes from."""
    archive, dialogues = data / "text/standardebooks.tar.gz", data / "tools/sgd_train.jsonl.gz"
    for path in (archive, dialogues):
        if not path.exists():
            raise SystemExit(f"{path} is not there; training/canary/README.md says what it is and where it comes from")
    out.mkdir(parents=True, exist_ok=True)
    found = books(archive)
    (out / "books.txt").write_text("".join(json.dumps(passage) + "\n" for passage in found))
    conversations = list(talk(dialogues))
    (out / "talk.jsonl").write_text("".join(json.dumps(turns) + "\n" for turns in conversations[::2]))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, default=0, help="print this many frequent words; words.txt was made from them")
    args = parser.parse_args()
    found = prepare(args.data, args.out)
    if args.words:
        counts = collections.Counter(re.findall(r"(?<= )[a-z]{4,8}(?=[ ,.])", " ".join(found)))
        print("\n".join(sorted(word for word, _ in counts.most_common(args.words))))  # noqa: T201


if __name__ == "__main__":
    main()
