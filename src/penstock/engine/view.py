"""The engine's work as plain data for people who watch: its last steps, its sequences, pages and prefix tree.

It only looks, between two turns, and what it looks at is bounded, so that watching costs a step at most a few milliseconds.
Steps are recorded only while somebody watches. It knows tokens by their number alone, never their text."""

import base64
import heapq
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.cache.manager import Cache
from penstock.cache.prefix import Node
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Sequence
from penstock.core.service import DEFAULT
from penstock.scheduler.scheduler import Scheduler

WATCHED_SECONDS = 5.0
"""Time for which steps are recorded after the last look."""

STEPS, SEQUENCES, CELLS, NODES = 120, 256, 4096, 120
"""The most that one look has of each."""

_PAGES = 50_000
"""Page ids of live sequences that one look goes through."""

_CHILDREN = 500
"""Children of one node of the prefix tree that are considered."""

FREE, KEPT, SHARED, HELD = range(4)
"""Values of the map of pages: free; kept by the prefix cache alone; held by several; HELD + i: by sequence i (at most 250)."""


class View:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._until = 0.0
        self._planned: dict[int, list[tuple[str, int, int]]] = {}
        self._steps: deque[tuple[int, float, float, list[tuple[str, int, int]]]] = deque(maxlen=STEPS)

    def planned(self, plan: StepPlan) -> None:
        """Notes the composition of a step that was just planned, if somebody watches."""
        if time.monotonic() > self._until:
            return
        sequences = self.scheduler.in_flight[-1].sequences
        self._planned[plan.id] = [(name_of(sequence), start, count) for sequence, start, count in
                                  zip(sequences, plan.starts.tolist(), plan.counts.tolist(), strict=True)]

    def done(self, result: StepResult) -> None:
        composition = self._planned.pop(result.id, None)
        if composition is not None:
            self._steps.append((result.id, time.time(), result.seconds, composition))

    def look(self) -> dict[str, Any]:
        """Everything now, in JSON's types. `steps`: [id, end, seconds, [[sequence, start, count], ...]]; `sequences`: running
        ones, then waiting ones; `pages`: the arena in base64; `tree`: the prefix cache, parents first."""
        if time.monotonic() > self._until:
            self._planned.clear()
            self._steps.clear()
        self._until = time.monotonic() + WATCHED_SECONDS
        scheduler = self.scheduler
        shown = list(islice(scheduler.running, SEQUENCES))
        waiting = list(islice(scheduler.waiting, 10 * SEQUENCES))
        return {"now": time.time(), "steps": list(self._steps),
                "sequences": [_sequence(one) for one in (*shown, *waiting[:SEQUENCES - len(shown)])],
                "queue": sorted(Counter((one.request.tier or DEFAULT, one.request.priority) for one in waiting).items()),
                "pages": pages(scheduler.cache, shown), "tree": tree(scheduler.cache)}


def name_of(sequence: Sequence) -> str:
    """"request" or, where there are several, "request/index", as in `Scheduler.abort`."""
    return f"{sequence.request.id}/{sequence.index}" if sequence.request.params.n > 1 else sequence.request.id


def _sequence(sequence: Sequence) -> dict[str, Any]:
    times = sequence.timings
    return {"id": name_of(sequence), "running": sequence.row >= 0, "priority": sequence.request.priority,
            "arrival": times.arrival, "scheduled": times.first_scheduled, "first": times.first_token,
            "preemptions": times.preemptions, "prompt": sequence.prompt_len, "known": sequence.known,
            "computed": sequence.computed, "cached": sequence.cached,
            "pages": sum(len(run.ids) - run.first for run in sequence.pages)}


def pages(cache: Cache, sequences: list[Sequence]) -> dict[str, Any]:
    """The arena's slabs as `cells` bytes (FREE, KEPT, ...); a cell of several slabs shows their highest."""
    layout, pools = cache.layout, cache.pools
    found: npt.NDArray[np.uint8] = np.zeros(layout.slabs, np.uint8)
    groups: npt.NDArray[np.uint8] = np.zeros(layout.slabs, np.uint8)
    for g, group in enumerate(layout.groups):
        holders, kept = (view.reshape(layout.slabs, group.per_slab) for view in pools.marks(g))
        found[kept.any(1)] = KEPT
        groups[kept.any(1) | holders.any(1)] = g + 1
        found[(holders == 1).any(1)] = 255
        found[(holders > 1).any(1)] = SHARED
    left = _PAGES
    for i, sequence in enumerate(sequences[:250]):
        for group, run in zip(layout.groups, sequence.pages, strict=False):
            ids = np.array(run.ids[run.first:run.first + left], np.int64)
            left -= len(ids)
            slabs = ids[ids >= 0] // group.per_slab
            found[slabs[found[slabs] != SHARED]] = HELD + i
    each = -(-layout.slabs // CELLS)
    padded = np.zeros(-(-layout.slabs // each) * each, np.uint8)
    padded[:layout.slabs] = found
    return {"slabs": layout.slabs, "slabs_a_cell": each, "slab_bytes": layout.slab_bytes, "page_tokens": layout.page,
            "groups": [int(np.count_nonzero(groups == g + 1)) for g in range(len(layout.groups))],
            "cells": base64.b64encode(padded.reshape(-1, each).max(1).tobytes()).decode()}


def tree(cache: Cache) -> list[dict[str, Any]]:
    """The most recently used nodes of the prefix tree, parents before children."""
    heap: list[tuple[int, int, int, Node]] = []
    pools, found, count = cache.pools, list[dict[str, Any]](), 0

    def offer(children: Iterator[Node], parent: int) -> None:
        nonlocal count
        for child in islice(children, _CHILDREN):
            count += 1
            heapq.heappush(heap, (-child.used, count, parent, child))

    for root in cache.index.roots.values():
        offer(iter(root.children.values()), -1)
    while heap and len(found) < NODES:
        _, _, parent, node = heapq.heappop(heap)
        held = any(page >= 0 and pools.holders(g, page) for g, ids in enumerate(node.pages) for page in ids[-1:])
        offer(iter(node.children.values()), len(found))
        found.append({"parent": parent, "start": node.start, "tokens": node.end - node.start, "uses": node.uses, "held": held,
                      "priority": node.priority, "adapter": node.label.adapter[:8], "children": len(node.children)})
    return found
