"""Suffix search in a ring beside a suffix tree, by exhaustive counts, on real texts: handbooks and edited passages."""

from __future__ import annotations

import tarfile
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer

from penstock.config.speculation import Speculation
from penstock.worker.drafters.suffix import Suffix
from tests.data import DATA, need

Tokens = npt.NDArray[np.int64]
DRAFTS = 8
SHORTEST, LONGEST = Speculation.shortest, Speculation.longest


@pytest.fixture(scope="module")
def documents() -> list[Tokens]:
    """Pieces of three handbooks, in random order."""
    tokenizer = Tokenizer.from_file(str(need(DATA / "tokenizers" / "qwen2.5" / "tokenizer.json")))
    found = []
    with tarfile.open(need(DATA / "text" / "docs.tar.gz")) as archive:
        for member in archive:
            file = archive.extractfile(member)
            text = "" if file is None else file.read().decode(errors="ignore")
            found += [tokenizer.encode(text[at:at + 3000]).ids for at in range(20_000, min(len(text), 110_000) - 3000, 3000)]
    return [np.array(found[place]) for place in np.random.default_rng(1).permutation(len(found))]


class Ring:
    """The drafter, after these outputs of one owner."""

    def __init__(self, outputs: list[Tokens]) -> None:
        self.tokens = torch.zeros(1, 1500, dtype=torch.int32)
        host: Any = SimpleNamespace(rows=SimpleNamespace(tokens=self.tokens, device=torch.device("cpu")))
        self.drafter = Suffix(SHORTEST, LONGEST, host)
        for output in outputs:
            self._enter(output)
            self.drafter._prompt[0], self.drafter._known[0] = 0, len(output)
            self.drafter.leave([0])

    def _enter(self, row: Tokens) -> None:
        self.tokens[0, :len(row)] = torch.from_numpy(row)

    def drafts(self, row: Tokens) -> list[int]:
        self._enter(row)
        self.drafter._propose(self.tokens, torch.tensor([0]), torch.tensor([len(row)]), np.array([DRAFTS], np.int32), len(row))
        found: list[int] = self.tokens[0, len(row):len(row) + DRAFTS].tolist()
        return found


def tree(text: Tokens, tail: Tokens, depth: int = 64) -> list[int]:
    """What SuffixDecoding drafts (Oliaro et al. 2024): of the paths below the nodes of all suffixes of the tail, each with the
    most frequent successors, that whose tokens have the highest sum of probabilities by the counts."""
    alive = np.ones(len(text) - 1, bool)
    best, found = 0.0, list[int]()
    for back in range(min(depth, len(tail))):
        alive[:back] = False
        alive[back:] &= text[:len(text) - 1 - back] == tail[-1 - back]
        if not alive.any():
            break
        if back + 1 < SHORTEST:
            continue
        places, path, score, chance = np.flatnonzero(alive), list[int](), 0.0, 1.0
        for place in range(1, DRAFTS + 1):
            inside = places[places + place < len(text)]
            counts = Counter(token for token in text[inside + place].tolist() if token >= 0)
            if not counts:
                break
            [(token, count)] = counts.most_common(1)
            chance *= count / len(places)
            score += chance
            path.append(token)
            places = inside[text[inside + place] == token]
        if score >= best:
            best, found = score, path
    return found


def kept(drafts: list[int], right: Tokens) -> int:
    """Drafts up to the first wrong one."""
    wrong = [place for place, (one, other) in enumerate(zip(drafts, right.tolist(), strict=False)) if one != other]
    return wrong[0] if wrong else len(drafts)


def test_a_ring_drafts_what_a_tree_of_all_suffixes_drafts(documents: list[Tokens]) -> None:
    """30 outputs are stored. Where a text is new, where it is an edited copy of what the row begins with, and where a stored
    output is said again, the drafts that prove right are as many as those of the tree: of all within 2 %, of each kind of text,
    200 places, within 5 %."""
    stored, others = documents[:30], documents[30:]
    ring = Ring(stored)
    known = np.concatenate([np.append(output, -1) for output in stored])
    assert len(known) < len(ring.drafter._ring)
    rng, found = np.random.default_rng(0), {}
    for name in ("new", "edited", "again"):
        pairs = []
        for document in (stored if name == "again" else others)[:40]:
            text = document[:600]
            if name == "edited":
                copy = text.copy()
                copy[::40] = 5
                text = np.concatenate((text, copy))
            for at in rng.integers(len(text) // 2 + 20, len(text) - DRAFTS, 5).tolist():
                row, right = text[:at], text[at:at + DRAFTS]
                pairs.append((kept(ring.drafts(row), right), kept(tree(np.concatenate((known, row)), row), right)))
        found[name] = np.array(pairs).mean(0)
    print(found)
    assert all(mine >= 0.95 * trees for mine, trees in found.values()), found
    mine, trees = sum(found.values())
    assert mine >= 0.98 * trees and found["again"][0] > 0.9 * DRAFTS and found["edited"][0] > 5, found


def test_the_longest_agreement_decides(documents: list[Tokens]) -> None:
    """Of two places behind which different tokens stand, that which agrees in more tokens, up to sixteen."""
    common, longer = documents[0][:12], documents[1][:4]
    for order in (0, 1):
        outputs = [np.concatenate((longer, common, documents[2][:20])), np.concatenate((common, documents[3][:20]))]
        ring = Ring(outputs[::-1] if order else outputs)
        assert ring.drafts(np.concatenate((documents[4][:30], longer, common))) == documents[2][:DRAFTS].tolist()
