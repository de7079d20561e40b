"""Masks that arrive late: the forward pass is launched without them, and choosing waits for the tokens of the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as List
from itertools import pairwise

import numpy as np
import pytest

from penstock.config.schema import EngineOptions
from penstock.core.masking import MaskedSegment
from penstock.core.plan import Masks, StepPlan
from penstock.core.request import Request, Update
from penstock.core.sampling import SamplingParams
from penstock.engine.engine import Engine
from penstock.engine.executor import Direct, Threaded
from tests.data import MODELS, need

VOCABULARY = 512
PROMPTS = [[1, 5, 9], [1, 300, 20, 31, 7], [1, 44], [1, *range(30, 90)]]


class Alternating:
    """Masks requests whose id begins with "m": after an even token only odd ones may follow, and the other way round."""

    def __init__(self) -> None:
        self.lines = 0

    def wants(self, request: Request) -> bool:
        return request.id.startswith("m")

    def masks(self, segments: List[MaskedSegment]) -> Masks:
        allowed = np.zeros((0, VOCABULARY), np.uint8)
        for sequence, drafts in segments:
            known = np.array([sequence.tokens[-1], *drafts])[:, None]
            allowed = np.concatenate((allowed, (np.arange(VOCABULARY)[None] % 2 != known % 2).astype(np.uint8)))
        self.lines += len(allowed)
        return Masks(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))


@pytest.fixture(params=["threaded", "direct"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = Engine(EngineOptions(model=str(need(MODELS / "stories260k")), threads=1, max_num_seqs=6, max_num_batched_tokens=16,
                                 max_model_len=128))
    if request.param == "direct":
        found.executor.close()
        found.executor = Direct(found.rank.worker)
    yield found
    found.close()


def _prompt(name: str) -> list[int]:
    return PROMPTS[ord(name[-1]) % len(PROMPTS)]


def _run(engine: Engine, ids: List[str], **params: object) -> dict[str, list[Update]]:
    for name in ids:
        engine.submit(Request(name, _prompt(name), SamplingParams(
            **{"temperature": 0, "max_tokens": 20, "seed": 3, "ignore_eos": True, **params})))
    found: dict[str, list[Update]] = {name: [] for name in ids}
    while engine.busy:
        for update in engine.turn():
            found[update.request_id].append(update)
    return found


def _tokens(updates: dict[str, list[Update]]) -> dict[str, list[int]]:
    return {name: [token for update in of for token in update.token_ids] for name, of in updates.items()}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
def test_masked_rows_obey_and_their_neighbours_do_not_notice(engine: Engine, params: dict[str, float]) -> None:
    plain = _tokens(_run(engine, ["a", "b", "c", "d"], **params))
    masker = engine.scheduler.masker = Alternating()
    found = _tokens(_run(engine, ["m0", "b", "m1", "m3"], **params))
    assert found["b"] == plain["b"] and masker.lines >= 60
    for name in ("m0", "m1", "m3"):
        row = [_prompt(name)[-1], *found[name]]
        assert len(row) == 21 and all(one % 2 != other % 2 for one, other in pairwise(row))
    assert any(one % 2 == other % 2 for one, other in pairwise(plain["a"]))


def test_log_probabilities_are_those_without_the_mask(engine: Engine) -> None:
    plain = _run(engine, ["a"], logprobs=3, max_tokens=1)["a"][0].logprobs
    assert _prompt("a") == _prompt("m1")
    engine.scheduler.masker = Alternating()
    found = _run(engine, ["m1"], logprobs=3, max_tokens=1)["m1"][0]
    assert plain is not None and found.logprobs is not None
    assert found.logprobs[0].ids[1:] == plain[0].ids[1:]
    assert found.logprobs[0].logprobs[1:] == plain[0].logprobs[1:]
    assert found.token_ids[0] % 2 != PROMPTS[1][-1] % 2


def test_a_mask_of_nothing_ends_that_request_alone(engine: Engine) -> None:
    class Nothing(Alternating):
        def masks(self, segments: List[MaskedSegment]) -> Masks:
            return Masks(np.zeros((len(segments), VOCABULARY // 32), np.int32))

    plain = _tokens(_run(engine, ["b"]))
    engine.scheduler.masker = Nothing()
    found = _run(engine, ["m", "b"])
    assert [update.finish_reason for update in found["m"]] == ["error"] and "excluded" in (found["m"][0].error or "")
    assert _tokens(found)["b"] == plain["b"]


def test_the_forward_pass_begins_before_the_step_before_is_applied(engine: Engine) -> None:
    """Overlap stays: when a masked plan is handed over, the result of the one before it has not been taken yet."""
    flying: list[int] = []
    submit = engine.executor.submit

    def watching(plan: StepPlan) -> object:
        if len(plan.masked):
            flying.append(len(engine._in_flight))
        return submit(plan)

    engine.executor.submit = watching  # type: ignore[method-assign]
    engine.scheduler.masker = Alternating()
    _run(engine, ["m"])
    assert len(flying) == 20 and flying.count(1) >= 19


def test_an_error_of_masks_does_not_block_what_follows(engine: Engine) -> None:
    class Broken(Alternating):
        def masks(self, segments: List[MaskedSegment]) -> Masks:
            raise ValueError("no mask")

    plain = _tokens(_run(engine, ["b"]))
    engine.scheduler.masker = Broken()
    engine.submit(Request("m", _prompt("m"), SamplingParams(temperature=0, max_tokens=20, seed=3)))
    with pytest.raises(ValueError, match="no mask"):
        while engine.busy:
            engine.turn()
    engine.abort(["m"])
    while engine.busy:
        engine.turn()
    assert _tokens(_run(engine, ["b"])) == plain


def test_closing_does_not_wait_for_masks_that_never_come() -> None:
    class Waiting:
        def launch(self, plan: StepPlan) -> object:
            return self

        def choose(self, masks: Masks) -> None:
            raise AssertionError("there are no masks")

    executor = Threaded(Waiting())  # type: ignore[arg-type]
    pending = executor.submit(StepPlan(0, rows=np.zeros(1, np.int32), masked=np.zeros(1, np.int32)))
    executor.close()
    with pytest.raises(RuntimeError, match="closed while plan 0 waited"):
        pending.result()
