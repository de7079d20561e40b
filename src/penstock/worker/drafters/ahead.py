"""Drafts ahead, by a model on a device of its own (SSD, "speculative speculative decoding", arXiv 2603.03251).

While the target verifies a row's drafts, the draft model drafts on for the outcomes that it thinks likely. An outcome is the
number of drafts that are kept and the token behind them. If the true outcome is among them (a hit), its drafts are there;
otherwise (a miss) they are drafted then. The draft model has rows, pages and a thread of its own: each row of the target that
it follows has a base row here, and branch rows, one for each outcome, which share the base row's pages up to theirs."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from penstock.config.speculation import Speculation
from penstock.core.errors import ConfigError
from penstock.core.plan import Enter, Ints, StepPlan, Want
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, lay_out
from penstock.layers.decoder import Decoder
from penstock.platform.facts import available_memory
from penstock.worker.arena import Arena
from penstock.worker.drafters.model import DraftModel, LoadedDraftModel
from penstock.worker.drafters.translation import Translation
from penstock.worker.drafting import Drafter, Drafting, Host, within
from penstock.worker.graphs import Graphs
from penstock.worker.rows import Arriving, Rows, upload
from penstock.worker.sampler import MAX_LOGITS_ROWS, Sampler

_ROWS = 32
"""The most rows that are followed. Where more run, steps are bound by compute, and drafts do not pay."""
_GRAPH_TOKENS = 256
_TO_SPARE = 2 << 30
"""Bytes of a GPU that graphs and passes may take."""


class LoadedAhead(LoadedDraftModel):
    """A draft model on a device of its own: its memory and its states are not the target's."""

    def __init__(self, model: Decoder, translation: Translation | None, asked: Speculation) -> None:
        super().__init__(model, translation=translation)
        self.own, self.asked, self.model, self.states = model, asked, None, []

    def start(self, host: Host) -> Drafter:
        self.thread = ThreadPoolExecutor(1, "penstock-draft")
        found = Ahead(self, host, self._tokens)
        self.thread.submit(found.warm_up).result()
        return found

    def detach(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        self.own.detach()


def _plan(rows: Ints, starts: Ints) -> StepPlan:
    return StepPlan(0, rows=rows, starts=starts.astype(np.int32))


@dataclass
class _Followed:
    base: int
    """Its row here."""
    length: int
    """Tokens that are known here."""
    read: int = 0
    """Positions whose cache entries are right, drafts under verification included."""
    drafts: list[int] = field(default_factory=list)
    """Drafts under verification."""
    ready: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Drafts by outcome: the number of drafts kept, and the token behind them."""


class Ahead(DraftModel):
    """A draft model that follows rows of one worker. Methods with a leading underscore run in its thread."""

    def __init__(self, loaded: LoadedAhead, host: Host, tokens: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        model, asked, longest = loaded.own, loaded.asked, host.rows.tokens.shape[1]
        device, cuda, self._most, self._outcomes = model.device, model.device.type == "cuda", asked.tokens, asked.ahead
        self._columns, self._private = -(-longest // host.page), (self._most + host.page - 2) // host.page + 1
        each = self._columns + self._outcomes * self._private
        # Nothing is given back before a row leaves, so that all layers' entries are of one kind.
        states = [replace(state, keep=Everything()) for state in model.states]
        layout = lay_out(states, host.page, 0)
        room = torch.cuda.mem_get_info(device)[0] - _TO_SPARE if cuda else available_memory() // 2
        self._count = count = min(_ROWS, len(host.rows.tokens), room // (each * layout.slab_bytes))
        if count < 1:
            raise ConfigError(f"the draft model's cache for one sequence of {longest} tokens does not fit on {device}; lower "
                              "max_model_len, or take a smaller draft model")
        self._arena = Arena(replace(layout, slabs=count * each), device)
        self._pages = torch.arange(count * each, dtype=torch.int32, device=device).view(count, each)
        """[base row, page] those of its context, then those of its branches."""
        rows = Rows(count * (1 + self._outcomes), longest, host.page, 1, device)
        rows.device_tables[0][:count] = self._pages[:, :self._columns]
        self._stream = torch.cuda.Stream(device) if cuda else None
        sampler = Sampler(model.kernels.sample, rows, model.kernels.chosen["sample"].capturable)

        def capture(one: Decoder) -> Graphs | None:
            if self._stream is None or one.kernels.uncapturable():
                return None
            graphs = Graphs(one, rows, host.page, len(rows.tokens), _GRAPH_TOKENS, self._stream, sampler)
            graphs.capture()
            return graphs

        model.attach(self._arena.views(states))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))
        super().__init__(model, Host(host.model, rows, host.page, sampler, host.budget, (), capture), tokens)
        self._synthetic, self._luck = asked.synthetic, np.random.default_rng(0)
        self._loaded, self._queue, self._sent = loaded, loaded.thread, deque[Future[Any]]()
        self._bases, self._followed = list(range(count)), dict[int, _Followed]()
        self._told, self._least = np.zeros((2, len(host.rows.tokens)), np.int32)
        """[the target's row] tokens that the thread was told of, and the fewest that were known when it was asked last."""
        self._unread = dict[int, int]()
        """Passes by which the thread has yet to read what the target's rows entered with. There is one in each step: ranks that
        divide the target draft the same only if the thread's work has the same order on all of them."""

    def leave(self, rows: list[int]) -> None:
        self._unread.update(dict.fromkeys(rows, 0))
        self._submit(self._forget, list(rows))

    def propose(self, drafting: Drafting) -> None:
        """The thread waits for the step before, whose outcome says which drafts are the right ones; this one's launch waits for
        the thread only before its forward pass."""
        for enter in drafting.plan.enter:
            self._least[enter.row] = len(enter.tokens)
            self._submit(self._enter, enter)
            # Besides the pass of its entering.
            self._unread[enter.row] = max(0, len(enter.tokens) - 2) // self._budget
        if len(drafting.segments):
            self._ask(drafting)
        # Other rows' drafts do not wait for long prompts.
        for row in [row for row, passes in self._unread.items() if passes]:
            self._submit(self._read, row)
            self._unread[row] -= 1

    def _ask(self, drafting: Drafting) -> None:
        """Has the thread find the drafts of a step, which are written before its forward pass."""
        plan, table = drafting.plan, drafting.rows
        rows, counts, known = plan.rows[drafting.segments], drafting.count, plan.starts[drafting.segments] + 1
        most = max(1, int((known - self._least[rows]).max()))
        self._least[rows] = known - (0 if plan.slack is None else plan.slack[drafting.segments])
        at = drafting.length[:, None] - torch.arange(most, 0, -1, dtype=torch.int32, device=table.device)
        last = table.tokens[drafting.row.long()[:, None], at.clamp(min=0).long()]
        found = self._submit(self._find, (rows, counts, Arriving(torch.cat((drafting.length[:, None], last), 1))))
        places = drafting.places(counts)

        def write() -> None:
            drafts = found.result()
            while self._sent and self._sent[0].done():
                self._sent.popleft().result()
            # All positions are verified, whether a draft was found for them or not.
            every = chain.from_iterable([*some, *[0] * (count - len(some))] for some, count in zip(
                drafts, counts.tolist(), strict=True))
            table.tokens[places] = upload(np.fromiter(every, np.int32), table.device)
            if any(drafts):
                table.late.append(partial(self._submit, self._draft_ahead, rows.tolist()))

        table.late.append(write)

    def _find(self, asked: tuple[Ints, Ints, Arriving]) -> list[list[int]]:
        """Drafts of so many tokens for rows of the target, given their numbers of known tokens and the last ones of these."""
        rows, counts, arriving = asked
        known = arriving.numpy()
        fresh, self._told[rows] = known[:, 0] - self._told[rows], known[:, 0]
        return self._answer([(row, line[len(line) - new:].tolist(), count) for row, line, new, count in zip(
            rows.tolist(), known, fresh.tolist(), counts.tolist(), strict=True)])

    def _submit(self, work: Callable[[Any], Any], given: Any) -> Future[Any]:
        self._sent.append(self._queue.submit(self._in_thread, work, given))
        return self._sent[-1]

    def _in_thread(self, work: Callable[[Any], Any], given: Any) -> Any:
        with torch.inference_mode(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return work(given)

    def warm_up(self) -> None:
        """Runs every pass once, in the thread."""
        for work, given in ((self._enter, Enter(0, [0, 0], 2, SamplingParams(), 0, [])), (self._answer, [(0, [0], self._most)]),
                            (self._draft_ahead, [0]), (self._forget, [0])):
            self._in_thread(work, given)
        self._loaded.counted = (0, 0)

    def _enter(self, enter: Enter) -> None:
        self._told[enter.row] = len(enter.tokens)
        if self._bases:
            self._followed[enter.row] = one = _Followed(self._bases.pop(), len(enter.tokens))
            self._host.rows.apply(StepPlan(0, enter=[enter._replace(row=one.base)]))
            # Branches draw by the row's own parameters.
            table, first = self._host.rows.parameters.table, self._count + one.base * self._outcomes
            table[first:first + self._outcomes] = table[one.base]
            self._read(enter.row)

    def _forget(self, rows: list[int]) -> None:
        for row in rows:
            one = self._followed.pop(row, None)
            if one is not None:
                self._host.rows.apply(StepPlan(0, leave=[one.base]))
                self._bases.append(one.base)
                one.length = 0

    def _read(self, row: int) -> None:
        """Reads a pass of the tokens with which a row of the target has entered."""
        one = self._followed.get(row)
        if one is not None and (count := min(one.length - 1 - one.read, self._budget)) > 0:
            base, read, some, none = np.array([[one.base], [one.read], [count], [0]], np.int32)
            list(self._over(_plan(base, read), none, none, some, Want.NOTHING))
            one.read += count

    def _answer(self, asked: list[tuple[int, list[int], int]]) -> list[list[int]]:
        """Drafts for rows of the target, of which it has chosen some further tokens; empty for those that are not followed.
        `asked`: (row, tokens, number of drafts)."""
        missed = []
        hits, tries = self._loaded.counted
        for at, (row, fresh, count) in enumerate(asked):
            one = self._followed.get(row)
            if one is None:
                continue
            kept = len(fresh) - 1 if fresh and fresh[:-1] == one.drafts[:len(fresh) - 1] else 0
            drafts = self._right(one, fresh, kept)
            if one.drafts:
                hits, tries = hits + bool(drafts), tries + 1
            one.length += len(fresh)
            one.read = min(one.read, one.length - len(fresh) + kept)
            one.drafts, one.ready = drafts[:count], {}
            self._put([(one.base, one.length - len(fresh) + j, token) for j, token in enumerate(fresh + one.drafts)])
            if not one.drafts and one.length - one.read <= self._budget:
                missed.append(at)
            elif not one.drafts:  # drafting has rested for long
                self._read(row)
        self._loaded.counted = hits, tries
        if missed:
            ones = [self._followed[asked[at][0]] for at in missed]
            drafted = self._chains(*np.array([(one.base, one.length - 1, one.length - 1 - one.read, asked[at][2])
                                             for at, one in zip(missed, ones, strict=True)], np.int32).T)
            for one, drafts in zip(ones, drafted, strict=True):
                one.drafts = drafts
                one.read = one.length + len(drafts) - 1
        return [one.drafts if (one := self._followed.get(row)) else [] for row, *_ in asked]

    def _right(self, one: _Followed, fresh: list[int], kept: int) -> list[int]:
        """The drafts that are there for the outcome of a verification, perhaps none."""
        if self._synthetic is None:
            return one.ready.get((kept, fresh[-1]), []) if kept == len(fresh) - 1 else []
        # Answers mean nothing, so that no token could be foreseen: the imposed share of outcomes is.
        likely = [drafts for (count, _), drafts in one.ready.items() if count == len(fresh) - 1] or list(one.ready.values())
        return likely[0] if likely and self._luck.random() < self._synthetic else []

    def _draft_ahead(self, rows: list[int]) -> None:
        """Drafts for the likely outcomes of the verification of these rows' drafts. The probability of an outcome is estimated
        as that of the drafts kept times that of the token behind them, other than the next draft, as the draft model has it."""
        # A branch may touch so many pages from the one of its token on.
        room = (self._columns - self._private) * self._host.page
        ones = [one for row in rows if (one := self._followed.get(row)) is not None and one.drafts
                and one.length + len(one.drafts) < room]
        if not ones:
            return
        base, length, read, drafted = np.array([(one.base, one.length, one.read, len(one.drafts)) for one in ones], np.int32).T
        kept, token = self._likely(base, length, np.minimum(read, length - 1), drafted)
        row = self._count + base[:, None] * self._outcomes + np.arange(self._outcomes, dtype=np.int32)
        start = length[:, None] + kept
        self._branch(row.ravel(), start.ravel())
        self._put(list(zip(*(values.ravel().tolist() for values in (row, start, token)), strict=True)))
        zeros = np.zeros(row.size, np.int32)
        found = self._chains(row.ravel(), start.ravel(), zeros, zeros + self._most)
        for at, one in enumerate(ones):
            one.read = one.length + len(one.drafts)
            one.ready = {(int(kept[at, j]), int(token[at, j])): found[at * self._outcomes + j] for j in range(self._outcomes)}

    def _likely(self, base: Ints, length: Ints, first: Ints, drafted: Ints) -> tuple[Ints, Ints]:
        """(drafts kept, token behind them) [rows, outcomes] of likely outcomes, after a pass from `first` to the last draft."""
        found: list[list[tuple[float, int, int]]] = [[] for _ in base]
        before, every, counts = [0.0] * len(base), np.arange(len(base)), length + drafted - first
        for part, ends, lines in self._over(_plan(base, first), every, 0 * first, counts, Want.SAMPLE | Want.EACH):
            wanted, of = drafted[part] + 1, counts[part]
            line = np.flatnonzero(within(of) >= np.repeat(of - wanted, of)).astype(np.int32)
            at, place = np.repeat(every[part], wanted), within(wanted)
            for begin in range(0, len(line), MAX_LOGITS_ROWS):
                some = slice(begin, begin + MAX_LOGITS_ROWS)
                own = upload(line[some], ends.device).long()
                row, position = lines.row[own], lines.position[own]
                value = self._host.model.kernels.sample.perturbed(self._chooser.logits(ends[own]),
                                                                  self._host.rows.parameters.table, row, position)
                chance, draft = value.log_softmax(-1), self._host.rows.tokens[row.long(), position.long()].long()
                best, share_of = chance.topk(self._outcomes + 1), chance.gather(1, draft[:, None])[:, 0]
                for one, kept, scores, tokens, other, share in zip(at[some].tolist(), place[some].tolist(), *(
                        each.tolist() for each in (best.values, best.indices, draft, share_of)), strict=True):
                    found[one] += [(before[one] + score, kept, token) for score, token in zip(scores, tokens, strict=True)
                                   if token != other or kept == drafted[one]]
                    before[one] += share
        best_of = np.array([sorted(some, reverse=True)[:self._outcomes] for some in found])[:, :, 1:].astype(np.int32)
        return best_of[:, :, 0], best_of[:, :, 1]

    def _branch(self, rows: Ints, starts: Ints) -> None:
        """Has branch rows begin at these positions: they share their base row's pages up to there, and copy the one there."""
        row, start = upload(np.stack((rows, starts)), self._host.rows.device).long()
        base, branch = (row - self._count) // self._outcomes, (row - self._count) % self._outcomes
        split = start // self._host.page
        own, table = torch.arange(self._private, device=row.device), self._host.rows.device_tables[0]
        mine = self._pages[base[:, None], self._columns + branch[:, None] * self._private + own]
        bytes_of = self._arena.pages[0]
        bytes_of[mine[:, 0].long()] = bytes_of[self._pages[base, split].long()]
        table[row] = table[base]
        table[row[:, None], split[:, None] + own] = mine

    def _chains(self, rows: Ints, starts: Ints, behind: Ints, counts: Ints) -> list[list[int]]:
        """Drafts so many tokens behind the positions `starts` of rows, after reading what is missing before."""
        table, most = self._host.rows.tokens, int(counts.max())
        plan, every = _plan(rows, starts), np.arange(len(rows))
        for _, ends, lines in self._over(plan, every, behind, behind + 1, Want.SAMPLE):
            self._chooser.write(ends, lines.row, lines.position)
        self._chain.run(plan, every, counts - 1, 1)
        row, first = upload(np.stack((rows, starts + 1)), table.device).long()
        found = table[row[:, None], (first[:, None] + torch.arange(most, device=table.device)).clamp(max=table.shape[1] - 1)]
        return [line[:count] for line, count in zip(found.tolist(), counts.tolist(), strict=True)]

    def _put(self, values: Sequence[tuple[int, int, int]]) -> None:
        """Writes tokens: (row, position, token)."""
        if values:
            row, position, token = upload(np.array(values, np.int32).T.copy(), self._host.rows.device)
            self._host.rows.tokens[row.long(), position.long()] = token
