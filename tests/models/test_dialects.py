"""Checkpoints that the field's own packages have quantized (tests/assets/make_quantized.py), and formats whose packages
do not install here, written by the formula. Matrices equal the package's to the bit, and greedy tokens are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.checkpoint import read_config
from penstock.checkpoint.tensors import read_headers
from penstock.cli.info import as_text, survey
from penstock.config.schema import EngineOptions
from penstock.core.errors import ModelError
from penstock.models import describe, load
from penstock.models.caching import stated, stored
from penstock.models.registry import checkpoint_of
from penstock.models.translated import Translated
from penstock.ops import coded_cpu
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from penstock.quant.dialects import reader
from penstock.quant.scheme import Factored
from tests.models.harness import Runner, open_model

ASSETS = Path(__file__).parent.parent / "assets" / "quantized"
FOLDERS = sorted(path.name for path in ASSETS.iterdir())


def matrices(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every quantized matrix of a checkpoint, decoded."""
    config = read_config(folder)
    checkpoint = checkpoint_of(folder, config, describe(config), "float32")
    assert isinstance(checkpoint, Translated)
    found = {}
    with checkpoint.mapped():
        for name, module in checkpoint._modules.items():
            scheme = module.form.scheme
            parts = {part.suffix: checkpoint.read(f"{name}.{part.suffix}").clone()
                     for part in scheme.parts(module.n, module.k, "float32")}
            for part in scheme.parts(module.n, module.k, "float32"):
                assert parts[part.suffix].shape == part.shape
                if part.dtype not in ("float16", "bfloat16"):
                    assert str(parts[part.suffix].dtype) == f"torch.{part.dtype}"
            found[f"{name}.weight"] = scheme.decode(parts, dtype)
    return found


EXACT = {f"linear.{name}": "reference" for name in coded_cpu.NAMES}
"""Activations as they are: the integer kernels round them to int8, which transformers does not."""


def greedy(folder: Path, prompt: list[int], count: int, **options: Any) -> list[int]:
    options.setdefault("kernels", EXACT)
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, device="cpu", dtype="float32", **options) as llm:
        [output] = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", FOLDERS)
def test_matrices_are_what_the_package_dequantizes(name: str) -> None:
    expected = json.loads((ASSETS / name / "expected.json").read_text())
    [kind] = {kind for kind, _ in expected["matrices"].values()}
    found = matrices(ASSETS / name, getattr(torch, kind))
    if name.startswith("auto") or name == "modelopt-nvfp4":
        # A scale below 0 makes zeros negative where codes are multiplied, but not in the model that AutoRound rounds in memory;
        # modelopt has no code for a zero with a sign.
        found = {at: matrix + 0.0 for at, matrix in found.items()}
    digests = {at: [kind, hashlib.sha256(matrix.view(torch.uint8).numpy().tobytes()).hexdigest()]
               for at, matrix in found.items()}
    assert digests == expected["matrices"] and len(digests) == 7


@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_tokens_are_transformers(name: str) -> None:
    """Where activations are quantized too, the first tokens suffice: transformers' model here does not quantize them. The same
    goes for matrices that it rounds to bfloat16 while ours are float32."""
    expected = json.loads((ASSETS / name / "expected.json").read_text())
    few = dict.fromkeys(("ct-int8", "ct-fp8-channel", "modelopt-fp8", "torchao-int8", "torchao-int4", "lc-fp8-block",
                         "lc-fp8-dynamic", "lc-w4a16-zeros", "quark-fp8-channel", "quark-int8"), 4)
    count = (few | {"lc-fp8-kv": 3, "quark-fp8": 3}).get(name, len(expected["greedy"]))
    assert greedy(ASSETS / name, expected["prompt"], count) == expected["greedy"][:count]


CANARY = ASSETS.parent / "quantized-canary"


def canary(name: str, count: int, **options: Any) -> list[list[int]]:
    """Answers to the first prompts of gguf-canary-256."""
    asked = json.loads((CANARY.parent / "gguf-canary-256" / "expected.json").read_text())["asked"][:count]
    wanted = SamplingParams(temperature=0, max_tokens=48, stop_token_ids=[2], include_stop_str_in_output=True)
    with LLM(str(CANARY / name), skip_tokenizer_init=True, max_model_len=2048, device="cpu", dtype="float32",
             kernels=EXACT, **options) as llm:
        answers = llm.generate([{"prompt_token_ids": one["prompt"]} for one in asked], wanted, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in answers]


@pytest.mark.parametrize("name", sorted(path.name for path in CANARY.iterdir() if path.is_dir()))
def test_canary_as_packages_quantize_it(name: str) -> None:
    """canary-256 (tests/assets/make_canary_quantized.py): matrices are the package's to the bit, and the answers to two prompts
    of each short skill those of transformers with these matrices."""
    expected = json.loads((CANARY / name / "expected.json").read_text())
    [kind] = {kind for kind, _ in expected["matrices"].values()}
    found = matrices(CANARY / name, getattr(torch, kind))
    if name == "auto-round":
        found = {at: matrix + 0.0 for at, matrix in found.items()}
    digests = {at: [kind, hashlib.sha256(matrix.view(torch.uint8).numpy()).hexdigest()] for at, matrix in found.items()}
    assert digests == expected["matrices"] and len(digests) == 35
    answers = canary(name, 28)
    assert answers == expected["answers"] and len(answers) == 28


def test_factors_are_cut_with_columns() -> None:
    expected = json.loads((CANARY / "modelopt-awq" / "expected.json").read_text())["answers"]
    assert canary("modelopt-awq", 6, tensor_parallel_size=2) == expected[:6]


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
         "max_position_embeddings": 256, "eos_token_id": 2, "tie_word_embeddings": False, "dtype": "float16"}
NAMES = {f"model.layers.{layer}.{part}": shape for layer in range(2) for part, shape in (
    ("self_attn.q_proj", (128, 128)), ("self_attn.k_proj", (64, 128)), ("self_attn.v_proj", (64, 128)),
    ("self_attn.o_proj", (128, 128)), ("mlp.gate_proj", (256, 128)), ("mlp.up_proj", (256, 128)),
    ("mlp.down_proj", (128, 256)))}

Writer = Callable[[str, tuple[int, int], np.random.Generator], tuple[dict[str, torch.Tensor], np.ndarray]]
"""Tensors of a module by suffix, and its matrix, as the format's documentation computes it, one number after another."""


def gptq(bits: int, group: int, older: bool, ordered: bool, symmetric: bool) -> Writer:
    def write(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        n, k = shape
        group_size = group if group > 0 else k
        codes = random.integers(0, 1 << bits, (k, n))
        zeros = np.full((k // group_size, n), 1 << bits - 1)
        if not symmetric:
            zeros = random.integers(1, 1 << bits, zeros.shape)
        scales = (random.uniform(0.2, 0.5, zeros.shape) / (1 << bits)).astype(np.float16)
        groups = np.arange(k) // group_size
        groups = random.permutation(groups) if ordered else groups

        def words(values: np.ndarray) -> np.ndarray:
            """Values along axis 0 as one stream of bits a column, in words of 32."""
            packed = np.zeros((len(values) * bits // 32, values.shape[1]), dtype=np.uint32)
            for at, row in enumerate(values):
                for bit in range(bits):
                    place = at * bits + bit
                    packed[place // 32] |= ((row.astype(np.uint32) >> bit) & 1) << (place % 32)
            return packed.view(np.int32)

        tensors = {"qweight": words(codes), "qzeros": words((zeros - older).T).T.copy(), "scales": scales,
                   "g_idx": groups.astype(np.int32)}
        matrix = (scales[groups].astype(np.float32) * (codes - zeros[groups]).astype(np.float32)).T
        return {suffix: torch.from_numpy(tensor) for suffix, tensor in tensors.items()}, matrix
    return write


def awq(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    n, k = shape
    codes, zeros = random.integers(0, 16, (k, n)), random.integers(0, 16, (k // 64, n))
    scales = random.uniform(0.01, 0.03, zeros.shape).astype(np.float16)

    def words(values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), n // 8), dtype=np.uint32)
        for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed |= values[:, column::8].astype(np.uint32) << (4 * i)
        return packed.view(np.int32)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    matrix = ((codes - zeros.repeat(64, 0)) * scales.repeat(64, 0).astype(np.float32)).T.astype(np.float32)
    return {suffix: torch.from_numpy(tensor) for suffix, tensor in tensors.items()}, matrix


def fp8(scale: str, per: str, given: dict[str, torch.Tensor] | None = None, powers: bool = False) -> Writer:
    def write(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        n, k = shape
        codes = torch.from_numpy(random.standard_normal(shape)).mul(20).to(torch.float8_e4m3fn)
        sizes = {"tensor": (), "row": (n, 1)}.get(per, (-(-n // 128), k // 128))
        scales = torch.from_numpy(random.uniform(1e-3, 3e-3, sizes).astype(np.float32)) if sizes else torch.tensor(2e-3)
        if powers:
            scales = torch.exp2(torch.floor(torch.log2(scales)))
        spread = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1) if "block" in per else scales
        scales = scales[:, None, :, None] if per == "wide blocks" else scales
        scales = scales.to(torch.float8_e8m0fnu) if powers else scales
        return {"weight": codes, scale: scales, **(given or {})}, (codes.float() * spread).numpy()
    return write


def fp4(suffix: str, block: int) -> Writer:
    """modelopt's NVFP4 (blocks of 16) and Quark's MXFP4 (32)."""
    def write(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        n, k = shape
        values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
        codes = random.integers(0, 16, shape)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        if block == 16:
            scales = torch.from_numpy(random.uniform(20, 400, (n, k // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
            whole = np.float32(1.5e-4)
            spread = scales.float().numpy() * whole
            more = {"weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(1.0)}
        else:
            scales = torch.from_numpy(random.integers(118, 124, (n, k // 32)).astype(np.uint8))
            spread, more = np.exp2(scales.numpy().astype(np.float32) - 127), {}
        return {"weight": torch.from_numpy(packed), suffix: scales, **more}, values[codes] * spread.repeat(block, 1)
    return write


def int8(suffix: str, group: int = 0, share: float = 1.0) -> Writer:
    """Signed codes as they are, with a scale for each group or row (bitsandbytes': the largest magnitude, 127 times that)."""
    def write(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        n, k = shape
        codes = random.integers(-127, 128, shape).astype(np.int8)
        scales = random.uniform(1e-4, 1e-3, (n, k // group) if group else (n, 1)).astype(np.float32)
        kept = torch.from_numpy(scales).bfloat16() if group else torch.from_numpy(scales[:, 0] if share > 1 else scales)
        spread = kept.float().numpy().reshape(n, -1).repeat(group or k, 1) / np.float32(share)
        return {"weight": torch.from_numpy(codes), suffix: kept}, codes.astype(np.float32) * spread
    return write


def mxfp8(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """OCP's: E4M3 in blocks of 32 with a power of two, as E8M0's exponent + 127."""
    n, k = shape
    codes = torch.from_numpy(random.standard_normal(shape)).mul(20).to(torch.float8_e4m3fn)
    scales = random.integers(114, 120, (n, k // 32)).astype(np.uint8)
    matrix = codes.float().numpy() * np.exp2(scales.astype(np.float32) - 127).repeat(32, 1)
    return {"weight": codes, "weight_scale": torch.from_numpy(scales)}, matrix


def packed_fp4(name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    tensors, matrix = fp4("weight_scale", 32)(name, shape, random)
    return {"weight_packed": tensors["weight"], "weight_scale": tensors["weight_scale"]}, matrix


def packed_int4(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """compressed-tensors: eight codes, 8 more than what they stand for, in a word, the first in the lowest bits."""
    n, k = shape
    codes, scales = random.integers(0, 16, shape), random.uniform(0.01, 0.03, (n, k // 64)).astype(np.float16)
    words = sum(codes[:, i::8].astype(np.uint32) << (4 * i) for i in range(8))
    packed = torch.from_numpy(np.asarray(words, np.uint32).view(np.int32))
    return {"weight_packed": packed, "weight_scale": torch.from_numpy(scales), "weight_shape": torch.tensor(shape)}, (
        (codes - 8) * scales.repeat(64, 1).astype(np.float32)).astype(np.float32)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}, "format": kind}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def torchao_int4(_name: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Two signed codes a byte; a number is code * scale + zero, exact with these scales."""
    n, k, group = *shape, 64
    codes = random.integers(-8, 8, (n, k))
    scale = 2.0 ** random.integers(-7, -3, (k // group, n))
    zero = scale * random.integers(-8, 8, scale.shape) / 2
    packed = (codes[:, ::2] & 15 | codes[:, 1::2] << 4).astype(np.int8)
    wide = (one.T.repeat(group, 1) for one in (scale, zero))
    return {"_weight_qdata": torch.from_numpy(packed), "_weight_scale": torch.from_numpy(scale).bfloat16(),
            "_weight_zero_point": torch.from_numpy(zero).bfloat16()}, (codes * next(wide) + next(wide)).astype(np.float32)


def torchao_config(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
FORMULAS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq-4": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, gptq(4, 64, True, False, False)),
    "gptq-4-act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
                         gptq(4, 32, True, True, True)),
    "gptq-3-v2": ({"quant_method": "gptq", "bits": 3, "group_size": 32, "checkpoint_format": "gptq_v2", "sym": False},
                  gptq(3, 32, False, False, False)),
    "gptq-2": ({"quant_method": "gptq", "bits": 2, "group_size": 128, "sym": True}, gptq(2, 128, True, False, True)),
    "gptq-8-whole": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True, "sym": False},
                     gptq(8, -1, True, False, False)),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "block_name_to_quantize":
                    "model.layers", "packing_format": "auto_round:auto_gptq"}, gptq(4, 64, True, False, False)),
    "auto-round-v2": ({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False,
                       "packing_format": "auto_round:gptqmodel"}, gptq(4, 64, False, False, False)),
    "auto-round-older": ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 64, "sym": False,
                          "backend": "auto_round:exllamav2"}, gptq(4, 64, False, False, False)),
    "gptq-of-the-other-version": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True},
                                  gptq(4, 64, False, False, True)),
    "gptq-v2-by-format": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "format": "gptq_v2"},
                          gptq(4, 64, False, False, False)),
    "auto-round-awq": ({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False,
                        "packing_format": "auto_round:auto_awq"}, awq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
                  fp8("weight_scale_inv", "block")),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"},
                   fp8("weight_scale", "tensor", {"input_scale": torch.tensor(0.05)})),
    "fp8-transformers": ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
                         fp8("weight_scale_inv", "tensor", {"activation_scale": torch.tensor(0.05)})),
    "fp8-block-powers": ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
                         fp8("weight_scale_inv", "block", powers=True)),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                     fp8("weight_scale", "tensor", {"input_scale": torch.tensor(0.05)})),
    "modelopt-nvfp4": ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, fp4("weight_scale", 16)),
    "quark-fp8": ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
                  fp8("weight_scale", "row")),
    "torchao-int4": (torchao_config("FqnToConfig", fqn_to_config={
        "_default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}, "lm_head": None}), torchao_int4),
    "bitsandbytes-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8("SCB", share=127)),
    "quark-int8": ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_channel"}}},
                   int8("weight_scale")),
    "compressed-int8-groups": (compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=64),
                               int8("weight_scale", 64)),
    "compressed-int4": (compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64), packed_int4),
    "compressed-mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
                         packed_fp4),
    "compressed-mxfp8": (compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32), mxfp8),
    "modelopt-mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, mxfp8),
    "modelopt-fp8-blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]},
                            fp8("weight_scale", "wide blocks")),
    "modelopt-fp8-rows": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
                          fp8("weight_scale", "row")),
    "quark-mxfp4": ({"quant_method": "quark", "global_quant_config": {"weight": QUARK_FP4}}, fp4("weight_scale", 32)),
}


def written(folder: Path, given: dict[str, Any], write: Writer, **changes: Any) -> dict[str, np.ndarray]:
    """A Llama's folder in a format; its matrices as the formula has them."""
    random, tensors, found = np.random.default_rng(5), {}, {}
    for name, shape in NAMES.items():
        parts, found[f"{name}.weight"] = write(name, shape, random)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}
        if "self_attn.k" in name:
            tensors[f"{name}.k_scale"] = torch.tensor(0.1)
    for name, shape in (("model.embed_tokens", (96, 128)), ("lm_head", (96, 128))):
        tensors[f"{name}.weight"] = torch.from_numpy(random.standard_normal(shape) * 0.1).half()
    norms = ["model.norm", *(f"model.layers.{layer}.{kind}_layernorm" for layer in range(2)
                             for kind in ("input", "post_attention"))]
    tensors |= {f"{name}.weight": torch.ones(128).half() for name in norms}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": given, **changes}))
    save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
              folder / "model.safetensors")
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_matrices_are_what_the_formula_gives(name: str, tmp_path: Path) -> None:
    expected = written(tmp_path, *FORMULAS[name])
    found = matrices(tmp_path, torch.float32)
    assert found.keys() == expected.keys()
    for at, matrix in found.items():
        assert np.array_equal(matrix.numpy(), expected[at]), at
    plain = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
             if any(part in name for part in ("norm", "lm_head", "embed"))}
    other = tmp_path / "plain"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LLAMA))
    save_file({**plain, **{at: torch.from_numpy(np.ascontiguousarray(matrix)).float() for at, matrix in expected.items()}},
              other / "model.safetensors")
    count = 3 if name.startswith(("fp8", "modelopt-fp8")) and name != "modelopt-fp8-blocks" else 24
    assert greedy(tmp_path, [5, 9, 2, 80], count) == greedy(other, [5, 9, 2, 80], count)


def test_the_largest_scale_of_inputs_serves_a_joined_matrix(tmp_path: Path) -> None:
    """Queries, keys and values are one matrix; with the smallest of their scales, inputs of the others would be cut off."""
    written(tmp_path, *FORMULAS["fp8-static"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name, scale in (("q", 0.03), ("k", 0.09), ("v", 0.01)):
        tensors[f"model.layers.1.self_attn.{name}_proj.input_scale"] = torch.tensor(scale)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, read_config(tmp_path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
                 kernels=bind(detect("cpu"), torch.float32))
    scales = [float(linear.weight.fixed) for linear in model.linears if "attention.qkv" in linear.path]
    assert scales == pytest.approx([0.05, 0.09])


def test_modules_of_their_own_in_auto_round() -> None:
    extra = {"model.layers.0.mlp.down_proj": {"bits": 16}, r".*layers\.1\.mlp.*": {"bits": 8, "group_size": 32},
             "lm_head": {"bits": 4}}
    read = reader({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": extra,
                   "block_name_to_quantize": "model.layers"})
    found = {module: read.form(module, 256, 256) for module in (
        "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj", "lm_head", "visual.merger")}
    assert [form.scheme.name if form else None for form in found.values()] == [None, "int8g32", "int4g128", "int4g128", None]
    with pytest.raises(ModelError, match="packing_format is 'auto_round:fp8'"):
        reader({"quant_method": "auto-round", "packing_format": "auto_round:fp8"})


def test_info_shows_schemes_and_kernels(tmp_path: Path) -> None:
    written(tmp_path, *FORMULAS["gptq-4"])
    found = survey(EngineOptions(model=str(tmp_path), device="cpu", max_model_len=128))
    schemes = {one["scheme"]: one for one in found["weights"]}
    assert schemes["int4g64"]["matrices"] == 8 and schemes["plain"]["matrices"] == 2 and "int4g64" in as_text(found)
    [kernel] = schemes["int4g64"]["kernels"]
    assert schemes["int4g64"]["layers"][f"mlp.down {kernel}"] == "0-1" and schemes["plain"]["layers"].keys() >= {
        f"head {name}" for name in schemes["plain"]["kernels"]}
    assert "layers 0-1: attention.qkv, attention.o, mlp.gate_up, mlp.down\n" in as_text(found)
    assert schemes["int4g64"]["bytes"] == sum(n * (k // 2 + k // 64 * 3) for n, k in NAMES.values())


def test_factors_of_inputs_leave_a_kernel_its_work() -> None:
    """modelopt's AWQ: `o_proj` and `down_proj` are served by the kernel of the others, for inputs that are multiplied first."""
    found = survey(EngineOptions(model=str(CANARY / "modelopt-awq"), device="cpu", max_model_len=128, skip_tokenizer_init=True))
    [scheme] = [one for one in found["weights"] if one["scheme"] == "int4g128"]
    assert scheme["kernels"] and "decoded in tiles" not in scheme["kernels"] and scheme["matrices"] == 20
    config = read_config(CANARY / "modelopt-awq")
    stored = {parameter.name: parameter.scheme for parameter in describe(config).parameters()}
    factored = [name for name, scheme in stored.items() if isinstance(scheme, Factored)]
    assert len(factored) == 10 and all(name.endswith(("attention.o.weight", "mlp.down.weight")) for name in factored)


def test_mixed_schemes_in_one_projection(tmp_path: Path) -> None:
    """q is plain and k and v are quantized: each has its own kernel."""
    given, write = FORMULAS["gptq-4"]
    expected = written(tmp_path, {**given, "dynamic": {"-:.*layers.1.self_attn.q_proj": {}}}, write)
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.1.self_attn.q_proj"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(at)}
    whole = tmp_path / "whole"
    written(whole, given, write)
    tensors[f"{at}.weight"] = torch.from_numpy(expected[f"{at}.weight"]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    assert greedy(tmp_path, [5, 9, 2, 80], 24) == greedy(whole, [5, 9, 2, 80], 24)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    given, write = FORMULAS["gptq-4"]
    written(tmp_path, given, write)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    tensors["model.layers.1.mlp.down_proj.qweight"] = tensors["model.layers.1.mlp.down_proj.qweight"][:-1].contiguous()
    tensors["model.layers.1.self_attn.o_proj.qzeros"] = tensors["model.layers.1.self_attn.o_proj.qzeros"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    with pytest.raises(ModelError) as caught:
        checkpoint_of(tmp_path, config, describe(config), "float32")
    text = str(caught.value)
    assert "model.layers.0.mlp.up_proj.scales is missing; int4g64 needs it" in text
    assert "model.layers.1.mlp.down_proj.qweight is [31, 128]; the config asks for [32, 128]" in text
    assert "model.layers.1.self_attn.o_proj.qzeros is float32; possible are int32" in text


@pytest.mark.parametrize(("given", "said"), [
    ({"quant_method": "gguf"}, "quant_method is 'gguf' in a folder; name its .gguf file"),
    ({"quant_method": "newest"}, "quant_method is 'newest'; possible are auto-round, auto_round, awq"),
    ({"quant_method": "gptq", "bits": 5}, "bits is 5; possible are 2, 3, 4, 8"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; possible are 'gemm'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; possible are 'FP8'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo is 'NVFP4_SVD'; possible are 'FP8'"),
    ({"quant_method": "quark", "export": {"pack_method": "tiles"}, "global_quant_config": {"weight": {
        "dtype": "uint4", "qscheme": "per_group", "group_size": 64}}}, "pack_method is 'tiles'; possible are 'reorder'"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'; possible are 'dense'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type is 'af4'"),
    ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "activation_scheme is 'sometimes'; possible are 'dynamic'"),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 7, "axis": 1}}}, "nbits is 7; possible are 8"),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}, "zero_quant_params": {"nbits": 8}}},
     "zero_quant_params is"),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quant_type is 'int8_weight_only'; possible is a config"),
    (torchao_config("UIntXWeightOnlyConfig"), "_type is 'UIntXWeightOnlyConfig'; possible are 'Int8WeightOnlyConfig'"),
    (torchao_config("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"), "TILE_PACKED_TO_4D"),
    (torchao_config("Int8WeightOnlyConfig", granularity={"_type": "PerTensor"}), "possible are PerRow, PerAxis"),
])
def test_unknown_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match="quantization_config: ") as caught:
        describe({**LLAMA, "quantization_config": given})
    assert said in str(caught.value)


def test_zeros_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    given, write = FORMULAS["gptq-4"]
    written(tmp_path, {**given, "sym": True}, write)
    with pytest.raises(ModelError, match=r"model\.layers\..*: quantization_config: sym is true, but zeros differ"):
        greedy(tmp_path, [5], 1)
    given, write = FORMULAS["awq"]
    written(tmp_path, {**given, "zero_point": False}, write)
    with pytest.raises(ModelError, match=r"model\.layers\..*: quantization_config: codes are symmetric, but zeros differ"):
        greedy(tmp_path, [5], 1)


@pytest.mark.parametrize(("name", "changes"), [
    ("gptq-4", {"group_size": "128x"}), ("gptq-4", {"dynamic": ["-:x"]}), ("gptq-4", {"dynamic": {"-:(": {}}}),
    ("fp8-block", {"weight_block_size": [0, 128]}), ("compressed-int4", {"config_groups": [{}]}),
    ("compressed-int4", {"config_groups": {"a": {"weights": {"num_bits": 4}}}}), ("compressed-int4", {"ignore": ["re:("]}),
    ("compressed-int4", {"config_groups": {"a": {"targets": ["Linear"], "weights": "int4"}}})])
def test_values_of_another_kind_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"quantization_config: a value is not what [\w-]+ has in its place: \w+\("):
        describe({**LLAMA, "quantization_config": {**FORMULAS[name][0], **changes}})


def test_quarks_scales_of_a_cache(tmp_path: Path) -> None:
    """They are named as scales of the outputs of keys and values."""
    written(tmp_path, *FORMULAS["quark-fp8"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("k_scale")}
    save_file({**tensors, **{f"model.layers.{layer}.self_attn.{part}_proj.output_scale": torch.tensor(0.05)
                             for layer in range(2) for part in "kv"}}, tmp_path / "model.safetensors")
    assert stored(read_headers(tmp_path)) == {"0": pytest.approx([0.05, 0.05]), "1": pytest.approx([0.05, 0.05])}
    assert len(greedy(tmp_path, [5, 9, 2, 80], 4, kv_cache_dtype="fp8")) == 4


@pytest.mark.parametrize(("name", "suffix", "tensor", "said"), [
    ("quark-int8", "weight_zero_point", torch.ones(128, dtype=torch.int8), "weight_zero_point differs from 0"),
    ("quark-int8", "input_zero_point", torch.tensor(3, dtype=torch.int8), "input_zero_point differs from 0"),
    ("bitsandbytes-int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format is 2; possible is 0"),
    ("compressed-int4", "weight_g_idx", torch.zeros(128, dtype=torch.int32), "actorder is not 'group'")])
def test_what_a_scheme_leaves_out_must_not_matter(name: str, suffix: str, tensor: torch.Tensor, said: str,
                                                  tmp_path: Path) -> None:
    """Tensors that change what others mean are refused unless they say what the config says."""
    written(tmp_path, *FORMULAS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.1.self_attn.o_proj"
    save_file({**tensors, f"{at}.{suffix}": torch.zeros_like(tensor)}, tmp_path / "model.safetensors")
    if suffix != "weight_g_idx":
        greedy(tmp_path, [5], 1)
    save_file({**tensors, f"{at}.{suffix}": tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{at}: .*{said}"):
        greedy(tmp_path, [5], 1)


def test_names_of_a_language_model_beside_towers(tmp_path: Path) -> None:
    """Modules that stay plain are named as in the whole model; tensors too, with the prefix before or after model."""
    given, write = FORMULAS["gptq-4"]
    expected = written(tmp_path, given, write)
    whole, at = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.down_proj"
    mixed = {name: tensor for name, tensor in whole.items() if not name.startswith(at)}
    mixed[f"{at}.weight"] = torch.from_numpy(expected[f"{at}.weight"]).contiguous()

    def tokens(prefix: str, tensors: dict[str, torch.Tensor], patterns: list[str]) -> list[int]:
        (tmp_path / "config.json").write_text(json.dumps({
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "text_config": {**LLAMA, "model_type": "mistral"},
            "quantization_config": {**given, "dynamic": {pattern: {} for pattern in patterns}}}))
        save_file({name.replace("model.", prefix, 1) if name.startswith("model.") else f"language_model.{name}": tensor
                   for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return greedy(tmp_path, [5, 9, 2, 80], 12)

    wanted = tokens("model.", whole, [])
    for prefix in ("language_model.model.", "model.language_model."):
        for pattern in (f"-:{prefix}layers.1.mlp.down_proj", "-:" + prefix.replace(".", r"\.") + r"layers\.1\.mlp\.down.*"):
            assert tokens(prefix, mixed, [pattern]) == wanted


def test_modules_are_asked_for_by_the_family_s_exact_names() -> None:
    """Lists of modules as published checkpoints have them: Kimi K2's of those that stay plain, one of targets, and DeepSeek's
    FP8, which lists nothing of what stays plain."""
    sizes = {"architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
             "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "vocab_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
             "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
             "v_head_dim": 32, "n_shared_experts": 1, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 16}

    def stored(given: dict[str, Any], **changes: Any) -> set[str]:
        spec = describe({**sizes, **changes, "quantization_config": given})
        return {one.name.split(".", 2)[-1] for one in spec.parameters() if one.scheme and one.scheme.name != "plain"}

    kimi = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
    kimi["ignore"] = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    assert stored(kimi, architectures=["DeepseekV3ForCausalLM"]) == {"mlp.experts.gate_up.weight", "mlp.experts.down.weight"}
    kimi["config_groups"]["group_0"]["targets"], kimi["ignore"] = [r"re:.*self_attn\.(q_a|q_b|kv_a|kv_b|o)_proj.*"], []
    assert stored(kimi, architectures=["DeepseekV3ForCausalLM"]) == {f"attention.{name}.weight" for name in (
        "a", "q_b", "kv_b", "o")}
    found = stored({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert "attention.index_k.weight" in found and "mlp.shared.down.weight" in found
    assert "attention.index_weights.weight" not in found
    assert reader({"quant_method": "fp8", "weight_block_size": [128, 128]}).form("model.layers.61.eh_proj", 128, 256) is None


def test_biases_of_zeros_beside_gptq_s_matrices_are_left_out(tmp_path: Path) -> None:
    """GPTQ's older programs write one for each matrix, though a Llama has none."""
    written(tmp_path, *FORMULAS["gptq-4"])
    wanted, tensors = greedy(tmp_path, [5, 9], 8), load_file(tmp_path / "model.safetensors")
    biases = {f"{name}.bias": torch.zeros(shape[0]).half() for name, shape in NAMES.items()}
    save_file({**tensors, **biases}, tmp_path / "model.safetensors")
    assert greedy(tmp_path, [5, 9], 8) == wanted
    biases["model.layers.1.mlp.up_proj.bias"][7] = 0.5
    save_file({**tensors, **biases}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unused \(1\):\n  model\.layers\.1\.mlp\.up_proj\.bias"):
        greedy(tmp_path, [5], 1)


def test_codes_of_bitsandbytes_stored_as_bfloat16(tmp_path: Path) -> None:
    """As training with FSDP wants them: `bnb_4bit_quant_storage`."""
    folder = ASSETS / "bnb-nf4-nested"
    tensors = {name: tensor.flatten().view(torch.bfloat16).view(-1, 1) if tensor.dtype is torch.uint8 and name[-7:] == ".weight"
               else tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_storage"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, wanted = matrices(tmp_path, torch.float32), matrices(folder, torch.float32)
    assert len(found) == 7 and all(torch.equal(found[name], matrix) for name, matrix in wanted.items())


@pytest.mark.parametrize("kind", ["int", "float"])
def test_activations_beside_four_bits(kind: str, tmp_path: Path) -> None:
    """W4A8 of compressed-tensors: inputs of each matrix are rounded token by token, as its own forward pass does."""
    given = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    given["config_groups"]["group_0"]["input_activations"] = inputs
    decoded = written(tmp_path, given, packed_int4)
    weights = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()
               if any(part in name for part in ("norm", "lm_head", "embed"))}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "dtype": "float32"})).eval()
    model.load_state_dict({**weights, **{name: torch.from_numpy(matrix) for name, matrix in decoded.items()}})

    def rounded(_module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = args[0].abs().amax(-1, keepdim=True) / (127.5 if kind == "int" else 448.0)
        codes = args[0] / scale
        return ((codes.round().clamp(-128, 127) if kind == "int" else codes.to(torch.float8_e4m3fn).float()) * scale,)

    prompt = list(range(3, 40))
    found = Runner(open_model(tmp_path)).prompt(0, prompt)
    with torch.inference_mode():
        plain = model(torch.tensor([prompt])).logits[0]
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(rounded)
        expected = model(torch.tensor([prompt])).logits[0]
    assert (found - expected).norm() < 0.05 * (plain - expected).norm()


def test_what_a_config_asks_of_activations_is_done_or_refused() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    name, token = "model.layers.0.mlp.up_proj", {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    for inputs, module, said in (({**token, "dynamic": False, "strategy": "tensor"}, name, "possible are dynamic scales"),
                                 ({**token, "num_bits": 4}, name, "num_bits is 4; possible are 8"),
                                 (token, "model.layers.0.mlp.experts.3.up_proj", "and no experts"),
                                 ({**token, "symmetric": False}, name, "symmetric false")):
        read = reader({**whole, "config_groups": {"group_0": {**group, "input_activations": inputs}}})
        with pytest.raises(ModelError, match=said):
            read.form(module, 256, 256)
    with pytest.raises(ModelError, match="a group has no weights, or output_activations"):
        reader({**whole, "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": token}}})
    rows = {"num_bits": 8, "type": "int", "strategy": "channel"}
    read = reader({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": rows, "input_activations": {**token, "type": "float"}}}})
    with pytest.raises(ModelError, match="type is 'float'; possible are 'int'"):
        read.form(name, 256, 256)
    with pytest.raises(ModelError, match="rotation is 'hadamard'"):
        reader({"quant_method": "gptq", "bits": 4, "group_size": 128, "rotation": "hadamard"})
    with pytest.raises(ModelError, match="act_bits is 8; possible are 16, 32"):
        reader({"quant_method": "auto-round", "bits": 4, "group_size": 128, "act_bits": 8})


def test_modelopt_with_a_cache_alone(tmp_path: Path) -> None:
    """Weights are plain, keys and values FP8."""
    given = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert reader(given).form("model.layers.0.mlp.up_proj", 256, 256) is None
    with pytest.raises(ModelError, match="quant_algo is 'NONE'"):
        reader({"quantization": {"quant_algo": None}})
    matrices = written(tmp_path, given, lambda _name, shape, random: (
        {"weight": torch.from_numpy(random.standard_normal(shape) * 0.1).half()}, np.zeros(shape)))
    assert matrices
    assert stated({"quantization_config": given}) == "fp8"
    assert len(greedy(tmp_path, [5, 9, 2, 80], 8)) == 8
