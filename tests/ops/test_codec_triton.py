"""Codecs of the KV cache in Triton against the reference: in the interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE  # isort: skip  (before Triton's kernels are imported)

from penstock.ops import attention_library, attention_work
from penstock.ops.attention import Span
from penstock.ops.attention_triton import INVARIANT, TRITON, TritonAttention, _by_words
from penstock.ops.codec import CODECS, Codec
from penstock.ops.codec_triton import cache_write
from penstock.ops.rows_triton import rope_write
from tests.ops.kernels import close, random, reference
from tests.ops.test_attention import Case
from tests.ops.test_attention_triton import built
from tests.ops.test_codec import cached, written

NAMED = pytest.mark.parametrize("name", CODECS)


def _named(name: str) -> Codec:
    return Codec(name, CODECS[name].key, CODECS[name].value, (0.05, 0.03))


@NAMED
def test_codes_are_the_references(name: str) -> None:
    """Up to ties that a division rounds otherwise; padding is not written."""
    codec, x = _named(name), random(9, 2, 32, seed=1).to(DEVICE)
    x[3], x[4, 0] = 0.0, torch.linspace(-1, 1, 32)
    slots = torch.tensor([3, -1, 7, 0, 1, 12, 11, -1, 15], device=DEVICE)
    found = []
    for write in (cache_write, reference("cache_write")):
        k, v, scales = cached(codec, 2, 2, 8, 32, DEVICE)
        write(x, x.flip(2), slots, k, v, scales)
        kept = torch.zeros(2, 8, dtype=torch.bool)
        kept.view(-1)[slots[slots >= 0].cpu()] = True
        found.append([codec.key.decode(k, scales.k, 0.05).transpose(1, 2)[kept],
                      codec.value.decode(v, scales.v, 0.03).transpose(1, 2)[kept], k.view(torch.uint8).transpose(1, 2)[~kept]])
    assert torch.equal(found[0][2], found[1][2])
    # The interpreter's conversion to FP8 loses the carry into the exponent.
    if DEVICE.type == "cuda" or not (name.startswith("fp8") or name == "nvfp4"):
        for one, other in zip(found[0][:2], found[1][:2], strict=True):
            assert ((one - other).abs() > 1e-3).float().mean() < 5e-3


@pytest.mark.parametrize(("attention", "case"), [
    (TRITON, Case([(70, 20), (330, 1)], 4, 1, 64)),
    (INVARIANT, Case([(90, 1), (20, 3)], 3, 1, 32, window=40)),
], ids=["triton", "invariant"])
@NAMED
def test_attention_is_that_over_decoded_numbers(name: str, attention: TritonAttention, case: Case) -> None:
    case = built(case, torch.float32)
    k, v, scales, keys, values = written(case, _named(name), reference("cache_write"))
    found = attention.apply(case.q, k, v, case.table, case.query_start, case.context, case.size**-0.5, case.window,
                            scales=scales)
    case.k, case.v = keys, values
    close(found, case.run(reference("attention")), 0.1, 2.0)


@pytest.mark.parametrize("case", [Case([(50, 40), (130, 1)], 2, 1, 64), Case([(300, 1), (40, 2)], 4, 2, 80, window=50)],
                         ids=["whole", "window"])
@NAMED
def test_half_precision(name: str, case: Case) -> None:
    """Products run on converted codes in 16 bits: those of 8 and of 4 bits by words where whole words fit."""
    if CODECS[name].key.misfit(case.size) is not None:
        pytest.skip(f"{name} does not fit heads of {case.size}")
    case = built(case, torch.float16)
    k, v, scales, keys, values = written(case, _named(name), reference("cache_write"))
    case.q, case.k, case.v = case.q, keys, values
    assert _by_words(scales, k, case.q) == (name != "turbo3" and (case.size == 64 or CODECS[name].key.bits == 8))
    found = TRITON.apply(case.q, k, v, case.table, case.query_start, case.context, case.size**-0.5, case.window,
                         scales=scales)
    case.q = case.q.float()
    close(found, case.run(reference("attention")), 1.0, 2.0)


@NAMED
def test_items_of_several_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of one multiprocessor a program loops over many blocks of keys."""
    monkeypatch.setattr(attention_work, "MULTIPROCESSORS", 1)
    case = built(Case([(700, 1), (390, 1)], 4, 1, 64), torch.float16)
    k, v, scales, keys, values = written(case, _named(name), reference("cache_write"))
    attention_work.layout.cache_clear()
    try:
        found = TRITON.apply(case.q, k, v, case.table, case.query_start, case.context, case.size**-0.5, scales=scales)
    finally:
        attention_work.layout.cache_clear()
    case.q, case.k, case.v = case.q.float(), keys, values
    close(found, case.run(reference("attention")), 1.0, 2.0)


@NAMED
def test_blocks_for_the_library(name: str) -> None:
    """A long prompt's attention: keys and values are gathered as plain numbers."""
    case = built(Case([(64, 10)], 2, 1, 64), torch.float32)
    k, v, scales, case.k, case.v = written(case, _named(name), reference("cache_write"))
    out = torch.empty_like(case.q)
    attention_library.attend(case.q, k, v, case.table, 0.125, [Span(0, 0, 10, 54)], out, scales)
    close(out, case.run(reference("attention")), 0.1, 2.0)


def test_keys_alone_are_rotated_to_their_tokens_place() -> None:
    q, k = random(5, 4, 16, seed=1).to(DEVICE), random(5, 2, 16, seed=2).to(DEVICE)
    angles = random(9, 8, seed=3).to(DEVICE)
    positions, found = torch.arange(5, dtype=torch.int32, device=DEVICE), []
    for call in (rope_write, reference("rope_write")):
        keys = torch.zeros_like(k)
        found.append((call(q, k, None, positions, None, keys[:, :, None], None, angles.cos(), angles.sin()), keys))
    close(found[0][0], found[1][0].double())
    close(found[0][1], found[1][1].double())
