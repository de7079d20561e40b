"""The codec of a layer: by option, by what a checkpoint says, with its scales; and all that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock import LLM, SamplingParams
from penstock.config.resolve import cache_asked
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError, ModelError
from penstock.core.state import lay_out
from penstock.layers.spec import ModelSpec
from penstock.models import configured as config_of, describe
from penstock.ops.codec import CODECS
from penstock.worker.arena import Arena
from tests.models.fakes import configured
from tests.models.families import CASES, make

ASSETS = Path(__file__).parent.parent / "assets"
FAMILY: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "head_dim": 32}


def folder_of(tmp_path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder = configured(tmp_path / "model", **FAMILY, **config)
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def described(folder: Path, **options: Any) -> ModelSpec:
    asked = EngineOptions(model=str(folder), **{"load_format": "dummy", **options})
    return describe(config_of(folder, cache=cache_asked(asked)))


def codecs(folder: Path, **options: Any) -> list[Any]:
    """Each layer's (codec, scales), or None."""
    found = described(folder, **options).attentions
    return [None if one.codec is None else (one.codec.name, one.codec.scales) for one in found]


def test_by_option(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert codecs(folder) == codecs(folder, kv_cache_dtype="float32") == [None] * 4
    for name, own in (("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("turboquant_4bit_nc", "turbo4")):
        assert codecs(folder, kv_cache_dtype=name) == [(own, (1.0, 1.0))] * 4
    given = codecs(folder, kv_cache_dtype="fp8", kv_cache_scales={"k": "0.5", "v": "2"},
                   kv_cache_plain_layers=["first", "-1"])
    assert given == [None, ("fp8", (0.5, 2.0)), ("fp8", (0.5, 2.0)), None]


def test_the_cache_shrinks_by_what_is_stored(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    sizes = {}
    for name in ("float32", *CODECS):
        states = described(folder, kv_cache_dtype=name).states("float32")
        layout = lay_out(states, 16, 1 << 20)
        sizes[name] = sum(field.page_bytes(16) for field in states[0].fields)
        views = Arena(layout, torch.device("cpu")).views(states)
        assert all(view[field.name].shape[-1] == field.shape[-1] for view, state in zip(views, states, strict=True)
                   for field in state.fields)
    assert sizes == {name: 2 * 16 * 2 * each for name, each in {
        "float32": 128, "fp8": 32, "fp8_e5m2": 32, "fp8_per_token_head": 36, "int8": 36, "int4": 20, "nvfp4": 18, "turbo4": 19,
        "turbo3": 15, "q8_0": 34, "q4_0": 18}.items()}


SAYINGS = [
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
      "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}}, "fp8"),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
      "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, "fp8_per_token_head"),
    ({"quant_method": "modelopt",
      "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}}, "fp8"),
]


@pytest.mark.parametrize(("said", "name"), SAYINGS, ids=lambda one: one if isinstance(one, str) else one["quant_method"])
def test_by_checkpoint(tmp_path: Path, said: dict[str, Any], name: str) -> None:
    tensors = {f"model.layers.{layer}.self_attn.{which}_scale": torch.tensor([value + layer], dtype=dtype)
               for layer in range(3) for which, value, dtype in (("k", 0.5, torch.bfloat16), ("v", 2.0, torch.float32))}
    tensors["model.layers.3.self_attn.k_proj.k_scale"] = torch.tensor(0.25, dtype=torch.float16)
    folder = folder_of(tmp_path, tensors, quantization_config=said)
    found = codecs(folder, load_format="auto")
    if name == "fp8":
        assert found == [("fp8", (0.5 + layer, 2.0 + layer)) for layer in range(3)] + [("fp8", (0.25, 1.0))]
    else:
        assert found == [(name, (1.0, 1.0))] * 4
    assert codecs(folder, load_format="auto", kv_cache_dtype="float32") == [None] * 4


REFUSED = [
    ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype is 'fp9'; possible are auto, .*turbo4"),
    ({"kv_cache_dtype": "bfloat16"}, "set dtype to bfloat16"),
    ({"kv_cache_plain_layers": ["0"]}, "kv_cache_plain_layers is given, but the cache is plain"),
    ({"kv_cache_dtype": "int8", "kv_cache_scales": {"k": "1", "v": "1"}}, "int8 finds its own scales"),
    ({"kv_cache_dtype": "fp8", "kv_cache_scales": {"k": "0"}}, "two numbers above 0"),
    ({"kv_cache_dtype": "fp8", "kv_cache_plain_layers": ["4"]}, "numbers from 0 to 3"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codecs(folder_of(tmp_path), **options)


def test_what_a_model_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"turbo4.*not a power of two. Possible are fp8"):
        codecs(configured(tmp_path / "odd", **FAMILY | {"head_dim": 12}), kv_cache_dtype="turbo4")
    with pytest.raises(ModelError, match=r"\{'num_bits': 5"):
        codecs(folder_of(tmp_path, quantization_config={"quant_method": "compressed-tensors", "config_groups": {},
                                                        "kv_cache_scheme": {"num_bits": 5}}))
    broken = folder_of(tmp_path, {"model.layers.0.self_attn.k_scale": torch.tensor(0.0)})
    with pytest.raises(ModelError, match=r"layers.0.self_attn.k_scale is \[0.0\]"):
        codecs(broken, kv_cache_dtype="fp8", load_format="auto")
    with pytest.raises(ConfigError, match="other states than keys and values"):
        codecs(ASSETS / "canary-mla", kv_cache_dtype="fp8")


@pytest.mark.parametrize("case", ["qwen3next-odd", "qwen3.5-odd"])
def test_delta_nets_beside_a_codec(case: str, tmp_path: Path) -> None:
    """Layers of attention have the codec, that of the checkpoint too; the states of the others stay as they are."""
    make(next(one for one in CASES if one.name == case), tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    prompt = list(range(3, 60))

    def answers(**options: Any) -> list[int]:
        with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=96, device="cpu", dtype="float32", **options) as llm:
            asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            [output] = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    assert answers(kv_cache_dtype="fp8") == answers(kv_cache_dtype="fp8", max_num_batched_tokens=16, max_num_seqs=4)
    assert answers(kv_cache_dtype="int8") == answers()
    with pytest.raises(ConfigError, match="'aged'"):
        answers(kv_cache_dtype="aged", cache_host_bytes=1 << 24)
    given["quantization_config"] = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert answers() == answers(kv_cache_dtype="fp8")
