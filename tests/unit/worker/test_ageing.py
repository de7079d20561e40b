"""Pages of the tiers in fewer bits: keys and values come back as the coding has them, and all else as it was."""

from __future__ import annotations

import pytest
import torch

from penstock import LLM
from penstock.canary.suite import SKILLS, graded, prompts
from penstock.cli.eval import answers
from penstock.core.errors import ConfigError
from penstock.core.state import Everything, Field, Snapshot, StateSpec, lay_out, layout_behind
from penstock.ops.codec import Codec, aged
from penstock.worker.ageing import Ageing
from penstock.worker.arena import Arena

PAGE = 8


def test_pages_come_back_as_their_coding_has_them() -> None:
    coding = aged(32)
    states = [StateSpec((Field("k", (2, 32), "bfloat16"), Field("v", (2, 32), "bfloat16")), Everything(),
                        Codec("aged", coding, coding).fields(2, 32)),
              StateSpec((Field("k", (1, 16), "float32"), Field("v", (1, 16), "float32")), Everything()),
              StateSpec((Field("s", (4, 8), "float32", per="page"),), Snapshot())]
    here = lay_out(states, PAGE, 1 << 20)
    there = layout_behind(here, states)
    assert there.groups[0].page_bytes < here.groups[0].page_bytes and there.slabs == here.slabs
    arena = Arena(here, torch.device("cpu"))
    views, ageing = arena.views(states), Ageing(states, here, there)
    torch.manual_seed(1)
    before, first = [], [0, 8 * here.groups[1].per_slab]
    for view in views:
        for name in view.fields:
            mine = view[name][first[view.group]:][:3]
            mine.copy_(torch.randn(mine.shape))
            before.append(mine.clone())
    for group in range(2):
        pages = arena.stretch(group, first[group], 3)
        old = ageing.old(group, pages, 3)
        pages.zero_()
        pages.copy_(ageing.young(group, old, 3, torch.device("cpu")))
    after = [view[name][first[view.group]:][:3] for view in views for name in view.fields]
    for one, other in zip(before[:2], after[:2], strict=True):
        codes, scales = coding.encode(one.flatten(0, 2))
        assert torch.equal(other.flatten(0, 2), coding.decode(codes, scales).to(torch.bfloat16))
        assert not torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(before[2:], after[2:], strict=True))


def test_evicted_pages_are_smaller_and_come_back() -> None:
    """Right answers survive 4 bits, and pages of three times as many tokens fit into the same host memory."""
    items = [item for skill in SKILLS for item in prompts(skill, 2)]
    right, kept = {}, {}
    for codec in ("auto", "aged"):
        with LLM("canary", device="cpu", threads=1, kv_cache_dtype=codec, cache_host_bytes=16 << 20, cache_load="always",
                 cache_write="evict", max_num_seqs=2, max_model_len=1024, kv_cache_memory_bytes=9 << 18) as llm:
            right[codec] = [graded(items, answers(llm, items)).right for _ in range(2)]
            host = next(tier for tier in llm.stats().tiers if tier.name == "host")
            assert host.hit_tokens > 500
            kept[codec] = host.bytes_in / host.stored_pages
    assert right["auto"][0] == right["auto"][1] == right["aged"][0]
    assert right["aged"][1] >= 0.9 * right["auto"][0], right
    assert kept["aged"] < 0.4 * kept["auto"]


def test_nothing_behind_the_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is behind it; set cache_host_bytes"):
        LLM("canary", device="cpu", kv_cache_dtype="aged", max_model_len=64)
