"""Messages between a frontend and the engine: requests in, updates out. Plain data, encodable by msgspec. `Sequence` is one
continuation of a request, as the engine knows it."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.core.sampling import SamplingParams
from penstock.core.service import BUILT_IN

PROMPT = 0
"""Value of `Span.upto` for the whole prompt. The frontend replaces it by a number of positions."""

WHOLE = 2**31 - 1
"""Value of `Span.upto` for the prompt and all generated tokens."""

DEFAULT_PRIORITY = 35
"""Retention priority of positions outside any live span. TensorRT-LLM's default."""

MARKED_PRIORITY = 70
"""Retention priority of positions before a breakpoint that names none."""

PINNED = 100
"""The highest retention priority: such positions are evicted only after all others."""


class Span(msgspec.Struct, array_like=True, frozen=True):
    """The first `upto` positions of a context should stay in the cache after the request that computed them.

    It begins at 0, because an entry is of use only with all before it. Of several the highest priority counts."""

    upto: int = PROMPT
    """Positions [0, upto); WHOLE for all. Values beyond the context's length mean all of it."""
    priority: int = MARKED_PRIORITY
    """0 to 100: of two positions that could be evicted, the one of lower priority goes first, whichever was used last."""
    seconds: float = 300.0
    """Time to live of the priority after the last use; then DEFAULT_PRIORITY applies. Infinity: no expiry."""


class Medium(msgspec.Struct, array_like=True, frozen=True):
    """An image, sound or video in a prompt: placeholder tokens at [start, start + count) stand for it."""

    start: int
    count: int
    digest: bytes
    """Equal only where the entries at these positions are equal, given equal tokens before them: a hash of the contents and of
    how they were prepared for the model, not of a name or an address."""


class Pool(msgspec.Struct, array_like=True, frozen=True):
    """The vector made of a prompt's hidden states, for a request that generates nothing."""

    kind: str
    """last | mean | cls (the first position's) | all (each position's) | labels (the head's logits after the last position) |
    tokens (the head's logits after each position)."""
    labels: list[int] = []
    """With labels: which logits, by their index in the head; empty for all."""

    @property
    def each(self) -> bool:
        """Whether the result has a vector for each position."""
        return self.kind in ("all", "tokens")

    @property
    def from_end(self) -> bool:
        """Whether only the last position's hidden state matters, so that cached positions need not be computed again."""
        return self.kind in ("last", "labels")


class Request(msgspec.Struct, array_like=True):
    """A checked request, in tokens. The engine knows no text."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    """Sampling parameters, with `max_tokens`, `seed` and `bad_words_token_ids` resolved."""
    eos_ids: list[int] = []
    """The tokens that end the output unless `params.ignore_eos`."""
    arrival: float = 0.0
    """time.time() at submission, in seconds."""
    priority: int = 0
    """Lower is served first among waiting requests, as in vLLM."""
    salt: str = ""
    """Cache namespace: pages are shared only between requests of equal salt."""
    tenant: str = ""
    """Owner of the cached pages, which count against its quota. Equal salts imply equal tenants."""
    retain: list[Span] = []
    """Spans that should stay in the cache, in the order of `upto`."""
    adapter: str = ""
    """The adapter whose weights compute this request, named by a digest of its contents. "" is the bare model."""
    part: bool = False
    """Whether it continues an admitted request, as the rounds of a beam search do. It is neither counted again nor refused."""
    media: list[Medium] = []
    """In the order of `start`; they do not overlap."""
    follows: str = ""
    """The first request of the same batch, which was submitted before: too many are refused together or not at all."""
    shown: list[int] = []
    """Special tokens that appear in the text although others are skipped: the markers by which an answer is parsed."""
    pool: Pool | None = None
    """Pool the prompt's hidden states instead of generating tokens."""
    tier: str = ""
    """Its class of service (`core/service.py`)."""
    deadline: float = 0.0
    """time.time() at which it ends unserved or unfinished; 0: never."""
    beside: float = 0.0
    """Seconds of its promise that the frontend takes: until the submission, and expected behind the engine's first token."""
    waits: bool = False
    """It would rather wait than be refused because its promise cannot be kept."""
    adapted_from: int = 0
    """The first position that the adapter computes (aLoRA); those before are the bare model's. The engine finds it."""
    predicted: bytes = b""
    """Tokens that the client expects to recur in the answer, 4 bytes each in the machine's order; tried as drafts."""

    @property
    def namespace(self) -> str:
        """The adapter whose pages the first page may be shared with; "" of the bare model's."""
        return "" if self.adapted_from else self.adapter

    @property
    def owner(self) -> str:
        """The same for all requests of a client's request with several prompts or beams."""
        return self.follows or self.id

    @property
    def list_words(self) -> int:
        """Device memory that the lists of all its sequences take, in 4-byte words."""
        params = self.params
        if not (params.bad_words_token_ids or params.logit_bias or params.allowed_token_ids or params.min_tokens):
            return 0
        return params.n * params.list_words(len(self.eos_ids) + len(params.stop_token_ids or ()))


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at one position: the token there first, then the most likely ones in order."""

    ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """1 is the most likely token."""


PHASES = ("queued", "cache", "prefill", "decode", "preempted", "grammar")
"""Where a sequence's time goes in the engine: waiting for room or its turn, for pages or another's prefill, computing its
prompt, its answer, waiting after it lost its pages, and waiting for its grammar."""


class Timings(msgspec.Struct, array_like=True, gc=False):
    """When things happened to one sequence, time.time() in seconds; 0.0 where it did not happen."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    preemptions: int = 0
    phases: list[float] = []
    """Seconds by PHASES; together they are the time from `arrival` to `finished`."""
    drafts: int = 0
    """Steps that verified drafts, and how many tokens were verified and kept there; 0 if the frontend ended the sequence."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    """The part of the decode phase in which steps drafted for it."""


class Update(msgspec.Struct, array_like=True, gc=False):
    """News of one sequence of a request: the tokens since the last update, and perhaps its end."""

    request_id: str
    index: int
    """Index among the request's `n` sequences."""
    token_ids: list[int]
    finish_reason: str | None = None
    """stop | length | abort | error; the last update of a sequence has one."""
    stop_reason: int | str | None = None
    """The stop token id or string that ended it; None for end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, if asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Prompt log probabilities from position 1 on, sent once, for sequence 0 only."""
    error: str | None = None
    """With finish_reason error: what went wrong."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed because the cache had them. On a sequence's first update with a token."""
    timings: Timings | None = None
    """On the last update."""
    status: int = 500
    """With finish_reason error: the HTTP status that fits. 400 if the request itself is at fault."""
    cached_by_tier: dict[str, int] | None = None
    """`cached_tokens` by the tier that had them: device, host, disk, remote. Tiers without any may be left out."""
    pooled: bytes | None = None
    """The result of a request with `pool`, on its only update: float32 numbers, of each position one vector after another."""


class TierStats(msgspec.Struct, array_like=True):
    """One place where pages are kept. Counts are since the start of the engine."""

    name: str
    """device | host | disk | remote, as in `Update.cached_by_tier`."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Held by live sequences or kept for later ones."""
    cached_pages: int = 0
    """Pages that the index knows here, of all groups."""
    hit_tokens: int = 0
    """Prompt tokens found here."""
    stored_pages: int = 0
    evicted_pages: int = 0
    bytes_in: int = 0
    """Moved into this tier from another: the device's are loaded, the host's saved."""
    bytes_out: int = 0
    """Moved out of this tier into another."""
    failures: int = 0
    """Pages that could not be read back: missing, short or corrupt. They are computed again."""
    late_loads: int = 0
    """Loads that were given up, because the tier did not answer or not before computing would have been as fast."""
    available: int = 1
    """0 while the tier cannot be used, or is left alone because it did not answer in time; else 1."""


class EngineStats(msgspec.Struct, array_like=True):
    """A snapshot of the engine, sent along with updates and at least once a second while it is alive."""

    time: float = 0.0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    """In units of slabs of the arena, the one thing that all cache groups borrow from."""
    pages_total: int = 0
    kv_usage: float = 0.0
    """Fraction of the arena in use, 0 to 1."""
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests admitted to a row; all of them are looked up in the cache."""
    generation_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` that the cache had."""
    plan_seconds: float = 0.0
    """Total host time in planning and applying since the start."""
    worker_seconds: float = 0.0
    """Total time of the worker in `run` since the start."""
    busy_seconds: float = 0.0
    """Total time with steps in flight since the start: `worker_seconds` and what lies between two steps."""
    kernel_seconds: float = 0.0
    """The part of `worker_seconds` inside the model's forward pass and head."""
    in_flight: int = 0
    grammars_waiting: int = 0
    grammars_compiled: int = 0
    grammars_cached: int = 0
    """Requests whose grammar was compiled before."""
    grammar_seconds: float = 0.0
    """Total time of compiling, on threads beside the loop."""
    masks: int = 0
    """Tokens that were chosen under a mask."""
    mask_seconds: float = 0.0
    """Total time in which masks were computed."""
    forced_tokens: int = 0
    """Tokens that a grammar left no choice about."""
    tiers: list[TierStats] = []
    """The device first, then further and further away."""
    cache_identity: str = ""
    """EngineInfo.cache_identity, once it is known."""
    drafted_tokens: int = 0
    """Drafted tokens that were checked."""
    accepted_tokens: int = 0
    """Drafted tokens that were kept."""
    drafts: int = 0
    """Segments that had drafted tokens."""
    accepted_by_place: list[int] = []
    """Number of times that the first, second, ... draft of a segment was kept."""
    ahead_hits: int = 0
    ahead_tries: int = 0
    """`core/plan.py::StepResult.ahead`"""
    expert_picks: list[list[int]] = []
    """Of each layer with experts, how often each was picked."""
    expert_hits: int = 0
    """Of those picks, how many were of experts on the device; 0 where all are."""
    limits: list[float] = []
    """Seconds of steps by what bound them, as in `scheduler/step.py::LIMITS`."""
    step_time: list[float] = []
    """The model of step time, as `core/steptime.py::StepTime.usual`: weights of TERMS, in seconds."""
    step_time_error: float = 0.0
    """Its recent error: |predicted - measured| / measured, on average."""
    rank_seconds: list[float] = []
    """Of steps, by rank, where there are several."""
    adapters: dict[str, list[int]] = {}
    """Sequences by the digest of their adapter: how many run, how many wait."""

    def count_draft(self, accepted: int) -> None:
        """Counts a segment with drafts, of which the first `accepted` were kept."""
        self.drafts += 1
        self.accepted_tokens += accepted
        self.accepted_by_place += [0] * (accepted - len(self.accepted_by_place))
        for place in range(accepted):
            self.accepted_by_place[place] += 1


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter that is served by a name."""

    name: str
    folder: str
    digest: str
    """Of its contents, as in `Request.adapter`."""


class EngineInfo(msgspec.Struct):
    """Facts about a started engine that a frontend needs. Fixed for the engine's life."""

    model: str
    """The folder or id as the user gave it."""
    architecture: str
    vocab_size: int
    max_model_len: int
    """Prompt plus output, in tokens; of an encoder, which has no output, the prompt."""
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    kv_tokens: int
    """Number of tokens of full context that fit in the arena."""
    pages_total: int
    dtype: str
    device: str
    weight_bytes: int
    step_bytes: int
    """The worst-case step's working memory."""
    kv_bytes: int
    graph_bytes: int = 0
    graphs: int = 0
    graph_seconds: float = 0.0
    compiled: int = 0
    """Kernels that were not in the cache on disk."""
    compile_seconds: float = 0.0
    """Seconds spent compiling them, most of it while weights loaded."""
    kernels: list[tuple[str, str]] = []
    """(operation, implementation) as bound at start."""
    prefix_caching: bool = False
    """Whether requests find what earlier ones computed."""
    cache_identity: str = ""
    """The model's identity in cache keys (`cache/keys.py::root`): of weights and cache entries. "" while it is hashed."""
    tenant_share: float = 1.0
    """The largest fraction of the device's cache that one tenant's pages may occupy."""
    kv_events: dict[str, Any] | None = None
    """Endpoints of the cache's events, as in `GET /kv_event_sources`; None if they are not published."""
    task: str = "generate"
    """generate, or, for a checkpoint without a language model's head: embed or classify."""
    labels: list[str] = []
    encoder: bool = False
    """Tokens see those behind them."""
    pairs: str = "joined"
    """layers/spec.py::ModelSpec.pairs"""
    second: int = 0
    """Ids from this one on name the tokens of a pair's second text (layers/embedding.py::EmbeddingSpec.second); 0: none do."""
    adapters: list[Adapter] = []
    """The adapters that are served from the start."""
    max_loras: int = 0
    """Adapters that the device holds at once; 0: none are served."""
    classes: list[str] = msgspec.field(default_factory=lambda: list(BUILT_IN))
    step_target: float | None = None
    """Target step time in seconds while sequences decode."""
    buckets: list[int] = []
    """Tokens to which steps are padded, ascending."""
    notes: list[str] = []
    """Sentences about decisions that the user may not expect."""


Floats = npt.NDArray[np.float32]


class Sequence:
    """Counts of positions: computed <= planned <= goal. There are no phases: the positions left to plan are `goal - planned`.

    `known` tokens are on the host (`tokens`), `planned` positions in plans, `computed` ones done. Only the scheduler writes."""

    __slots__ = ("acceptance", "cache_state", "cached", "cached_by_tier", "chances", "children", "computed", "constraint",
                 "done", "due", "epoch", "expected", "forecast", "goal", "index", "limit", "mark", "masked", "pages", "passed",
                 "phase", "planned", "pooled", "predicted", "promise", "promised", "prompt_len", "request", "room", "row",
                 "scores", "scoring", "seed", "since", "slack", "stops", "stretched", "timings", "tokens")

    def __init__(self, request: Request, index: int, seed: int, limit: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.limit = limit
        """Maximum tokens, prompt plus output."""
        self.tokens: list[int] = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.goal = self.prompt_len
        """Positions to compute: of known tokens and those that plans in flight sample, but for the last possible one's."""
        self.planned = 0
        """An upper bound while drafts are in flight: rejected drafts are subtracted when their result is applied."""
        self.slack = 0
        """Maximum amount by which `planned` may be too high."""
        self.promised = 0
        """Maximum tokens that plans in flight may add."""
        self.expected: tuple[int, list[int]] | None = None
        """(position, tokens) that the host expects from there on; verified like drafts."""
        self.predicted = 0
        """The place in `request.predicted`, in bytes, up to which the answer follows it. Written by the drafts alone."""
        self.acceptance: float | None = None
        """Estimated probability that a draft is kept if those before it are. Written by the draft policy alone."""
        self.chances: list[float] = []
        """The same for each of its newest drafts, as the drafter itself estimates it, if it does."""
        self.computed = 0
        self.epoch = 0
        """Number of preemptions."""
        self.row = -1
        self.done = False
        self.cached = 0
        """Prompt tokens that the cache had at first admission."""
        self.cached_by_tier: dict[str, int] = {}
        self.promise = request.arrival
        """When its first token is due, time.time() in seconds. Written by the policy alone."""
        self.forecast = 0.0
        """When it was expected at admission, if others waited; else 0. Written by the policy alone."""
        self.stretched = False
        """Whether the prompt is so long that more time was promised than its class has. Written by the policy alone."""
        self.mark = 0
        """Tokens that it had when it was last preempted: it is not again before it has more."""
        self.passed = 0
        """Number of later sequences admitted while this one waited for room."""
        self.children: list[Sequence] = []
        """The request's other sequences, until they are forked off at the end of the prompt."""
        ends = () if request.params.ignore_eos else request.eos_ids
        self.stops = frozenset((*(request.params.stop_token_ids or ()), *ends))
        self.scoring = index == 0 and request.params.prompt_logprobs is not None
        """Whether prompt log probabilities are still to be delivered."""
        self.scores: list[TokenLogprobs] = []
        self.pooled: list[Floats] = []
        """Collected so far for `request.pool`: [lines, width] of each segment."""
        self.masked = False
        """Whether its tokens are chosen under a mask."""
        self.constraint: object = None
        """The state of its grammar constraint. Written by the masker alone."""
        self.pages: list[PageRun] = []
        """The sequence's pages, a run for each cache group; empty before the first grow. Written by the cache alone."""
        self.room = 0
        """Positions below this can be written without asking the cache. Written by the cache alone."""
        self.due = 1 << 62
        """Value of `computed` at which the scheduler must call `Cache.commit` again. Written by the cache alone."""
        self.cache_state: object = None
        """The cache's own record of this sequence, beside its pages."""
        self.timings = Timings(arrival=request.arrival, phases=[0.0] * len(PHASES))
        self.phase = PHASES.index("queued")
        self.since = request.arrival
        """Where its time goes now, and since when."""

    def enter(self, phase: str, now: float) -> None:
        """Its time goes elsewhere from now on."""
        self.timings.phases[self.phase] += max(0.0, now - self.since)
        self.phase, self.since = PHASES.index(phase), max(now, self.since)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def computes_all(self) -> bool:
        """Whether every position must be computed, although the cache may have some."""
        return self.scoring or (self.request.pool is not None and not self.request.pool.from_end)

    def restart(self) -> None:
        """Resets the computed positions, as preemption does. Known tokens stay; plans in flight may still add some."""
        self.epoch += 1
        self.mark = self.known
        self.planned = self.computed = self.slack = 0
        self.row = -1
        self.pooled = []
        if self.scoring:
            self.scores.clear()


class PageRun(msgspec.Struct, eq=False):
    """The pages of one cache group that a sequence holds: `ids[i]` covers positions [i * page, (i + 1) * page).

    Entries below `first` were given back (behind a window); -1 where none is needed, inside a segment of an exact state."""

    ids: list[int] = []
    first: int = 0
