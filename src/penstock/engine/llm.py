"""The offline API: runs the engine in this process and returns whole outputs. `async_llm` is the asyncio counterpart."""

import gc
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import FrameType, TracebackType
from typing import Any

from tqdm import tqdm

from penstock import canary
from penstock.config.resolve import replicas
from penstock.config.schema import engine_options
from penstock.core import service
from penstock.core.errors import ConfigError, RequestError
from penstock.core.request import Adapter, EngineInfo, EngineStats, Pool, Request, Span
from penstock.core.sampling import BeamSearchParams, SamplingParams
from penstock.engine import pooling as pooled
from penstock.engine.adapters import LoRARequest, located
from penstock.engine.engine import Engine
from penstock.engine.inputs import Prompt
from penstock.engine.layout import auto
from penstock.engine.loading import find, inputs_of, load_text, shown
from penstock.engine.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Outputs, RequestOutput
from penstock.engine.pooling import PoolingRequestOutput, Scorer, Text
from penstock.observe.log import LOG
from penstock.text import Tokenizer

Message = Mapping[str, Any]
Output = RequestOutput | PoolingRequestOutput
Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one for each; None for the model's defaults."""
Retention = Span | Sequence[Span] | Sequence[Sequence[Span] | None] | None
"""Spans for all prompts, or a list of them for each."""
Lora = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each."""
Bar = bool | Callable[..., Any]
"""True to show a progress bar, False for none, or a class like tqdm."""

_A_TURN = 64
"""Requests submitted to the engine before each turn: usually more than a step has room for, and less work than a turn."""

_SELDOM, _INTERPRETERS = 1000, 10_000
"""Collections of the middle generation per full garbage collection while a batch runs: some millions of surviving objects. And
more objects than an interpreter freezes itself when it starts (Python 3.12: 375)."""

_FEW = 256
"""The number of requests that may always run at once; fewer would leave a large device idle."""


class LLM:
    """A model ready to generate. Also a context manager; `close` frees the engine."""

    def __init__(self, model: str = canary.NAME, tokenizer: str | None = None, *, layout: str | None = None,
                 **options: Any) -> None:
        """Loads `model`, a Hugging Face folder or a hub id; without one canary, the small model that comes with Penstock.

        `options` are the fields of EngineOptions (config/schema.py). `layout` "auto": ranks and stages of this one engine are
        found by the model's size and the GPUs.
        vLLM's trust_remote_code (a model's own code is never run) and tensor_parallel_size=1 are accepted and change nothing.
        ConfigError for an option that does not exist, naming similar ones; ModelError if the model cannot be used."""
        self.options = engine_options(str(model), {"tokenizer": tokenizer, **options})
        if layout not in (None, "auto"):
            raise ConfigError(f"layout is {layout!r}; possible is auto, or the sizes themselves (tensor_parallel_size ...)")
        if layout is not None:
            ranks, why = auto(asdict(self.options))
            LOG.info("layout: %s", why)
            self.options = replace(self.options, **ranks | {"data_parallel_size": 1})
        if len(replicas(self.options)) > 1:
            raise ConfigError("data_parallel_size needs a server, which sends each request to one of several engines: use "
                              "penstock serve or AsyncLLM; a program of its own can make several LLMs")
        found = find(self.options)
        # Before the weights: this fails in milliseconds.
        self._tokenizer, template = load_text(found, self.options)
        with tqdm(desc="loading weights", unit="B", unit_scale=True, disable=None, leave=False, delay=1.0) as bar:
            self.engine = Engine(self.options, progress=shown(bar))
        self.inputs = inputs_of(found, self._tokenizer, template, self.engine.info, self.options)
        self._outputs = Outputs(self._tokenizer)
        self._count = 0
        self._adapters = {adapter.name: adapter for adapter in self.engine.info.adapters}

    # -- facts

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. ConfigError if the LLM was made without one."""
        if self._tokenizer is None:
            raise ConfigError("there is no tokenizer: the LLM was made with skip_tokenizer_init=True")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that `generate` uses by default: the model's own, from generation_config.json."""
        return self.inputs.default_params()

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, in every tier. Running requests are not disturbed."""
        return self.engine.reset_prefix_cache()

    def start_profile(self) -> None:
        self.engine.start_profile()

    def stop_profile(self, folder: str) -> list[str]:
        """Ends that. Returns the traces in `folder`: one of each engine, unless its ranks are on several machines."""
        return self.engine.stop_profile(folder)

    # -- work

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: Bar = True, *,
                 priority: Sequence[int] | None = None, cache_salt: str | Sequence[str | None] | None = None,
                 retention: Retention = None, lora_request: Lora = None,
                 service_tier: str | Sequence[str | None] | None = None) -> list[RequestOutput]:
        """Completes prompts; the outputs are in the prompts' order. Work begins with those that may have the longest ones.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; for a list of them (a batch)
        `sampling_params` and `priority` may be lists too. Requests share cached prompts only where `cache_salt` is equal (one
        for all, or a list); `retention`: what should stay in the cache, Spans for all or a list of them for each prompt.
        `lora_request` names the adapter that answers, `service_tier` the class of service (one for all, or a list): classes
        share the engine by their weights, and none is refused for its promise. RequestError, naming the prompt, before anything
        runs if one cannot be served. One that fails while it runs ends with finish_reason "error"; the others go on."""
        batch = _batch(prompts)
        texts = [_text(prompt) for prompt in batch]
        return self._run(batch, texts, sampling_params, use_tqdm, True, priority, cache_salt, retention, lora_request,
                         tiers=service_tier)

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params = None,
             use_tqdm: Bar = True, *, chat_template: str | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, tools: Sequence[Mapping[str, Any]] | None = None,
             documents: Sequence[Mapping[str, Any]] | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None, cache_salt: str | Sequence[str | None] | None = None,
             retention: Retention = None, lora_request: Lora = None) -> list[RequestOutput]:
        """Answers a conversation (a list of messages) or several (a list of such lists), written out by the chat template.

        `chat_template` is a template's text or the name of one of the model's; `cache_salt`, `retention` and `lora_request`
        are `generate`'s, the other keywords `ChatTemplate.render`'s. Parts marked with cache_control stay cached
        (docs/cache.md). Each output has a `message`: its text read as content, reasoning and tool calls (docs/tools.md)."""
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = []
        for place, conversation in enumerate(conversations):
            with _naming(place, len(conversations), "conversation"):
                prompts.append(self.inputs.marked(
                    conversation, chat_template=chat_template, tools=tools, add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message, documents=documents,
                    chat_template_kwargs=chat_template_kwargs))
        # The template writes the special tokens itself.
        found = self._run(prompts, [prompt.text for prompt in prompts], sampling_params, use_tqdm, False, None, cache_salt,
                          retention, lora_request, parsed=self._tokenizer is not None,
                          grammar=self.inputs.calling(tools, must=False) if tools and self.inputs.holds(tools) else None)
        for prompt, output in zip(prompts, found, strict=True):
            for answer in output.outputs:
                parser = self.inputs.parser(prompt.text, tools)
                parser.push(answer.text)
                parser.finish()
                answer.message = parser.message()
        return found

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: Bar = False, *,
                    cache_salt: str | None = None) -> list[BeamSearchOutput]:
        """The most probable continuations of each prompt, best first; the rules are those of Hugging Face's generate.

        As `generate` with SamplingParams(beam_width=...), in vLLM's shapes. RequestError as there, and if one fails."""
        found = []
        for output in self.generate(prompts, params.sampling(), use_tqdm, cache_salt=cache_salt):
            failed = next((one.error for one in output.outputs if one.error), None)
            if failed:
                raise RequestError(f"a beam search failed: {failed}", code="generation_failed", status=500)
            found.append(BeamSearchOutput([self._beam(output, one, params) for one in output.outputs]))
        return found

    def _beam(self, output: RequestOutput, one: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        shown = one.token_ids[:-1] if one.finish_reason == "stop" and not params.include_stop_str_in_output else one.token_ids
        tokens = [*output.prompt_token_ids, *shown]
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens)
        return BeamSearchSequence(tokens, one.logprobs or [], one.cumulative_logprob or 0.0, text, one.finish_reason,
                                  one.stop_reason)

    def embed(self, prompts: Prompt | Sequence[Prompt], use_tqdm: Bar = True, *, dimensions: int | None = None,
              normalize: bool | None = None, truncate_prompt_tokens: int | None = None) -> list[PoolingRequestOutput]:
        """The embedding of each text (or list of token ids) as the model's folder pools, `outputs.embedding`."""
        scaled = self.inputs.pooler.normalize if normalize is None else normalize
        return self._pool([Text(prompt) for prompt in _batch(prompts)], pooled.embedding_pool(self.inputs), use_tqdm,
                          lambda vector: pooled.EmbeddingOutput(pooled.embedding(vector, scaled, dimensions).tolist()),
                          truncate_prompt_tokens)

    def encode(self, prompts: Prompt | Sequence[Prompt], use_tqdm: Bar = True, *, pooling: str = "all",
               truncate_prompt_tokens: int | None = None) -> list[PoolingRequestOutput]:
        """Hidden states after the last norm as they are, `outputs.data`: of all tokens, or pooled (last, mean, cls)."""
        if pooling not in ("all", "last", "mean", "cls"):
            raise RequestError(f"pooling is {pooling!r}; possible are all, last, mean and cls", param="pooling")
        return self._pool([Text(prompt) for prompt in _batch(prompts)], Pool(pooling), use_tqdm, pooled.PoolingOutput,
                          truncate_prompt_tokens)

    def classify(self, prompts: Prompt | Sequence[Prompt], use_tqdm: Bar = True) -> list[PoolingRequestOutput]:
        """The probabilities of a classifier's labels, `outputs.probs`."""
        return self._pool([Text(prompt) for prompt in _batch(prompts)], pooled.class_pool(self.inputs), use_tqdm,
                          lambda logits: pooled.ClassificationOutput(pooled.probabilities(logits).tolist()))

    def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str], use_tqdm: Bar = True, *,
              instruction: str | None = None) -> list[PoolingRequestOutput]:
        """Each second text's similarity to the first or its counterpart, by a reranker or embeddings: `outputs.score`."""
        pairs, scorer = pooled.paired(text_1, text_2, ("text_1", "text_2")), Scorer(self.inputs)
        found = self._pool(scorer.texts(pairs, instruction), scorer.pool, use_tqdm, pooled.PoolingOutput)
        scores = scorer.scores(pairs, [one.vector for one in found])
        return [PoolingRequestOutput(str(place), [], pooled.ScoringOutput(score), True) for place, score in enumerate(scores)]

    def _pool(self, texts: Sequence[Text], pool: Pool, use_tqdm: Bar, made: Callable[[pooled.Floats], Any],
              keep: int | None = None) -> list[PoolingRequestOutput]:
        """Runs pooling requests to completion; `made` makes a vector what the call gives. RequestError if one fails."""
        requests = []
        for place, text in enumerate(texts):
            with _naming(place, len(texts), "prompt"):
                requests.append(self.inputs.pooling(str(self._count), text.prompt, pool, keep=keep,
                                                    add_special_tokens=text.add_special_tokens))
            self._count += 1
        results = {request.id: PoolingRequestOutput.empty(request) for request in requests}
        self._finish(requests, results, use_tqdm)
        failed = next((one.error for one in results.values() if one.error), None)
        if failed:
            raise RequestError(f"a prompt could not be pooled: {failed}", code="generation_failed", status=500)
        for one in results.values():
            one.outputs = made(one.vector)
        return list(results.values())

    def close(self) -> None:
        """Stops the engine. The LLM cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- how

    def _run(self, prompts: Sequence[Any], texts: Sequence[str | None], params: Params, use_tqdm: Bar, specials: bool,
             priority: Sequence[int] | None, cache_salt: str | Sequence[str | None] | None,
             retention: Retention, adapters: Lora = None, parsed: bool = False,
             grammar: str | None = None, tiers: str | Sequence[str | None] | None = None) -> list[RequestOutput]:
        """`grammar` holds answers that the parameters do not constrain."""
        count = len(prompts)
        each = zip(prompts, _spread(params, count, "sampling_params"), _spread(priority, count, "priority"),
                   [cache_salt] * count if isinstance(cache_salt, str) else _spread(cache_salt, count, "cache_salt"),
                   _spans(retention, count), _spread(adapters, count, "lora_request"),
                   [tiers] * count if isinstance(tiers, str) else _spread(tiers, count, "service_tier"), strict=True)
        requests = []
        for place, (prompt, wanted, order, salt, retain, lora, tier) in enumerate(each):
            if grammar is not None and (wanted is None or (wanted.structured_outputs is None and wanted.grammar is None)):
                wanted = (wanted or self.inputs.default_params()).replace(grammar=grammar)
            with _naming(place, count, "prompt"):
                requests.append(self.inputs.request(str(self._count), prompt, wanted, add_special_tokens=specials,
                                                    priority=order or 0, salt=salt or "", retain=retain, parsed=parsed,
                                                    adapter=self._adapter(lora)))
                if tier is not None:
                    requests[-1].tier, requests[-1].waits = service.named(tier, self.info.classes), True
            self._count += 1
        results = [RequestOutput.empty(request, text, self._tokenizer) for request, text in zip(requests, texts, strict=True)]
        self._finish(requests, {output.request_id: output for output in results}, use_tqdm)
        return results

    def _adapter(self, asked: LoRARequest | None) -> str:
        """The digest of an adapter, which is read when it is first asked for; "" for none."""
        if asked is None:
            return ""
        known = self._adapters.get(asked.lora_name)
        if known is not None and asked.lora_path in ("", known.folder):
            return known.digest
        folder = located(asked.lora_name, asked.lora_path)
        if known is None or folder != known.folder:
            self._adapters[asked.lora_name] = known = Adapter(asked.lora_name, folder, self.engine.add_adapter(folder))
        return known.digest

    def _finish(self, requests: list[Request], results: Mapping[str, Output], use_tqdm: Bar) -> None:
        """Runs `requests` to completion. On any exception, Ctrl-C included, they are aborted in the engine."""
        bar_of = use_tqdm if callable(use_tqdm) else tqdm
        # The longest possible output goes first, so that it does not end last.
        waiting, engine = deque(sorted(requests, key=lambda one: (one.priority, -self._most(one)))), self.engine
        # So many at once that all could end with the longest. More would leave it to run almost alone in the end, and while
        # steps are small, each token costs many times as much.
        lengths = [self._most(request) for request in requests]
        room = max(_FEW, -(-sum(lengths) // max(lengths, default=1)))
        try:
            with (bar_of(total=len(requests), desc="prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm) as bar,
                  _interrupts_between_turns() as interrupt, _old_objects_at_rest()):
                meter = _Meter(bar)
                while waiting or len(self._outputs):
                    self._submit(waiting, room)
                    deltas = self._outputs.push(engine.turn())
                    ended = []
                    for delta in deltas:
                        output = results[delta.request_id]
                        output.add(delta)
                        if output.finished:
                            ended.append(output)
                    meter.count(sum(len(delta.token_ids) for delta in deltas), ended)
                    aborts = self._outputs.take_aborts()
                    if aborts:
                        engine.abort(aborts)
                    interrupt()
            self._drain()
        except BaseException:
            engine.expect(0)
            for request in requests:
                self._outputs.forget(request.id)
            engine.abort([request.id for request in requests])
            self._drain()
            raise

    def _most(self, request: Request) -> int:
        """The most tokens that an answer may have; the context length bounds requests without max_tokens."""
        most, longest = request.params.max_tokens or 0, self.info.max_model_len
        return longest if len(request.prompt_ids) + most >= longest else most

    def _submit(self, waiting: deque[Request], room: int) -> None:
        """Submits some requests to the engine, at most `room` in all and no more than its queue takes. Submission is
        incremental, so that the device works on the first requests meanwhile."""
        for _ in range(min(_A_TURN, len(waiting), room - len(self._outputs))):
            request = waiting[0]
            request.arrival = time.time()
            try:
                self.engine.submit(request)
            except RequestError as error:
                if error.code == "queue_full" and len(self._outputs):
                    break
                raise
            self._outputs.register(request)
            waiting.popleft()
        self.engine.expect(min(len(waiting), room - len(self._outputs)))

    def _drain(self) -> None:
        """Runs the engine until the aborted requests have ended."""
        while self.engine.busy:
            self.engine.turn()


class _Meter:
    """The progress bar's statistics: finished prompts, and input and output tokens per second."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar
        self._start = self._shown = time.perf_counter()
        self._read = self._written = 0

    def count(self, tokens: int, ended: Sequence[Output]) -> None:
        """Updates the bar after a turn that produced `tokens` tokens and finished `ended`."""
        self._written += tokens
        for output in ended:
            self._read += len(output.prompt_token_ids)
            self._bar.update()
        now = time.perf_counter()
        if now - self._shown > 0.2 or self._bar.n == self._bar.total:
            self._shown, seconds = now, now - self._start
            self._bar.set_postfix_str(f"in {self._read / seconds:.0f}, out {self._written / seconds:.0f} tokens/s")


@contextmanager
def _interrupts_between_turns() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C to the points between engine turns: the yielded function raises it. A second Ctrl-C raises at once.

    Active only in the main thread while Python's default SIGINT handler is installed."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is not signal.default_int_handler:
        yield lambda: None
        return
    asked: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    def interrupt() -> None:
        if asked:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _old_objects_at_rest() -> Iterator[None]:
    """Leaves present objects out of collections in the block, and makes full ones rare: each would take longer than a step."""
    first, second, third = gc.get_threshold()
    if third >= _SELDOM or gc.get_freeze_count() > _INTERPRETERS:
        # Another caller is inside such a block, or the program has frozen its objects itself.
        yield
        return
    gc.set_threshold(first, second, _SELDOM)
    gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)
        # Else the batch's young collections would bring a full one, of everything, right behind it.
        gc.collect()
        gc.unfreeze()


@contextmanager
def _naming(place: int, count: int, what: str) -> Iterator[None]:
    """Adds to a RequestError from inside which of several inputs it is about."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{what} {place} of {count}: {error.message}", param=error.param, code=error.code,
                           status=error.status) from None


def _batch(prompts: Any) -> list[Any]:
    """The prompts of a call as a list; a single prompt becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [prompts] if prompts and type(prompts[0]) is int else prompts


def _text(prompt: Any) -> str | None:
    found = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return found if isinstance(found, str) else None


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for all, or a list with one for each."""
    if value is None or isinstance(value, SamplingParams | LoRARequest):
        return [value] * count
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be one for all or a list with one for each prompt, got {type(value).__name__}",
                           param=name)
    if len(value) != count:
        raise RequestError(f"there are {count} prompts, but {len(value)} {name}; give one for all, or one for each", param=name)
    return list(value)


def _spans(retention: Retention, count: int) -> list[Sequence[Span]]:
    """The spans of each prompt: the same for all, or a list of them for each."""
    if retention is None:
        return [()] * count
    given = [retention] if isinstance(retention, Span) else list(retention)
    spans = [span for span in given if isinstance(span, Span)]
    return [spans] * count if len(spans) == len(given) else [each or () for each in _spread(given, count, "retention")]
