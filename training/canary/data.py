"""Training data on disk: documents tokenized, marked and packed into rows by worker processes; read back batch by batch.

A shard is an array of uint16 [rows, length]. The low 12 bits are the token; LEARN marks a token that is to be predicted; BEGIN
the first token of a document. Every row begins with a document; the rest of a row that nothing fits is padding.

    python -m training.canary.data --text build/canary/text --out DIR --worker 0 --tokens 1000000
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from training.canary import documents
from training.canary.documents import BUCKETS, EDGE, LONG, MIXTURES, Bucket, Document, Texts
from training.canary.tokenizer import FOLDER

Rows = NDArray[np.uint16]

TOKEN, LEARN, BEGIN = 0x0FFF, 0x8000, 0x4000
SHARD = 1 << 20
"""Tokens of a shard."""
BATCH = 1 << 15
"""Tokens of a training batch, whatever its rows' length."""
OPEN_ROWS = 12
"""Rows that are being filled at a time; a document goes to the first that has room."""


class Encoder:
    """Documents to marked tokens, by the family's tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        number = self.tokenizer.token_to_id
        self.start, self.end, self.thought = number("<|im_start|>"), number("<|im_end|>"), number("<think>")
        self.padding = number("<|endoftext|>")
        self.speaker = self.tokenizer.encode("assistant\n").ids

    def encode(self, batch: Sequence[Document]) -> Iterator[Rows]:
        """The marked tokens of each document."""
        for document, encoding in zip(batch, self.tokenizer.encode_batch_fast([each.text for each in batch]), strict=True):
            ids = np.array(encoding.ids, dtype=np.uint16)
            marked = ids.copy()
            if document.whole:
                marked[1:] |= LEARN
            else:
                for first, last in self._spoken(ids, document.hinted):
                    marked[first : last + 1] |= LEARN
            marked[0] |= BEGIN
            yield marked

    def _spoken(self, ids: Rows, hinted: bool) -> Iterator[tuple[int, int]]:
        """The first and last tokens of what the assistant says, the end mark included."""
        ends = np.flatnonzero(ids == self.end)
        skip = len(self.speaker) + 1
        for start in np.flatnonzero(ids == self.start):
            if ids[start + 1] == self.speaker[0]:
                first = int(start) + skip
                if hinted and ids[first] == self.thought:
                    first += 2
                yield first, int(ends[np.searchsorted(ends, first)])


def pack(encoded: Iterator[Rows], length: int, padding: int) -> Iterator[Rows]:
    """Rows of `length` tokens, full as far as documents fit; too long documents are left out."""
    held: list[list[Rows]] = [[] for _ in range(OPEN_ROWS)]
    room = [length] * OPEN_ROWS
    for ids in encoded:
        if len(ids) > length:
            continue
        place = next((k for k in range(OPEN_ROWS) if room[k] >= len(ids)), None)
        if place is None:
            place = min(range(OPEN_ROWS), key=room.__getitem__)
            yield _row(held[place], length, padding)
            held[place], room[place] = [], length
        held[place].append(ids)
        room[place] -= len(ids)
    yield from (_row(documents_, length, padding) for documents_ in held if documents_)


def _row(parts: list[Rows], length: int, padding: int) -> Rows:
    row = np.full(length, padding | BEGIN, dtype=np.uint16)  # padding tokens are documents of their own
    filled = np.concatenate(parts)
    row[: len(filled)] = filled
    return row


def stream(seed: int, bucket: Bucket, texts: Texts, encoder: Encoder, mixture: str) -> Iterator[Rows]:
    """Endless rows of a bucket. Everything follows from the seed."""
    rng = Random(f"{seed} {bucket.name}")

    def encoded() -> Iterator[Rows]:
        size = 8 if bucket is LONG else 64
        while True:
            yield from encoder.encode([documents.document(rng, bucket, texts, mixture) for _ in range(size)])

    if bucket is LONG:
        return (_row([ids], bucket.length, encoder.padding) for ids in encoded() if len(ids) <= bucket.length)
    return pack(encoded(), bucket.length, encoder.padding)


def write(out: Path, worker: int, texts: Texts, encoder: Encoder, tokens: int, mixture: str) -> None:
    """Writes shards, one of canary-edge's bucket first if this is worker 0, then the others, the buckets in proportion to their
    shares, until so many tokens are written or a file `stop` appears.
    """
    streams = {bucket.name: stream(worker, bucket, texts, encoder, mixture) for bucket in (*BUCKETS, EDGE)}
    written = {bucket.name: 0 for bucket in (*BUCKETS, EDGE)}
    while sum(written.values()) < tokens and not (out / "stop").exists():
        bucket = min(BUCKETS, key=lambda each: written[each.name] / each.share)
        if worker == 0 and not written[EDGE.name]:
            bucket = EDGE
        rows = SHARD // bucket.length
        shard = np.stack([next(streams[bucket.name]) for _ in range(rows)])
        name = f"{bucket.name}-{written[bucket.name] // SHARD:04d}-{worker:02d}.npy"
        np.save(out / f".{name}", shard)
        os.replace(out / f".{name}", out / name)
        written[bucket.name] += SHARD


class Reader:
    """Batches of a bucket from the shards as they appear, in the order of their names; from the start again when all are
    read.
    """

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder, self.bucket = folder, bucket
        self.passes = 0
        self._read: set[str] = set()
        self._shard: Rows | None = None
        self._at = 0

    def next(self) -> Rows:
        """[BATCH // length, length]."""
        rows = BATCH // self.bucket.length
        if self._shard is None or self._at + rows > len(self._shard):
            self._shard, self._at = np.load(self._choose()), 0
        self._at += rows
        return self._shard[self._at - rows : self._at]

    def _choose(self) -> Path:
        while True:
            names = sorted(path.name for path in self.folder.glob(f"{self.bucket.name}-*.npy"))
            fresh = [name for name in names if name not in self._read]
            if not fresh and names:
                self._read, fresh, self.passes = set(), names, self.passes + 1
            if fresh:
                self._read.add(fresh[0])
                return self.folder / fresh[0]
            time.sleep(0.5)


def main() -> None:
    """The command: one worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--mixture", choices=MIXTURES, default="first")
    args = parser.parse_args()
    os.nice(10)  # what trains goes first
    write(args.out, args.worker, Texts.load(args.text), Encoder(), args.tokens, args.mixture)


if __name__ == "__main__":
    main()
