"""Latent attention's two forms say the same, and the expanded one runs where it is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.layers.block import RMSNormSpec
from penstock.layers.latent import Held, LatentAttention, SparseLatentAttention, SparseLatentAttentionSpec, hadamard, largest
from penstock.layers.rope import RopeSpec
from penstock.ops.attention import AttentionOps, Geometry, Ints, Span
from tests.models.families import CASES, PROMPT, make
from tests.models.harness import Runner, open_model


def spans(_ops: AttentionOps, geometry: Geometry, counts: Ints, context: Ints) -> list[Span]:
    """Every segment of at least 5 queries."""
    first = np.cumsum(counts) - counts
    return [Span(s, int(first[s]), int(counts[s]), int(context[s] - counts[s])) for s in range(len(counts)) if counts[s] >= 5]


@pytest.mark.parametrize("name", ["deepseek2-yarn", "deepseek3-halved", "deepseek3-one"])
def test_both_forms_say_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == name)
    make(case, tmp_path)
    prompt = torch.randint(3, 199, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    absorbed = Runner(open_model(tmp_path)).greedy(prompt, 30)
    expanded: list[int] = []
    expand = LatentAttention._expand

    def counted(self: LatentAttention, q: torch.Tensor, held: Held, *rest: torch.Tensor) -> None:
        expanded.append(held[0].count)
        expand(self, q, held, *rest)

    monkeypatch.setattr(LatentAttention, "_expand", counted)
    monkeypatch.setattr(AttentionOps, "library_spans", spans)
    runner = Runner(open_model(tmp_path))
    found = runner.greedy(prompt, 30)
    assert expanded == [30] * 3 + [13] * 3 + [24] * 3  # the first 7 tokens have no context
    torch.testing.assert_close(found[0], absorbed[0], atol=1e-4, rtol=0)
    assert found[1] == absorbed[1]
    # A step of both kinds: a token and a chunk, side by side.
    together = runner.step([(0, [found[1][-1]]), (1, prompt[:20])])
    torch.testing.assert_close(together[1:], absorbed[0][:20], atol=1e-4, rtol=0)
    # Prompts without a context, whose keys are expanded together, side by side.
    plain, several = AttentionOps.prompts, list[int]()

    def noted(self: AttentionOps, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, spans: Sequence[Span],
              out: torch.Tensor) -> None:
        several.extend(span.count for span in spans)
        plain(self, q, k, v, scale, spans, out)

    monkeypatch.setattr(AttentionOps, "prompts", noted)
    expanded.clear()
    beside = Runner(open_model(tmp_path)).step([(0, prompt[:9]), (1, prompt[:20])])
    torch.testing.assert_close(beside, torch.cat((absorbed[0][:9], absorbed[0][:20])), atol=1e-4, rtol=0)
    assert not expanded and several == [9, 20] * 3


def test_index_keys_in_fp8_pick_nearly_the_same() -> None:
    """132 bytes a position in 16-bit models; queries and keys are spread alike, so that scores are those of the keys."""
    sparse = SparseLatentAttentionSpec(64, 2, 32, 16, 16, 0.2, RopeSpec(1e4, 16), RMSNormSpec(1e-6), 24)
    (state,), (exact,) = sparse.states("bfloat16"), sparse.states("float32")
    assert sum(field.nbytes for field in state.fields if field.name.startswith("index")) == 132
    assert {field.name: field.dtype for field in exact.fields} == {"latent": "float32", "index": "float32"}
    layer = SparseLatentAttention.__new__(SparseLatentAttention)
    layer._spread = hadamard(128, torch.device("cpu"))
    torch.testing.assert_close(layer._spread @ layer._spread.T, torch.eye(128))
    layer.index = torch.zeros(40, 1, 16, 128, dtype=torch.float8_e4m3fn)
    layer.index_scale = torch.zeros(40, 1, 16, 1)
    generator = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(600, 128, generator=generator), torch.randn(9, 4, 128, generator=generator)
    keys[:, 3] *= 40
    slots = torch.randperm(640, generator=generator)[:600]
    layer.keep(slots, keys)
    found = torch.einsum("thd,kd->tk", layer.asked(queries), layer.kept(slots // 16, slots % 16))
    wanted = torch.einsum("thd,kd->tk", queries, keys)
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.03
    picks = (one.topk(64).indices.tolist() for one in (found, wanted))
    assert min(len(set(a) & set(b)) for a, b in zip(*picks, strict=True)) >= 58


def test_equal_index_scores_pick_the_same_in_any_chunk(tmp_path: Path) -> None:
    """Where no head of an index query meets a key, the score is 0: with two heads, many are. transformers picks among them by
    the length of what it computes at once, so that its own cached decoding differs; Penstock picks the first."""
    case = next(case for case in CASES if case.name == "deepseek32-long")
    make(replace(case, config={**case.config, "index_n_heads": 2}), tmp_path)
    prompt = torch.randint(3, 199, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    chunks, whole = Runner(open_model(tmp_path)).prompt(0, prompt), Runner(open_model(tmp_path)).step([(0, prompt)])
    torch.testing.assert_close(chunks, whole, atol=1e-4, rtol=0)
    assert largest(torch.tensor([[0.0, 2.0, 0.0, -1.0, -0.0, 3.0]]), 4).tolist() == [[0, 1, 2, 5]]
