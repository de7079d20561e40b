"""The worker: owns a device's rows, KV cache memory and model, and executes plans in order."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, Logprobs, Masks, StepPlan, StepResult, Want
from penstock.core.state import CacheLayout
from penstock.layers.decoder import Decoder
from penstock.ops.lora import Slabs
from penstock.parallel.pipe import Pipe
from penstock.stores.opening import Behind
from penstock.worker.adapters import Adapters
from penstock.worker.arena import Arena
from penstock.worker.balancing import Balancing
from penstock.worker.clock import Clock, Interval
from penstock.worker.drafting import Drafter, Drafting, Host, LoadedDrafter
from penstock.worker.dummy import dummy_round
from penstock.worker.graphs import Graphs, Runner
from penstock.worker.movers import Movers
from penstock.worker.pooling import REPORTS, Reports
from penstock.worker.rejection import Judging, Rejection, settled
from penstock.worker.returning import Returning
from penstock.worker.rows import Arriving, Rows, to_host
from penstock.worker.sampler import MAX_LOGITS_ROWS, LogitsRows, RowMasks, Sampled, Sampler, Scores, prompts
from penstock.worker.step import fitted, fitted_sizes, picks_of
from penstock.worker.trees import Trees, heads_of
from penstock.worker.verify import STRICT, Verified, Verifier

_SAMPLE, _SCORE, _EACH = int(Want.SAMPLE), int(Want.SCORE), int(Want.EACH)
_ALL = _SCORE | REPORTS
"""Flags of `Want` that need the hidden states of all tokens."""
_DRAFTS = 3
"""Tokens drafted in the rounds of the warm-up."""
_SAME_KERNELS_ABOVE = 8192
"""Number of tokens above which cuBLAS picks no other kernels."""


@cache
def compute_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the one stream that steps run on; a second stream would get its own cuBLAS workspaces."""
    return torch.cuda.Stream(device)


@dataclass(slots=True)
class Forward:
    """The results of a step's forward pass, for the second launch (sampling)."""

    hidden: torch.Tensor
    """Hidden states of all tokens if prompts are scored or hidden states reported; else those of the logits rows."""
    ends: torch.Tensor
    """Hidden states of the logits rows, possibly followed by padding."""
    lines: LogitsRows
    logits: torch.Tensor | None
    """The first MAX_LOGITS_ROWS logits rows, until they are consumed; None if no token is chosen."""
    wants: int
    """All flags of `Want` that a segment has."""


_PICKS_SECONDS = 0.5
"""Between two reports of how often experts were picked."""
_MOST_PROMOTED = 64
"""Experts that change places at a time: some hundred megabytes over PCIe, which the next step waits for."""


@dataclass(slots=True)
class Chosen:
    """The outputs of a step's second launch; their copies to the host are in flight."""

    sampled: list[Sampled] = field(default_factory=list)
    verified: Verified | None = None
    """Set if drafts were verified, or the true length of rows was found out."""
    scores: Scores | None = None
    reports: Reports | None = None


class Launched:
    """A step whose work is enqueued on the device, including the copies of its results to the host."""

    def __init__(self, plan: StepPlan, interval: Interval, movers: Movers | None,
                 choose: Callable[[Masks | None], Chosen] | None, chosen: Chosen | None = None,
                 picks: Callable[[StepResult], None] | None = None) -> None:
        """`choose` enqueues the second launch; None if `chosen` holds its outputs. `picks` adds counts to it."""
        self._plan = plan
        self._interval = interval
        self._movers = movers
        self._choose = choose
        self._chosen = chosen or Chosen()
        self._picks = picks
        self._result: StepResult | None = None
        self.told: Arriving | None = None
        """The drafts that were written, if `StepPlan.tells_drafts`."""
        self.chances: torch.Tensor | None = None
        """`StepResult.chances`, on the host once the device has run the step."""

    @property
    def waits(self) -> bool:
        """Whether the second launch is pending."""
        return self._choose is not None

    def ended(self) -> bool:
        """Whether `result` would return at once."""
        return self._choose is None and self._interval.ended()

    def drafts(self) -> Ints:
        """Waits for the drafts of the plan's `drafted` segments, one after the other, if it `tells_drafts`."""
        assert self.told is not None
        return self.told.numpy()

    def choose(self, masks: Masks | None) -> None:
        """Enqueues the second launch, which samples tokens from the logits. Called once, if `waits`."""
        assert self._choose is not None, "the tokens of this step are already chosen"
        choose, self._choose = self._choose, None
        self._chosen = choose(masks)

    def result(self) -> StepResult:
        """Waits until the device has finished the step, and returns its result."""
        assert self._choose is None, "the step waits for its masks"
        if self._result is None:
            self._interval.wait()
            self._result = self._gather(self._plan, self._chosen)
            self._result.seconds, self._result.kernel_seconds = self._interval.seconds, self._interval.kernel_seconds
            self._result.draft_seconds = self._interval.draft_seconds
            self._result.chances = None if self.chances is None else self.chances.numpy()
            if self._movers is not None:
                # A step without segments waits for loads that the engine needs.
                self._result.load_results, self._result.write_results = self._movers.arrived(wait=self._plan.idle)
            if self._picks is not None:
                self._picks(self._result)
            self._chosen = Chosen()
        return self._result

    @staticmethod
    def _gather(plan: StepPlan, chosen: Chosen) -> StepResult:
        tokens = [sampled.tokens() for sampled in chosen.sampled]
        result = StepResult(plan.id, np.concatenate(tokens) if tokens else np.zeros(0, np.int32), plan.wants & _SAMPLE)
        asked = [sampled.scores for sampled in chosen.sampled if sampled.scores is not None]
        if asked:
            result.logprobs = asked[0].logprobs(*asked[1:])
        verified = chosen.verified
        if verified is not None and (plan.wants & _EACH).any():
            result.kept, picks, scored = verified.kept(), picks_of(plan), result.logprobs
            result.tokens = result.tokens[verified.holds(result.kept, picks.segments,
                                                         plan.starts[picks.segments] + picks.offsets + 1)]
            if scored is not None:
                held = verified.holds(result.kept, scored.segments, scored.positions)
                result.logprobs = Logprobs(*(getattr(scored, one.name)[held] for one in fields(scored)))
        if chosen.scores is not None:
            result.scores = chosen.scores.logprobs()
        if chosen.reports is not None:
            result.hidden, result.labels = chosen.reports.hidden, chosen.reports.labels
        return result


class Worker:
    """Executes plans on one device. Not thread-safe: one thread uses it."""

    def __init__(self, model: Decoder, layout: CacheLayout, max_num_seqs: int, max_model_len: int, device: torch.device,
                 graph_tokens: int = 0, behind: Behind | None = None, drafter: LoadedDrafter | None = None,
                 budget: int = 0, pipe: Pipe | None = None, slabs: Slabs | None = None) -> None:
        """`graph_tokens`: capture steps of up to that many tokens as CUDA graphs; 0 captures nothing. `behind`: where pages go
        besides the device. `drafter`: writes drafts; its states follow those of `model` in `layout`. `budget`: the most tokens
        of a step. `pipe`: the links of a pipeline stage. `slabs`: room for adapters."""
        self.closed = False
        self._picks_due = 0.0
        self._seen: npt.NDArray[np.int64] | None = None
        self._hits = 0
        """Picks of experts that were on the device, of mixtures with experts in host memory."""
        self._slabs = slabs
        self.model = model
        self.layout = layout
        self.arena = Arena(layout, device)
        own = len(model.states)
        states = [*model.states, *(drafter.states if drafter is not None else ())]
        views = self.arena.views(states)
        model.attach(views[:own])
        self._views = views[:own]
        self._loaded_drafter = drafter
        self._follows = drafter is not None and drafter.follows
        self.drafter: Drafter | None = None
        self.returning: Returning | None = None
        self.balancing: Balancing | None = None
        self.movers: Movers | None = None
        try:
            if behind is not None:
                self.movers = Movers(self.arena, behind, device, states)
            if not model.spec.begins:
                # At one address from now on, where graphs find it.
                model.entry(max(fitted(budget), graph_tokens))
            self._set_up(max_num_seqs, max_model_len, device, graph_tokens)
            self.runner.pipe = pipe
            if pipe is not None:
                self.returning = Returning(pipe, self.rows, first=model.spec.begins, last=model.spec.ends,
                                           late=drafter is not None and drafter.late)
            if drafter is not None and drafter.here:
                self.drafter = drafter.start(Host(model, self.rows, layout.page, self.sampler, budget, views[own:],
                                                  partial(self._capture, graph_tokens), self.trees,
                                                  None if self.rejection is None else self.rejection.draw))
        except BaseException:
            self.close()
            raise

    def _set_up(self, max_num_seqs: int, max_model_len: int, device: torch.device, graph_tokens: int) -> None:
        model, layout = self.model, self.layout
        # Only full-attention layers share prefixes, and all of them are in one cache group.
        watched = {work.group for work in model.works if work.ops.shares(work.geometry)}
        self.rows = Rows(max_num_seqs, max_model_len, layout.page, len(layout.groups), device, next(iter(watched), None),
                         model.kernels.bring)
        self.runner = Runner(model, self.rows, layout.page)
        self.runner.adapters = self.adapters = Adapters(max_num_seqs, self._slabs, model.kernels.lora, device)
        self.sampler = Sampler(model.kernels.sample, self.rows, model.kernels.chosen["sample"].capturable, model)
        rule = STRICT if self._loaded_drafter is None else self._loaded_drafter.asked
        self.verifier = Verifier(self.rows, rule)
        self.trees = Trees(self.rows, model.kernels.sample, *rule.tree) if rule.tree is not None else None
        self.rejection = Rejection(self.rows, rule.rejection, model.spec.vocab_size) if rule.rejection else None
        self.clock = Clock(device)
        self.graphs: Graphs | None = None
        self.stream = compute_stream(device) if device.type == "cuda" else None
        self._on_stream = torch.cuda.stream(self.stream)
        if graph_tokens and self.stream is not None:
            self.stream.wait_stream(torch.cuda.default_stream(device))
            self.runner.graphs = self.graphs = self._capture(graph_tokens, model, self.adapters)

    def _capture(self, graph_tokens: int, model: Decoder, adapters: Adapters | None = None) -> Graphs | None:
        if not graph_tokens or self.stream is None:
            return None
        graphs = Graphs(model, self.rows, self.layout.page, len(self.rows.tokens), graph_tokens, self.stream, self.sampler,
                        adapters, self._loaded_drafter is not None)
        graphs.capture()
        return graphs

    def warm_up(self, scratch: int, tokens: int) -> None:
        """Warm-up: reserves `scratch` bytes in the allocator and runs every GEMM shape of up to `tokens` tokens once, because
        allocation and lazy kernel loading synchronise the device."""
        if self.stream is None:
            return
        with torch.inference_mode(), self._on_stream:
            torch.empty(scratch, dtype=torch.uint8, device=self.rows.device)
            captured = [] if self.graphs is None else self.graphs.buckets.all()
            counts = {*fitted_sizes(MAX_LOGITS_ROWS), *(bucket.segments for bucket in captured)}
            lines = {min(MAX_LOGITS_ROWS, count - at) for count in counts for at in range(0, count, MAX_LOGITS_ROWS)}
            draft = None if self._loaded_drafter is None else self._loaded_drafter.model
            for model in [self.model] if draft is None else [self.model, draft]:
                model.warm_up_gemms(fitted_sizes(min(tokens, _SAME_KERNELS_ABOVE)), sorted(lines))
            if self._loaded_drafter is not None:
                for rows in (1 << power for power in range(min(len(self.rows.tokens), tokens // 2).bit_length())):
                    self._launch(dummy_round(rows, min(_DRAFTS, tokens // rows - 1), len(self.rows.tables))).result()
        self.stream.synchronize()

    def _picks(self, result: StepResult) -> None:
        """Adds the drafter's counts, and the experts', if it has some and time has passed: that waits for the device."""
        if self._loaded_drafter is not None:
            result.ahead = self._loaded_drafter.counted
        now = time.monotonic()
        if now < self._picks_due:
            return
        found = self.model.picks
        self._picks_due = math.inf if found is None else now + _PICKS_SECONDS
        if found is None:
            return
        result.picks = counts = found.cpu().numpy()
        self._promote(counts)
        result.expert_hits = self._hits

    def _promote(self, counts: npt.NDArray[np.int64]) -> None:
        """Lets experts in host memory that are picked often change places with others on the device, and counts hits."""
        left = _MOST_PROMOTED
        with torch.inference_mode(), self._on_stream:
            for layer, now, before in zip(self.model.experts, counts, self._seen if self._seen is not None else 0 * counts,
                                          strict=True):
                if layer.residency is None:
                    return
                picked = now - before
                self._hits += int(picked[layer.residency.slot >= 0].sum())
                left -= layer.residency.promote(picked, left)
        self._seen = counts

    def close(self) -> None:
        """Stops the movers' threads and frees all memory. Nothing can be run afterwards."""
        if self.closed:
            return
        self.closed = True
        if self.movers is not None:
            self.movers.close()
        on_device = self.model.device.type == "cuda"
        self.model.detach()
        if self._loaded_drafter is not None and self.drafter is not None:
            self._loaded_drafter.detach()
        vars(self).clear()
        self.closed = True
        if on_device:
            gc.collect()
            torch.cuda.empty_cache()

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Enqueues a plan without waiting for the device: of a masked one the forward pass, `Launched.choose` the rest."""
        with torch.inference_mode(), self._on_stream:
            self.rows.late.clear()
            launched = self._launch(plan)
            while self.rows.late:
                self.rows.settle()
            return launched

    def _launch(self, plan: StepPlan) -> Launched:
        interval, told, chances = self.clock.start(), None, None
        if self.returning is not None and self.model.spec.begins:
            self.returning.take(plan)
        if self.balancing is not None and not plan.idle:
            self.balancing.step()
        if self.drafter is not None and self._loaded_drafter is not None and plan.leave:
            self.drafter.leave(plan.leave)
        self.rows.apply(plan)
        if self.verifier.thinking is not None:
            self.verifier.thinking.enter(plan.enter)
        self.adapters.apply(plan)
        if self.movers is not None:
            self.movers.start(plan)
        self.arena.copy(plan.moves)
        if self.movers is not None:
            self.movers.load(plan)
        idle = plan.idle
        drafting = Drafting(plan, self.rows)
        if self.trees is not None and not idle:
            self.trees.begin(plan)
        if self.drafter is not None and not idle:
            if self.rejection is not None:
                self.rejection.begin(drafting)
            if self._follows and not plan.rests:
                self.rows.before.copy_(self.rows.length)
            said = self.drafter.propose(drafting)
            chances = None if said is None else to_host(said)
        if self.returning is not None or plan.tells_drafts:
            # Drafts are read before the forward pass.
            self.rows.settle()
        if self.returning is not None and len(drafting.segments):
            self.returning.hand_on(drafting, () if self.trees is None else self.trees.tables)
            if self.trees is not None:
                self.trees.planted = True
        if plan.tells_drafts:
            told = Arriving(drafting.written())
        whole = (plan.rests or not self._follows) and not idle and self.verifier.thinking is None
        decoded = self.graphs.decode(plan) if self.graphs is not None and whole else None
        if decoded is not None:
            return Launched(plan, interval.stop(whole=True), self.movers, None, Chosen([Sampled(decoded, None)]), self._picks)
        interval.mark(1)
        if idle:
            interval.mark(2)
            return Launched(plan, interval.stop(), self.movers, None)
        wants = int(np.bitwise_or.reduce(plan.wants))
        branches = self.trees.of(plan) if self.trees is not None else None
        hidden, ends, lines = self.runner.forward(plan, bool(wants & _ALL), branches=branches)
        count = len(lines.rows)
        if self.model.spec.ends:
            first = min(MAX_LOGITS_ROWS, count)
            logits = self._head(plan, ends[:MAX_LOGITS_ROWS], lines.segments[:first])[:first] if count else None
            choose: Callable[[Masks | None], Chosen] = partial(
                self._choose, plan, Forward(hidden, ends, lines, logits, wants), interval)
        else:
            choose = partial(self._passed, lines, interval)
        interval.mark(2)
        masked = len(plan.masked) > 0
        launched = Launched(plan, interval, self.movers, partial(self._choose_masked, choose, interval) if masked else None,
                            None if masked else choose(None), self._picks)
        launched.told, launched.chances = told, chances
        return launched

    def follow(self, meets: bool = False) -> None:
        """Takes part in a step of other engines, without a token. `meets`: its ranks wait for each other then."""
        lockstep = self.model.lockstep
        assert lockstep is not None
        with torch.inference_mode(), self._on_stream:
            lockstep.begin(-meets, True)
            if lockstep.most and not lockstep.awaits:
                self.model.follow()

    def _head(self, plan: StepPlan, hidden: torch.Tensor, segments: npt.NDArray[np.integer]) -> torch.Tensor:
        """The logits of hidden states of these segments, followed by those of padding."""
        return self.model.head(hidden, self.adapters.head(plan, segments, len(hidden)))

    def _passed(self, lines: LogitsRows, interval: Interval, _masks: Masks | None) -> Chosen:
        """The second launch where another stage chooses."""
        if self.trees is not None and self.trees.planted:
            self.trees.expect(lines)
            self._compact(self.trees)
        # Steps that are only measured pass nothing on.
        if self.returning is not None and self.model.spec.begins:
            self.returning.expect(lines)
        interval.stop()
        return Chosen()

    def _choose_masked(self, choose: Callable[[Masks | None], Chosen], interval: Interval, masks: Masks | None) -> Chosen:
        with torch.inference_mode(), self._on_stream:
            if masks is not None:
                interval.resume()
            return choose(masks)

    def _choose(self, plan: StepPlan, forward: Forward, interval: Interval, masks: Masks | None) -> Chosen:
        found, lines, wants = Chosen(), forward.lines, forward.wants
        checks = plan.slack is not None or bool(wants & _EACH)
        trees = self.trees if self.trees is not None and self.trees.planted else None
        reading = trees if trees is not None else self.verifier
        drafts = reading.drafts(lines) if checks and len(lines.rows) else None
        thinking = self.verifier.thinking
        stay = checks or self.returning is not None or thinking is not None
        judging = Judging(self.rejection, self.rows, lines, drafts) if self.rejection and drafts is not None else None
        judging = judging if judging is not None and judging.needed else None
        found.sampled = list(self._sample(plan, forward, masks, stay, drafts, judging))
        if drafts is not None:
            chosen = torch.cat([sampled.chosen for sampled in found.sampled])
            if judging is not None:
                drafts, chosen = judging.settle(chosen)
                settled(found.sampled, chosen)
            walked = None
            if trees is not None:
                chosen, walked = self._walk(trees, plan, forward, drafts, chosen)
                settled(found.sampled, chosen)
            found.verified = self.verifier.verify(plan, lines, drafts, chosen, walked)
        elif thinking is not None and found.sampled:
            thinking.follow(lines, torch.cat([sampled.chosen for sampled in found.sampled]))
        if self.returning is not None and found.sampled:
            self.returning.send([sampled.chosen for sampled in found.sampled])
        if self.drafter is not None and self._follows and not plan.rests:
            self.drafter.follow(plan, forward.ends, lines, found.verified)
        if wants & _SCORE:
            found.scores = prompts(self.model, partial(self._head, plan), forward.hidden, plan, self.rows,
                                   self.runner.builder.size)
        if wants & REPORTS:
            found.reports = Reports(self.model, forward.hidden, plan, self.rows)
        interval.stop()
        return found

    def _walk(self, trees: Trees, plan: StepPlan, forward: Forward, drafts: torch.Tensor,
              chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Brings the accepted paths to the front: of the chosen tokens [L], which are returned with the numbers of kept ones,
        of the states that a drafter reads, and of the cache."""
        order, kept = trees.walk(lines := forward.lines, drafts, chosen)
        heads = heads_of(plan, chosen.device)
        assert len(heads) == len(lines.rows)
        if forward.wants & _ALL:
            forward.hidden[heads] = forward.hidden[heads[order]]
        if self._follows:
            forward.ends = forward.ends[order]
            if len(self.model.tapped):
                self.model.tapped[heads] = self.model.tapped[heads[order]]
        self._compact(trees)
        return chosen[order], kept

    def _compact(self, trees: Trees) -> None:
        if self.returning is not None:
            trees.paths = self.returning.share(trees.paths)
        trees.compact(self._views)

    def _sample(self, plan: StepPlan, forward: Forward, masks: Masks | None, stay: bool,
                drafts: torch.Tensor | None, judging: Judging | None) -> Iterator[Sampled]:
        """Samples the step's logits rows, MAX_LOGITS_ROWS at a time. `judging` verifies `drafts` at their positions."""
        at, line = 0, 0
        logits, forward.logits = forward.logits, None
        for part in forward.lines.parts(MAX_LOGITS_ROWS):
            if logits is None:
                logits = self._head(plan, forward.ends[at:at + MAX_LOGITS_ROWS], part.segments)[:len(part.rows)]
            masked = None
            if masks is not None:
                which = np.flatnonzero(np.isin(part.segments, plan.masked))
                masked = RowMasks(masks.bits[line:line + len(which)], which) if len(which) else None
                line += len(which)
            if drafts is not None and self.verifier.thinking is not None:
                self.verifier.thinking.relax(logits, part, drafts[at:at + len(part.rows)])
            sampled = self.sampler.launch(logits, part, masked, stay, judging is not None)
            if judging is not None and sampled.probabilities is not None:
                judging.take(part, sampled.probabilities)
                sampled.probabilities = None
            yield sampled
            logits, at = None, at + MAX_LOGITS_ROWS
