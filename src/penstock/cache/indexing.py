"""Inserts computed pages into the prefix index: whole pages while a sequence runs, the partial last page when it ends."""

from penstock.cache.eviction import Evictor
from penstock.cache.pool import Pools
from penstock.cache.prefix import TOKEN, Lookup, Node
from penstock.cache.sequence_state import SequenceState, packed, state_of, words
from penstock.core.request import Sequence, Span


class Indexer:
    """Adds the pages of sequences to the index. Resulting block table edits are appended to `edits[g]`."""

    def __init__(self, lookup: Lookup, evictor: Evictor, pools: Pools, edits: list[list[int]]) -> None:
        self.index = lookup.index
        self.page = lookup.page
        self.keeps = lookup.keeps
        self.shift = lookup.shift
        self.simple = lookup.simple
        self.evictor = evictor
        self.pools = pools
        self._edits = edits

    def add(self, sequence: Sequence) -> None:
        """Adds the sequence's whole pages below `sequence.computed` to the index.

        Where the index has pages with equal contents already, they replace the sequence's own pages."""
        state, page = state_of(sequence), self.page
        upto = sequence.computed - sequence.computed % page
        if upto <= state.indexed:
            return
        node = state.node
        one_more = self.simple and upto == state.indexed + page
        if one_more and node is not None and self.index.grows(node, sequence, state.indexed):
            # Fast path: one more page, full attention alone, and a leaf that only this sequence extends.
            self.index.append(node, words(sequence, state.indexed, upto), sequence.pages[0].ids[state.indexed // page])
            state.indexed = upto
            self.evictor.enforce_quota(node.label.account)
            return
        data = packed(sequence, upto)
        node = self._place(sequence, state)
        first, last = state.indexed // page, upto // page
        pages = [self._whole(sequence, g, first, last) for g in range(len(self.keeps))]
        node, spent = self.index.insert(node, state.indexed, data[state.indexed * TOKEN:upto * TOKEN], pages, sequence)
        state.indexed, state.node, state.deepest = upto, node, node
        for g, ids in enumerate(pages):
            self._adopt(g, sequence, first - self.shift[g], ids)
        for useless in spent:
            self.forget(useless)
        if not self.simple and self.evictor.removable(node):
            self.evictor.offer(node)
        self.evictor.enforce_quota(node.label.account)

    def _place(self, sequence: Sequence, state: SequenceState) -> Node:
        """The sequence's node in the tree. It is looked up again if there is none yet, or if it has been evicted."""
        node = state.node
        if node is None or node.gone or node.end < state.indexed:
            request = sequence.request
            node = self.index.root(request.namespace, request.salt, request.tenant)
            trail = self.index.walk(node, state.packed[:state.indexed * TOKEN])
            state.indexed = trail.matched - trail.matched % self.page
            if state.indexed:
                node = self.index.locate(trail.nodes[-1], state.indexed)
            state.node = node
        return node

    def _whole(self, sequence: Sequence, g: int, first: int, last: int) -> list[int]:
        """A group's pages for blocks [first, last) of the tree; -1 for blocks without a whole page held by the sequence."""
        run, shift = sequence.pages[g], self.shift[g]
        ids = run.ids[max(run.first, first - shift):last - shift]
        ids = [-1] * (last - first - len(ids)) + ids
        if shift:
            # Forks that diverge in the next block may share such a page, which would then be on both paths: do not add it.
            ids = [-1 if page >= 0 and self.pools.shared(g, page) else page for page in ids]
        if self.keeps[g].exact:
            # Only a chunk that ended at the page boundary has left a snapshot of that boundary.
            ids = [-1] * (len(ids) - 1) + [ids[-1] if sequence.computed % self.page == 0 else -1]
        return ids

    def _adopt(self, g: int, sequence: Sequence, first: int, ids: list[int]) -> None:
        """Replaces the sequence's pages from index `first` on by `ids`, where they differ."""
        run = sequence.pages[g]
        if first >= 0 and run.ids[first:first + len(ids)] == ids:
            return
        for i, page in enumerate(ids, first):
            if page >= 0 and i >= run.first and page != run.ids[i] and run.ids[i] >= 0:
                self.pools.share(g, [page])
                self.pools.give(g, [run.ids[i]])
                run.ids[i] = page
                if sequence.row >= 0:
                    self._edits[g] += (sequence.row, i, page)

    def end(self, sequence: Sequence) -> None:
        """Called before a sequence releases its pages: adds committed ones that the index lacks, the partial last one too."""
        self.add(sequence)
        state, page, computed = state_of(sequence), self.page, sequence.computed
        node, block = self._place(sequence, state), computed // page
        if computed % page == 0 or state.indexed != block * page:
            return
        pages = [[self._rest(sequence, g, block)] for g in range(len(self.keeps))]
        if any(ids[0] >= 0 for ids in pages):
            data = packed(sequence, computed)[state.indexed * TOKEN:computed * TOKEN]
            leaf, spent = self.index.rest(node, state.indexed, data, pages)
            state.deepest = leaf or state.deepest
            for useless in spent:
                self.forget(useless)

    def _rest(self, sequence: Sequence, g: int, block: int) -> int:
        """A group's partial last page; -1 if it cannot be reused, or others hold it too."""
        keep, run, i = self.keeps[g], sequence.pages[g], block - self.shift[g]
        if not run.first <= i < len(run.ids) or run.ids[i] < 0 or self.pools.shared(g, run.ids[i]):
            return -1
        if keep.exact and sequence.planned != sequence.computed:
            return -1
        if keep.ahead and (i + 1) * self.page + keep.ahead > sequence.computed:
            return -1
        return run.ids[i]

    def used(self, sequence: Sequence, node: Node) -> None:
        """Called when a sequence ends or is preempted at this node: updates its last use and applies its retention spans."""
        if node.gone:
            return
        self.index.touch(node, self.evictor.now)
        at: Node | None = node
        while at is not None:
            at.longest = max(at.longest, sequence.computed)
            at.author = None
            at = at.parent
        for span in sequence.request.retain:
            self._retain(node, span)

    def _retain(self, node: Node, span: Span) -> None:
        """Sets the retention priority of the path to `node`, as far as the span reaches."""
        now = self.evictor.now
        upto = -(-span.upto // self.page) * self.page
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.start < upto < at.end:
                at = self.index.split(at, (upto - at.start) // self.page)
            if at.start < upto and not (at.until > now and at.priority > span.priority):
                at.priority, at.seconds, at.until = span.priority, span.seconds, now + span.seconds
            at = at.parent

    def forget(self, node: Node, upwards: bool = False) -> None:
        """Removes a leaf's blocks from the tree until one has a holder; `upwards`: then its parent's, if that is a leaf now."""
        while self.evictor.removable(node):
            last, parent = node.blocks - 1, node.parent
            for g, ids in enumerate(node.pages):
                if ids[last] >= 0:
                    self.index.drop(node, g, last)
            self.index.cut(node)
            if node.gone and parent is not None:
                self.evictor.offer(parent)
                if not upwards:
                    return
                node = parent
