"""Describes a model's vocabulary to llguidance: each token's bytes, the special tokens, and how text is tokenized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from penstock.core.errors import RequestError
from penstock.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer, TokenizerWrapper


class _Wrapped:
    """The attributes and the call that LLTokenizer reads."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("\n", add_special_tokens=False)
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = tokens
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < len(tokens))

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text inside another text: sentencepiece adds a space before a text that stands alone."""
        found = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        if found[:len(self._before)] == self._before:
            return found[len(self._before):]
        return self._tokenizer.encode(text, add_special_tokens=False)


def texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Returns the bytes of the model's tokens, empty for ids that only the model has: those cannot be chosen."""
    size = min(vocab_size, tokenizer.vocab_size)
    return [tokenizer.token_bytes(token) for token in range(size)] + [b""] * (vocab_size - size)


def build(tokenizer: Tokenizer, tokens: list[bytes], eos_ids: Iterable[int]) -> LLTokenizer:
    """Returns llguidance's tokenizer; takes seconds for 200,000 tokens. `tokens` are the model's `texts`; each of `eos_ids`
    ends an answer. Raises RequestError if the model has no end-of-sequence token."""
    from llguidance import LLTokenizer

    ends = [token for token in eos_ids if token < len(tokens)] or [t for t in (tokenizer.eos_id,) if t is not None]
    if not ends:
        raise RequestError("this model has no end-of-sequence token, so that a constrained answer could not end",
                           code="unsupported_parameter")
    return LLTokenizer(cast("TokenizerWrapper", _Wrapped(tokenizer, tokens, ends[0])), eos_token=ends)
