"""Input processing: turns a prompt and parameters into a request in tokens (encoding, checks, defaults, limits).

Runs in the frontend, so that a bad request is refused before it reaches the engine."""

import random
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.checkpoint import Pooler
from penstock.config.schema import GENERATION_DEFAULTS
from penstock.core.errors import ConfigError, RequestError, UnsupportedError
from penstock.core.request import EngineInfo, Pool, Request, Span
from penstock.core.sampling import MAX_LOGPROBS, SamplingParams
from penstock.dialects.choice import Choice, choose
from penstock.dialects.parser import Parser, opened
from penstock.dialects.schemas import Tools
from penstock.dialects.writing import structure, triggered
from penstock.engine.retention import Marked, Side, check_spans, resolve_spans, spans_of, written
from penstock.engine.work import checkpoint
from penstock.grammar.definition import define, node_grammar
from penstock.text import ChatTemplate, Tokenizer
from penstock.text.template import check_variables

Prompt = str | Sequence[int] | Mapping[str, Any] | Marked
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; these may have a cache_salt; a text with cache marks."""

CHARACTERS_A_TOKEN = 8
"""Upper bound of a token's mean length in most texts. Texts longer than this times the context are tokenized in steps."""

LEAST_BEGINNING = 64 << 10
"""Characters up to which a text is tokenized in one go, however short the context is."""

CUT_TOKENS = 64
"""The most tokens by which cutting a text can change the count of its beginning."""

BAD_WORD_CHARACTERS = 64 << 10
"""The most characters of all bad words of a request."""

WORDS_AT_ONCE = 64
"""Bad words that are tokenized between two checks for cancellation."""


class Inputs:
    """Makes requests for one engine. Its only state is the generator of seeds; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, info: EngineInfo,
                 generation_config: Mapping[str, Any] | None = None, eos_ids: Iterable[int] = (),
                 seed: int | None = None, max_logprobs: int = MAX_LOGPROBS, dialect: Choice | None = None,
                 constrain_tools: bool = False, pooler: Pooler | None = None, reranker: str = "none") -> None:
        """`generation_config`: the model's defaults, empty if not wanted. `eos_ids`: of the model's files, else the
        generation_config's and the tokenizer's. `seed` makes the drawn seeds repeatable. `max_logprobs` bounds a request's
        alternatives. `dialect`: how the model writes reasoning and tool calls, by default what its template shows.
        `constrain_tools`: calls that the model makes unasked are held to their schemas; ConfigError where its dialect cannot.
        `pooler`: how the model embeds, `reranker` whose prompts it scores pairs with, "none" if it does not."""
        self.pooler = pooler or Pooler()
        self.reranker = reranker
        self.tokenizer = tokenizer
        self.template = template
        self.info = info
        config = generation_config or {}
        self.defaults = {name: config[key] for key, name in GENERATION_DEFAULTS.items() if config.get(key) is not None}
        self.eos_ids = list(dict.fromkeys(eos_ids)) or _eos_ids(config, tokenizer)
        self.max_logprobs = max_logprobs
        self._random = random.Random(seed)
        self.choice = dialect or choose(template.sources if template is not None else ())
        self.constrain_tools = constrain_tools
        if constrain_tools and triggered(self.choice.dialect, Tools([{"name": "tool"}]), True) is None:
            raise ConfigError(f"constrain_tools is auto, but {self.choice.why}; leave it off, or name the model's dialect with "
                              "--tool-call-parser")
        self._shown = [token for marker in self.choice.dialect.markers() if tokenizer is not None
                       and (token := tokenizer.token_id(marker)) is not None and token in tokenizer.special_ids]

    def default_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults."""
        return SamplingParams(**self.defaults)

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """A conversation as a prompt's text, to be encoded without special tokens added. `how` is `marked`'s."""
        return self.marked(messages, **how).text

    def marked(self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None,
               tools: Sequence[Mapping[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
               **how: Any) -> Marked:
        """`render` with the breakpoints of the conversation's cache_control marks. `how` is passed to `ChatTemplate.render`."""
        if self.template is None:
            raise RequestError("there is no tokenizer (skip_tokenizer_init), so no chat template; send token ids",
                               param="messages", code="no_tokenizer")
        template = self.template if chat_template is None else self.template.using(chat_template)
        variables = chat_template_kwargs or {}
        check_variables(variables)
        return written(lambda messages, tools: template.render(messages, tools, **how, **variables), messages, tools)

    def parser(self, prompt: str | None, tools: Sequence[Mapping[str, Any]] | None = None) -> Parser:
        """A parser for the answer to a prompt. Without `tools`, tool calls are plain text."""
        return Parser(self.choice.dialect, tools, prompt=prompt, calls=bool(tools))

    def holds(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether calls of these tools that the model makes by itself must fit their schemas."""
        return bool(tools) and (self.constrain_tools or any((tool.get("function") or tool).get("strict") for tool in tools))

    def calling(self, tools: Sequence[Mapping[str, Any]], *, must: bool, parallel: bool = True) -> str:
        """The grammar, for SamplingParams, of an answer that `must` call these tools in the model's dialect, or may: free text,
        and calls that fit their schemas once they have begun. RequestError for a model whose dialect is not known."""
        dialect, schemas = self.choice.dialect, Tools(tools)
        node = triggered(dialect, schemas, parallel) if not must else \
            structure(dialect, schemas, parallel) if dialect.written is not None else None
        if node is None or self.tokenizer is None:
            what, hint = ("a tool call cannot be forced", "") if must else (
                "strict tools cannot be enforced", ", or leave strict and format out")
            raise UnsupportedError(f"{what}: {self.choice.why}. Name the model's dialect with --tool-call-parser{hint}",
                                   "tool_choice" if must else "tools")
        special = {name: token for token in self.tokenizer.special_ids if (name := self.tokenizer.token_name(token))}
        return node_grammar(node, special)

    def thinking(self, prompt: str, budget: int | None, off: bool = False) -> dict[str, Any]:
        """The sampling parameters of an answer that begins with thinking, as the prompt's end shows, or may begin with it.
        `off`: was switched off. RequestError for a `budget` of thinking tokens (None: no limit) that cannot be enforced."""
        reasoning = self.choice.dialect.reasoning
        if budget is not None and (reasoning is None or self.tokenizer is None):
            raise UnsupportedError("max_thinking_tokens cannot be honoured: this model's way to begin and end its thinking is "
                                   "not known; leave it out, or name it with --reasoning-parser", "max_thinking_tokens")
        # Where the end of the prompt has closed the thinking section, the answer has none.
        if reasoning is None or self.tokenizer is None or prompt.rstrip().endswith(reasoning.end):
            return {}
        found = {"reasoning_end_ids": self.tokenizer.encode(reasoning.end[0], add_special_tokens=False),
                 "max_thinking_tokens": budget}
        if opened(self.choice.dialect, prompt):
            return found
        start = self.tokenizer.encode(reasoning.start[0], add_special_tokens=False)
        if budget is None and (off or len(start) > 1):
            # Text that could be the answer's own: a constrained answer begins at once.
            return {}
        return {**found, "reasoning_start_ids": start}

    def request(self, name: str, prompt: Prompt, params: SamplingParams | None = None, *, add_special_tokens: bool = True,
                priority: int = 0, salt: str = "", tenant: str = "", retain: Sequence[Span] = (), keep: int | None = None,
                side: Side = "left", parsed: bool = False, adapter: str = "", predicted: str = "") -> Request:
        """A request ready for the engine. RequestError for everything that cannot be honoured.

        `add_special_tokens` applies to text. `salt`, `tenant`, `retain` and `adapter` are the Request's. `keep` keeps so many
        of the prompt's tokens (vLLM's truncate_prompt_tokens), -1 as many as fit, the rest is cut off at `side`; marks are the
        whole prompt's. `parsed`: the answer shows the dialect's markers. `predicted`: a text to try as drafts."""
        if self.info.task != "generate":
            raise UnsupportedError("this model cannot generate: its checkpoint has no language model's head, only what is "
                                   f"needed to {self.info.task}", "model")
        params = _checked(params if params is not None else self.default_params())
        if isinstance(prompt, Mapping):
            prompt, salt = _from_mapping(prompt, salt)
        checkpoint()
        ids = self._ids(prompt.text if isinstance(prompt, Marked) else prompt, add_special_tokens, keep is not None)
        retain = list(retain)
        if isinstance(prompt, Marked) and self.tokenizer is not None:
            retain += spans_of(prompt, ids, self.tokenizer, add_special_tokens)
        check_spans(retain)
        kept = ids if keep is None else self._kept(ids, keep, side, params)
        params = self._with_defaults(params, len(kept))
        return Request(name, kept, params, list(self.eos_ids), time.time(), priority, salt, tenant,
                       resolve_spans(retain, len(kept), len(ids) - len(kept) if side == "left" else 0), adapter,
                       shown=self._shown if parsed else [], predicted=self._predicted(predicted, params))

    def _predicted(self, text: str, params: SamplingParams) -> bytes:
        if not text or self.tokenizer is None:
            return b""
        if params.n > 1 or params.beam_width:
            raise UnsupportedError("a prediction is only possible for one answer; leave out n and use_beam_search",
                                   "prediction")
        return array("I", self.tokenizer.encode(text, False)).tobytes()

    def pooling(self, name: str, prompt: str | Sequence[int], pool: Pool, *, add_special_tokens: bool = True, priority: int = 0,
                salt: str = "", tenant: str = "", keep: int | None = None, side: Side = "right") -> Request:
        """A request that pools a prompt's hidden states. RequestError as for `request`, whose arguments these are; but where
        a text is cut, what the tokenizer puts around it stays: encoders pool by it."""
        checkpoint()
        params = SamplingParams(max_tokens=1, detokenize=False, seed=0)
        ids = self._ids(prompt, add_special_tokens, keep is not None)
        most = min(self.info.max_model_len - (not self.info.encoder), self.pooler.most or len(ids))
        kept = ids if keep is None else self._kept(ids, most if keep == -1 else keep, side, params)
        if len(kept) < len(ids) and isinstance(prompt, str) and add_special_tokens and self.tokenizer is not None:
            kept = _within(self.tokenizer.encode(""), ids, len(kept), side)
        if len(kept) > most:
            why = (" (the max_seq_length of the model's folder)" if most == self.pooler.most else
                   " in one step (--max-num-batched-tokens bounds it, too)" if self.info.encoder else "")
            raise RequestError(f"a text has {len(kept)} tokens; at most {most} are possible{why}. Please reduce the length of "
                               "the input prompt, or send truncate_prompt_tokens", param="input",
                               code="context_length_exceeded")
        return Request(name, kept, params, arrival=time.time(), priority=priority, salt=salt, tenant=tenant, pool=pool)

    def _ids(self, prompt: str | Sequence[int], add_special_tokens: bool, whole: bool) -> list[int]:
        """The prompt's tokens. Unless the `whole` is wanted, a text that cannot fit is refused before all is tokenized."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("there is no tokenizer (skip_tokenizer_init); send the prompt as token ids", param="prompt",
                                   code="no_tokenizer")
            ids = self._encode(self.tokenizer, prompt, add_special_tokens, whole)
            if not ids and self.tokenizer.bos_id is not None:
                ids = [self.tokenizer.bos_id]
            if not ids:
                raise RequestError("the prompt is empty, and this model has no token to begin a text with; send at least one "
                                   "character", param="prompt")
        else:
            ids = _plain_ids(prompt)
        known = self.info.vocab_size + self.info.second
        if min(ids) < 0 or max(ids) >= known:
            wrong = next(token for token in ids if not 0 <= token < known)
            raise RequestError(f"the prompt has token {wrong}, out of vocabulary: the model knows ids 0 to {known - 1}",
                               param="prompt")
        return ids

    def _encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, whole: bool) -> list[int]:
        """The tokens of a text. A long one is tokenized in growing beginnings first; one may show that it cannot fit."""
        longest = self.info.max_model_len + self.info.encoder
        size = max(CHARACTERS_A_TOKEN * longest, LEAST_BEGINNING)
        while not whole and size < len(text):
            # The cut changes tokens near the end alone.
            found = len(tokenizer.encode(text[:size], add_special_tokens))
            if found > longest + CUT_TOKENS:
                raise RequestError(f"the prompt has more than {found - CUT_TOKENS} tokens, but this model's context is "
                                   f"{longest} tokens, prompt and output together. Please reduce the length of the input "
                                   f"prompt to at most {longest - 1}", param="prompt", code="context_length_exceeded")
            checkpoint()
            size *= 4
        return tokenizer.encode(text, add_special_tokens)

    def _kept(self, ids: list[int], count: int, side: Side, params: SamplingParams) -> list[int]:
        if count == -1:
            count = max(1, self.info.max_model_len - (params.max_tokens or 1))
        if not 1 <= count <= self.info.max_model_len:
            raise RequestError(f"truncate_prompt_tokens is {count}; possible are 1 to {self.info.max_model_len}, or -1 for as "
                               "many as fit. Please request a smaller truncation size", param="truncate_prompt_tokens")
        return ids[-count:] if side == "left" else ids[:count]

    def _with_defaults(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """`params` with all defaults filled in: max_tokens, seed, token sequences of bad words."""
        longest = self.info.max_model_len
        room = longest - prompt_len
        if room < 1:
            raise RequestError(f"the prompt has {prompt_len} tokens, but this model's context is {longest} tokens, prompt and "
                               f"output together. Please reduce the length of the input prompt to at most {longest - 1}",
                               param="prompt", code="context_length_exceeded")
        wanted = params.max_tokens
        if wanted is not None and wanted > room:
            raise RequestError(f"max_tokens is {wanted} and the prompt has {prompt_len} tokens, together "
                               f"{wanted + prompt_len}, but this model's context is {longest} tokens; lower max_tokens to at "
                               f"most {room}, or shorten the prompt", param="max_tokens", code="context_length_exceeded")
        changes: dict[str, Any] = {}
        if wanted is None:
            changes["max_tokens"] = min(room, self.defaults.get("max_tokens", room))
        if params.seed is None:
            changes["seed"] = self._random.getrandbits(63)
        params = self.counted(self.spelled(params))
        if params.stops and (self.tokenizer is None or not params.detokenize):
            why = "detokenize is false" if self.tokenizer else "there is no tokenizer (skip_tokenizer_init)"
            raise RequestError(f"stop strings are found in the text, but {why}; use stop_token_ids", param="stop")
        params = params.replace(**changes | self._constrained(params))
        params.check()
        params.check_vocabulary(self.info.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.max_logprobs:
                if name == "logprobs" and params.logprob_token_ids:
                    name = "the number of logprob_token_ids"
                raise RequestError(f"{name} is {wanted}; at most {self.max_logprobs} are possible (--max-logprobs)",
                                   param=name.split()[-1])
        return params

    def counted(self, params: SamplingParams) -> SamplingParams:
        """`params` with the size of the vocabulary for -1 log probabilities."""
        whole = {name: self.info.vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1}
        return params.replace(**whole) if whole else params

    def spelled(self, params: SamplingParams) -> SamplingParams:
        """`params` with bad words as token sequences. For a batch this is done once, before its requests are made."""
        if not params.bad_words:
            return params
        sequences = [*(params.bad_words_token_ids or ()), *self._bad_sequences(params.bad_words)]
        return params.replace(bad_words=None, bad_words_token_ids=sequences)

    def _constrained(self, params: SamplingParams) -> dict[str, Any]:
        """The parameters for the grammar of the answer, if any. The answer ends with it, even with `ignore_eos`."""
        if params.structured_outputs is None and params.grammar is None:
            return {}
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer (skip_tokenizer_init), so that no answer can be constrained",
                               param="structured_outputs", code="no_tokenizer")
        grammar = params.grammar if params.structured_outputs is None else define(params.structured_outputs)
        return {"grammar": grammar, "ignore_eos": False}

    def _bad_sequences(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences that spell a word: at the start of a text, after a space, and within or after another word.

        A word can be spelled by still other sequences, which stay possible, as in vLLM."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("bad_words are text, but there is no tokenizer (skip_tokenizer_init); use bad_words_token_ids",
                               param="bad_words", code="no_tokenizer")
        characters = sum(map(len, words))
        if characters > BAD_WORD_CHARACTERS:
            raise RequestError(f"bad_words have {characters:,} characters; at most {BAD_WORD_CHARACTERS:,} are possible",
                               param="bad_words")
        newline = tokenizer.encode("\n", add_special_tokens=False)
        bare = [word.lstrip() or word for word in words]
        # Vocabularies that prefix a text with a space show the spelling without a space only after other text.
        spellings = [text for word in bare for text in (word, " " + word, "\n" + word)]
        found: dict[tuple[int, ...], None] = {}
        for start in range(0, len(spellings), 3 * WORDS_AT_ONCE):
            checkpoint()
            batch = tokenizer.encode_batch(spellings[start:start + 3 * WORDS_AT_ONCE], add_special_tokens=False)
            for plain, spaced, inner in zip(batch[::3], batch[1::3], batch[2::3], strict=True):
                found[tuple(plain)] = found[tuple(spaced)] = None
                if inner[:len(newline)] == newline:
                    found[tuple(inner[len(newline):])] = None
        return [list(sequence) for sequence in found if sequence]


def _within(around: list[int], ids: list[int], count: int, side: Side) -> list[int]:
    """`count` of a text's tokens, those that the tokenizer puts `around` every text among them, if there is room for more."""
    room, inner = count - len(around), len(ids) - len(around)
    for front in range(len(around) + 1) if room > 0 else ():
        if ids[:front] == around[:front] and ids[front + inner:] == around[front:]:
            at = front + (inner - room if side == "left" else 0)
            return [*around[:front], *ids[at:at + room], *around[front:]]
    return ids[-count:] if side == "left" else ids[:count]


def _checked(params: SamplingParams) -> SamplingParams:
    """A checked copy: every field has its type and a possible value."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be a SamplingParams, got {type(params).__name__}", param="sampling_params")
    try:
        copy = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"the sampling parameters are not of the right types: {error}", param="sampling_params") from None
    copy.check()
    return copy


def _from_mapping(prompt: Mapping[str, Any], salt: str) -> tuple[str | Sequence[int], str]:
    """(text or ids, cache salt) of a prompt in vLLM's object form."""
    extra = sorted(prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})
    if extra:
        raise UnsupportedError(f"a prompt object may not have {', '.join(extra)}; possible are prompt or prompt_token_ids, and "
                               "cache_salt", extra[0])
    # vLLM's objects may carry the text along with the ids that stand for it.
    found = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if found is None:
        raise RequestError("a prompt object needs prompt (a text) or prompt_token_ids", param="prompt")
    return found, prompt.get("cache_salt") or salt


def _plain_ids(prompt: Any) -> list[int]:
    """Token ids as a list of ints; accepts arrays and tensors."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple | range) or not {*map(type, ids)} <= {int}:
        shown = repr(prompt)
        raise RequestError(f"a prompt must be a text, a list of token ids, or an object with prompt or prompt_token_ids; got "
                           f"{type(prompt).__name__} {shown if len(shown) < 80 else shown[:77] + '...'}", param="prompt")
    if not ids:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    return list(ids)


def _eos_ids(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    given = config.get("eos_token_id")
    if isinstance(given, int):
        return [given]
    if given:
        return list(dict.fromkeys(given))
    return [tokenizer.eos_id] if tokenizer is not None and tokenizer.eos_id is not None else []
