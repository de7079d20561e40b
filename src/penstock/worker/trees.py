"""Draft trees: several candidates for a position, verified in one segment (EAGLE-2, Li et al. 2024).

A tree's drafts lie in consecutive slots behind the row's last known token, parents before children. A draft attends to the
row's context and its ancestors, bits of a word, at the position of its depth. The target's own choice behind a node is looked
up among its children, so tokens are those of decoding one by one. The accepted path is moved to the front: tokens and cache.

Rows whose sampling looks at earlier tokens (penalties, bad words, masks), and those without room for a tree have chains."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from penstock.core.plan import StepPlan, Want
from penstock.layers.step import StateView
from penstock.ops.sample import SampleOps
from penstock.ops.sample_table import Feature
from penstock.worker.drafting import Drafting, part_of, places_of, within
from penstock.worker.graphs import Runner
from penstock.worker.rows import Rows, upload
from penstock.worker.sampler import MAX_LOGITS_ROWS, LogitsRows
from penstock.worker.step import FAR, Branches, picks_of

WORD = 64
"""Drafts of a tree are at most the bits of a word."""
_EACH = int(Want.EACH)
_PLAIN = ~int(Feature.RANDOM | Feature.FILTER)


class Trees:
    """The trees of a worker's rows in the step that is being made."""

    def __init__(self, rows: Rows, ops: SampleOps, branches: int, levels: int, nodes: int) -> None:
        """`branches`: candidates for a draft's successor, and drafts that are followed in each level. `levels`: the most
        drafts of a path. `nodes`: the drafts of a tree."""
        self._rows, self._ops = rows, ops
        self.branches, self.levels, self.nodes = branches, levels, nodes
        place = torch.arange(WORD, device=rows.device)
        self._chain = (1 << place) | ((1 << place) - 1), place.int(), place.int() + 1
        count = len(rows.tokens)
        self._bits, self._parent, self._depth = (line.repeat(count, 1) for line in self._chain)
        """[row, draft] its ancestors and itself; its parent's line within the segment (0: the root's); its depth (0: none)."""
        self.planted = False
        """Whether the step has any tree that is not a chain, or may have on another pipeline stage."""
        self.paths = torch.empty(0)
        """[S, 1 + longest segment] how many tokens the step's segments with logits rows keep; which lines these are, first."""

    def begin(self, plan: StepPlan) -> None:
        """Makes all drafts of a step chains."""
        self.planted = False
        row = upload(plan.rows[(plan.wants & _EACH) > 0], self._rows.device).long()
        for table, line in zip((self._bits, self._parent, self._depth), self._chain, strict=True):
            table[row] = line

    def split(self, drafting: Drafting, grow: "Callable[[Growth, Drafting], None]") -> Drafting:
        """Has trees grown for the segments that may have some, and returns those that need chains."""
        plan, picked = drafting.plan, drafting.segments
        fits = (drafting.count >= self.branches * (self.levels - 1)) & ~np.isin(picked, plan.masked)
        fits &= self._rows.parameters.features[plan.rows[picked]] & _PLAIN == 0
        if fits.any():
            grown = drafting.part(fits, self.nodes)
            grow(Growth(self, grown, self._ops), grown)
        return drafting.part(~fits, self.levels)

    def plant(self, drafting: Drafting, bits: torch.Tensor, parent: torch.Tensor, depth: torch.Tensor) -> None:
        """Sets the trees [D, nodes] of the segments."""
        self.planted = True
        row = drafting.row.long()
        for table, one in zip((self._bits, self._parent, self._depth), (bits, parent, depth), strict=True):
            table[row, :one.shape[1]] = one.to(table.dtype)

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The trees by rows, which pipeline stages tell each other."""
        return self._bits, self._parent, self._depth

    def of(self, plan: StepPlan) -> Branches | None:
        """The way in which a step's tokens see each other; None if it has no trees."""
        if not self.planted:
            return None
        each = (plan.wants & _EACH) > 0
        pairs = np.stack((np.repeat(plan.rows, plan.counts), within(plan.counts), np.repeat(each, plan.counts)))
        row, offset, inside = upload(pairs.astype(np.int32), self._rows.device).long()
        draft = (inside > 0) & (offset > 0)
        at = row, (offset - 1).clamp(0, WORD - 1)
        shift = torch.where(draft, self._depth[at] - offset, 0)
        return Branches(np.where(each, 1, FAR).astype(np.int32), torch.where(draft, self._bits[at], 0), shift.int())

    def drafts(self, lines: LogitsRows) -> torch.Tensor:
        """[L] the drafts of each segment, at its logits rows but the last. Call before sampling overwrites them."""
        first, count = lines.groups()
        ends = upload(np.stack((first, count)), lines.row.device).long()
        self._laid = int(count.max()), *ends, *places_of(count, lines.row.device)
        _, begin, _, group, offset = self._laid
        at = (lines.position[begin][group] + offset).clamp(max=self._rows.tokens.shape[1] - 1)
        return self._rows.tokens[lines.row.long(), at.long()]

    def walk(self, lines: LogitsRows, drafts: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(order [L], kept [S]): the step's logits rows with those of the accepted path first in each segment, and the number
        of tokens that each segment with logits rows keeps. The path's tokens and positions are written."""
        most, begin, size, group, offset = self._laid
        place = torch.arange(most, device=chosen.device)
        row, nodes = lines.row[begin].long(), place[:-1]
        line = (begin[:, None] + place).clamp(max=len(chosen) - 1)
        bits, parent, depth = (table[row, :most - 1] for table in (self._bits, self._parent, self._depth))
        valid = (nodes < (size - 1)[:, None]) & (depth > 0)
        right = valid & (drafts[line[:, :-1]] == chosen[line].gather(1, parent.long()))
        matched = torch.where(right, 1 << nodes, 0).sum(1, keepdim=True)
        accepted = valid & ((bits & ~matched) == 0)
        kept = 1 + torch.where(accepted, depth, 0).amax(1)
        rank = torch.where(accepted, depth.long(), WORD + nodes).masked_fill(~valid, 3 * WORD)
        places = torch.argsort(torch.cat((torch.zeros_like(size)[:, None], rank), 1), stable=True)
        self.expect(lines)
        self.paths = torch.cat((kept[:, None], places), 1)
        order = begin[group] + places[group, offset]
        position = lines.position[begin][group] + offset.int()
        lines.position.copy_(position)
        self._rows.tokens[lines.row.long(), position.long()] = chosen[order].clamp(min=0)
        return order, kept.int()

    def expect(self, lines: LogitsRows) -> None:
        """Makes room for the `paths` of a step, which one pipeline stage finds."""
        first, count = lines.groups()
        begin = upload(first, lines.row.device).long()
        self._moved = lines.row[begin].long(), lines.position[begin].long() - 1
        self.paths = torch.zeros(len(first), 1 + int(count.max()), dtype=torch.int64, device=begin.device)

    def compact(self, views: Sequence[StateView]) -> None:
        """Moves the cache entries of the accepted paths to where a chain's would be."""
        (row, start), kept, order = self._moved, self.paths[:, :1], self.paths[:, 1:]
        to = torch.arange(1, min(order.shape[1] - 1, self.levels) + 1, device=row.device)[None]
        source = start[:, None] + torch.where(to < kept, order[:, 1:to.shape[1] + 1], to)
        target = start[:, None] + to
        for view in views:
            table = self._rows.device_tables[view.group]
            places = [(table[row[:, None], (at // view.page).clamp(max=table.shape[1] - 1)].long(), at % view.page)
                      for at in (source, target)]
            (page, slot), (page_to, slot_to) = [(one.flatten(), other.flatten()) for one, other in places]
            for field in view.fields.values():
                cells = field.view(torch.uint8) if field.element_size() == 1 else field
                cells[page_to, :, slot_to] = cells[page, :, slot]


class Growth:
    """Trees of B segments, grown level by level from a drafter's logits. A candidate's score is the logarithm of the
    probability of its path, where a seed's noise is part of the logits."""

    def __init__(self, trees: Trees, drafting: Drafting, ops: SampleOps) -> None:
        self._trees, self._drafting, self._ops, self.levels = trees, drafting, ops, trees.levels
        count, device = len(drafting.segments), drafting.rows.device
        self._pool: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Of each level [B, candidates]: tokens, scores, the number of the parent among all candidates."""
        self._size = 0
        self._depths: list[int] = []
        self._front = torch.full((count, 1), -1, device=device)
        """[B, F] the candidates that the next level follows."""
        self._score = torch.zeros(count, 1, device=device)
        self._bits = torch.zeros(count, 1, dtype=torch.int64, device=device)
        """[B, F] their ancestors and they themselves, by the slots of the drafter's own cache."""
        self._token = torch.zeros(0, dtype=torch.int32, device=device)

    def grow(self, states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Adds a level from the hidden states [B x F, W] of the candidates that were followed (or [B, W] for all of them).
        Returns for each of the next ones which of these states is its parent's, [B x branches]."""
        count, width = len(self._score), self._trees.branches
        each = len(states) // count
        row, position = (x.repeat_interleave(each) for x in (self._drafting.row, self._drafting.length + len(self._depths)))
        found = []
        for at in range(0, len(states), MAX_LOGITS_ROWS):
            part = slice(at, at + MAX_LOGITS_ROWS)
            logits = self._ops.perturbed(head(states[part]), self._drafting.rows.parameters.table, row[part], position[part])
            found.append(logits.log_softmax(-1).topk(width))
        value, token = (torch.cat(part).view(count, each, width) for part in zip(*found, strict=True))
        front = self._score.shape[1]
        score = (self._score[:, :, None] + value).flatten(1)
        token = token.expand(-1, front, -1).flatten(1).int()
        self._pool.append((token, score, self._front.repeat_interleave(width, 1)))
        best = score.topk(width)
        source = best.indices // width
        level, slots = len(self._depths), torch.arange(width, device=score.device)
        self._depths.append(score.shape[1])
        self._bits = self._bits.gather(1, source) | (1 << (level * width + slots))
        self._front, self._score, self._token = self._size + best.indices, best.values, token.gather(1, best.indices)
        self._size += score.shape[1]
        return (torch.arange(count, device=score.device)[:, None] * front + source).flatten()

    def follow(self, runner: Runner, offset: int, states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor],
               enter: Callable[[torch.Tensor], None] | None = None) -> None:
        """Grows whole trees and plants them. `states` [B, W]: the drafter's after the last known token. `offset`: where the
        first draft's entry lies in its cache, from the segment's start on. `enter`: takes the states that go with tokens."""
        drafting, width = self._drafting, self._trees.branches
        plan, picked, rows = drafting.plan, drafting.segments, drafting.rows
        source = self.grow(states, head)
        ones, slots = np.ones(len(picked), np.int32), torch.arange(width, device=rows.device)
        for level in range(1, self._trees.levels):
            at = (level - 1) * width
            rows.tokens[drafting.row.long()[:, None], drafting.length.long()[:, None] + at + slots] = self._token
            if enter is not None:
                enter(states[source])
            branches = Branches(-at * ones, self._bits.flatten(), (level - 1 - at - slots).int().repeat(len(picked)))
            part = part_of(plan, picked, plan.starts[picked] + offset + at, width * ones, Want.SAMPLE | Want.EACH)
            _, ends, _ = runner.forward(part, behind=-(offset + at) * ones, branches=branches)
            states = ends[:len(picked) * width].clone()
            source = self.grow(states, head)
        self.plant()

    def plant(self) -> None:
        """Takes the best candidates as the segments' drafts. Parents score no less than their children, and come first."""
        token, score, parent = (torch.cat(part, 1) for part in zip(*self._pool, strict=True))
        nodes, device, size = min(self._trees.nodes, self._size), token.device, self._size
        numbers, count = torch.arange(nodes, device=device), upload(self._drafting.count, device)[:, None]
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        # A segment has no room for more drafts than it verifies: those that are none come last.
        order = order.masked_fill(numbers >= count, size).sort(1).values
        score, token, parent = (F.pad(x, (0, 1), value=value) for x, value in ((score, -torch.inf), (token, 0), (parent, -1)))
        line = torch.zeros(len(order), size + 1, dtype=torch.int64, device=device)
        line.scatter_(1, order, (numbers + 1).expand_as(order))
        line[:, size] = 0
        parent = line.gather(1, parent.gather(1, order) % (size + 1))
        bits = own = (1 << numbers).expand_as(order)
        for _ in self._depths:
            bits = own | torch.cat((torch.zeros_like(bits[:, :1]), bits), 1).gather(1, parent)
        depths = np.repeat(np.arange(1, len(self._depths) + 1), self._depths).astype(np.int32)
        depth = F.pad(upload(depths, device), (0, 1))[order]
        none = score.gather(1, order).isneginf()
        self._trees.plant(self._drafting, torch.where(none, own, bits), parent.masked_fill(none, 0), depth.masked_fill(none, 0))
        counts = np.minimum(self._drafting.count, nodes)
        self._drafting.rows.tokens[self._drafting.places(counts)] = token.gather(1, order)[*places_of(counts, device)]


def heads_of(plan: StepPlan, device: torch.device) -> torch.Tensor:
    """[L] the tokens of a step after which its logits rows are chosen."""
    picks = picks_of(plan)
    return upload((np.cumsum(plan.counts) - plan.counts)[picks.segments].astype(np.int32) + picks.offsets.astype(np.int32),
                  device).long()
