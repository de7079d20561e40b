"""A scheme that no model has: weights stored transposed, with a second tensor beside them. Nothing else has to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.checkpoint import read_config
from penstock.cli.info import as_text, survey
from penstock.config.schema import EngineOptions
from penstock.core.errors import ModelError
from penstock.models import describe
from penstock.ops import registry
from penstock.quant.scheme import Decoding
from tests.models import fakes
from tests.models.families import PROMPT
from tests.models.harness import Runner, open_model, reference

IDS = torch.randint(3, 131, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
SCHEMES = (("blocks.*", fakes.Transposed()), ("head", fakes.Transposed()))


def plain_names() -> dict[str, tuple[int, ...]]:
    """A Llama checkpoint's tensors."""
    shapes = {"model.embed_tokens": (131, 48), "lm_head": (131, 48), "model.norm": (48,)}
    for at in (f"model.layers.{i}" for i in range(4)):
        shapes |= {f"{at}.self_attn.{n}_proj": (48 if n in "qo" else 24, 48) for n in "qkvo"}
        shapes |= {f"{at}.mlp.down_proj": (48, 64)}
        shapes |= {f"{at}.mlp.{n}_proj": (64, 48) for n in ("gate", "up")}
        shapes |= {f"{at}.{n}_layernorm": (48,) for n in ("input", "post_attention")}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The same model stored plainly, and by the scheme."""
    plain, stored = fakes.configured(tmp_path / "plain"), fakes.configured(tmp_path / "stored")
    config = (plain / "config.json").read_text()
    (plain / "config.json").write_text(config.replace("FakeForCausalLM", "LlamaForCausalLM"))
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * (shape[-1]**-0.5 if len(shape) > 1 else 1.0)
               for name, shape in plain_names().items()}
    save_file(tensors, plain / "model.safetensors")
    encoded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or "embed" in name:
            encoded[name] = tensor
        else:
            stem = name.removesuffix(".weight")
            encoded |= {f"{stem}.{suffix}": part for suffix, part in fakes.Transposed().encode(tensor).items()}
    save_file(encoded, stored / "model.safetensors")
    module = fakes.family(SCHEMES)
    module.RULES = tuple(fakes.rules.Rule("lm_head.*", "head.*") if rule.target == "head.weight" else rule
                         for rule in fakes.rules.LLAMA)
    fakes.enter(monkeypatch, module)
    return plain, stored


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Runner(open_model(folder, **options)).prompt(0, IDS)


@pytest.mark.parametrize("kernels", ["reference", "default"])
def test_a_checkpoint_is_read_and_decoded_where_no_kernel_serves(folders: tuple[Path, Path], kernels: str) -> None:
    """Fused matrices are joined along each tensor's own axis."""
    plain, stored = folders
    bound = {"kernels": reference()} if kernels == "reference" else {}
    assert torch.equal(logits(stored, **bound), logits(plain, **bound))


def test_a_kernel_is_bound_by_operation_scheme_and_shape(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    registry.load()
    monkeypatch.setitem(registry.TABLE, "linear.transposed", {"reference": fakes.kernel(fits=lambda n, k: n != 131)})
    monkeypatch.setattr(fakes.TransposedOps, "packed", 0)
    plain, stored = folders
    decoder = open_model(stored, kernels=reference())
    ops = [linear.weight.ops for linear in decoder.linears]
    assert ops == [fakes.TransposedOps] * 16 and fakes.TransposedOps.packed == 16
    assert isinstance(decoder.logits.weight.ops, Decoding), "the head's shape does not fit the kernel"
    assert decoder.embedding.weight.ops is decoder.kernels.linear, "the embedding is plain"
    assert ("linear.transposed", "reference") in decoder.kernels.table()
    torch.testing.assert_close(Runner(decoder).prompt(0, IDS), logits(plain, kernels=reference()), atol=1e-4, rtol=0)


def test_random_weights_and_the_engine(folders: tuple[Path, Path]) -> None:
    """The same numbers as those of the plain model, since they are drawn before they are stored."""
    found = []
    for folder in folders:
        with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=128, device="cpu") as llm:
            [output] = llm.generate([{"prompt_token_ids": IDS}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                                    use_tqdm=False)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


def test_memory_is_planned_and_shown_as_stored(folders: tuple[Path, Path]) -> None:
    plain, stored = folders
    assert describe(read_config(stored)).size == describe(read_config(plain)).size
    rows = 4 * (96 + 48 + 128 + 48) + 131
    assert describe(read_config(stored)).nbytes("float32") - describe(read_config(plain)).nbytes("float32") == rows * 4
    found = survey(EngineOptions(model=str(stored), device="cpu", max_model_len=128))
    schemes = {one["scheme"]: one for one in found["weights"]}
    assert schemes["transposed"]["matrices"] == 17 and schemes["plain"]["matrices"] == 1
    assert schemes["transposed"]["kernels"] == ["decoded in tiles"]
    assert found["files"]["tensors"] == 2 * (4 * 7 + 1) + 1 + 9
    assert "transposed" in as_text(found)


def test_tensors_that_do_not_fit_the_scheme_are_named(folders: tuple[Path, Path]) -> None:
    _, stored = folders
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.peak"]
    tensors["model.layers.2.mlp.gate_proj.weight_t"] = torch.zeros(48, 60)
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(64, 48)
    tensors["lm_head.peak"] = torch.zeros(131, dtype=torch.int8)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_model(stored)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "model.layers.1.self_attn.k_proj.peak" in lines
    assert "model.layers.3.mlp.up_proj.weight [64, 48]" in lines
    assert "model.layers.2.mlp.gate_proj.weight_t is [48, 60]; the config asks for [48, 64]" in lines
    assert "lm_head.peak is I8; weights can be F32, F16, BF16" in lines


def test_norms_and_gates_know_the_matrix_that_reads_them(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kernel can round activations for it on the way. A matrix is moved once, whoever knows it."""
    decoder = open_model(folders[0])
    for block in decoder.blocks:
        (attention,), (mlp,) = block.stages
        assert attention.pre is not None and mlp.pre is not None
        assert getattr(attention.pre, "reader", None) is attention.body.linears[0].weight
        assert getattr(mlp.pre, "reader", None) is mlp.body.linears[0].weight
        up, down = (linear.weight for linear in mlp.body.linears)
        assert up.reader is down
    moved = list[torch.Tensor]()
    up.move(lambda tensor: moved.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert len(moved) == 1
