"""A parameter says how ranks may divide it, and Linear is where a rank's collective and an adapter's delta are added."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.layers.attention import AttentionSpec
from penstock.layers.build import Build, Linear, Parameter, Piece, Split, Values
from penstock.layers.mlp import MLP, MLPSpec
from penstock.layers.step import BASE, Base
from penstock.quant.scheme import PLAIN, pack
from tests.models import fakes
from tests.models.families import CASES, PROMPT, make
from tests.models.harness import CPU, Runner, open_model, reference

ADAPTED = ("llama-tied-biased", "gemma2-plain", "gemma4-shared", "gemma3n-shared", "neox-parallel", "gpt2-plain")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_shares_are_whole_units_and_leave_nothing_out(ranks: int) -> None:
    qkv, *_ = AttentionSpec(60, 6, 3, 10, 1.0).qkv.parameters("a.qkv")
    down, bias = MLPSpec(60, 88, "silu", bias=True).output.parameters("m.down")
    shares = [qkv.share(rank, ranks) for rank in range(ranks)]
    for piece, (first, rows) in enumerate(((0, 60), (60, 30), (90, 30))):
        held = [range(*share[piece]) if ranks > 1 else range(first, first + rows) for share in shares]
        assert {row for rows in held for row in rows} == set(range(first, first + rows))
        assert all(len(rows) % 10 == 0 and rows.start % 10 == 0 and len(rows) for rows in held), "heads stay together"
        if ranks <= rows // 10:
            assert sum(map(len, held)) == rows, "nothing is held twice"
    columns = [range(*down.share(rank, ranks)[0]) for rank in range(ranks)] if ranks > 1 else [range(88)]
    assert [column for held in columns for column in held] == list(range(88))
    assert bias.share(1, 2) == [(0, 60)], "it is added to the sum, once"
    norm = Parameter("n.weight", (60,))
    assert norm.split is Split.WHOLE and norm.share(1, 2) == [(0, 60)]


def test_rows_that_are_no_whole_units_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="no whole units"):
        Parameter("a.weight", (25, 8), PLAIN, (Piece("a.q", 25, 10),), split=Split.ROWS).share(0, 2)


class WholeStep(Base):
    """A step whose tokens are all wanted."""

    def narrow(self, x: torch.Tensor, ends: torch.Tensor | None) -> tuple[torch.Tensor, Base]:
        assert ends is None
        return x, self


def test_two_ranks_add_up_to_the_whole() -> None:
    """Each computes with its share of a feed-forward layer; the collective is the sum, in one process."""
    spec = MLPSpec(24, 40, "silu", bias=True)
    generator = torch.Generator().manual_seed(3)
    whole = {p.name: torch.randn(p.shape, generator=generator) * 0.3 for p in spec.parameters("mlp")}
    described = {p.name: p for p in spec.parameters("mlp")}
    kernels = reference()
    x = torch.randn(5, 24, generator=generator)

    def built(tensors: dict[str, torch.Tensor], reduce: object = None) -> MLP:
        group = None if reduce is None else SimpleNamespace(rank=0, size=2, reduce=reduce)
        values = Values({name: pack(PLAIN, tuple(tensor.shape), {"weight": tensor}, torch.float32, kernels)
                         if tensor.dim() == 2 else tensor for name, tensor in tensors.items()})
        return MLP(spec, "mlp", Build(values, kernels, CPU, 64, group))  # type: ignore[arg-type]

    def held(rank: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in whole.items():
            if described[name].split is Split.WHOLE:
                found[name] = tensor
            else:
                axis = 0 if described[name].split is Split.ROWS else 1
                found[name] = torch.cat([tensor.narrow(axis, a, b - a) for a, b in described[name].share(rank, 2)], axis)
        return found

    sent: list[torch.Tensor] = []

    def send(out: torch.Tensor) -> torch.Tensor:
        sent.append(out)
        return out

    step = WholeStep()
    built(held(1), send)(x, step)  # type: ignore[arg-type]
    result = built(held(0), lambda out: out + sent[0])(x, step)  # type: ignore[arg-type]
    assert len(sent) == 1, "only the projection whose inputs are divided is summed"
    torch.testing.assert_close(result, built(whole)(x, step), atol=1e-5, rtol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ADAPTED], ids=lambda c: c.name)
def test_deltas_on_every_projection_are_a_merged_model(case: fakes.Any, tmp_path: Path) -> None:
    """Of a fake adapter that adds x A B to each projection's result, the embedding's and the head's included. Activations
    follow the delta."""
    make(case, tmp_path)
    runner = Runner(open_model(tmp_path, kernels=reference()))
    decoder = runner.decoder
    deltas: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(9)

    def of(path: str, n: int, k: int) -> torch.Tensor:
        if path not in deltas:
            deltas[path] = (torch.randn(n, 2, generator=generator) @ torch.randn(2, k, generator=generator)) * 0.02
        return deltas[path]

    class Given:
        def shrink(self, _path: str, x: torch.Tensor) -> torch.Tensor:
            return x

        def expand(self, path: str, low: torch.Tensor | None, out: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
            assert low is not None
            return out + low @ of(path, out.shape[1], low.shape[1]).t()

        def product(self, *_: object) -> None:
            """No kernel of its own."""

        def embed(self, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return out + of("embedding", decoder.spec.vocab_size, decoder.spec.width)[tokens.long()]

        def head(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return self.expand("head", x, out, bias)

    adapted = Base(delta=Given())
    forward, head = decoder.forward, decoder.head
    prompt = torch.randint(3, 100, (PROMPT,), generator=generator).tolist()
    base = runner.prompt(0, prompt)

    def with_delta(step: fakes.Step) -> torch.Tensor:
        step.delta = step.end_delta = Given()
        return forward(step)

    decoder.forward, decoder.head = with_delta, lambda hidden: head(hidden, adapted)  # type: ignore[method-assign]
    found = runner.prompt(1, prompt)
    decoder.forward, decoder.head = forward, head  # type: ignore[method-assign]
    assert len(deltas) == len(decoder.linears) + 2
    for linear in [*decoder.linears, decoder.logits]:
        weight = linear.weight
        merged = weight.data + deltas[linear.path]
        linear.weight = pack(PLAIN, (weight.n, weight.k), {"weight": merged}, torch.float32, decoder.kernels)
    table = decoder.embedding.weight
    decoder.embedding.weight = pack(PLAIN, (table.n, table.k), {"weight": table.data + deltas["embedding"]}, torch.float32,
                                    decoder.kernels)
    merged_logits = Runner(decoder).prompt(0, prompt)
    assert (found - base).abs().max() > 0.05
    torch.testing.assert_close(found, merged_logits, atol=2e-3, rtol=0)


def test_a_linear_without_adapter_or_ranks_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without adapters cost nothing: the kernel's own result is returned."""
    kernels = reference()
    values = Values({"m.down.weight": pack(PLAIN, (3, 4), {"weight": torch.ones(3, 4)}, torch.float32, kernels)})
    out = torch.zeros(2, 3)
    linear = Linear(MLPSpec(3, 4, "silu").output, "m.down", Build(values, kernels, CPU, 8))
    monkeypatch.setattr(linear, "_apply", lambda *_: out)
    assert linear(torch.zeros(2, 4), BASE) is out
