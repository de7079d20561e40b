"""Makes tests/assets/quantized-canary: canary-256 quantized by the packages that people use. Not run by tests.

    pip install llmcompressor gptqmodel bitsandbytes hqq auto-round amd-quark nvidia-modelopt
    PYTHONPATH=src:. python tests/assets/make_canary_quantized.py OUT [NAME ...]

The folders share the embedding, which is the head too and stays plain, by embedding.safetensors. expected.json has the
SHA-256 of every matrix as the package itself dequantizes it, and the answers of transformers' model with those matrices, in
float32, to the prompts of gguf-canary-256: greedy tokens up to the answer's end.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.assets.make_quantized import by_hqq, digest, linears
from training.canary.render import render
from training.canary.ship import place
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, CompressedTensorsConfig

from penstock.canary.suite import SKILLS, prompts

SOURCE = place("canary-256")
TABLE = "model.embed_tokens.weight"
LONGEST = 48
"""Tokens of an answer that are kept."""
Matrices = dict[str, torch.Tensor]


def plain(dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(SOURCE, dtype=dtype)


def samples() -> list[list[int]]:
    """Prompts and answers to calibrate with, other than those that a test asks."""
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    items = [item for skill in SKILLS if skill != "retrieve-4k" for item in prompts(skill, 9)[2:5]]
    texts = [render(item.messages, item.tools, item.thinking) for item in items]
    return [tokenizer.encode(text, add_special_tokens=False)[:256] for text in texts]


def llm_compressor(folder: Path, name: str) -> Matrices:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier  # asks for a GPU

    given: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
    recipe = {"awq": lambda: [AWQModifier(), QuantizationModifier(scheme="W4A16_ASYM", **given)],
              "w8a8": lambda: GPTQModifier(scheme="W8A8", **given),
              "fp8": lambda: QuantizationModifier(scheme="FP8_DYNAMIC", **given),
              "nvfp4": lambda: QuantizationModifier(scheme="NVFP4A16", **given)}[name.removeprefix("lc-")]()
    ids = samples()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]})
    made = plain()
    oneshot(model=made, recipe=recipe, dataset=data, num_calibration_samples=len(ids), max_seq_length=256, batch_size=1)
    made.save_pretrained(folder, save_compressed=True)
    return linears(AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.bfloat16))


def gptqmodel(folder: Path, name: str) -> Matrices:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    given: dict[str, Any] = {"gm-gptq": {"desc_act": True, "sym": False},
                             "gm-awq": {"sym": False, "method": "awq", "format": "gemm"}}[name]
    config = QuantizeConfig(bits=4, group_size=128, **given, offload_to_disk=False, pack_impl="original")
    made = GPTQModel.load(str(SOURCE), config, dtype=torch.bfloat16)
    made.quantize([{"input_ids": one, "attention_mask": [1] * len(one)} for one in samples()], batch_size=1)
    made.save(str(folder))
    if name == "gm-awq":
        stored = load_file(folder / "model.safetensors")
        names = [at.removesuffix(".qweight") for at in stored if at.endswith(".qweight")]
        return {f"{at}.weight": dequantize_gemm(*(stored[f"{at}.{part}"] for part in ("qweight", "qzeros", "scales")), 4,
                                                128).T.contiguous() for at in names}
    back = GPTQModel.load(str(folder), device="cpu", dtype=torch.float16, backend=BACKEND.GPTQ_TORCH)
    return {f"{at}.weight": part.dequantize_weight().T.contiguous()
            for at, part in back.model.named_modules() if hasattr(part, "dequantize_weight")}


def bitsandbytes(folder: Path, _name: str) -> Matrices:
    from bitsandbytes.functional import dequantize_4bit

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=torch.bfloat16)
    made = AutoModelForCausalLM.from_pretrained(SOURCE, quantization_config=config, dtype=torch.bfloat16, device_map="cpu")
    made.save_pretrained(folder)
    return {f"{at}.weight": dequantize_4bit(part.weight.data, part.weight.quant_state) for at, part in made.named_modules()
            if hasattr(getattr(part, "weight", None), "quant_state")}


def hqq(folder: Path, _name: str) -> Matrices:
    made = plain()
    config, tensors, matrices = by_hqq(made, {"nbits": 4, "group_size": 64, "axis": 1})
    made.save_pretrained(folder)
    rest = {at: tensor for at, tensor in made.state_dict().items() if at not in matrices and at != "lm_head.weight"}
    save_file({**rest, **tensors}, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")
    return matrices


def auto_round(folder: Path, _name: str) -> Matrices:
    from auto_round import AutoRound

    words = SimpleNamespace(pad_token=None, eos_token="x", padding_side="right", name_or_path="canary",
                            save_pretrained=lambda *_, **__: ())

    def rounding() -> AutoRound:
        return AutoRound(plain(), tokenizer=words, bits=4, group_size=128, sym=False, iters=0, disable_opt_rtn=True,
                         device_map="cpu")

    rounding().quantize_and_save(str(folder / "whole"), format="auto_round:gptqmodel")
    for path in next((folder / "whole").rglob("config.json")).parent.iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / "whole")
    return {at: matrix + 0.0 for at, matrix in linears(rounding().quantize()[0]).items()}


def quark(folder: Path, name: str) -> Matrices:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as q

    kind = {"quark-int4": q.Int4PerGroupSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=-1,
                                             is_dynamic=False, group_size=128)}[name]
    quantizer = ModelQuantizer(q.QConfig(global_quant_config=q.QLayerConfig(weight=kind.to_quantization_spec()),
                                         exclude=["lm_head"]))
    made = quantizer.freeze(quantizer.quantize_model(plain(), [torch.tensor([one]) for one in samples()]))
    found = {f"{at}.weight": part._weight_quantizer(part.weight).detach()
             for at, part in made.named_modules() if hasattr(part, "_weight_quantizer")}
    export_safetensors(made, str(folder), custom_mode="quark", pack_method="order")
    return found


def modelopt(folder: Path, name: str) -> Matrices:
    """AWQ's matrices are of inputs that are scaled, by the norm before or by pre_quant_scale."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = {"modelopt-awq": mtq.INT4_AWQ_CFG, "modelopt-fp8-blocks": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG}[name]
    made = mtq.quantize(plain(), config, lambda each: [each(torch.tensor([one])) for one in samples()])
    export_hf_checkpoint(made, export_dir=folder)
    stored, found = load_file(folder / "model.safetensors"), {}
    for at in [at.removesuffix("_scale") for at in stored if at.endswith(".weight_scale")]:
        codes, scale = stored[at], stored[f"{at}_scale"].float()
        if name == "modelopt-awq":
            low, high = ((codes >> shift & 15).to(torch.int8) for shift in (0, 4))
            both = torch.stack((low, high), 1).flatten(0, 1).int()
            wide = torch.where(both > 7, both - 16, both).float() * scale.repeat_interleave(both.shape[1] // scale.shape[1], 1)
        else:
            wide = codes.float() * scale.reshape(scale.shape[0], -1).repeat_interleave(128, 0).repeat_interleave(128, 1)
        factor = stored.get(at.removesuffix("weight") + "pre_quant_scale")
        found[at] = wide if factor is None else wide * factor.float()
    return found


MAKERS = {"lc-awq": llm_compressor, "lc-w8a8": llm_compressor, "lc-fp8": llm_compressor, "lc-nvfp4": llm_compressor,
          "gm-gptq": gptqmodel, "gm-awq": gptqmodel, "bnb-nf4": bitsandbytes, "hqq-int4": hqq, "auto-round": auto_round,
          "quark-int4": quark, "modelopt-awq": modelopt, "modelopt-fp8-blocks": modelopt}
PACKAGES = {"lc": "llmcompressor", "gm": "gptqmodel", "bnb": "bitsandbytes", "auto": "auto-round", "quark": "amd-quark",
            "modelopt": "nvidia-modelopt"}


def finish(folder: Path, name: str, matrices: Matrices) -> None:
    """Leaves what no other folder has, and writes expected.json."""
    stored = load_file(folder / "model.safetensors")
    made = plain(torch.float32)
    norms = {at: tensor.float() for at, tensor in stored.items() if "norm" in at}
    made.load_state_dict({**made.state_dict(), **norms, **matrices})
    asked = json.loads((SOURCE.parent / "gguf-canary-256" / "expected.json").read_text())["asked"]
    answers = []
    for one in asked:
        with torch.no_grad():
            ids = made.generate(torch.tensor([one["prompt"]]), max_new_tokens=LONGEST, do_sample=False, eos_token_id=2)[0]
        answers.append(ids[len(one["prompt"]):].tolist())
    package = PACKAGES.get(name.partition("-")[0], name.partition("-")[0])
    (folder / "expected.json").write_text(json.dumps({
        "package": package, "version": version(package), "answers": answers,
        "matrices": {at: [str(tensor.dtype).removeprefix("torch."), digest(tensor)] for at, tensor in sorted(matrices.items())},
    }) + "\n")
    for path in folder.iterdir():
        if path.name not in ("config.json", "expected.json", "hf_quant_config.json"):
            path.unlink()
    table, files = stored.pop(TABLE), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert torch.equal(table, load_file(SOURCE / "model.safetensors")[TABLE]), f"{name} changes the embedding"
    save_file(stored, folder / files[0], {"format": "pt"})
    if not (folder.parent / "embedding.safetensors").exists():
        save_file({TABLE: table}, folder.parent / "embedding.safetensors", {"format": "pt"})
    (folder / files[1]).symlink_to("../embedding.safetensors")
    places = {**dict.fromkeys(stored, files[0]), TABLE: files[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}) + "\n")


def main() -> None:
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or list(MAKERS):
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        finish(folder, name, MAKERS[name](folder, name))


if __name__ == "__main__":
    main()
