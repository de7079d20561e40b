"""The loader: what it accepts, what it refuses and in which words, and how much memory it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.checkpoint import dtype_of, read_config
from penstock.core.errors import ModelError
from penstock.layers.decoder import Decoder
from penstock.models import describe, load
from penstock.ops.registry import bind
from penstock.platform.facts import detect
from tests.models.families import CASES, EVEN, ODD, PROMPT, TIED, Case, make, randomise
from tests.models.harness import CPU, Runner, open_model, reference

PROMPT_IDS = torch.randint(3, 199, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    return Runner(open_model(folder, **options)).prompt(0, PROMPT_IDS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make(Case("llama", "Llama", ODD), folder)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) takes out tensors of a single-file folder; "__" stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Spreads a single file over shards with an index; returns the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, folder / file)
        places.update(dict.fromkeys(names[i::parts], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_shards_are_the_same_model(llama: Path, copy: Path) -> None:
    shard(copy)
    assert torch.equal(logits_of(copy), logits_of(llama))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_files_as_float32(llama: Path, copy: Path, stored: torch.dtype) -> None:
    save_file({name: t.to(stored) for name, t in load_file(copy / "model.safetensors").items()}, copy / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT_IDS])).logits[0]
    torch.testing.assert_close(logits_of(copy), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["reference", "default"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_file_as_half(llama: Path, dtype: torch.dtype, kernels: str) -> None:
    bound = reference() if kernels == "reference" else bind(detect("cpu"), dtype)
    logits, exact = logits_of(llama, dtype=dtype, kernels=bound), logits_of(llama)
    assert logits.dtype == torch.float32
    steps = {torch.float16: 1, torch.bfloat16: 8}[dtype]
    assert 0 < (logits - exact).abs().mean() < 0.006 * steps * exact.std()


def test_mixed_types_in_one_file(llama: Path, copy: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(copy, **{name.replace(".", "__"): load_file(copy / "model.safetensors")[name].to(torch.bfloat16)})
    assert 0 < (logits_of(copy) - logits_of(llama)).abs().max() < 0.5


def test_misfits_are_all_listed_at_once(copy: Path) -> None:
    edit(copy, model__layers__0__self_attn__k_proj__weight=None, model__layers__2__input_layernorm__weight=None,
         model__norm__weight=None, model__layers__1__mlp__gate_proj__weight=torch.zeros(3, 60), extra__thing=torch.zeros(2, 3),
         model__layers__7__mlp__up_proj__weight=torch.zeros(88, 60), lm_head__weight=torch.zeros(199, 60, dtype=torch.int8))
    with pytest.raises(ModelError) as caught:
        open_model(copy)
    lines = str(caught.value).splitlines()
    assert "missing (3):" in lines
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.2.input_layernorm.weight", "model.norm.weight"):
        assert f"  {name}" in lines
    assert "unused (2):" in lines
    assert "  extra.thing [2, 3]" in lines
    assert "  model.layers.7.mlp.up_proj.weight [88, 60]" in lines
    assert "of the wrong shape or type (2):" in lines
    assert "  model.layers.1.mlp.gate_proj.weight is [3, 60]; the config asks for [88, 60]" in lines
    assert "  lm_head.weight is I8; weights can be F32, F16, BF16" in lines


def test_a_parameter_named_twice_is_refused(tmp_path: Path) -> None:
    make(next(case for case in CASES if case.name == "neox-parallel"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = next(name for name in ("lm_head.weight", "embed_out.weight") if name in tensors)
    other = {"lm_head.weight": "embed_out.weight", "embed_out.weight": "lm_head.weight"}[head]
    save_file({**tensors, other: tensors[head].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"doubled \(1\)"):
        open_model(tmp_path)
    save_file({**{n: t for n, t in tensors.items() if n != head}, other: tensors[head]}, tmp_path / "model.safetensors")
    assert logits_of(tmp_path).isfinite().all()


def test_a_missing_bias_and_an_unexpected_one(copy: Path) -> None:
    configure(copy, attention_bias=True)
    with pytest.raises(ModelError, match=r"missing \(12\)") as caught:
        open_model(copy)
    assert "model.layers.1.self_attn.o_proj.bias" in str(caught.value)
    configure(copy, attention_bias=False)
    edit(copy, model__layers__0__self_attn__q_proj__bias=torch.zeros(60))
    with pytest.raises(ModelError, match=r"unused \(1\)"):
        open_model(copy)


def test_harmless_leftovers_are_named_by_rules(llama: Path, copy: Path) -> None:
    edit(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(6), model__rotary_emb__inv_freq=torch.zeros(6))
    assert torch.equal(logits_of(copy), logits_of(llama))


@pytest.mark.parametrize("kernels", ["reference", "default"])
def test_tied_weights_are_held_once(tmp_path: Path, kernels: str) -> None:
    make(Case("tied", "Llama", {**EVEN, **TIED}), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = logits_of(tmp_path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, tmp_path / "model.safetensors")
    decoder = open_model(tmp_path, kernels=reference() if kernels == "reference" else None)
    assert torch.equal(Runner(decoder).prompt(0, PROMPT_IDS), plain)
    assert decoder.logits.weight is decoder.embedding.weight
    tables = 2 * 256 * 8 * 4
    parameters = decoder.spec.nbytes("float32")
    assert parameters + tables <= decoder.weight_bytes <= 1.1 * parameters + tables


@pytest.mark.parametrize("name", ["gpt2-plain", "neox-serial"])
def test_names_without_the_prefix_and_with_buffers(name: str, tmp_path: Path) -> None:
    make(next(case for case in CASES if case.name == name), tmp_path)
    plain = logits_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {key.removeprefix("transformer.").removeprefix("gpt_neox."): tensor for key, tensor in tensors.items()}
    assert set(bare) != set(tensors)
    mask = {"gpt2-plain": "h.0.attn.bias", "neox-serial": "layers.0.attention.bias"}[name]
    save_file({**bare, mask: torch.ones(1, 1, 4, 4, dtype=torch.uint8), mask.replace("bias", "masked_bias"): torch.ones(1)},
              tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path), plain)


def test_the_text_part_of_a_model_with_vision(tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(**{**EVEN, **TIED, "sliding_window": 16, "query_pre_attn_scalar": 16})
    vision = transformers.SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                                             image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=198)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    prompt = [token % 190 for token in PROMPT_IDS]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), token_type_ids=torch.zeros(1, len(prompt), dtype=torch.int64)).logits[0]
    torch.testing.assert_close(Runner(open_model(tmp_path)).prompt(0, prompt), expected, atol=1e-4, rtol=0)
    renamed = {"model.language_model.": "language_model.model.", "language_model.model.": "model.language_model."}
    tensors = load_file(tmp_path / "model.safetensors")
    (old,) = (prefix for prefix in renamed if any(name.startswith(prefix) for name in tensors))
    save_file({name.replace(old, renamed[old]): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(Runner(open_model(tmp_path)).prompt(0, prompt), expected, atol=1e-4, rtol=0)


def _cut(data: bytes) -> bytes:
    return data[:-1000]


def _grown(data: bytes) -> bytes:
    return data + bytes(16)


def _header(data: bytes, change: Any) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = change(data[8:8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length:]


@pytest.mark.parametrize(("damage", "word"), [
    (_cut, "cut short"),
    (_grown, "the file has"),
    (lambda data: data[:5], "5 bytes"),
    (lambda data: b"", "0 bytes"),
    (lambda data: (1 << 60).to_bytes(8, "little") + data[8:], "header would be 1152921504606846976 bytes"),
    (lambda data: _header(data, lambda h: b"\xff" + h[1:]), "not JSON"),
    (lambda data: _header(data, lambda h: b"[1, 2]"), "not an object"),
    (lambda data: _header(data, lambda h: h.replace(b'"F32"', b'"F99"', 1)), "entry for tensor"),
    (lambda data: _header(data, lambda h: h.replace(b"[199,60]", b"[198,60]", 1)), "entry for tensor"),
    (lambda data: _header(data, lambda h: h.replace(b"[199,60]", b"[-199,-60]", 1)), "entry for tensor"),
    (lambda data: b"<html>502 Bad Gateway</html>", "header"),
])
def test_a_damaged_file_is_named_and_the_damage_said(copy: Path, damage: Any, word: str) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=word) as caught:
        open_model(copy)
    assert str(path) in str(caught.value)


def test_overlapping_tensors_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"

    def overlap(text: bytes) -> bytes:
        header = json.loads(text)
        names = [name for name in header if name.endswith("q_proj.weight")]
        header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
        return json.dumps(header).encode()

    path.write_bytes(_header(path.read_bytes(), overlap))
    with pytest.raises(ModelError, match="begins at byte"):
        open_model(copy)


def test_a_wrong_index(copy: Path) -> None:
    places = shard(copy)
    index = copy / "model.safetensors.index.json"

    def refused(weight_map: Any) -> str:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError) as caught:
            open_model(copy)
        return str(caught.value)

    name, file = next(iter(places.items()))
    assert "lack" in refused({**places, "ghost": file})
    assert "lack" in refused({**places, name: next(other for other in places.values() if other != file)})
    assert "not in the folder" in refused({**places, name: "model-00009-of-00009.safetensors"})
    assert "own folder" in refused({**places, name: "../elsewhere.safetensors"})
    assert "weight_map" in refused([])
    index.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        open_model(copy)
    index.unlink()
    with pytest.raises(ModelError, match="3 safetensors files but no"):
        open_model(copy)


def test_weights_in_other_formats_are_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*safetensors only"):
        open_model(copy)
    (copy / "pytorch_model.bin").rename(copy / "model-q4.gguf")
    with pytest.raises(ModelError, match=r"model-q4\.gguf"):
        open_model(copy)
    (copy / "model-q4.gguf").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        open_model(copy)


def test_progress_counts_every_byte(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(llama, read_config(llama), dtype=torch.float32, device=CPU, kernels=reference(), max_model_len=64,
         progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == describe(read_config(llama)).size * 4
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_learned_positions_bound_the_length(tmp_path: Path) -> None:
    make(next(case for case in CASES if case.name == "gpt2-inner"), tmp_path)
    with pytest.raises(ModelError, match="161 is beyond the 160 positions"):
        open_model(tmp_path, max_model_len=161)


def test_the_type_of_a_checkpoint(copy: Path) -> None:
    assert dtype_of(copy, {"torch_dtype": "bfloat16"}) == "bfloat16"
    assert dtype_of(copy, {}) == "float32"
    assert dtype_of(copy.parent, {}) == "bfloat16"
    with pytest.raises(ModelError, match="float8"):
        dtype_of(copy, {"dtype": "float8_e4m3fn"})


@pytest.mark.parametrize("name", ["llama-plain", "gemma2-plain", "gpt2-plain", "neox-parallel"])
def test_dummy_weights_are_sane_and_a_function_of_the_seed(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    config = {**getattr(transformers, f"{case.kind}Config")(**case.config).to_dict(), "architectures": [case.model]}

    def logits(seed: int) -> torch.Tensor:
        decoder = load(None, config, dtype=torch.float32, device=CPU, kernels=reference(), load_format="dummy",
                       max_model_len=256, seed=seed)
        return Runner(decoder).prompt(0, PROMPT_IDS)

    first = logits(1)
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))
    assert 0.05 < first.std() < 50
    assert len(first.argmax(-1).unique()) > 10


def test_dummy_weights_are_made_quickly() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2,
              "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
    start = time.perf_counter()
    decoder: Decoder = load(None, config, dtype=torch.bfloat16, device=CPU, kernels=reference(), load_format="dummy",
                            max_model_len=64)
    per_gigabyte = (time.perf_counter() - start) / decoder.weight_bytes * 1e9
    assert per_gigabyte < 20, "8B parameters would take more than five minutes"


MEMORY = """
import sys, torch
from pathlib import Path
from penstock.checkpoint import read_config
from penstock.models import load
from penstock.ops.registry import bind
from penstock.platform.facts import detect
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
kernels = bind(detect("cpu"), torch.bfloat16, {"*": "reference"})
torch.randn(100, 100) @ torch.randn(100, 100)
before = peak()
folder = Path(sys.argv[1])
decoder = load(folder, read_config(folder), dtype=torch.bfloat16, device=torch.device("cpu"), kernels=kernels, max_model_len=64)
print((peak() - before) / decoder.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_peaks_at_the_weights_and_one_matrix(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6,
              "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 16000, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (16000, 1024), "lm_head": (16000, 1024), "model.norm": (1024,)}
    for i in range(6):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj": (1024, 1024) for n in "qkvo"} | {f"{at}.mlp.down_proj": (1024, 2816)}
        shapes |= {f"{at}.mlp.{n}_proj": (2816, 1024) for n in ("gate", "up")}
        shapes |= {f"{at}.{n}_layernorm": (1024,) for n in ("input", "post_attention")}
    save_file({f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
              tmp_path / "model.safetensors")
    shard(tmp_path, 4)
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.15
