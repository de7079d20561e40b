"""A model's tokenizer: finding its files and special tokens, and the interface that all vocabularies share.

The work is done by `fast.py` (tokenizer.json) and `spm.py` (tokenizer.model). Encoding gives what transformers' AutoTokenizer
gives for the same folder. Decoding gives what the model wrote: transformers' clean_up_tokenization_spaces, which rewrites
text, is not applied (transformers itself has stopped applying it to such vocabularies)."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelError, RequestError
from penstock.core.files import read_json
from penstock.text.detokenize import Detokenizer
from penstock.text.fast import FastVocabulary
from penstock.text.spm import SentencePieceVocabulary

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name of their own, as in tokenizer_config.json."""


Vocabulary = FastVocabulary | SentencePieceVocabulary
"""Both have the same methods. Unknown ids are no error: they have no name and no text."""


class Tokenizer:
    """Text to tokens and back. Immutable; may be used from several threads, a detokenizer from one."""

    def __init__(self, vocabulary: Vocabulary, named: Mapping[str, str], extra: Sequence[str] = (),
                 config: Mapping[str, Any] | None = None) -> None:
        """`named` are special tokens by role; `extra` are additional_special_tokens; `config` is tokenizer_config.json."""
        self._vocabulary = vocabulary
        self.config = dict(config or {})
        self.vocab_size = vocabulary.size
        """One more than the largest id."""
        self.special_ids = vocabulary.special_ids
        self.special_tokens: dict[str, Any] = dict(named)
        """By role, as chat templates see them: bos_token, eos_token, ..., additional_special_tokens (a list)."""
        if extra:
            self.special_tokens["additional_special_tokens"] = list(extra)
        self.bos_id = self._role("bos_token")
        self.eos_id = self._role("eos_token")

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """The tokenizer of a model's folder: tokenizer.json, or else tokenizer.model. A sentencepiece file may be named itself.

        ModelError says what is missing or corrupt and what to do about it."""
        path = Path(folder)
        if path.is_file():
            return cls._load_sentencepiece(path, {}, {}, [], {})
        settings = read_json(path / "tokenizer_config.json", optional=True)
        named, extra = _specials(path, settings)
        if (path / "tokenizer.json").exists():
            vocabulary = FastVocabulary(path / "tokenizer.json", settings, {**named, **{name: name for name in extra}})
            return cls(vocabulary, named, extra, settings)
        file = _sentencepiece_file(path)
        if file is None:
            raise ModelError(_missing(path))
        listed = settings.get("added_tokens_decoder") or {}
        added = {int(token): entry["content"] for token, entry in listed.items()}
        added |= {token: name for name, token in read_json(path / "added_tokens.json", optional=True).items()}
        return cls._load_sentencepiece(file, settings, named, extra, added)

    @classmethod
    def _load_sentencepiece(cls, file: Path, settings: Mapping[str, Any], named: Mapping[str, str], extra: Sequence[str],
                            added: Mapping[int, str]) -> "Tokenizer":
        vocabulary = SentencePieceVocabulary(file, settings, {**named, **{name: name for name in extra}}, added)
        # Without Hugging Face's files, sentencepiece's own markers play the parts.
        own = {role: token for role, token in vocabulary.markers().items() if role not in settings}
        return cls(vocabulary, {**own, **named}, extra, settings)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of `text`. Special tokens spelled out in it are recognised; `add_special_tokens` adds what the model
        wants around a text (often bos). RequestError if the text is not valid Unicode."""
        _check(text)
        return self._vocabulary.encode(text, add_special_tokens)

    def encode_pair(self, one: str, two: str, second: int = 0) -> list[int]:
        """Two texts with the model's special tokens around and between them. `second` is added to the ids of the second one."""
        _check(one)
        _check(two)
        return self._vocabulary.encode_pair(one, two, second)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on several threads where the library can."""
        for text in texts:
            _check(text)
        return self._vocabulary.encode_batch(texts, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that belong to no character become U+FFFD, ids outside the vocabulary have no text."""
        stream = self._vocabulary.detokenizer(self.special_ids if skip_special_tokens else frozenset(), ())
        return stream.push(ids) + stream.flush()

    def detokenizer(self, skip_special_tokens: bool = True, after: Sequence[int] = (),
                    shown: Sequence[int] = ()) -> Detokenizer:
        """A stream whose pushes and flush, joined, give `decode` of all its ids.

        `after`: tokens before them, such as the prompt, whose text the stream continues: a space that decoding strips from a
        text is kept between the two, and a character that began there is completed. `shown`: special tokens not skipped."""
        hidden = self.special_ids.difference(shown) if skip_special_tokens else frozenset()
        return self._vocabulary.detokenizer(hidden, after)

    def definition(self) -> str | None:
        """The vocabulary as a tokenizer.json whose added tokens are all special; None if there is none."""
        return self._vocabulary.definition()

    def token_id(self, token: str) -> int | None:
        return self._vocabulary.id_of(token)

    def token_name(self, token: int) -> str | None:
        """A token's name in the vocabulary, in the vocabulary's own spelling of bytes and spaces."""
        return self._vocabulary.name_of(token) if 0 <= token < self.vocab_size else None

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes. Joined over a text without special tokens they are its bytes, but for a space in front of some."""
        return self._vocabulary.bytes_of(token) if 0 <= token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; a part of a character is shown as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _role(self, role: str) -> int | None:
        name = self.special_tokens.get(role)
        return None if name is None else self._vocabulary.id_of(name)


def read_specials(folder: Path) -> dict[str, Any]:
    """`Tokenizer.special_tokens` as far as a folder's configuration names them, without loading the vocabulary."""
    named, extra = _specials(folder, read_json(folder / "tokenizer_config.json", optional=True))
    return {**named, "additional_special_tokens": extra} if extra else dict(named)


def _specials(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(special tokens by role, additional ones)."""
    older = read_json(folder / "special_tokens_map.json", optional=True)
    return _named(older) | _named(settings), _extra(settings) or _extra(older)


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: character {error.start} is a lone surrogate "
                           f"(U+{ord(text[error.start]):04X}). Send properly encoded UTF-8", param="prompt",
                           code="invalid_value") from None


def _content(value: Any) -> str | None:
    """A token is written as its text, or as an object that has it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named(values: Mapping[str, Any]) -> dict[str, str]:
    return {role: content for role in ROLES if (content := _content(values.get(role))) is not None}


def _extra(values: Mapping[str, Any]) -> list[str]:
    listed = values.get("additional_special_tokens") or values.get("extra_special_tokens") or []
    if isinstance(listed, Mapping):
        listed = list(listed.values())
    return [content for value in listed if (content := _content(value)) is not None]


def _sentencepiece_file(folder: Path) -> Path | None:
    """tokenizer.model, or one of the names that Mistral gave to its versions, the latest."""
    named = folder / "tokenizer.model"
    if named.exists():
        return named
    found = sorted(path for pattern in ("*.model", "*.model.v*") for path in folder.glob(pattern))
    return found[-1] if found else None


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; give one that has tokenizer.json or tokenizer.model"
    present = sorted(path.name for path in folder.iterdir()
                     if path.name in ("vocab.json", "merges.txt", "tekken.json") or path.suffix == ".tiktoken")
    also = f" ({', '.join(present)} alone are not enough)" if present else ""
    return (f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model{also}. Copy the file from the model's "
            "repository; or make it, as save_pretrained of transformers' AutoTokenizer does; or give another folder as "
            "tokenizer; or run on token ids alone with skip_tokenizer_init")
