"""Plain checkpoints that are quantized as they are loaded: matrices are the scheme's, rules decide, nothing is held twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import canary
from penstock.cli.info import survey
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
from penstock.models import configured, describe, load
from penstock.models.registry import checkpoint_of
from penstock.models.translated import Translated
from penstock.quant.dialects.at_load import SCHEMES
from penstock.quant.microscaling import MXFP4
from tests.models.families import CASES, make
from tests.models.harness import CPU, Runner, reference
from tests.models.test_dialects import LLAMA, NAMES, greedy


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    generator = torch.Generator().manual_seed(4)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * shape[1]**-0.5 for name, shape in NAMES.items()}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(96, 128, generator=generator) * 0.1
    norms = (f"model.layers.{i}.{kind}_layernorm" for i in range(2) for kind in ("input", "post_attention"))
    for name in ("model.norm", *norms):
        tensors[f"{name}.weight"] = torch.ones(128)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "dtype": "float32"}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_answers_as_its_decoded_matrices(name: str, plain: Path, tmp_path: Path) -> None:
    config = configured(plain, name)
    tensors = load_file(plain / "model.safetensors")
    for at in NAMES:
        scheme = SCHEMES[name](tensors[f"{at}.weight"].shape[1])
        assert scheme is not None
        tensors[f"{at}.weight"] = scheme.decode(scheme.encode(tensors[f"{at}.weight"]), torch.float32)
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    spec = describe(config)
    model = load(plain, config, dtype=torch.float32, device=CPU, kernels=reference(), max_model_len=64)
    found = Runner(model).prompt(0, [5, 9, 2, 80, 41])
    expected = Runner(load(tmp_path, configured(tmp_path), dtype=torch.float32, device=CPU, kernels=reference(),
                           max_model_len=64)).prompt(0, [5, 9, 2, 80, 41])
    # W8A8 rounds activations too.
    rounded = name in ("fp8", "fp8_block", "int8")
    torch.testing.assert_close(found, expected, atol=0.6 if rounded else 1e-4, rtol=0)
    assert spec.nbytes("float32") < describe(configured(plain)).nbytes("float32")
    assert greedy(plain, [5, 9, 2, 80], 8, quantization=name)[0] == greedy(tmp_path, [5, 9, 2, 80], 8)[0]


def test_rules_by_pattern_first_last_and_head(plain: Path) -> None:
    rules = {"first": "plain", "*.down_proj": "int8_weights", "lm_head": "q8_0"}
    options = EngineOptions(model=str(plain), device="cpu", max_model_len=64, quantization="int4", quantization_rules=rules)
    weights = survey(options)["weights"]
    assert {one["scheme"]: one["matrices"] for one in weights} == {"plain": 5, "int4g128": 3, "int8": 1, "q8_0": 1}
    layers = {one["scheme"]: {matrix.split()[0]: layers for matrix, layers in one["layers"].items()} for one in weights}
    assert layers["int4g128"] == dict.fromkeys(("attention.qkv", "attention.o", "mlp.gate_up"), "1")
    assert layers["int8"] == {"mlp.down": "1"} and layers["q8_0"] == {"head": ""}


def test_canary_quantized_at_load_still_answers() -> None:
    """Its sizes fill groups of 32 in every matrix, and larger ones in some."""
    spec = describe(configured(canary.model_folder(), "int4"))
    assert {parameter.scheme.name for parameter in spec.parameters() if parameter.scheme is not None} == {
        "plain", "int4g128", "int4g64", "int4g32"}
    [parameter] = [one for one in spec.parameters() if one.name == "blocks.0.mlp.down.weight"]
    assert parameter.scheme is not None and parameter.scheme.name == "int4g32"


def test_nothing_is_held_twice(plain: Path) -> None:
    """A module's parts are made when they are asked for, and let go of."""
    config = configured(plain, "int4")
    checkpoint = checkpoint_of(plain, config, describe(config), "float32")
    assert isinstance(checkpoint, Translated)
    with checkpoint.mapped():
        for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"):
            for part in ("weight", "scale"):
                checkpoint.read(f"{name}.{part}")
            assert checkpoint._cached[0] == name
            for part in ("weight", "scale"):
                checkpoint.drop(f"{name}.{part}")
            assert not checkpoint._cached[1]


def test_what_cannot_be_asked_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int5' is not known; possible are fp8, .*q8_0"):
        configured(plain, "int5")
    with pytest.raises(ConfigError, match="quantization_rules are given without quantization"):
        configured(plain, None, {"lm_head": "plain"})
    gptq = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": gptq}))
    assert configured(tmp_path, "gptq")["quantization_config"] == gptq
    with pytest.raises(ConfigError, match="quantization is 'fp8', but the model is quantized already, by 'gptq'"):
        configured(tmp_path, "fp8")


@pytest.mark.parametrize(("rules", "unused"), [
    ({"lm_haed": "plain"}, "'lm_haed'"), ({"first": "plain", "*.down_projection": "int8"}, "'*.down_projection'"),
    ({"layers.2": "plain", "re:.*_Proj": "int8", "lm_head": "q8_0"}, "'layers.2', 're:.*_Proj'")])
def test_rules_that_fit_nothing_are_refused(rules: dict[str, str], unused: str, plain: Path) -> None:
    """A word that is misspelt would leave matrices in a scheme that they were not meant to have."""
    said = f"quantization rules: {re.escape(unused)} fits no matrix.* lm_head, .*model\\.layers\\.\\*\\.mlp\\.down_proj.* first"
    with pytest.raises(ConfigError, match=said):
        describe(configured(plain, "int4", rules))


def test_gpt_oss_experts_in_mxfp4(tmp_path: Path) -> None:
    """Blocks along the inputs, a gate beside its up: the same answers as of the decoded matrices in the plain layout."""
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 96,
              "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "dtype": "float32",
              "eos_token_id": 2, "tie_word_embeddings": False}
    generator, scheme, at = torch.Generator().manual_seed(2), MXFP4(), "model.layers.0"
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
              "self_attn.o_proj": (64, 64), "mlp.router": (4, 64)}
    common = {f"{at}.{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    common |= {f"{at}.{name}.bias": torch.randn(shape[0], generator=generator) * 0.1 for name, shape in shapes.items()}
    common |= {f"{at}.self_attn.sinks": torch.zeros(2), "model.embed_tokens.weight": torch.randn(96, 64, generator=generator),
               "lm_head.weight": torch.randn(96, 64, generator=generator) * 0.2}
    common |= {f"{name}.weight": torch.ones(64) for name in ("model.norm", f"{at}.input_layernorm",
                                                             f"{at}.post_attention_layernorm")}
    blocks, decoded = dict(common), dict(common)
    for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        parts = scheme.encode(torch.randn(4, rows, columns, generator=generator) * 0.2)
        blocks[f"{at}.mlp.experts.{name}_blocks"] = parts["weight"].unflatten(-1, (-1, 16))
        blocks[f"{at}.mlp.experts.{name}_scales"] = parts["scale"]
        decoded[f"{at}.mlp.experts.{name}"] = scheme.decode(parts, torch.float32).transpose(1, 2).contiguous()
        for tensors in (blocks, decoded):
            tensors[f"{at}.mlp.experts.{name}_bias"] = torch.zeros(4, rows) + 0.01
    answers = []
    for kind, tensors, more in (("plain", decoded, {}), ("mxfp4", blocks, {"quantization_config": {
            "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}})):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, folder / "model.safetensors")
        answers.append(greedy(folder, [5, 9, 2, 80], 16))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("case", "kept"), [
    ("granite-moe-odd", "blocks.0.mlp.router"), ("internlm2-plain", "head"), ("chatglm-plain", "head"),
    ("hunyuan-moe-odd", "blocks.0.mlp.router"), ("hunyuan3-odd", "blocks.1.mlp.router")])
def test_heads_and_routers_stay_plain_by_any_name(case: str, kept: str, tmp_path: Path) -> None:
    """Routers called router.layer or gate.wg, heads called output or output_layer."""
    make(next(one for one in CASES if one.name == case), tmp_path)
    config = configured(tmp_path, "int8_weights")
    decoder = load(tmp_path, config, dtype=torch.float32, device=CPU, kernels=reference(), max_model_len=256)
    schemes = {one.stem: one.scheme.name for one in decoder.spec.parameters() if one.scheme is not None}
    assert schemes[kept] == "plain"
    assert "int8" in schemes.values()
    assert Runner(decoder).prompt(0, list(range(3, 20))).isfinite().all()


@pytest.mark.parametrize("case", ["falcon-multi-query", "gpt2-plain", "neox-parallel", "bigcode-one-kv"])
def test_joined_matrices_that_blocks_do_not_fit(case: str, tmp_path: Path) -> None:
    """Blocks of 128 rows would reach over the borders of queries, keys and values in one tensor: it stays plain."""
    make(next(one for one in CASES if one.name == case), tmp_path)
    spec = describe(configured(tmp_path, "fp8_block"))
    schemes = {one.stem: one.scheme.name for one in spec.parameters() if one.scheme is not None}
    assert schemes["blocks.0.attention.qkv"] == "plain" and schemes["blocks.0.mlp.down"] == "fp8_block"
    decoder = load(tmp_path, configured(tmp_path, "fp8_block"), dtype=torch.float32, device=CPU, kernels=reference(),
                   max_model_len=128)
    assert Runner(decoder, length=128).prompt(0, list(range(3, 20))).isfinite().all()
