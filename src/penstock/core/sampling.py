"""Sampling parameters of a request, with their meanings and limits.

Field names and call shape are vLLM's where the meaning is the same. `ops/sample.py` has the arithmetic."""

import math
from typing import Any

import msgspec

from penstock.core.errors import RequestError, UnsupportedError

MAX_LOGPROBS = 20
"""Default maximum of `logprobs` and `top_logprobs`, as in OpenAI's API; the option max_logprobs changes it."""

MOST_LOGPROBS = 1 << 20
"""Maximum of `logprobs` whatever the option max_logprobs is: more tokens than any vocabulary has."""

MAX_N = 128
"""Maximum `n`, as in OpenAI's API."""

MAX_BEAM_WIDTH = 64

MAX_TEMPERATURE = 1e30
"""Maximum temperature. Its inverse is a float32 on the device; above the maximum it would be 0, and 0 times -inf is NaN."""

EDIT_WORDS = 5
"""Words of device memory that an entry of logit_bias or bad_words takes, besides a bad word's own tokens."""

MAX_LIST_WORDS = 1 << 15
"""Maximum words of device memory for the lists of one sequence."""

MAX_OPEN_LIST_WORDS = 1 << 21
"""Maximum words for the lists of all open requests of a server. The memory plan reserves room for them."""

MAX_TOP_K = 2**31 - 1

_RANGES = {"n": (1, MAX_N), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100),
           "temperature": (0, MAX_TEMPERATURE), "min_p": (0, 1), "logprobs": (-1, MOST_LOGPROBS),
           "prompt_logprobs": (-1, MOST_LOGPROBS), "beam_width": (0, MAX_BEAM_WIDTH), "length_penalty": (-10, 10)}
"""The least and the most of numbers."""

NOT_FOR_BEAMS = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_p": 1.0, "min_p": 0.0,
                 "stop": None, "logit_bias": None, "allowed_token_ids": None, "bad_words": None, "bad_words_token_ids": None,
                 "prompt_logprobs": None, "logprob_token_ids": None, "structured_outputs": None, "grammar": None,
                 "max_thinking_tokens": None}
"""Parameters that beam search does not support, with the defaults that they must keep."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint on the answer: exactly one of the first six fields. Names and shapes are vLLM's."""

    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, or its text. A schema with a part that cannot be enforced is refused."""
    regex: str | None = None
    """A regex that matches the whole answer, in Rust's syntax: no look-around, no back-references."""
    choice: list[str] | None = None
    grammar: str | None = None
    """A context-free grammar, in Lark's syntax or in llama.cpp's GBNF (EBNF)."""
    json_object: bool | None = None
    """The answer is some JSON object."""
    structural_tag: dict[str, Any] | str | None = None
    """Constrains the parts of the answer between tags."""
    disable_any_whitespace: bool | None = None
    """JSON without whitespace."""
    disable_additional_properties: bool | None = None
    """Objects have only the listed properties, unless the schema says otherwise."""
    whitespace_pattern: str | None = None
    """A regex for the whitespace in JSON; by default a few blanks, or a line break and an indentation."""
    disable_fallback: bool | None = None
    """Has no effect: there is one way to constrain."""


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Parameters of one request. Treat an object as immutable once constructed; `check()` is called on submission.

    A result is a function of (seed, position) and the logits alone, never of the other requests in the batch."""

    n: int = 1
    """Number of independent continuations. Each has its own seed, derived from `seed` and its index."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated. [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (Keskar et al. 2019).
    [0.01, 100]: beyond that, logits could overflow."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id among equals. [0, 1e30]."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with this much probability. (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one. [0, 1]."""
    seed: int | None = None
    """None draws a seed at submission."""
    stop: list[str] | str | None = None
    """Strings that end the output. The match is removed unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output. The token is part of `token_ids`; its text appears only with `include_stop_str_in_output`."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Maximum number of generated tokens; None means up to the context length."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be chosen before this many tokens were generated."""
    logprobs: int | None = None
    """Report the log probability of each chosen token and of so many likeliest others; -1: of all. At most max_logprobs."""
    prompt_logprobs: int | None = None
    """Report log probabilities of the prompt's tokens, as `logprobs` does for generated ones."""
    logprob_token_ids: list[int] | None = None
    """Report the log probabilities of these tokens, each once, instead of the most likely ones; `logprobs` is their number."""
    detokenize: bool = True
    """False leaves `text` empty."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Kept for vLLM's call shape; only True is supported."""
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    """Added to the logits of single tokens. [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    """Words that cannot be generated; the frontend turns them into `bad_words_token_ids`."""
    bad_words_token_ids: list[list[int]] | None = None
    """Token sequences whose last token cannot follow the others."""
    beam_width: int = 0
    """Above 0, beam search: the `beam_width` most probable beginnings are continued, and the best `n` finished answers are
    returned together, best first. Nothing is drawn. [0, 64]."""
    length_penalty: float = 1.0
    """Beam search compares answers by log probability / length ** length_penalty. [-10, 10]."""
    early_stopping: bool | str = False
    """When beam search ends: True, once `beam_width` answers are complete; False, once a better one is unlikely; "never",
    once a better one is impossible. The meanings are those of Hugging Face's generate."""

    structured_outputs: StructuredOutputsParams | None = None
    grammar: str | None = None
    """The constraint as a grammar for the engine. Derived from `structured_outputs` or a dialect's structure."""
    reasoning_end_ids: list[int] | None = None
    """The tokens that end the model's thinking; the constraint applies after them. None: it applies at once."""
    reasoning_start_ids: list[int] | None = None
    """The tokens with which the model itself begins to think, if the prompt has not begun it: a constrained answer may begin
    with them if they are one token. None: the prompt has begun it. Needs `reasoning_end_ids`."""
    max_thinking_tokens: int | None = None
    """Number of thinking tokens after which the end of thinking is forced, once. Needs `reasoning_end_ids`."""

    def __post_init__(self) -> None:
        if self.logprob_token_ids:
            self.logprob_token_ids = list(dict.fromkeys(self.logprob_token_ids))
            self.logprobs = len(self.logprob_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def check(self) -> None:
        """Raises RequestError that names the first field with an invalid value."""

        def need(good: bool, param: str, possible: str, value: object) -> None:
            if not good:
                raise RequestError(f"{param} must be {possible}, got {value!r}", param=param)

        def finite(x: float) -> bool:
            return not isinstance(x, bool) and math.isfinite(x)

        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (finite(value) and least <= value <= most):
                need(False, name, f"between {least:g} and {most:g}", value)
        need(finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        need(-1 <= self.top_k <= MAX_TOP_K, "top_k", f"-1, 0 (all tokens) or a positive number up to {MAX_TOP_K}", self.top_k)
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        need(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens",
             f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        need(all(self.stops), "stop", "non-empty strings", self.stop)
        need(self.spaces_between_special_tokens, "spaces_between_special_tokens", "true (false is not supported)", False)
        for token, bias in (self.logit_bias or {}).items():
            need(finite(bias) and -100 <= bias <= 100, "logit_bias", "between -100 and 100 for every token", {token: bias})
        need(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "a non-empty list",
             self.allowed_token_ids)
        need(all(self.bad_words or ["x"]), "bad_words", "non-empty strings", self.bad_words)
        need(self.early_stopping in (True, False, "never"), "early_stopping", 'true, false or "never"', self.early_stopping)
        need(self.max_thinking_tokens is None or self.max_thinking_tokens >= 0, "max_thinking_tokens", "0 or more",
             self.max_thinking_tokens)
        need(self.max_thinking_tokens is None or bool(self.reasoning_end_ids), "max_thinking_tokens",
             "left out for a model whose end of thinking is not known", self.max_thinking_tokens)
        need(not self.reasoning_start_ids or bool(self.reasoning_end_ids), "reasoning_start_ids",
             "left out without reasoning_end_ids", self.reasoning_start_ids)
        if self.beam_width:
            self._check_beams()

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise RequestError(f"n is {self.n}, but beam search finds beam_width ({self.beam_width}) answers; lower n or raise "
                               "beam_width", param="n")
        for name, neutral in NOT_FOR_BEAMS.items():
            if (getattr(self, name) or neutral) != neutral:
                hint = "; use stop_token_ids" if name == "stop" else ""
                raise UnsupportedError(f"{name} cannot be honoured together with beam search{hint}", name)
        if self.temperature not in (0.0, 1.0) or self.top_k not in (0, -1):
            name = "top_k" if self.temperature in (0.0, 1.0) else "temperature"
            raise UnsupportedError(f"{name} cannot be honoured: beam search draws nothing; leave it out", name)

    def list_words(self, ends: int = 0) -> int:
        """The 32-bit words that the lists take on the device (`worker/rows.py`); `ends` are banned below `min_tokens`."""
        words = self.bad_words_token_ids or ()
        edits = len(self.logit_bias or ()) + len(words) + (ends if self.min_tokens else 0)
        allowed = max(self.allowed_token_ids) // 32 + 1 if self.allowed_token_ids else 0
        return allowed + EDIT_WORDS * edits + sum(len(word) - 1 for word in words)

    def check_lists(self) -> None:
        """Raises RequestError for lists that take too much device memory."""
        words = self.list_words()
        if words > MAX_LIST_WORDS:
            names = [name for name in ("bad_words", "logit_bias", "allowed_token_ids")
                     if getattr(self, "bad_words_token_ids" if name == "bad_words" else name)]
            raise RequestError(f"{' and '.join(names)} take {4 * words:,} bytes of device memory for each sequence; at most "
                               f"{4 * MAX_LIST_WORDS:,} are possible; send fewer or shorter entries", param=names[0])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError for a token id outside the vocabulary."""
        named: dict[str, Any] = {name: getattr(self, name) or () for name in (
            "logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids", "reasoning_end_ids",
            "reasoning_start_ids")}
        named["bad_words"] = [token for word in self.bad_words_token_ids or [] for token in word]
        for param, ids in named.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{param} names token {token}; the vocabulary has {vocab_size} ids, from 0 on",
                                       param=param)
        self.check_lists()

    def replace(self, **changes: Any) -> "SamplingParams":
        return msgspec.structs.replace(self, **changes)


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """vLLM's parameters of `LLM.beam_search`, with the meanings of SamplingParams."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    n: int | None = None
    """Number of answers to return; by default all `beam_width`."""

    def sampling(self) -> SamplingParams:
        wanted = {name: getattr(self, name) for name in self.__struct_fields__ if name != "n"}
        return SamplingParams(n=self.beam_width if self.n is None else self.n, logprobs=0, **wanted)
