"""Vocabularies in tokenizer.json, run by the tokenizers library: encoding, and the text of each token."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import ModelError
from penstock.text.detokenize import ByteFallback, ByteLevel, Detokenizer, Pieces, WholeRun

_MATCHING = ("single_word", "lstrip", "rstrip", "normalized")
"""Fields of an added token that control how it is matched in a text."""

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(256)}.difference(_PRINTABLE)))}
"""GPT-2's spelling of bytes: printable ones of Latin-1 stand for themselves, the others for characters from U+0100 on."""


class FastVocabulary:
    """A tokenizer.json as transformers would use it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
        """`settings` is tokenizer_config.json; `named` are the special tokens by role. ModelError if the file is corrupt."""
        try:
            self._core = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
            raise ModelError(f"{path} is not a usable tokenizer: {error}. Download it again, or use a version of the "
                             f"tokenizers library that knows it (this is {tokenizers.__version__})") from None
        # A file may carry these from training; a prompt is never cut or filled up.
        self._core.no_truncation()
        self._core.no_padding()
        _prefix_space(self._core, settings)
        _add_tokens(self._core, settings, named)
        _add_ends(self._core, settings, named)
        added = self._core.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.size = 1 + max(max(self._core.get_vocab(False).values(), default=-1), max(added, default=-1))
        self._spelling = _spelling(path, self._core)
        self._table = functools.cache(lambda hidden: Pieces[Any](self._piece, self.size, self._spelling.empty, hidden))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call is the one that has a variant without offsets.
        return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_pair(self, one: str, two: str, second: int) -> list[int]:
        """Two texts with the special tokens that the file puts around and between them."""
        found = self._core.encode(one, two)
        return [token + second * kind for token, kind in zip(found.ids, found.type_ids, strict=True)] if second else found.ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [found.ids for found in self._core.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def definition(self) -> str | None:
        # Readers of the file take all added tokens for special.
        return self._core.to_str() if len(self._core.get_added_tokens_decoder()) == len(self.special_ids) else None

    def id_of(self, token: str) -> int | None:
        return self._core.token_to_id(token)

    def name_of(self, token: int) -> str | None:
        return self._core.id_to_token(token)

    def bytes_of(self, token: int) -> bytes:
        piece = self._piece(token)
        return bytes([piece]) if isinstance(piece, int) else piece if isinstance(piece, bytes) else piece.encode()

    def detokenizer(self, hidden: frozenset[int], after: Sequence[int]) -> Detokenizer:
        return self._spelling.detokenizer(self._table(hidden), after)

    def _piece(self, token: int) -> str | bytes | int:
        name = self._core.id_to_token(token)
        piece: str | bytes | int = self._spelling.empty if name is None else self._spelling.piece(name)
        return piece


class _Spelling(NamedTuple):
    """The rule by which a token's name spells its text."""

    piece: Callable[[str], Any]
    """The text or bytes of a name; an int for a byte token."""
    empty: str | bytes
    detokenizer: Callable[[Pieces[Any], Sequence[int]], Detokenizer]
    """Of a table of pieces, and the tokens that come before."""


def _bytes(name: str) -> bytes:
    """The bytes that a name spells in GPT-2's characters."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in name])
    except KeyError:
        # An added token need not be spelled so; then it is its own text.
        return name.encode()


def _text(replacements: list[tuple[str, str]], fallback: bool) -> Callable[[str], str | int]:
    """The text of a name with some characters replaced; with `fallback` a byte may be spelled <0xHH>."""
    def piece(name: str) -> str | int:
        for old, new in replacements:
            name = name.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(name) if fallback else None
        return int(byte[1], 16) if byte else name

    return piece


def _whole_runs(leading: int, pieces: Pieces[str | int], after: Sequence[int]) -> Detokenizer:
    return ByteFallback(pieces, WholeRun(), leading, True, after)


def _spelling(path: Path, core: tokenizers.Tokenizer) -> _Spelling:
    """The token spelling that the file's decoder describes. ModelError for a decoder that cannot be streamed exactly."""
    decoder: dict[str, Any] = {"type": "no decoder"} if core.decoder is None else json.loads(core.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return _Spelling(_bytes, b"", ByteLevel)
    if [step["type"] for step in steps] == ["WordPiece"]:
        # Words have a space before them; the library takes it from before punctuation, which an encoder never writes.
        mark = steps[0]["prefix"]
        return _Spelling(lambda name: name.removeprefix(mark) if name.startswith(mark) else f" {name}", "",
                         functools.partial(_whole_runs, 1))
    replacements: list[tuple[str, str]] = []
    fallback, leading, fused = False, 0, False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not fallback and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and len(steps) == 1:
            replacements.append((step["replacement"], " "))
            leading = int(step["prepend_scheme"] != "never")
        elif kind == "ByteFallback" and not fallback and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not leading and step["content"] == " " and not step["stop"]:
            leading = step["start"]
        else:
            break
    else:
        # Without Fuse the library joins the tokens by nothing all the same.
        return _Spelling(_text(replacements, fallback), "", functools.partial(_whole_runs, leading))
    shape = " + ".join(step["type"] for step in steps)
    raise ModelError(f"{path} decodes by {shape}, which Penstock does not know how to stream; it knows ByteLevel, and "
                     "sequences of Replace (of a string), ByteFallback, Fuse and Strip (of leading spaces). Run the model on "
                     "token ids alone, with skip_tokenizer_init")


def _prefix_space(core: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """tokenizer_config.json's add_prefix_space wins over the file's, where the pre-tokenizer has that choice."""
    wanted = settings.get("add_prefix_space")
    if isinstance(wanted, bool) and hasattr(core.pre_tokenizer, "add_prefix_space"):
        core.pre_tokenizer.add_prefix_space = wanted


def _add_tokens(core: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds the tokens that only tokenizer_config.json lists, by ascending id, and marks every named token as special."""
    known = {entry.content: entry for entry in core.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = AddedToken(entry["content"], **{key: entry[key] for key in (*_MATCHING, "special") if key in entry})
        if repr(known.get(token.content)) != repr(token):
            known[token.content] = token
            (core.add_special_tokens if token.special else core.add_tokens)([token])
    for content in named.values():
        if content not in known or not known[content].special:
            old = known.get(content, AddedToken(content, normalized=False))
            known[content] = AddedToken(content, special=True, **{key: getattr(old, key) for key in _MATCHING})
            core.add_special_tokens([known[content]])


def _add_ends(core: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """add_bos_token and add_eos_token in tokenizer_config.json win over the file's own rule, for the classes that obeyed them.

    Other classes of transformers ignore them beside a tokenizer.json, and its version 5 does so for all; but models were
    published (DeepSeek's) whose file alone lacks the bos that they were trained with."""
    obeyed = str(settings.get("tokenizer_class", "")).removesuffix("Fast") in ("LlamaTokenizer", "CodeLlamaTokenizer",
                                                                              "GemmaTokenizer", "CohereTokenizer")
    if not obeyed or not ("add_bos_token" in settings or "add_eos_token" in settings):
        return
    first = named.get("bos_token") if settings.get("add_bos_token") else None
    last = named.get("eos_token") if settings.get("add_eos_token") else None
    parts = [part for part in (first, "$A", last) if part is not None]
    # TemplateProcessing wants each special token with its id.
    ids = [(token, core.token_to_id(token)) for token in {first, last} if token is not None]
    core.post_processor = TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=ids)
