"""Media in contexts: equal placeholders are the same context only where the media are, in the index, in keys and in events."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from penstock.cache import keys, media
from penstock.cache.events import BlockStored, Journal
from penstock.cache.manager import Cache
from penstock.cache.sequence_state import packed
from penstock.core.plan import StepPlan
from penstock.core.request import Medium, Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out

PAGE, PLACEHOLDER = 4, 9


def digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


def request(*parts: int | tuple[str, int], salt: str = "", adapter: str = "") -> Request:
    """A prompt of tokens and of media (name, placeholders)."""
    tokens, found = list[int](), list[Medium]()
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            found.append(Medium(len(tokens), part[1], digest(part[0])))
            tokens += [PLACEHOLDER] * part[1]
    return Request("r", tokens, SamplingParams(), media=found, salt=salt, adapter=adapter)


def a_cache(journal: Journal | None = None) -> Cache:
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    return Cache(lay_out(states, PAGE, lay_out(states, PAGE, 0).slab_bytes * 200), model="m", sink=journal)


def run(cache: Cache, asked: Request) -> int:
    """Computes a prompt and leaves it in the cache; how many positions were there already."""
    sequence = Sequence(asked, 0, 0, 1000)
    sequence.row = 0
    found = sequence.planned = sequence.computed = cache.match(sequence)
    assert cache.grow(sequence, len(sequence.tokens))
    cache.enter(sequence)
    cache.drain(StepPlan(0))
    sequence.planned = sequence.computed = len(sequence.tokens)
    cache.commit(sequence)
    cache.release(sequence)
    cache.check([])
    return found


def content_keys(asked: Request) -> list[bytes]:
    sequence = Sequence(asked, 0, 0, 1000)
    return keys.links(keys.root("m", asked.adapter, asked.salt), packed(sequence, len(sequence.tokens)), PAGE)


def test_equal_placeholders_are_no_hit() -> None:
    """The false hit of caches that look at tokens alone: same question, another picture."""
    cache = a_cache()
    cat, dog = (request(1, 2, 3, (name, 10), 4, 5, 6, 7) for name in ("cat", "dog"))
    assert cat.prompt_ids == dog.prompt_ids
    assert run(cache, cat) == 0
    assert run(cache, dog) == 3, "up to the picture, and not a position further"
    assert run(cache, cat) == run(cache, dog) == len(cat.prompt_ids) - 1
    assert run(cache, request(1, 2, 3, *[PLACEHOLDER] * 10, 4, 5)) == 3, "placeholders without a picture"
    assert run(cache, request(1, 2, 3, ("cat", 10), 4, 5, 8)) == 15, "the rest differs"
    assert run(cache, request(1, 2, ("cat", 10), 4, 5, 8)) == 2, "the same picture elsewhere"
    assert run(cache, request(1, 2, 3, ("cat", 10), 4, 5, salt="other")) == 0
    assert run(cache, request(1, 2, 3, ("cat", 10), 4, 5, adapter="lora")) == 0


def test_random_contexts_agree_exactly_where_their_contents_do() -> None:
    rng = random.Random(4)
    cache, before = a_cache(), list[tuple[Request, list[object]]]()
    for _ in range(150):
        parts: list[int | tuple[str, int]] = []
        for _ in range(rng.randrange(1, 7)):
            parts.append((rng.choice("ab"), 3) if rng.random() < 0.5 else rng.choice((1, PLACEHOLDER)))
        asked = request(*parts)
        contents: list[object] = []
        for part in parts:
            contents += [part] if isinstance(part, int) else [(part[0], i) for i in range(part[1])]
        shared = [next((i for i, (x, y) in enumerate(zip(contents, theirs, strict=False)) if x != y),
                       min(len(contents), len(theirs))) for _, theirs in before]
        expected = min(max(shared, default=0), len(contents) - 1)
        assert run(cache, asked) == expected, parts
        pages = content_keys(asked)
        for (other, _), same in zip(before, shared, strict=True):
            agree = sum(a == b for a, b in zip(pages, content_keys(other), strict=False))
            assert agree == min(same // PAGE, len(pages)), "keys agree page by page"
        before.append((asked, contents))


def test_keys_by_the_document() -> None:
    """As docs/cache.md states them; the same in every process, whatever was seen before."""
    for noise in range(3):
        content_keys(request((f"noise{noise}", 8)))
        asked = request(1, 2, 3, ("cat", 6), ("dog", 2), 5)
        first = (b"\1\0\0\0\2\0\0\0\3\0\0\0\x09\0\0\0" + b"\3\0\0\0\1\0\0\0" + (32).to_bytes(8, "little") + digest("cat"))
        second = b"\x09\0\0\0" * 4 + b"\0\0\0\0\4\0\0\0" + (32).to_bytes(8, "little") + digest("cat")
        third = (b"\x09\0\0\0" * 3 + b"\5\0\0\0" + b"\0\0\0\0\1\0\0\0" + (32).to_bytes(8, "little") + digest("cat")
                 + b"\1\0\0\0\2\0\0\0" + (32).to_bytes(8, "little") + digest("dog"))
        expected, key = [], keys.root("m")
        for page in (first, second, third):
            key = blake2b(key + page, digest_size=32).digest()
            expected.append(key)
        assert content_keys(asked) == expected


def test_without_media_keys_are_as_ever() -> None:
    asked = request(*range(20, 33))
    assert content_keys(asked) == keys.chain(keys.root("m"), asked.prompt_ids, PAGE)


def test_events_name_placeholders_and_digests() -> None:
    journal = Journal(PAGE)
    cache = a_cache(journal)
    asked = request(1, 2, ("cat", 3), 4, 5, 6, 7, salt="s")
    run(cache, asked)
    (stored,) = [event for event in journal.take() if isinstance(event, BlockStored)]
    assert stored.token_ids == asked.prompt_ids[:8]
    assert stored.extra_keys == [["s", digest("cat").hex()], [digest("cat").hex()]]


def test_a_word_has_one_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many media there are: what was forgotten is not found, and nothing else is found in its place."""
    monkeypatch.setattr(media, "_MOST", 4)
    cache = a_cache()
    asked = [request((f"picture {i}", 5), 1, 2, 3) for i in range(12)]
    for one in asked:
        assert run(cache, one) == 0
    for one in asked:
        assert run(cache, one) in (0, 7)
    assert run(cache, asked[-1]) == 7


def test_a_name_that_comes_later() -> None:
    """Pages from before the weights had their name are announced when they have got it, parents first; none before."""
    journal = Journal(PAGE)
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    cache = Cache(lay_out(states, PAGE, lay_out(states, PAGE, 0).slab_bytes * 50), model=None, sink=journal)
    journal.take()
    run(cache, request(*range(20, 33)))
    run(cache, request(*range(20, 29), *range(40, 50)))
    assert not journal.take() and cache.index.model is None
    cache.name("m")
    stored = [event for event in journal.take() if isinstance(event, BlockStored)]
    known: set[bytes | int | None] = {None}
    for event in stored:
        assert event.parent_block_hash in known
        known.update(event.block_hashes)
    expected = {*content_keys(request(*range(20, 33))), *content_keys(request(*range(20, 29), *range(40, 50)))}
    assert known == expected | {None}
    run(cache, request(*range(60, 70)))
    assert len(journal.take()) == 1
