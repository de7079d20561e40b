"""Describes a model's vocabulary to llguidance: each token's bytes, the special tokens, and how text is tokenized."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from penstock.core.errors import UnsupportedError
from penstock.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer, TokenizerWrapper


_FORCED = ('{"', '{"name": "', '", "age": ', "}", "]}", '": [', " true", "false}", "<tool_call>\n{", "\n</tool_call>", "  - ",
           "12", "functions.get_weather:0", "été", "日本語")
"""Texts as grammars force them."""


@dataclass
class Described:
    """A vocabulary with the attributes and the call that LLTokenizer reads."""

    tokens: list[bytes]
    encode: Callable[[str], list[int]]
    eos_token_id: int
    bos_token_id: int | None
    special_token_ids: list[int]
    is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode())


def texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Returns the bytes of the model's tokens, empty for ids that only the model has: those cannot be chosen."""
    size = min(vocab_size, tokenizer.vocab_size)
    return [tokenizer.token_bytes(token) for token in range(size)] + [b""] * (vocab_size - size)


def build(tokenizer: Tokenizer, tokens: list[bytes], eos_ids: Iterable[int]) -> "LLTokenizer":
    """Returns llguidance's tokenizer; takes seconds for 200,000 tokens. `tokens` are the model's `texts`; each of `eos_ids`
    ends an answer. Raises RequestError if the model has no end-of-sequence token.

    Where it agrees with ours, llguidance's own reading of a tokenizer.json serves: its threads then never wait for Python."""
    from llguidance import LLTokenizer

    ends = [token for token in eos_ids if token < len(tokens)] or [t for t in (tokenizer.eos_id,) if t is not None]
    if not ends:
        raise UnsupportedError("this model has no end-of-sequence token, so that a constrained answer could not end")
    before = tokenizer.encode("\n", add_special_tokens=False)

    @functools.lru_cache(4096)
    def encode(text: str) -> list[int]:
        """The tokens of a text inside another text: sentencepiece adds a space before a text that stands alone. llguidance asks
        for the text that a grammar forces, in every fourth mask, from its threads too, and few texts are many of those."""
        found = tokenizer.encode("\n" + text, add_special_tokens=False)
        return found[len(before):] if found[:len(before)] == before else tokenizer.encode(text, add_special_tokens=False)

    special = sorted(token for token in tokenizer.special_ids if token < len(tokens))
    if (definition := tokenizer.definition()) is not None:
        # A form of tokenizer.json that llguidance does not know is no error here.
        with contextlib.suppress(Exception):
            own = LLTokenizer(definition, n_vocab=len(tokens), eos_token=ends)
            if _equal(own, tokens, frozenset(special), encode):
                return own
    return LLTokenizer(cast("TokenizerWrapper", Described(tokens, encode, ends[0], tokenizer.bos_id, special)), eos_token=ends)


def _equal(own: "LLTokenizer", tokens: list[bytes], special: frozenset[int], encode: Callable[[str], list[int]]) -> bool:
    """Whether llguidance has the same tokens, and cuts the texts that grammars force into the same ones. It takes tokens
    without bytes for special, too, and those with byte 255 first, by which it marks special ones."""
    marked = special.union(token for token, text in enumerate(tokens) if text[:1] in (b"", b"\xff"))
    return (own.vocab_size == len(tokens)
            and all(own.is_special_token(token) == (token in marked) for token in range(len(tokens)))
            and all(own.decode_bytes([token]) == text for token, text in enumerate(tokens) if token not in marked)
            and all(own.tokenize_str(text) == encode(text) for text in _FORCED))
