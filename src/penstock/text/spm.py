"""Vocabularies in sentencepiece's tokenizer.model, run by the sentencepiece library."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from penstock.core.errors import ModelError
from penstock.text.detokenize import ByteFallback, Detokenizer, EachCharacter, Pieces

_SPACE = "\u2581"
"""Sentencepiece's character for a space."""

_NO_DUMMY_PREFIX = bytes([3 << 3 | 2, 2, 3 << 3 | 0, 0])
"""normalizer_spec { add_dummy_prefix: false } as protobuf. Appended to a file's bytes it overrides: later fields merge in."""


class SentencePieceVocabulary:
    """A tokenizer.model, with what the Hugging Face files beside it add: special tokens, and which ends are added.

    As in transformers, special tokens are recognised in the text, and each segment between them is encoded separately; with
    `legacy` (the default) every segment gets the leading space that otherwise only the first one gets."""

    def __init__(self, path: Path, settings: Mapping[str, Any], named: Mapping[str, str], added: Mapping[int, str]) -> None:
        """`added` are tokens beyond the file's own. ModelError if the file is corrupt."""
        self._core = _open(path)
        self._bare = _open(path, _NO_DUMMY_PREFIX)
        core, size = self._core, self._core.vocab_size()
        self._names: dict[int, str] = {token: name for token, name in added.items() if token >= size}
        self.size = max([size, *(token + 1 for token in self._names)])
        markers = {token: core.id_to_piece(token) for token in range(size) if core.is_control(token) or core.is_unknown(token)}
        names = {token for name in named.values() if (token := self.id_of(name)) is not None}
        self.special_ids = frozenset(markers) | frozenset(self._names) | frozenset(names)
        self._special = {self._name(token): token for token in self.special_ids}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._legacy = settings.get("legacy") in (None, True)
        self._front = self._end_id(settings, "add_bos_token", True, named.get("bos_token"), core.bos_id())
        self._back = self._end_id(settings, "add_eos_token", False, named.get("eos_token"), core.eos_id())
        self._leading = _leading(core)
        self._table = functools.cache(lambda hidden: Pieces[str | int](self._piece, self.size, "", hidden))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = list(self._front) if add_special_tokens else []
        if self._splitter is None:
            ids += self._core.encode(text)
        else:
            for place, part in enumerate(self._splitter.split(text)):
                if place % 2:
                    ids.append(self._special[part])
                elif part:
                    ids += (self._core if place == 0 or self._legacy else self._bare).encode(part)
        if add_special_tokens:
            ids += self._back
        return ids

    def encode_pair(self, one: str, two: str, second: int) -> list[int]:
        return [*self.encode(one, True), *(token + second for token in self.encode(two, False))]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def name_of(self, token: int) -> str | None:
        return self._name(token) if 0 <= token < self._core.vocab_size() or token in self._names else None

    def definition(self) -> None:
        """There is none."""

    def bytes_of(self, token: int) -> bytes:
        piece = self._piece(token)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def detokenizer(self, hidden: frozenset[int], after: Sequence[int]) -> Detokenizer:
        return ByteFallback(self._table(hidden), EachCharacter(), self._leading, False, after)

    def markers(self) -> dict[str, str]:
        """The special tokens that the file itself names, by role."""
        core = self._core
        roles = {"bos_token": core.bos_id(), "eos_token": core.eos_id(), "unk_token": core.unk_id(), "pad_token": core.pad_id()}
        return {role: core.id_to_piece(token) for role, token in roles.items() if token >= 0}

    def _piece(self, token: int) -> str | int:
        name = self.name_of(token)
        if name is None:
            return ""
        if token in self.special_ids:
            return name
        return int(name[3:5], 16) if self._core.is_byte(token) else name.replace(_SPACE, " ")

    def _name(self, token: int) -> str:
        return self._names[token] if token in self._names else self._core.id_to_piece(token)

    def id_of(self, name: str) -> int | None:
        for token, added in self._names.items():
            if added == name:
                return token
        token = self._core.piece_to_id(name)
        # The library returns the id of the unknown token for pieces that it does not have.
        return token if self._core.id_to_piece(token) == name else None

    def _end_id(self, settings: Mapping[str, Any], key: str, default: bool, name: str | None, own: int) -> list[int]:
        if not settings.get(key, default):
            return []
        token = self.id_of(name) if name is not None else own
        return [token] if token is not None and token >= 0 else []


def _open(path: Path, changes: bytes = b"") -> sentencepiece.SentencePieceProcessor:
    core = sentencepiece.SentencePieceProcessor()
    try:
        core.LoadFromSerializedProto(path.read_bytes() + changes)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} is not a usable sentencepiece model: {error}. Download it again") from None
    return core


def _leading(core: sentencepiece.SentencePieceProcessor) -> int:
    """The number of leading spaces that decoding strips (none, the one that encoding adds, or all), found by a trial."""
    lone = core.piece_to_id(_SPACE)
    if core.id_to_piece(lone) != _SPACE:
        return 1
    return 3 - len(core.decode([lone] * 3)) if core.decode([lone] * 3) else 1 << 30
