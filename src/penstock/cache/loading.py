"""In-flight loads of pages from other tiers to the device, and the sequences that wait for them.

A load belongs to no sequence: its pages enter the prefix index when they have arrived, and waiting sequences match them there
like any others. So a sequence may end while it waits, several may wait for one load, and a failed load costs only time."""

import time
from typing import NamedTuple

import numpy as np

from penstock.cache import keys
from penstock.cache.eviction import Evictor
from penstock.cache.pool import Pools
from penstock.cache.prefix import TOKEN, Lookup, Node, reach
from penstock.cache.sequence_state import packed, state_of
from penstock.cache.tiers import Content
from penstock.cache.tiers.hierarchy import Hierarchy
from penstock.core.plan import LoadResult
from penstock.core.request import Sequence


class _Load(NamedTuple):
    namespace: tuple[str, str, str]
    """Adapter, salt and tenant."""
    deepest: Node
    """The deepest matched node, with pages that were on the device before the load."""
    tokens: bytearray
    """The tokens of all blocks up to the last loaded one."""
    pages: list[list[int]]
    """For each group the page of each block, loaded or already on the device; -1 where none is needed."""
    blocks: dict[tuple[int, keys.Key], int]
    """The block of each loaded page, by group and key."""
    waiting: list[Sequence]
    gain: dict[str, int]
    """The number of positions gained from each tier."""


class Loading:
    """Starts loads, tracks them by ticket, and adds their pages to the prefix index."""

    def __init__(self, lookup: Lookup, evictor: Evictor, pools: Pools, tiers: Hierarchy) -> None:
        self.lookup = lookup
        self.index = lookup.index
        self.evictor = evictor
        self.pools = pools
        self.tiers = tiers
        self._loads: dict[int, _Load] = {}
        self._tickets: dict[tuple[int, keys.Key], int] = {}
        """(group, key) of a page in flight -> the ticket of its load."""

        self._stale: set[int] = set()
        """Tickets of loads that were in flight when the cache was reset; their pages are dropped."""

    def __bool__(self) -> bool:
        return bool(self._loads)

    def ask(self, sequence: Sequence) -> bool:
        """True if a sequence without pages must wait for a load, which is in flight already or is started now."""
        state = state_of(sequence)
        if state.ticket is None and state.asked != sequence.epoch:
            state.ticket = self._begin(sequence)
            if state.ticket is None:
                state.asked = sequence.epoch
        elif state.ticket is not None and time.monotonic() > state.until:
            # The sequence computes its prefix instead. The load continues, for others that wait and for later requests.
            self._loads[state.ticket].waiting.remove(sequence)
            state.ticket, state.asked = None, sequence.epoch
        return state.ticket is not None

    def _begin(self, sequence: Sequence) -> int | None:
        """Starts or joins a load that extends the prefix on the device by at least a page, and returns its ticket, or None."""
        request, page = sequence.request, self.lookup.page
        blocks = (len(sequence.tokens) - 1) // page
        if not blocks:
            return None
        root = self.index.root(request.namespace, request.salt, request.tenant)
        state, data = state_of(sequence), packed(sequence, blocks * page)[:blocks * page * TOKEN]
        if len(state.keys) < blocks:
            state.keys = keys.links(self.index.root_key(root), data, page)
        found = self.lookup.find(root, data, blocks * page)
        # A page of which only the first tokens match is not part of this context.
        whole = found.trail.matched // page
        device = [ids[:max(0, whole - shift)] for ids, shift in zip(found.places, self.lookup.shift, strict=True)]
        places = self._everywhere(device, state.keys, blocks)
        upto = reach(self.lookup.keeps, [np.array(ids, np.int32) for ids in places], page, blocks * page, blocks * page, -1)
        if upto - found.reach < page:
            return None
        wanted, held = self._divide(device, upto)
        if not wanted:
            return None
        # One deadline covers all loads that the sequence waits for.
        state.until = state.until or time.monotonic() + self.tiers.patience(upto - found.reach)
        for g, i in wanted:
            ticket = self._tickets.get((g, state.keys[i + self.lookup.shift[g]]))
            if ticket is not None:
                self._loads[ticket].waiting.append(sequence)
                return ticket
        deepest = found.trail.nodes[-1] if found.trail.nodes else root
        return self._start(sequence, deepest, data, device, wanted, held, upto - found.reach)

    def _everywhere(self, device: list[list[int]], names: list[keys.Key], blocks: int) -> list[list[int]]:
        """For each group, by page index: a number >= 0 if the page is on the device or in any tier, else -1."""
        everywhere = []
        for g, shift in enumerate(self.lookup.shift):
            ids = device[g][:blocks - shift]
            ids += [-1] * (blocks - shift - len(ids))
            missing = [i for i, page in enumerate(ids) if page < 0]
            for i, there in zip(missing, self.tiers.find(g, [names[i + shift] for i in missing]), strict=True):
                ids[i] = 0 if there else -1
            everywhere.append(ids)
        return everywhere

    def _divide(self, device: list[list[int]], upto: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pages (group, index) that a context needs to continue at `upto`: those to load, and those on the device."""
        wanted, held = list[tuple[int, int]](), list[tuple[int, int]]()
        for g, keep in enumerate(self.lookup.keeps):
            low = keep.needed(upto)[0]
            for i in range(low // self.lookup.page, -(-upto // self.lookup.page) if low < upto else 0):
                (held if i < len(device[g]) and device[g][i] >= 0 else wanted).append((g, i))
        return wanted, held

    def _start(self, sequence: Sequence, deepest: Node, data: bytearray, device: list[list[int]], wanted: list[tuple[int, int]],
               held: list[tuple[int, int]], positions: int) -> int | None:
        """Allocates pages and requests a load into them; None if there is no room or the tiers refuse."""
        state, request, shift, page = state_of(sequence), sequence.request, self.lookup.shift, self.lookup.page
        blocks = 1 + max(i + shift[g] for g, i in wanted)
        pages = [[-1] * blocks for _ in shift]
        for g, i in held:
            if i + shift[g] < blocks:
                pages[g][i + shift[g]] = device[g][i]
        for g, ids in enumerate(pages):
            self.pools.share(g, [p for p in ids if p >= 0])
        contents = []
        for g in range(len(shift)):
            mine = [i for group, i in wanted if group == g]
            if not self.evictor.make_room(g, len(mine)):
                self._let_go(deepest, pages)
                return None
            for i, target in zip(mine, self.pools.take(g, len(mine)), strict=True):
                block = i + shift[g]
                pages[g][block] = target
                contents.append(Content(g, target, state.keys[block]))
        ticket = self.tiers.load(contents, positions)
        if ticket is None:
            self._let_go(deepest, pages)
            return None
        gain = {tier: positions * count // len(contents) for tier, count in self.tiers.source(ticket).items()}
        places = {(g, state.keys[i + shift[g]]): i + shift[g] for g, i in wanted}
        namespace = request.namespace, request.salt, request.tenant
        self._loads[ticket] = _Load(namespace, deepest, data[:blocks * page * TOKEN], pages, places, [sequence], gain)
        self._tickets.update(dict.fromkeys(places, ticket))
        return ticket

    def _let_go(self, deepest: Node, pages: list[list[int]]) -> None:
        """Releases all pages of a load. The pages that the index keeps are in `deepest` or its ancestors."""
        for g, ids in enumerate(pages):
            idle = set(self.pools.give(g, [page for page in ids if page >= 0]))
            if idle and self.evictor.bounded[g]:
                self.evictor.loosen(g, [(block, page) for block, page in enumerate(ids) if page in idle], deepest)
        # Nodes below the held pages may have been evicted meanwhile; `offer` finds the one that is left.
        self.evictor.offer(deepest)

    def land(self, result: LoadResult) -> int:
        """Adds a finished load's pages to the index up to the first lost block, and wakes who waits; returns its bytes."""
        load = self._loads.pop(result.ticket)
        for name in load.blocks:
            del self._tickets[name]
        kept = result.ok and result.ticket not in self._stale
        self._stale.discard(result.ticket)
        deepest, held = load.deepest, [list(ids) for ids in load.pages]
        blocks = len(held[0])
        if result.lost:
            blocks = min(load.blocks[name.group, name.key] for name in result.lost)
            # Without a loaded page before the first lost one there is nothing new.
            kept = kept and any(block < blocks for block in load.blocks.values())
        if kept:
            pages = [ids[:blocks] for ids in load.pages]
            tokens = load.tokens[:blocks * self.lookup.page * TOKEN]
            deepest, _ = self.index.insert(self.index.root(*load.namespace), 0, tokens, pages, None)
            self.index.touch(deepest, self.evictor.now)
        self._let_go(deepest, held)
        if load.waiting:
            # Only the sequence that has waited longest stops requesting; the others may need more pages and ask again.
            state_of(load.waiting[0]).asked = load.waiting[0].epoch
        for sequence in load.waiting:
            state = state_of(sequence)
            state.ticket = None
            if kept:
                state.loaded = {tier: count * blocks // len(held[0]) for tier, count in load.gain.items()}
        groups = self.pools.layout.groups
        return sum(groups[g].page_bytes for g, _ in load.blocks) if result.ok else 0

    def reset(self) -> None:
        """Marks in-flight loads as stale, so that their pages do not enter the index."""
        self._stale.update(self._loads)

    def held(self) -> list[list[list[int]]]:
        """The pages held by each load, by group; for consistency checks."""
        return [load.pages for load in self._loads.values()]
