"""The host's part of a decode step, counted in calls: times say nothing on a machine that is shared."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from penstock import LLM, SamplingParams

MOST = 430
"""Calls of Penstock's functions in a decode step of canary (eight layers) on a CPU, a tenth more than there are."""


def test_a_decode_step_makes_few_calls() -> None:
    calls = 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "penstock" in frame.f_code.co_filename

    tokens, before = 100, sys.getprofile()
    threading.setprofile(count)
    try:
        with LLM("canary", threads=1, device="cpu", max_model_len=512, enable_prefix_caching=False) as llm:
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate([{"prompt_token_ids": [1, 5, 17]}], sampling, use_tqdm=False)
            calls = 0
            sys.setprofile(count)
            llm.generate([{"prompt_token_ids": [1, 5, 17]}], sampling, use_tqdm=False)
            sys.setprofile(before)
    finally:
        threading.setprofile(None)
        sys.setprofile(before)
    assert 100 < calls / tokens <= MOST, calls / tokens
