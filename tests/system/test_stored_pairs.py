"""Every scheme with every codec of the cache, on each device and over ranks: it runs, with the tokens of one rank, or it is
refused at start with what would work.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import PenstockError
from penstock.engine.engine import Engine
from penstock.ops.codec import CODECS
from penstock.quant.dialects.at_load import SCHEMES
from tests.sampling import sampled
from tests.system.random_models import saved_random
from tests.system.ranks import Threaded
from tests.system.test_layouts import greedy, options

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
CUT = ("q4_k", "q6_k", "fp8_block")
"""Schemes whose blocks are cut apart where two ranks divide 256 columns, or the 128 rows of keys."""
ROUNDING = ("fp8", "int8")
"""Schemes that round activations by scales of a token's columns, of which each rank has some."""
ALL = [(scheme, codec, device, ranks) for scheme, codec, (device, ranks) in itertools.product(
    ("plain", *SCHEMES), ("auto", *CODECS, "aged"), (*((device, 1) for device in DEVICES), ("cpu", 2)))]
NARROW = [(scheme, codec) for scheme in ("int4", "q8_0") for codec in CODECS]


def llama(folder: Path, hidden: int, head: int) -> Path:
    import transformers

    torch.manual_seed(6)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head, vocab_size=160, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    return saved_random(made, folder, 0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole blocks of every scheme and codec; on two ranks not of all."""
    return llama(tmp_path_factory.mktemp("model"), 256, 64)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 24 elements, which many codecs do not fit, and rows of 96."""
    return llama(tmp_path_factory.mktemp("narrow"), 96, 24)


def stored(folder: Path, scheme: str, codec: str, device: str = "cpu", ranks: int = 1) -> list[list[int]]:
    more: dict[str, Any] = {} if scheme == "plain" else {"quantization": scheme}
    if codec == "aged":
        more |= {"cache_host_bytes": 1 << 22}
    asked = options(folder, kv_cache_dtype=codec, device=device, tensor_parallel_size=ranks, **more)
    return greedy(Engine(asked, rank=Threaded(asked)) if ranks > 1 else Engine(asked))


@functools.cache
def alone(folder: Path, scheme: str, codec: str) -> list[list[int]]:
    return stored(folder, scheme, codec)


@pytest.mark.parametrize("pair", sampled(ALL, 31, name=str))
def test_a_pair_runs_or_is_refused(model: Path, pair: tuple[str, str, str, int]) -> None:
    scheme, codec, device, ranks = pair
    if ranks > 1 and scheme in CUT:
        with pytest.raises(PenstockError, match=rf"blocks .*\({scheme}\).* possible for tensor_parallel_size is 1"):
            stored(model, scheme, codec, device, ranks)
        return
    found = stored(model, scheme, codec, device, ranks)
    assert [len(tokens) for tokens in found] == [16] * 3
    if ranks > 1 and scheme not in ROUNDING:
        assert found == alone(model, scheme, codec)


@pytest.mark.parametrize("pair", sampled(NARROW, 3, name=str))
def test_heads_that_codecs_do_not_fit(narrow: Path, pair: tuple[str, str]) -> None:
    """The refusal names the codecs that do fit."""
    scheme, codec = pair
    fits = [name for name, one in CODECS.items() if one.key.misfit(24) is None and one.value.misfit(24) is None]
    assert "int4" in fits and "turbo4" not in fits
    if codec in fits:
        assert stored(narrow, scheme, codec)
        return
    with pytest.raises(PenstockError, match=rf"kv_cache_dtype '{codec}' does not fit .*Possible are {', '.join(fits)}"):
        stored(narrow, scheme, codec)


def test_aged_pages_need_a_place_behind_the_device(model: Path) -> None:
    with pytest.raises(PenstockError, match="set cache_host_bytes, cache_disk or cache_remote"):
        greedy(Engine(options(model, kv_cache_dtype="aged", quantization="int4")))
