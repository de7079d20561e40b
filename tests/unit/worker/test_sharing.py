"""Which rows begin with the same pages, whatever rows enter, leave, or have pages exchanged."""

from __future__ import annotations

import numpy as np

from penstock.core.plan import StepPlan
from penstock.ops.attention import SharedPrefixes
from penstock.worker.sharing import Sharing

PAGE = 16


def plan(rows: list[int], lengths: dict[int, int], counts: list[int] | None = None) -> StepPlan:
    return StepPlan(0, rows=np.array(rows, np.int32), starts=np.array([lengths[row] for row in rows], np.int32),
                    counts=np.array(counts or [1] * len(rows), np.int32))


def pairs(prefixes: SharedPrefixes | None, segments: int) -> np.ndarray:
    """[S, S] positions that any two segments share."""
    found = np.zeros((segments, segments), int)
    if prefixes is not None:
        for i, one in enumerate(prefixes.segments):
            for j in range(i + 1, len(prefixes.segments)):
                found[one, prefixes.segments[j]] = found[prefixes.segments[j], one] = prefixes.common[i:j].min()
    return found


def test_beside_every_pair() -> None:
    """Random tables: rows leave, are taken by others, start from another's pages, grow, and are given another page for one."""
    rng, page, shared = np.random.default_rng(0), 1, 0
    rows, columns = 12, 20
    table = np.full((rows, columns), -1, np.int32)
    sharing = Sharing(table, PAGE)
    lengths: dict[int, int] = {}
    placed: dict[int, int] = {}
    for _ in range(600):
        edits = []
        for row in list(lengths):
            if rng.random() < 0.1:
                sharing.forget([row])
                del lengths[row], placed[row]
        for row in range(rows):
            if row not in lengths and rng.random() < 0.3:
                lengths[row] = int(rng.integers(0, columns * PAGE - 40))
                pages, common = lengths[row] // PAGE + 1, 0
                if placed and rng.random() < 0.8:
                    other = int(rng.choice(list(placed)))
                    common = min(int(rng.integers(0, 12)), placed[other], pages - 1)
                    table[row, :common] = table[other, :common]
                for i in range(common, pages):
                    table[row, i] = page = page + 1
                placed[row] = -1
                edits += [(row, i, table[row, i]) for i in range(pages)]
        for row in [row for row, pages in placed.items() if pages > 0 and rng.random() < 0.05]:
            at = int(rng.integers(0, placed[row]))
            table[row, at] = page = page + 1
            edits.append((row, at, page))
        sharing.edited(np.array(edits, np.int32).reshape(-1, 3))
        chosen = [row for row in lengths if rng.random() < 0.9]
        rng.shuffle(chosen)
        if not chosen:
            continue
        counts = [1 if rng.random() < 0.95 else 3 for _ in chosen]
        found = pairs(sharing.of(plan(chosen, lengths, counts)), len(chosen))
        for row, count in zip(chosen, counts, strict=True):
            if count == 1:
                placed[row] = lengths[row] // PAGE if placed[row] < 0 and len(chosen) > 1 else placed[row]
        for i, one in enumerate(chosen):
            for j, other in enumerate(chosen[:i]):
                pages = min(placed[one], placed[other]) if counts[i] == counts[j] == 1 else 0
                same = table[one, :pages] == table[other, :pages]
                exact = pages if same.all() else int(same.argmin())
                assert found[i, j] <= exact * PAGE
                shared += exact > 0
                # An exchanged page puts a row in its place again, by the pages that it has then.
                assert found[i, j] == exact * PAGE, (one, other)
    assert shared > 2000


def test_the_same_rows_are_answered_without_looking() -> None:
    table = np.zeros((4, 8), np.int32)
    table[:, 3:] = np.arange(20).reshape(4, 5) + 1
    sharing = Sharing(table, PAGE)
    lengths = dict.fromkeys(range(4), 100)
    first = sharing.of(plan([2, 0, 1], lengths))
    assert first is not None and sorted(first.segments) == [0, 1, 2] and first.common.tolist() == [48, 48]
    # They go on, and get pages behind those that they began with.
    sharing.edited(np.array([[0, 7, 99], [2, 6, 98]], np.int32))
    assert sharing.of(plan([2, 0, 1], dict.fromkeys(range(4), 113))) is first
    # Another order, another row, one that reads a prompt, and a page that is exchanged.
    assert sharing.of(plan([0, 2, 1], lengths)) is not first
    assert len(sharing.of(plan([0, 2, 1, 3], lengths)).segments) == 4
    assert sorted(sharing.of(plan([0, 2, 1, 3], lengths, [1, 1, 5, 1])).segments) == [0, 1, 3]
    table[1, 1] = 77
    sharing.edited(np.array([[1, 1, 77]], np.int32))
    assert pairs(sharing.of(plan([0, 1, 2], lengths)), 3)[1].tolist() == [16, 0, 16]
    sharing.forget([0, 2, 3])
    assert sharing.of(plan([1], lengths)) is None


def test_rows_that_share_nothing() -> None:
    table = np.arange(32, dtype=np.int32).reshape(4, 8)
    sharing = Sharing(table, PAGE)
    assert sharing.of(plan([0, 1, 2, 3], dict.fromkeys(range(4), 64))) is None
    assert sharing.of(plan([], {})) is None
    sharing.forget([0, 1, 2, 3])
    table[:] = 5
    assert sharing.of(plan([0, 1], dict.fromkeys(range(4), 15))) is None, "less than a page is nobody else's"
