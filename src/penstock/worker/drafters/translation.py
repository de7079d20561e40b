"""Two tokenizers side by side, so that a draft model may have another one than its target: token-level intersection (Timor et
al. 2025). The draft model reads each token of the target as its own of the same bytes, and drafts only what both have."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.text import Tokenizer

_FILES = ("tokenizer.json", "tokenizer.model")
_SHARED = 64
"""Tokens that two vocabularies have in common at least."""


@dataclass(frozen=True)
class Translation:
    reads: torch.Tensor
    """[target's vocabulary] int32: the draft model's token for each of the target's. One without a counterpart is read as the
    last of the tokens that its text has in the other tokenizer."""
    own: torch.Tensor
    """[N] int64: the draft model's tokens that the target has too."""
    targets: torch.Tensor
    """[N] int64: the target's numbers of them."""


def translation(target: Path, draft: Path, size: int, draft_size: int) -> Translation | None:
    """From the tokenizer of a folder, for `size` tokens, to that of a draft model's folder; None if they are the same, or one
    folder has none. ConfigError if they have too few tokens in common."""
    named = [next((folder / name for name in _FILES if (folder / name).exists()), None) for folder in (target, draft)]
    if None in named or len({path.read_bytes() for path in named if path is not None}) == 1:
        return None
    one, other = Tokenizer.load(target), Tokenizer.load(draft)
    theirs, mine = (_names(tokenizer, count) for tokenizer, count in ((one, size), (other, draft_size)))
    if all(a == b for a, b in zip(theirs, mine, strict=False)) and abs(size - draft_size) <= 1024:
        return None
    place = {name: token for token, name in reversed(list(enumerate(mine))) if name}
    reads = np.array([-1 if name is None else place.get(name, -1) for name in theirs], np.int32)
    both = np.flatnonzero(reads >= 0)
    if len(both) < _SHARED:
        raise ConfigError(f"the tokenizers of {target} and of the draft model {draft} have only {len(both)} tokens in common; "
                          "take a draft model of the same family, or use ngram")
    _, first = np.unique(reads[both], return_index=True)
    both = both[first]
    missing = np.flatnonzero(reads < 0)
    texts = other.encode_batch([one.token_bytes(token).decode("utf-8", "ignore") for token in missing.tolist()], False)
    reads[missing] = [ids[-1] if ids else 0 for ids in texts]
    return Translation(torch.from_numpy(reads), torch.from_numpy(reads[both].astype(np.int64)), torch.from_numpy(both))


def _names(tokenizer: Tokenizer, size: int) -> list[tuple[str, bytes] | None]:
    """By number, by which name tokens of two vocabularies are the same: special ones by their part, others by their bytes."""
    parts = {token: role for role in ("bos_token", "eos_token") if (token := getattr(tokenizer, role[:3] + "_id")) is not None}
    found: list[tuple[str, bytes] | None] = []
    for token in range(size):
        if token in parts:
            found.append((parts[token], b""))
        elif token in tokenizer.special_ids:
            found.append(("special", (tokenizer.token_name(token) or "").encode()))
        else:
            content = tokenizer.token_bytes(token)
            found.append(("", content) if content else None)
    return found
