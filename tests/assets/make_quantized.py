"""Makes tests/assets/quantized: one tiny Llama, quantized by the packages that people use. Not run by tests.

    pip install compressed-tensors bitsandbytes accelerate torchao hqq auto-round nvidia-modelopt scipy
    pip install llmcompressor gptqmodel amd-quark
    python tests/assets/make_quantized.py OUT [canary]

Beside each model, expected.json has the SHA-256 of every matrix as the package itself dequantizes it, and transformers' greedy
tokens.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

CONFIG = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 256, "eos_token_id": 2,
          "bos_token_id": 1, "tie_word_embeddings": False}
PROMPT = [1, 17, 40, 3, 77, 21]


def model() -> LlamaForCausalLM:
    torch.manual_seed(11)
    made = LlamaForCausalLM(LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1]**-0.5 * 1.5)
    return made.to(torch.bfloat16).eval()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def expect(folder: Path, package: str, matrices: dict[str, torch.Tensor], plain: Any) -> None:
    """`plain` is a model that computes with the dequantized matrices."""
    with torch.no_grad():
        ids = plain.float().generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
    found = {"package": package, "version": importlib.metadata.version(package), "prompt": PROMPT,
             "greedy": ids[len(PROMPT):].tolist(),
             "matrices": {name: [str(tensor.dtype).removeprefix("torch."), digest(tensor)]
                          for name, tensor in matrices.items()}}
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in ("generation_config.json",):
        (folder / name).unlink(missing_ok=True)


def linears(made: Any) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": part.weight.data for name, part in made.named_modules()
            if isinstance(part, torch.nn.Linear) and not name.endswith("lm_head")}


def compressed(out: Path) -> None:
    from compressed_tensors.compressors.model_compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def weights(**values: Any) -> dict[str, Any]:
        return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **values}

    token = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    kinds = {
        "ct-fp8-channel": ("float-quantized", weights(type="float"), token),
        "ct-fp8-tensor": ("naive-quantized", weights(type="float", strategy="tensor"), None),
        "ct-fp8-block": ("float-quantized", weights(type="float", strategy="block", block_structure=[128, 128]), None),
        "ct-int8": ("int-quantized", weights(), {**token, "type": "int"}),
        "ct-int4-group": ("pack-quantized", weights(num_bits=4, strategy="group", group_size=64), None),
        "ct-int4-zeros": ("pack-quantized", weights(num_bits=4, strategy="group", group_size=32, symmetric=False), None),
        "ct-nvfp4": ("nvfp4-pack-quantized", weights(num_bits=4, type="float", strategy="tensor_group", group_size=16), None),
    }
    for name, (form, given, inputs) in kinds.items():
        made, folder = model(), out / name
        groups = {"group_0": {"targets": ["Linear"], "weights": given, "input_activations": inputs, "format": form}}
        config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format=form, quantization_status="frozen")
        apply_quantization_config(made, config)
        for part in made.modules():
            if isinstance(part, torch.nn.Linear) and hasattr(part, "weight_scale"):
                fill(part, calculate_qparams, generate_gparam)
        made.save_pretrained(folder)
        compressor = ModelCompressor.from_pretrained_model(made)
        compressor.compress_model(made)
        made.save_pretrained(folder)
        compressor.update_config(folder)
        compressor.decompress_model(made)
        expect(folder, "compressed-tensors", linears(made), plain_of(made))


def fill(part: Any, calculate_qparams: Any, generate_gparam: Any) -> None:
    """Scales by the largest magnitude, for the package leaves observers to llm-compressor."""
    args, weight = part.quantization_scheme.weights, part.weight.data.float()
    shape = part.weight_scale.shape
    if args.strategy == "block":
        grouped = weight.unflatten(0, (shape[0], -1)).unflatten(2, (shape[1], -1)).transpose(1, 2).flatten(2)
    elif len(shape) == 2 and shape[1] > 1:
        grouped = weight.unflatten(1, (shape[1], -1))
    else:
        grouped = weight.unflatten(1, (1, -1)) if shape[0] > 1 else weight.view(1, 1, -1)
    low, high, more = grouped.amin(-1), grouped.amax(-1), {}
    if hasattr(part, "weight_global_scale"):
        part.weight_global_scale.data.copy_(generate_gparam(weight.min(), weight.max()))
        more = {"global_scale": part.weight_global_scale.data}
    scale, zero = calculate_qparams(low, high, args, **more)
    part.weight_scale.data.copy_(scale.view(shape))
    if hasattr(part, "weight_zero_point"):
        part.weight_zero_point.data.copy_(zero.view(shape))


def plain_of(made: Any) -> Any:
    """The same weights in a model that quantizes nothing."""
    found = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)
    found.load_state_dict({name: tensor for name, tensor in made.state_dict().items() if name in found.state_dict()})
    return found.eval()


def torchao(out: Path) -> None:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
    )
    from transformers import TorchAoConfig

    model().save_pretrained(out / "plain")
    kinds = {"torchao-int8": Int8DynamicActivationInt8WeightConfig(), "torchao-fp8": Float8WeightOnlyConfig(),
             "torchao-int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
             "torchao-int3": IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerGroup(64),
                                                  mapping_type=MappingType.ASYMMETRIC)}
    for name, kind in kinds.items():
        config = TorchAoConfig(kind)
        made = AutoModelForCausalLM.from_pretrained(out / "plain", quantization_config=config, dtype=torch.bfloat16,
                                                    device_map="cpu")
        made.save_pretrained(out / name)
        matrices = {f"{at}.weight": part.weight.dequantize() for at, part in made.named_modules()
                    if isinstance(part, torch.nn.Linear) and hasattr(part.weight, "dequantize") and at != "lm_head"}
        plain = model()
        plain.load_state_dict({**plain.state_dict(), **matrices})
        expect(out / name, "torchao", matrices, plain)


def bitsandbytes(out: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    model().save_pretrained(out / "plain")
    kinds = {"bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
             "bnb-nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
             "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}}
    for name, given in kinds.items():
        config = BitsAndBytesConfig(**given, bnb_4bit_compute_dtype=torch.bfloat16)
        made = AutoModelForCausalLM.from_pretrained(out / "plain", quantization_config=config, dtype=torch.bfloat16,
                                                    device_map="cpu")
        made.save_pretrained(out / name)
        matrices = {}
        for at, part in made.named_modules():
            if isinstance(part, torch.nn.Linear) and hasattr(part.weight, "quant_state"):
                matrices[f"{at}.weight"] = dequantize_4bit(part.weight.data, part.weight.quant_state)
        plain = model()
        plain.load_state_dict({**plain.state_dict(), **matrices})
        expect(out / name, "bitsandbytes", matrices, plain)


def by_hqq(made: Any, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """hqq's config, the tensors of all linear layers but the head, and the matrices that they stand for."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config, tensors, matrices = BaseQuantizeConfig(**given), {}, {}
    for at, part in made.named_modules():
        if isinstance(part, torch.nn.Linear) and at != "lm_head":
            # As transformers saves its layers, whose own quantizer asks for a GPU.
            layer = HQQLinear(part, config, compute_dtype=torch.float32, device="cpu", initialize=True, del_orig=False)
            matrices[f"{at}.weight"] = layer.dequantize().to(torch.bfloat16)
            tensors |= {f"{at}.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    return {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}, tensors, matrices


def hqq(out: Path) -> None:
    kinds: dict[str, Any] = {"hqq-int4": {"nbits": 4, "group_size": 64, "axis": 1},
                             "hqq-int2": {"nbits": 2, "group_size": 32, "axis": 1},
                             "hqq-int3-columns": {"nbits": 3, "group_size": 64, "axis": 0}}
    for name, given in kinds.items():
        made, plain = model(), model()
        config, tensors, matrices = by_hqq(made, given)
        plain.load_state_dict({**plain.state_dict(), **matrices})
        made.save_pretrained(out / name)
        rest = {at: tensor for at, tensor in made.state_dict().items() if at not in matrices}
        save_file({**rest, **tensors}, out / name / "model.safetensors", {"format": "pt"})
        said = json.loads((out / name / "config.json").read_text()) | {"quantization_config": config}
        (out / name / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        expect(out / name, "hqq", matrices, plain)


def canary(out: Path) -> None:
    """canary by hqq, for bench/quantized.py --folders."""
    from penstock.canary import model_folder

    for bits, group in ((8, 64), (4, 64), (3, 64), (2, 32)):
        folder = out / f"hqq-int{bits}g{group}"
        shutil.copytree(model_folder(), folder)
        made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        config, tensors, matrices = by_hqq(made, {"nbits": bits, "group_size": group, "axis": 1})
        rest = {at: tensor for at, tensor in load_file(folder / "model.safetensors").items() if at not in matrices}
        save_file({**rest, **tensors}, folder / "model.safetensors", {"format": "pt"})
        said = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")


def auto_round(out: Path) -> None:
    """In its own packings, and in those of GPTQ and AWQ. The matrices are those of the model that it rounded in memory."""
    from types import SimpleNamespace

    from auto_round import AutoRound

    tokenizer = SimpleNamespace(pad_token=None, eos_token="x", padding_side="right", name_or_path="tiny",
                                save_pretrained=lambda *_, **__: ())
    for name, form, symmetric, group in (
            ("auto-round-gptq", "auto_round:auto_gptq", True, 64), ("auto-round-awq", "auto_round:auto_awq", False, 32),
            ("auto-gptq", "auto_gptq", True, 64), ("auto-awq", "auto_awq", False, 32)):
        def rounding(group: int = group, symmetric: bool = symmetric) -> AutoRound:
            return AutoRound(model(), tokenizer=tokenizer, bits=4, group_size=group, sym=symmetric, iters=0,
                             disable_opt_rtn=True, device_map="cpu")

        rounding().quantize_and_save(str(out / "whole" / name), format=form)
        folder = next((out / "whole" / name).rglob("config.json")).parent
        folder.rename(out / name)
        (out / name / "quantization_config.json").unlink()
        made = rounding().quantize()[0]
        # Zeros without a sign.
        expect(out / name, "auto-round", {at: matrix + 0.0 for at, matrix in linears(made).items()}, plain_of(made))


def modelopt(out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    ids = torch.randint(3, CONFIG["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(1))
    for name, config in (("modelopt-fp8", mtq.FP8_DEFAULT_CFG), ("modelopt-nvfp4", mtq.NVFP4_DEFAULT_CFG)):
        made, folder = model(), out / name
        made.config.architectures = ["LlamaForCausalLM"]
        shapes = {at: matrix.shape for at, matrix in linears(made).items()}
        export_hf_checkpoint(mtq.quantize(made, config, lambda each: each(ids)), export_dir=folder)
        stored, matrices = load_file(folder / "model.safetensors"), {}
        for at, shape in shapes.items():
            scale = stored[f"{at}_scale"]
            if name == "modelopt-fp8":
                wide = FP8QTensor(shape, torch.float32, stored[at]).dequantize(scale=scale)
            else:
                wide = NVFP4QTensor(shape, torch.float32, stored[at]).dequantize(
                    scale=scale, double_scale=stored[f"{at}_scale_2"], block_sizes={-1: 16})
            matrices[at] = wide.to(torch.bfloat16)
        plain = model()
        plain.load_state_dict({**plain.state_dict(), **matrices})
        expect(folder, "nvidia-modelopt", matrices, plain)


def with_words(out: Path) -> tuple[Path, list[list[int]]]:
    """The plain model with a tokenizer, which some packages ask for, and rows of tokens to calibrate with."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(CONFIG["vocab_size"])}, unk_token="t0"))
    model().save_pretrained(out / "plain")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t2", eos_token="t2", bos_token="t1",
                            unk_token="t0").save_pretrained(out / "plain")
    return out / "plain", torch.randint(3, CONFIG["vocab_size"], (8, 32), generator=torch.Generator().manual_seed(1)).tolist()


def llm_compressor(out: Path) -> None:
    """The matrices are those that transformers decompresses."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import CompressedTensorsConfig

    plain, ids = with_words(out)
    given = {"dataset": Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 32] * len(ids)}),
             "num_calibration_samples": len(ids), "max_seq_length": 32}
    pairs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "lc-fp8-dynamic": (QuantizationModifier, {"scheme": "FP8_DYNAMIC"}),
        "lc-fp8-block": (QuantizationModifier, {"scheme": "FP8_BLOCK"}),
        "lc-fp8-kv": (QuantizationModifier, {"scheme": "FP8", "kv_cache_scheme": pairs}),
        "lc-w4a16": (GPTQModifier, {"scheme": "W4A16"}), "lc-w8a8": (GPTQModifier, {"scheme": "W8A8"}),
        "lc-w4a16-zeros": (QuantizationModifier, {"scheme": "W4A16_ASYM"}),
        "lc-nvfp4": (QuantizationModifier, {"scheme": "NVFP4"}), "lc-mxfp4": (QuantizationModifier, {"scheme": "MXFP4A16"})}
    for name, (modifier, values) in kinds.items():
        made = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        oneshot(model=made, recipe=modifier(targets="Linear", ignore=["lm_head"], **values), **given)
        made.save_pretrained(out / name, save_compressed=True)
        (out / name / "recipe.yaml").unlink(missing_ok=True)
        read = AutoModelForCausalLM.from_pretrained(
            out / name, quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.bfloat16)
        expect(out / name, "llmcompressor", linears(read), plain_of(read))


def gptqmodel(out: Path) -> None:
    """The matrices are those that its own layers dequantize in float16, as their scales are."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    plain, ids = with_words(out)
    kinds: dict[str, dict[str, Any]] = {
        "gm-gptq": {"group_size": 128, "desc_act": False, "sym": True},
        "gm-gptq-act": {"group_size": 32, "desc_act": True, "sym": True},
        "gm-gptq-zeros": {"group_size": 64, "desc_act": False, "sym": False},
        "gm-gptq-v2": {"group_size": 64, "desc_act": False, "sym": False, "format": "gptq_v2"},
        "gm-awq": {"group_size": 64, "sym": False, "method": "awq", "format": "gemm"}}
    for name, given in kinds.items():
        config = QuantizeConfig(bits=4, **given, offload_to_disk=False, pack_impl="original")
        made = GPTQModel.load(str(plain), config, dtype=torch.float16)
        made.quantize([{"input_ids": one, "attention_mask": [1] * len(one)} for one in ids], batch_size=1)
        made.save(str(out / name))
        stored = load_file(out / name / "model.safetensors")
        if "awq" in name:
            names = [at.removesuffix(".qweight") for at in stored if at.endswith(".qweight")]
            matrices = {f"{at}.weight": dequantize_gemm(*(stored[f"{at}.{part}"] for part in ("qweight", "qzeros", "scales")),
                                                        4, given["group_size"]).T.contiguous() for at in names}
        else:
            back = GPTQModel.load(str(out / name), device="cpu", dtype=torch.float16, backend=BACKEND.GPTQ_TORCH)
            matrices = {f"{at}.weight": part.dequantize_weight().T.contiguous()
                        for at, part in back.model.named_modules() if hasattr(part, "dequantize_weight")}
        for extra in ("quant_log.csv", "quantize_config.json", "tokenizer.json", "tokenizer_config.json"):
            (out / name / extra).unlink(missing_ok=True)
        computed = model().float()
        rest = {at: tensor for at, tensor in stored.items() if at in computed.state_dict()}  # AWQ changes norms too
        computed.load_state_dict({**computed.state_dict(), **rest, **matrices})
        expect(out / name, "gptqmodel", matrices, computed)


def quark(out: Path) -> None:
    """The matrices are those that its own quantizers make of the plain ones."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as q

    plain, ids = with_words(out)
    fp8 = q.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)
    rows = q.Int8PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False)
    kinds = {"quark-fp8": (fp8, fp8), "quark-int8": (rows, None),
             "quark-mxfp4": (q.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False), None),
             "quark-uint4": (q.Uint4PerGroupSpec(symmetric=False, scale_type="float", round_method="half_even", ch_axis=-1,
                                                 is_dynamic=False, group_size=64), None),
             "quark-fp8-channel": (q.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
                                   q.FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1))}
    for name, (weight, inputs) in kinds.items():
        made = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        layer = q.QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=inputs and inputs.to_quantization_spec())
        quantizer = ModelQuantizer(q.QConfig(global_quant_config=layer, exclude=["lm_head"]))
        made = quantizer.freeze(quantizer.quantize_model(made, [torch.tensor([one]) for one in ids]))
        matrices = {f"{at}.weight": part._weight_quantizer(part.weight).detach()
                    for at, part in made.named_modules() if hasattr(part, "_weight_quantizer")}
        export_safetensors(made, str(out / name), custom_mode="quark")
        for extra in ("tokenizer.json", "tokenizer_config.json"):
            (out / name / extra).unlink(missing_ok=True)
        computed = model()
        computed.load_state_dict({**computed.state_dict(), **matrices})
        expect(out / name, "amd-quark", matrices, computed)


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    OUT.mkdir(parents=True, exist_ok=True)
    for make in (compressed, bitsandbytes, torchao, hqq, auto_round, modelopt, llm_compressor, gptqmodel,
                 quark) if "canary" not in sys.argv else (canary,):
        make(OUT)
