"""Drafts by a small model with the same tokenizer, one token after another.

Its cache entries are further states of the target's pages, so that allocation, prefix cache, tiers and preemption treat both
alike. It samples with the parameters, seeds and positions of the rows: the noise of sampling depends on (seed, position) alone,
so that at a temperature above 0 both models draw the same token wherever their distributions allow it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.core.state import Everything, StateSpec, Window
from penstock.layers.decoder import Decoder
from penstock.layers.embedding import Embedding
from penstock.layers.step import Step
from penstock.worker.drafters.translation import Translation
from penstock.worker.drafting import Chooser, Drafter, Drafting, Host, LoadedDrafter, hide, part_of, parts, within
from penstock.worker.graphs import Runner
from penstock.worker.rows import upload
from penstock.worker.sampler import LogitsRows
from penstock.worker.step import Bucket, Parts, StepBuilder, picks_of
from penstock.worker.trees import Growth

_BEHIND = 16
"""Single tokens that the draft model may lag behind a row that is not drafted for: it then reads all of them at once."""
_CAPTURED = 64
"""Rows up to which passes are captured. Where more are drafted for, the device is busy for longer than launches take."""


def lag(states: Sequence[StateSpec]) -> int:
    """The most that a model of such states may lag behind a row, whose pages it still writes; 0 if it cannot draft."""
    widths = [state.keep.width for state in states if isinstance(state.keep, Window)]
    if any(not isinstance(state.keep, Everything | Window) for state in states):
        return 0
    most = min((_BEHIND, *(width - 2 for width in widths)))
    return most if most >= 3 else 0


class LoadedDraftModel(LoadedDrafter):
    def __init__(self, model: Decoder, mask: int | None = None, translation: Translation | None = None) -> None:
        """`mask`: the token in whose place the model predicts one, if it drafts all tokens in one pass. `translation`: from the
        target's tokenizer to the model's, if that is another."""
        super().__init__(model)
        self._mask = mask
        self._tokens: tuple[torch.Tensor, torch.Tensor] | None = None
        if translation is not None:
            assert isinstance(model.embedding, Embedding)
            model.embedding.reads = translation.reads.to(model.device)
            self._tokens = translation.own.to(model.device), translation.targets.to(model.device)

    def start(self, host: Host) -> Drafter:
        model = self.attached(host)
        return DraftModel(model, host, self._tokens) if self._mask is None else ParallelModel(model, host, self._mask)


class Chain:
    """Passes of a model that draft one token a row each: the host prepares them once, and the device moves on from one to the
    next. On a GPU a pass is one CUDA graph: forward pass, choice of the tokens, and moving on."""

    def __init__(self, runner: Runner, read: Callable[[Step, torch.Tensor, torch.Tensor], None], host: Host) -> None:
        """`read`(step, row [S], position [S]): runs the model on segments of one token, and writes the tokens that it chooses
        to these places of rows; a row of -1 has all its drafts."""
        self._runner, self._read = runner, read
        # A head that is whole may end in the target's logits, which ranks divide.
        alone = runner.model.group is None and (host.model.group is None or not runner.model.spec.drafts)
        captured = host.sampler.capturable and host.draw is None and alone
        graphs = [runner.graphs] * 2 if captured and runner.graphs is not None else []
        self._moves = not any(work.ops.invariant or work.geometry.stripe.of > 1 for work in runner.model.works)
        """Whether work lists can be corrected on the device."""
        # A graph cannot be launched again before it has ended: two take turns.
        self._graphs = [one.passes(partial(self._pass, one.builder), _CAPTURED) for one in graphs]

    def run(self, plan: StepPlan, picked: npt.NDArray[np.int64], passes: Ints, first: int = 0) -> None:
        """Drafts so many tokens [D] for segments of a plan that begin at their rows' last known token, one a pass. `first`: the
        first pass reads the token so far behind the last known one."""
        more, ones = np.maximum(passes - 1, 0).astype(np.int32), np.ones_like(passes)
        for place in range(int(passes.max(initial=0))):
            if place == 0 or not self._moves:
                # Where segments move on, the last pass is prepared, and the first begins so many positions before it.
                at = more if self._moves else np.minimum(more, place)
                part = part_of(plan, picked, plan.starts[picked] + first + at, ones, Want.SAMPLE)
                if self._moves:
                    part.slack = more if part.slack is None else part.slack + more
                again = self._prepare(part, *((-first * ones, passes) if self._moves else (-first - at, passes > place)))
            again[place % len(again)]()

    def _prepare(self, plan: StepPlan, behind: Ints, passes: npt.NDArray[np.integer]) -> list[Callable[[], None]]:
        """A pass, perhaps in two copies."""
        graphs, builder, picks, left = self._runner.graphs, self._runner.builder, picks_of(plan), passes.astype(np.int32)
        bucket = None if graphs is None else graphs.buckets.of(plan, len(plan.rows))
        if graphs is not None and bucket is not None and self._graphs and bucket in self._graphs[0]:
            graphs.builder.fill(plan, bucket, picks, behind=behind, passes=left)
            return [copy[bucket].replay for copy in self._graphs]
        bucket = builder.bucket(plan, len(plan.rows))
        return [partial(self._pass, builder, bucket, builder.fill(plan, bucket, picks, behind=behind, passes=left))]

    def _pass(self, builder: StepBuilder, bucket: Bucket, parts: Parts) -> None:
        _, row, position = builder.choice(parts, bucket.segments)
        self._read(builder.step(bucket, parts), row, position)
        if self._moves:
            builder.move(bucket, parts)


class DraftModel(Drafter):
    def __init__(self, model: Decoder, host: Host, tokens: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """`tokens`: as in `Chooser`."""
        self._runner = Runner(model, host.rows, host.page, host.capture(model))
        self._chooser = Chooser(host, model, self._runner.builder.size, tokens)
        self._host = host
        self._chain = Chain(self._runner, self._further, host)
        self._budget = host.budget
        self._lag = lag(model.states)
        # The model makes up for so many positions behind a rest. Pages that a window has left may have been given back.
        self._backlog = self._lag if any(isinstance(state.keep, Window) for state in model.states) else self._budget - 1
        self._behind = np.zeros(len(host.rows.tokens), np.int32)
        """[row] positions before the row's last known token whose entries are missing."""

    def propose(self, drafting: Drafting) -> None:
        plan, picked = drafting.plan, drafting.segments
        self._behind[[enter.row for enter in plan.enter]] = 0
        if plan.rests:
            self._behind[plan.rows] = np.minimum(self._behind[plan.rows] + plan.counts, self._backlog)
            return
        self._follow(plan, np.setdiff1d(np.arange(len(plan.rows)), picked))
        drafting = self._host.chains(drafting, self._grow)
        if len(drafting.segments):
            self._first(drafting, self._missing(plan, drafting.segments))

    def _grow(self, growth: Growth, drafting: Drafting) -> None:
        """Drafts trees for the segments. The entries of their drafts are not where those of kept tokens belong."""
        plan, picked = drafting.plan, drafting.segments
        behind = self._missing(plan, picked)
        states = torch.cat([ends[:len(lines.rows)].clone()
                            for _, ends, lines in self._over(plan, picked, behind, behind + 1, Want.SAMPLE)])
        growth.follow(self._runner, 1, states, self._chooser.logits)
        self._behind[plan.rows[picked]] = growth.levels

    def _missing(self, plan: StepPlan, picked: npt.NDArray[np.int64]) -> Ints:
        """The positions that the model is behind in these segments, at most to the beginnings of their rows."""
        sure = plan.starts[picked] if plan.slack is None else plan.starts[picked] - plan.slack[picked]
        return np.minimum(self._behind[plan.rows[picked]], sure)

    def _first(self, drafting: Drafting, behind: Ints) -> None:
        """Drafts for the segments, after reading what the model is `behind`."""
        plan, picked, count = drafting.plan, drafting.segments, drafting.count
        for _, ends, lines in self._over(plan, picked, behind, behind + 1, Want.SAMPLE):
            self._chooser.write(ends, lines.row, lines.position)
        self._chain.run(plan, picked, count - 1, 1)
        # If all drafts are kept, the last of them was never an input of the draft model.
        self._behind[plan.rows[picked]] = 1

    def _further(self, step: Step, row: torch.Tensor, position: torch.Tensor) -> None:
        """Reads one draft of each row, and writes the next one."""
        self._chooser.write(self._runner.model.forward(step), row, position)

    def _follow(self, plan: StepPlan, others: npt.NDArray[np.int64]) -> None:
        """Reads the segments that are not drafted for: prompts at once, single tokens several at a time."""
        rows, behind = plan.rows[others], np.minimum(self._missing(plan, others), self._budget - plan.counts[others])
        due = (plan.counts[others] > 1) | (behind + 1 >= self._lag)
        self._behind[rows] = np.where(due, 0, behind + 1)
        picked, behind = others[due], behind[due]
        for _ in self._over(plan, picked, behind, plan.counts[picked] + behind, Want.NOTHING):
            pass

    def _over(self, plan: StepPlan, picked: npt.NDArray[np.int64], behind: Ints, counts: Ints,
              want: Want) -> Iterator[tuple[slice, torch.Tensor, LogitsRows]]:
        """Reads so many tokens of these segments' rows, from so many before the last known ones on: yields some of the
        segments at a time, the hidden states of their logits rows, and those."""
        for part in parts(counts, self._budget):
            some = part_of(plan, picked[part], plan.starts[picked[part]] - behind[part], counts[part], want)
            _, ends, lines = self._runner.forward(some, behind=behind[part])
            yield part, ends, lines


class ParallelModel(DraftModel):
    """A draft model trained to predict several tokens in one pass (PARD, An et al. 2025): behind the last known token it reads
    masks, each of which predicts the token after it. Their cache entries are of no use: the next pass begins where this did."""

    def __init__(self, model: Decoder, host: Host, mask: int) -> None:
        super().__init__(model, host)
        self._mask = mask

    def _first(self, drafting: Drafting, behind: Ints) -> None:
        plan, picked, count = drafting.plan, drafting.segments, drafting.count
        hide(drafting, count - 1, self._mask)
        whole = behind + count
        for part, ends, lines in self._over(plan, picked, behind, whole, Want.SAMPLE | Want.EACH):
            at = np.flatnonzero(within(whole[part]) >= np.repeat(behind[part], whole[part])).astype(np.int32)
            drafted = upload(at, ends.device).long()
            self._chooser.write(ends[drafted], lines.row[drafted], lines.position[drafted])
        self._behind[plan.rows[picked]] = count
