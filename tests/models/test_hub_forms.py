"""The forms that `quantization_config` has in checkpoints people take from the hub, by the names of such models: each is read
as the scheme that it is, or refused with a reason. Settings without an effect here (observers, versions) stay where they occur.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import read_config
from penstock.core.errors import ModelError
from penstock.models.caching import stated
from penstock.quant.dialects import reader

Q, GATE, DOWN, HEAD, EXPERT = (
    "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate", "model.layers.0.mlp.down_proj", "lm_head",
    "model.layers.3.mlp.experts.7.up_proj")
"""Modules, each of [512, 512]."""


def ct(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """compressed-tensors with one group, as llm-compressor writes it."""
    usual = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax",
             "observer_kwargs": {}, "symmetric": True}
    group = {"format": kind, "input_activations": {**usual, **inputs} if inputs else None, "output_activations": None,
             "targets": ["Linear"], "weights": {**usual, **weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
            "global_compression_ratio": None, "kv_cache_scheme": None, "quantization_status": "compressed", "version": "0.12.2",
            "sparsity_config": {}, "transform_config": {}, **more}


FP8_TOKEN = {"dynamic": True, "num_bits": 8, "observer": None, "strategy": "token", "type": "float"}
FP8_TENSOR = {"num_bits": 8, "strategy": "tensor", "type": "float"}
KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
NV4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
QUARK8 = {"ch_axis": None, "dtype": "fp8_e4m3", "group_size": None, "is_dynamic": False, "qscheme": "per_tensor",
          "observer_cls": "PerTensorMinMaxObserver", "round_method": "half_even", "scale_type": "float", "symmetric": None}
QUARK4 = {"ch_axis": -1, "dtype": "fp4", "group_size": 32, "is_dynamic": True, "qscheme": "per_group", "scale_format": "e8m0",
          "scale_calculation_mode": "even", "symmetric": None}
QUARK8_LAYER = {"weight": QUARK8, "input_tensors": QUARK8, "output_tensors": None, "bias": None, "target_device": None}
BNB = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True, "load_in_8bit": False,
       "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
       "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_threshold": 6.0}
AUTO = {"quant_method": "auto-round", "autoround_version": "0.5.1", "bits": 4, "data_type": "int", "group_size": 128,
        "sym": True,
        "enable_norm_bias_tuning": False, "iters": 200, "block_name_to_quantize": "model.layers"}
INTX = {"_type": "Int8DynamicActivationIntxWeightConfig", "_version": 2, "_data": {
    "weight_dtype": {"_data": "int4", "_type": "torch.dtype"}, "act_mapping_type": {"_data": "ASYMMETRIC",
                                                                                    "_type": "MappingType"},
    "weight_granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
    "weight_mapping_type": {"_data": "SYMMETRIC", "_type": "MappingType"}}}
TORCHAO = {"quant_method": "torchao", "include_input_output_embeddings": False, "modules_to_not_convert": None,
           "untie_embedding_weights": False}

READ: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "Qwen/Qwen3-8B-FP8": ({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128,
                                                                                                                       128],
                           "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"]},
                          {Q: "fp8_block", GATE: None, HEAD: None}),
    "deepseek-ai/DeepSeek-V3.1": ({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                                   "weight_block_size": [128, 128]}, {Q: "fp8_block", EXPERT: "fp8_block", GATE: None}),
    "MiniMaxAI/MiniMax-M2": ({"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                              "weight_block_size":
                              [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
                             {Q: "fp8_block", "model.layers.1.mlp.gate_proj": "fp8_block", GATE: None}),
    "mistralai/Ministral-3-8B-Instruct-2512": ({"activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
                                                "modules_to_not_convert": ["model.vision_tower", "lm_head"],
                                                "weight_block_size": None}, {Q: "fp8", HEAD: None}),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8": ({"activation_scheme": "static", "ignored_layers": ["lm_head"],
                                                  "quant_method": "fp8"}, {Q: "fp8", HEAD: None}),
    "meta-llama/Llama-3.1-405B-Instruct-FP8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
                                                "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.q_proj"]},
                                               {Q: None, DOWN: "fp8"}),
    "RedHatAI/Qwen3-8B-FP8-dynamic": (ct("float-quantized", {"num_bits": 8, "strategy": "channel", "type": "float"}, FP8_TOKEN),
                                      {Q: "fp8", HEAD: None}),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": (ct("float-quantized", FP8_TENSOR, FP8_TENSOR, kv_cache_scheme=KV), {Q: "fp8"}),
    "RedHatAI/Qwen3-30B-A3B-FP8-block": (ct("float-quantized", {
        "num_bits": 8, "strategy": "block", "block_structure": [128, 128], "type": "float"},
        {"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True, "type": "float"},
        ignore=["lm_head", "re:.*mlp.gate$"]), {Q: "fp8_block", GATE: None, EXPERT: "fp8_block"}),
    "RedHatAI/Mistral-Small-3.2-24B-Instruct-2506-FP8": (ct("float-quantized", {
        "num_bits": 8, "strategy": "channel", "type": "float"}, FP8_TOKEN, ignore=[
            "language_model.lm_head", "re:vision_tower.*", "re:multi_modal_projector.*",
            r"re:model\.language_model\.layers\.0\.mlp\..*"]), {Q: "fp8", DOWN: None, HEAD: None}),
    "moonshotai/Kimi-K2.5": (ct("pack-quantized", {
        "num_bits": 4, "strategy": "group", "group_size": 32, "type": "int"}, ignore=[
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*language_model.*mlp\\.(gate|up|down)_proj.*",
            "re:.*vision_tower.*"]), {Q: None, EXPERT: "int4g32"}),
    "with columns in an order": (ct("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128, "type": "int",
                                                       "actorder": "dynamic"}), {Q: "int4g128"}),
    "RedHatAI/Qwen3-8B-quantized.w4a16": (ct("pack-quantized", {
        "num_bits": 4, "strategy": "group", "group_size": 128, "type": "int", "actorder": "weight"}), {Q: "int4g128",
                                                                                                       HEAD: None}),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16": (ct("pack-quantized", {
        "num_bits": 8, "strategy": "channel", "type": "int"}), {Q: "int8row"}),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": (ct("int-quantized", {
        "num_bits": 8, "strategy": "channel", "type": "int"}, {**FP8_TOKEN, "type": "int"}), {Q: "int8"}),
    "RedHatAI/Llama-3.1-8B-Instruct-NVFP4": (ct("nvfp4-pack-quantized", NV4, {**NV4, "dynamic": "local"}), {Q: "nvfp4"}),
    "moonshotai/Kimi-K2-Thinking": (ct("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "int"},
                                       ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]),
                                    {Q: None, EXPERT: "int4g32", GATE: None}),
    "a mixed one by llm-compressor": ({**ct("mixed-precision", {}), "config_groups": {
        "group_0": {"format": "float-quantized", "targets": ["re:.*self_attn.(q|k|v|o)_proj$"], "weights": {
            "num_bits": 8, "strategy": "channel", "type": "float"}, "input_activations": FP8_TOKEN},
        "group_1": {"format": "nvfp4-pack-quantized", "targets": ["re:.*mlp.*_proj$"], "weights": NV4}}},
        {Q: "fp8", DOWN: "nvfp4", HEAD: None}),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ({"bits": 4, "damp_percent": 0.01, "desc_act": False, "group_size": 128,
                                            "quant_method":
                                            "gptq", "static_groups": False, "sym": True, "true_sequential": True,
                                            "model_file_base_name": "model", "model_name_or_path": None},
                                           {Q: "int4g128", HEAD: None}),
    "ModelCloud/Qwen2.5-Coder-32B-gptqmodel-4bit-vortex-v1": ({
        "bits": 4, "checkpoint_format": "gptq", "desc_act": True, "dynamic": None, "format": "gptq", "group_size": 32,
        "lm_head":
        False, "meta": {"quantizer": ["gptqmodel:1.4.0"]}, "method": "gptq", "pack_dtype": "int32", "quant_method": "gptq",
        "sym": True}, {Q: "int4g32"}),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ({"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq",
                                      "version": "gemm", "zero_point": True}, {Q: "int4g128", HEAD: None}),
    "one that leaves layers out": ({"bits": 4, "group_size": 128, "modules_to_not_convert": ["model.layers.0."], "quant_method":
                                    "awq", "version": "gemm", "zero_point": True}, {Q: None, EXPERT: "int4g128"}),
    "QuixiAI/DeepSeek-R1-AWQ": ({"bits": 4, "group_size": 64, "modules_to_not_convert": ["self_attn.kv_a_proj_with_mqa"],
                                 "quant_method": "awq", "version": "gemm", "zero_point": True, "backend": "autoawq", "do_fuse":
                                 False, "exllama_config": None, "fuse_max_seq_len": None}, {EXPERT: "int4g64", GATE: None}),
    "unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit": ({**BNB, "llm_int8_skip_modules": [
        "lm_head", "multi_modal_projector", "model.layers.0.mlp"]}, {Q: "nf4", DOWN: None, HEAD: None}),
    "unsloth/gemma-3-4b-it-unsloth-bnb-4bit": ({**BNB, "llm_int8_skip_modules": [
        "lm_head", "multi_modal_projector", "vision_tower", "language_model.model.layers.0.mlp"]},
        {Q: "nf4", DOWN: None, HEAD: None}),
    "unsloth/llama-3-8b-bnb-4bit": ({**BNB, "llm_int8_skip_modules": None}, {Q: "nf4", DOWN: "nf4", HEAD: None}),
    "a model by load_in_8bit": ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, {Q: "int8", HEAD: None}),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ({"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.15.1"},
                                          "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules":
                                                           ["lm_head"]}}, {Q: "fp8", HEAD: None}),
    "nvidia/DeepSeek-R1-0528-FP4": ({"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": [
            "lm_head", "model.layers.0.self_attn*", "model.layers.*.mlp.gate"]}}, {Q: None, EXPERT: "nvfp4", GATE: None}),
    "nvidia/Qwen3-30B-A3B-FP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {
        "dynamic": False, "num_bits": 8, "type": "float"}, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}}, "ignore": ["lm_head",
                                                                                              "model.layers.*.mlp.gate"],
        "producer": {"name": "modelopt", "version": "0.33.0"}}, {Q: "nvfp4", EXPERT: "nvfp4", GATE: None, HEAD: None}),
    "4-bit integers by modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"]},
                                   {Q: "int4g128", DOWN: "int4g128", HEAD: None}),
    "NVFP4 with AWQ's factors": ({"quant_method": "modelopt", "quantization": {
        "quant_algo": "NVFP4_AWQ", "group_size": 16, "pre_quant_scale": True, "exclude_modules": ["lm_head"]}},
        {Q: "nvfp4", DOWN: "nvfp4", HEAD: None}),
    "a mixed one by modelopt": ({"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION",
                                                                              "quantized_layers": {
        Q: {"quant_algo": "FP8"}, DOWN: {"quant_algo": "NVFP4", "group_size": 16}, EXPERT: {"quant_algo": "mxfp8"}}}},
        {Q: "fp8", DOWN: "nvfp4", EXPERT: "mxfp8", HEAD: None}),
    "amd/Llama-3.1-8B-Instruct-FP8-KV": ({
        "algo_config": None, "exclude": ["lm_head"], "export": {"kv_cache_group": ["*k_proj", "*v_proj"],
                                                                "pack_method": "reorder",
                                                               "weight_format": "real_quantized"}, "quant_method": "quark",
        "global_quant_config": QUARK8_LAYER, "layer_quant_config": {"*k_proj": {**QUARK8_LAYER, "output_tensors": QUARK8}},
        "layer_type_quant_config": {}, "quant_mode": "eager_mode", "softmax_quant_spec": None},
        {Q: "fp8", "model.layers.0.self_attn.k_proj": "fp8", HEAD: None}),
    "amd's int4": ({"quant_method": "quark", "exclude": ["lm_head"], "export": {"pack_method": "order"},
                    "global_quant_config": {
        "weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}, "input_tensors": None}},
        {Q: "int4g32", HEAD: None}),
    "amd/DeepSeek-R1-0528-MXFP4": ({"quant_method": "quark", "exclude": ["lm_head", "re:.*self_attn.*"],
                                    "layer_quant_config": {},
                                    "global_quant_config": {"weight": {**QUARK4, "is_dynamic": False},
                                                            "input_tensors": QUARK4}},
                                   {Q: None, EXPERT: "mxfp4", HEAD: None}),
    "Intel/Qwen3-8B-int4-AutoRound": ({**AUTO, "packing_format": "auto_round:auto_gptq", "extra_config": {
        DOWN: {"bits": 16, "data_type": "float"}}}, {Q: "int4g128", DOWN: None, HEAD: None}),
    "Intel/Mistral-7B-Instruct-v0.2-int4-inc": ({**AUTO, "quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"},
                                                {Q: "int4g128"}),
    "one by AutoRound with zeros": ({**AUTO, "sym": False, "group_size": 64, "packing_format": "auto_round",
                                     "to_quant_block_names": "model.layers"}, {Q: "int4g64", HEAD: None}),
    "OPEA/Qwen2-VL-7B-Instruct-int4-sym-inc": ({**AUTO, "block_name_to_quantize": None, "to_quant_block_names":
                                                "model.language_model.layers", "packing_format": "auto_round:auto_gptq"},
                                               {Q: "int4g128", "model.visual.blocks.3.attn.qkv": None, HEAD: None}),
    "an older one by AutoRound": ({**AUTO, "sym": False, "backend": "auto_round:awq"}, {Q: "int4g128"}),
    "pytorch/Qwen3-8B-FP8": ({**TORCHAO, "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig",
                                                                    "_version": 2, "_data": {"granularity": [
                                                                        {"_type": "PerRow", "_data": {},
                                                                         "_version": 1}] * 2}}}},
                             {Q: "fp8", HEAD: None}),
    "pytorch/Qwen3-4B-INT8-INT4": ({**TORCHAO, "quant_type": {"default": {"_type": "ModuleFqnToConfig", "_version": 1,
                                                                          "_data": {
        "module_fqn_to_config": {"_default": INTX, "model.embed_tokens": None}}}}}, {Q: "int4g32", HEAD: None}),
    "openai/gpt-oss-20b": ({"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        {Q: None, "model.layers.0.mlp.experts.gate_up_proj": "mxfp4", "model.layers.0.mlp.router": None, HEAD: None}),
    "one by hqq": ({"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
        "offload_meta": False, "scale_quant_params": None, "zero_quant_params": None, "weight_quant_params": {
            "axis": 1, "channel_wise": True, "group_size": 64, "nbits": 4, "optimize": True, "round_zero": True,
            "view_as_float": False}}}, {Q: "int4g64", HEAD: None}),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "RedHatAI/Sparse-Llama-3.1-8B-2of4": (ct("dense", {"num_bits": 8}, sparsity_config={"format": "sparse-24-bitmask"}),
                                          "sparsity_config's format is 'sparse-24-bitmask'; possible is 'dense'"),
    "rotated by llm-compressor": (ct("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128, "type": "int"},
                                     transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "with zero points of activations": (ct("int-quantized", {"num_bits": 8, "strategy": "channel", "type": "int"},
                                           {**FP8_TOKEN, "type": "int", "symmetric": False}), "symmetric false"),
    "TheBloke's exllama v2 folder": ({"quant_method": "exl2", "bits": 4.0}, "quant_method is 'exl2'; possible are auto-round"),
    "Marlin's own packing": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin",
                              "is_marlin_format": True}, "checkpoint_format is 'marlin'; possible are 'gptq', 'gptq_v2'"),
    "casperhansen/llama-3-8b-instruct-awq-gemv": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv_fast"},
                                                  "version is 'gemv_fast'"),
    "nvidia's W4A8": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; possible are 'FP8'"),
    "amd's int3": ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3", "qscheme": "per_group"}}},
                   "dtype is 'int3'; possible are 'fp8_e4m3'"),
    "amd's rotated inputs": ({"quant_method": "quark", "algo_config": [{"name": "rotation", "r1": True, "r4": True}],
                              "global_quant_config": {"weight": QUARK4}}, "algo_config rotates inputs while the model runs"),
    "AutoRound's MXFP4": ({**AUTO, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}, "packing_format is"),
    "pytorch/Qwen3-8B-INT4": ({**TORCHAO, "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {
        "group_size": 128, "int4_packing_format": {"_data": "TILE_PACKED_TO_4D", "_type": "Int4PackingFormat"}}}}},
        "TILE_PACKED_TO_4D"),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "bitlinear"}, "quant_method is 'bitnet'"),
}


@pytest.mark.parametrize("name", READ)
def test_forms_of_the_hub_are_read(name: str) -> None:
    given, expected = READ[name]
    read = reader(given)
    found = {module: read.form(module, 512, 512) for module in expected}
    assert {module: form.scheme.name if form else None for module, form in found.items()} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str) -> None:
    given, said = REFUSED[name]
    with pytest.raises(ModelError, match="quantization_config: ") as caught:
        reader(given).form(Q, 512, 512)
    assert said in str(caught.value)


def test_caches_that_checkpoints_ask_for() -> None:
    found = {name: stated({"quantization_config": given}) for name, (given, _) in READ.items()}
    assert {name for name, codec in found.items() if codec == "fp8"} == {
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "nvidia/Llama-3.1-8B-Instruct-FP8", "nvidia/Qwen3-30B-A3B-FP4"}
    # AutoFP8's.
    assert stated({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}}) == "fp8"


@pytest.mark.parametrize(("name", "given", "method"), [
    ("hf_quant_config.json", READ["nvidia/DeepSeek-R1-0528-FP4"][0]["quantization"], "modelopt"),
    ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True, "sym": True}, "gptq"),
    ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq")])
def test_settings_in_a_file_beside_the_config(name: str, given: dict[str, Any], method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / name).write_text(json.dumps({"quantization": given} if method == "modelopt" else given))
    found = read_config(tmp_path)["quantization_config"]
    form = reader(found).form(EXPERT, 512, 512)
    assert found["quant_method"] == method and form is not None and form.scheme.name in ("nvfp4", "int4g128")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert read_config(tmp_path)["quantization_config"] == {"quant_method": "fp8"}


def test_the_older_key_of_compressed_tensors(tmp_path: Path) -> None:
    given = READ["RedHatAI/Qwen3-8B-quantized.w4a16"][0]
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": given}))
    assert read_config(tmp_path)["quantization_config"] == given
