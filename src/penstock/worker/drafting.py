"""The interface of drafters, which write the tokens that a step verifies. They run on the device, before its forward pass.

A step that is planned while the one before still runs does not know that one's tokens; a drafter finds them on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.plan import Ints, StepPlan, Want
from penstock.core.state import StateSpec
from penstock.layers.decoder import Decoder
from penstock.layers.step import StateView
from penstock.worker.graphs import Graphs
from penstock.worker.rows import Rows, upload
from penstock.worker.sampler import MAX_LOGITS_ROWS, LogitsRows, Sampler
from penstock.worker.verify import STRICT, Verified

if TYPE_CHECKING:
    from penstock.worker.trees import Growth, Trees


class Drafting:
    """The input of a drafter: the step's plan, and its D segments whose drafts are missing (possibly none)."""

    def __init__(self, plan: StepPlan, rows: Rows) -> None:
        self.plan = plan
        self.rows = rows
        """Drafts are written to `rows.tokens` [row, position] behind the known tokens: at `length`, `length` + 1, ..."""

    @cached_property
    def segments(self) -> npt.NDArray[np.int64]:
        """[D] indices of the plan's segments."""
        return self.plan.drafted

    @cached_property
    def count(self) -> Ints:
        """[D] number of tokens to draft, at least 1. All of these positions are verified, whether written or not."""
        return self.plan.counts[self.segments] - 1

    @property
    def row(self) -> torch.Tensor:
        """[D] int32, on the device."""
        return self._there[0]

    @property
    def length(self) -> torch.Tensor:
        """[D] int32, on the device: number of known tokens of each row."""
        return self._there[1]

    def part(self, which: npt.NDArray[np.bool_], most: int) -> Drafting:
        """The input for some of the segments [D], of at most so many drafts each."""
        found = Drafting(self.plan, self.rows)
        vars(found).update(segments=self.segments[which], count=np.minimum(self.count[which], most))
        return found

    def written(self) -> torch.Tensor:
        """The drafts of all segments, one after the other, on the device."""
        return self.rows.tokens[self.places(self.count)]

    def places(self, counts: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, positions) of so many tokens behind the known ones of each segment's row, on the device."""
        segment, place = places_of(counts, self.rows.device)
        return self.row[segment].long(), self.length[segment].long() + place

    @cached_property
    def _there(self) -> tuple[torch.Tensor, torch.Tensor]:
        plan, picked = self.plan, self.segments
        slack = np.zeros_like(self.count) if plan.slack is None else plan.slack[picked]
        row, known, unsure = upload(np.stack((plan.rows[picked], plan.starts[picked] + 1, slack)), self.rows.device)
        return row, torch.where(unsure > 0, self.rows.length[row.long()], known)


Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Host:
    """The parts of a worker that drafters work with."""

    model: Decoder
    """The target, which verifies the drafts."""
    rows: Rows
    page: int
    sampler: Sampler
    budget: int
    """The most tokens of a forward pass."""
    views: Sequence[StateView]
    """The drafter's windows into the arena, in the order of `LoadedDrafter.states`."""
    capture: Callable[[Decoder], Graphs | None]
    """Captures another model's steps as CUDA graphs, if the worker captures any."""
    trees: Trees | None = None
    """The trees of the rows, if drafts branch."""
    draw: Draw | None = None
    """Draws drafts in place of the rule by which their targets are sampled, if drafts are verified by rejection."""

    def chains(self, drafting: Drafting, grow: Callable[[Growth, Drafting], None]) -> Drafting:
        """Has trees grown where drafts branch, and returns the segments that need chains, perhaps none."""
        return drafting if self.trees is None or not len(drafting.segments) else self.trees.split(drafting, grow)

    def choose(self, logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """Writes the drafts that follow from logits [S, V] to these positions [S] of rows."""
        self.sampler.choose(logits, row, position)
        if self.draw is not None:
            self.draw(logits, row, position)


class Chooser:
    def __init__(self, host: Host, model: Decoder, size: Callable[[int], int],
                 tokens: tuple[torch.Tensor | slice, torch.Tensor] | None = None,
                 bias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        """`size`: the padded number of lines. `tokens`: those that can be drafted, by the model's numbers and by the target's;
        None: these are the same. `bias`(row, position): what is added to the logits [L, V]."""
        self._host, self._model, self._size, self._tokens, self._bias = host, model, size, tokens, bias

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[L, V] logits of the target's vocabulary that follow from hidden states [L, width], L at most MAX_LOGITS_ROWS."""
        model, target, count = self._model, self._host.model, len(states)
        room = self._size(count) - count
        padded = F.pad(states, (0, 0, 0, room)) if room else states
        # Its head is the target's, or its own.
        whole = target.whole if model.logits is target.logits else model.whole
        # Entries that were never computed may hold anything, but a draft must be a token.
        logits = torch.nan_to_num(whole(model.head(padded))[:count])
        if self._tokens is not None:
            own, numbers = self._tokens
            logits = logits.new_full((count, target.spec.vocab_size), -torch.inf).index_copy_(1, numbers, logits[:, own])
        return logits[:, :target.spec.vocab_size].contiguous()

    def write(self, states: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> None:
        """Chooses the tokens at these positions [L] of rows from hidden states, perhaps followed by padding."""
        for at in range(0, len(row), MAX_LOGITS_ROWS):
            one, place = row[at:at + MAX_LOGITS_ROWS], position[at:at + MAX_LOGITS_ROWS]
            logits = self.logits(states[at:at + len(one)])
            self._host.choose(logits if self._bias is None else logits + self._bias(one, place), one, place)


class LoadedDrafter:
    """A drafter's weights, loaded before the cache is planned. Each file in `drafters/` has one."""

    follows = False
    """Whether its drafter's `follow` is called."""
    asked = STRICT
    """By which rule its drafts are kept."""
    here, late = True, False
    """Whether this pipeline stage drafts; whether the last one does, not the first."""
    counted: tuple[int, int] = (0, 0)
    """Of one that drafts ahead: outcomes for which it had drafts, and all."""

    def __init__(self, model: Decoder | None = None, drafter: Callable[[Host], Drafter] | None = None) -> None:
        """`drafter`: makes one that has neither weights nor states."""
        self._drafter = drafter
        self.model = model
        """The model that drafts, if there is one: its steps take memory and kernels like the target's."""
        self.states: list[StateSpec] = [] if model is None else model.states
        """Its cache states, which share the target's pages."""
        self.computation = "" if model is None else model.computation

    def start(self, host: Host) -> Drafter:
        """Its drafter on the rows of a worker."""
        assert self._drafter is not None
        return self._drafter(host)

    def attached(self, host: Host) -> Decoder:
        """Its model, in the host's arena."""
        assert self.model is not None
        self.model.attach(host.views)
        return self.model

    def detach(self) -> None:
        """Lets go of the arena. It may start again in another."""
        if self.model is not None:
            self.model.detach()


class Drafter(Protocol):
    """Writes draft tokens. `scheduler/drafting.py::DraftPolicy` decides how many, and `verify.py` verifies them."""

    def propose(self, drafting: Drafting) -> torch.Tensor | None:
        """Enqueues the kernels that compute and write the drafts, without synchronising the device. Called before each step's
        forward pass, so that drafters with a cache of their own can follow the rows; pages exist for all of the plan's
        positions. Where `StepPlan.rests`, there is nothing to draft, and what can be left out should be: `follow` is. A drafter
        that says how likely its drafts are kept returns `StepResult.chances`, on the device."""

    def leave(self, rows: list[int]) -> None:  # noqa: ARG002
        """Called before rows are given up, while their tokens are there."""
        return

    def follow(self, plan: StepPlan, ends: torch.Tensor, lines: LogitsRows, verified: Verified | None) -> None:  # noqa: ARG002
        """Enqueues a drafter's part of a step with chosen tokens, if `LoadedDrafter.follows`. `ends`: the logits rows' hidden
        states, perhaps padded; all tokens' are where `Decoder.tap` said. `verified`: None if all are certain."""
        return


def last_of(ends: torch.Tensor, lines: LogitsRows, verified: Verified | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, states) of the hidden states `ends` [logits rows] after which each row's last known token was chosen."""
    if verified is None:
        return lines.row.long(), ends[:len(lines.rows)]
    return verified.row.long(), ends[(verified.first + verified.count - 1).long()]


def part_of(plan: StepPlan, picked: npt.NDArray[np.int64], starts: Ints, counts: Ints, want: Want) -> StepPlan:
    """Returns a plan of other segments of the same rows, which change nothing else."""
    slack = None if plan.slack is None else plan.slack[picked]
    return StepPlan(plan.id, rows=plan.rows[picked], starts=starts.astype(np.int32), counts=counts.astype(np.int32),
                    wants=np.full(len(picked), int(want), np.int32), slack=slack)


def within(counts: Ints) -> Ints:
    """0, 1, ... for each of these counts, one after the other."""
    return (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)


def places_of(counts: Ints, device: torch.device) -> torch.Tensor:
    """[2, sum] int64: for each of so many places of segments, one after the other, the segment and the place in it."""
    return upload(np.stack((np.repeat(np.arange(len(counts)), counts), within(counts))).astype(np.int32), device).long()


def parts(counts: Ints, budget: int) -> Iterator[slice]:
    """Divides segments of so many tokens into runs within the budget."""
    first, total = 0, 0
    for at, count in enumerate(counts.tolist()):
        if total and total + count > budget:
            yield slice(first, at)
            first, total = at, 0
        total += count
    if total:
        yield slice(first, len(counts))


def hide(drafting: Drafting, counts: Ints, mask: int) -> None:
    """Writes so many mask tokens behind the known tokens of the segments' rows."""
    drafting.rows.tokens[drafting.places(counts)] = mask
