"""Reads the flat arrays of a step's result by segment, and takes each segment's tokens into its sequence."""

from collections.abc import Callable
from itertools import accumulate

from penstock.core.plan import NOT_FINITE, Logprobs, StepResult
from penstock.core.request import EngineStats, Floats, Sequence, TokenLogprobs, Update
from penstock.scheduler import pooling
from penstock.scheduler.drafting import Drafts


def tokens(result: StepResult) -> list[list[int]]:
    found, kept = result.tokens.tolist(), result.kept.tolist()
    if len(found) == len(kept) == kept.count(1):
        return [[token] for token in found]
    return [found[end - count:end] for end, count in zip(accumulate(kept), kept, strict=True)]


def lines(given: Logprobs | None, sequences: list[Sequence], asked: str) -> dict[int, list[TokenLogprobs]]:
    """Groups a step's log probabilities by segment, in order of position, with as many alternatives as was `asked`."""
    found: dict[int, list[TokenLogprobs]] = {}
    if given is None:
        return found
    columns = zip(given.segments.tolist(), given.ids.tolist(), given.values.tolist(), given.ranks.tolist(), strict=True)
    for segment, ids, values, ranks in columns:
        width = 1 + (getattr(sequences[segment].request.params, asked) or 0)
        found.setdefault(segment, []).append(TokenLogprobs(ids[:width], values[:width], ranks[:width]))
    return found


_NOT_FINITE_ERROR = ("the model gave no usable next-token scores for this request (not a number, infinite, or every token is "
                     "excluded by its parameters)")


class Taker:
    """Takes what segments add into their sequences, and finds where these end."""

    def __init__(self, stats: EngineStats, drafts: Drafts, begun: Callable[[Sequence, float], None],
                 finish: Callable[[Sequence, Update, float], None], tell: Callable[[Update], None]) -> None:
        """`begun` is told of first tokens; `finish` ends a sequence with its last update; `tell` is given all other updates."""
        self._stats = stats
        self._drafts = drafts
        self._begun = begun
        self._finish = finish
        self._tell = tell

    def vectors(self, sequence: Sequence, lines: Floats | None, now: float) -> None:
        """Processes what a segment of a pooled prompt reports; ends the sequence with the last one."""
        if lines is not None:
            sequence.pooled.append(lines)
        if sequence.computed < sequence.prompt_len:
            return
        update = Update(sequence.request.id, 0, [], finish_reason="stop", cached_tokens=sequence.cached,
                        cached_by_tier=sequence.cached_by_tier)
        found = pooling.pooled(sequence)
        if found is None:
            update.finish_reason, update.error = "error", "the model gave hidden states that are not finite for this prompt"
        else:
            update.pooled = found.astype("<f4").tobytes()
        self._finish(sequence, update, now)

    def drafts(self, sequence: Sequence, drafts: int, own: list[int], gone: bool) -> int:
        """Takes verified drafts; returns the computed positions. `own`, the kept tokens, ends where the sequence does; all but
        the last become known, and `token` handles that. `gone`: it was preempted since, and its counts are 0 again."""
        for j, token in enumerate(own):
            if token in sequence.stops or len(sequence.tokens) + j + 1 >= sequence.limit:
                del own[j + 1:]
                break
        sequence.promised -= drafts
        sequence.tokens += own[:-1]
        if not gone:
            sequence.slack -= drafts
            sequence.planned -= drafts + 1 - len(own)
        # The last of `own` is still promised.
        sequence.goal = min(len(sequence.tokens) + sequence.promised, sequence.limit - 1)
        if len(own) <= drafts:
            sequence.expected = None
        self._stats.drafted_tokens += drafts
        self._stats.count_draft(len(own) - 1)
        timings = sequence.timings
        timings.drafts += 1
        timings.drafted_tokens += drafts
        timings.accepted_tokens += len(own) - 1
        if self._drafts.policy is not None:
            self._drafts.policy.learn(sequence, drafts, len(own) - 1)
        return len(own)

    def token(self, sequence: Sequence, own: list[int], logprobs: list[TokenLogprobs] | None, now: float) -> None:
        """Processes the tokens that a segment adds; all but the last are already known."""
        request, tokens, token = sequence.request, sequence.tokens, own[-1]
        if token == NOT_FINITE:
            self._finish(sequence, Update(request.id, sequence.index, own[:-1], finish_reason="error", error=_NOT_FINITE_ERROR,
                                          logprobs=logprobs[:len(own) - 1] if logprobs else None), now)
            return
        tokens.append(token)
        self._stats.generation_tokens += len(own)
        # Drafts behind the answer's end may have been kept, with log probabilities.
        update, known = Update(request.id, sequence.index, own, logprobs=logprobs and logprobs[:len(own)]), len(tokens)
        if sequence.scoring and sequence.computed >= sequence.prompt_len:
            update.prompt_logprobs, sequence.scoring = sequence.scores, False
        if known - len(own) == sequence.prompt_len:
            sequence.timings.first_token = now
            sequence.enter("decode", now)
            self._begun(sequence, now)
            update.cached_tokens, update.cached_by_tier = sequence.cached, sequence.cached_by_tier
        if token in sequence.stops:
            update.finish_reason = "stop"
            update.stop_reason = token if token in (request.params.stop_token_ids or ()) else None
            self._finish(sequence, update, now)
        elif known >= sequence.limit:
            update.finish_reason = "length"
            self._finish(sequence, update, now)
        else:
            self._tell(update)
