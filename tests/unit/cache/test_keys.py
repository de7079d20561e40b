"""Keys: equal exactly where contexts are equal, and the same on every machine, in every process, after every restart."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
from itertools import product

from penstock.cache import keys


def by_the_document(model: str, adapter: str, salt: str, tokens: list[int], page: int) -> list[bytes]:
    """The rule as docs/cache.md states it, in other words than the code's."""
    texts = [text.encode() for text in (model, adapter, salt)]
    body = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    key = hashlib.blake2b(body, digest_size=32, person=b"penstock1").digest()
    found = []
    for start in range(0, len(tokens) // page * page, page):
        key = hashlib.blake2b(key + struct.pack(f"<{page}i", *tokens[start:start + page]), digest_size=32).digest()
        found.append(key)
    return found


def test_the_documented_rule() -> None:
    rng = random.Random(5)
    for _ in range(50):
        tokens = [rng.randrange(200_000) for _ in range(rng.randrange(1, 200))]
        page = rng.choice((1, 4, 16))
        texts = [rng.choice(("", "a", "ß€")) for _ in range(3)]
        assert keys.chain(keys.root(*texts), tokens, page) == by_the_document(*texts, tokens, page)


def test_a_key_never_changes() -> None:
    """Disk tiers and routers hold these."""
    chain = keys.chain(keys.root("model", "", "salt"), list(range(8)), 4)
    assert [key.hex()[:16] for key in chain] == ["df58145468247d8d", "87dd66cc8388ec84"]
    assert keys.number(chain[0]) == int(chain[0].hex()[-16:], 16)


def test_the_same_in_another_process_with_other_seeds() -> None:
    code = "from penstock.cache import keys; print(keys.chain(keys.root('model', '', 'salt'), list(range(8)), 4)[1].hex())"
    found = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
                            text=True, check=True).stdout.strip() for seed in ("1", "2")}
    assert found == {keys.chain(keys.root("model", "", "salt"), list(range(8)), 4)[1].hex()}


def test_another_token_changes_its_page_and_all_after() -> None:
    tokens = list(range(10, 30))
    root = keys.root("model")
    before = keys.chain(root, tokens, 4)
    tokens[9] += 1
    after = keys.chain(root, tokens, 4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False, False]
    assert keys.chain(before[1], list(range(18, 30)), 4) == before[2:]
    assert keys.chain(before[0], range(14, 18), 4) == [before[1]]


def test_namespaces_never_meet() -> None:
    """Model, adapter and salt cannot be shifted into one another."""
    parts = ("", "a", "aa", "a\0", "\0")
    roots = {keys.root(*texts) for texts in product(parts, repeat=3)}
    assert len(roots) == len(parts) ** 3
