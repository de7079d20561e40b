"""`penstock quantize`: what it writes is read back as it was, by this engine and in the layout of compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock import canary
from penstock.cli.main import main
from penstock.models import configured, describe
from penstock.models.quantized import projections
from penstock.text import Tokenizer
from penstock.worker.calibration import Moments
from tests.models.test_at_load import plain  # noqa: F401 (a fixture)
from tests.models.test_dialects import greedy, matrices
from tests.models.test_rounding import loss

SCHEMES = ("fp8", "fp8_block", "fp8_weights", "int8", "int8_weights", "int4", "int4_zeros", "mxfp4", "mxfp8", "nvfp4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_is_what_is_read(scheme: str, plain: Path, tmp_path: Path) -> None:  # noqa: F811
    from penstock.quant.dialects.at_load import SCHEMES as KNOWN
    from penstock.quant.dialects.compressed_tensors import writable
    assert main(["quantize", str(plain), str(tmp_path / "out"), "--scheme", scheme]) == 0
    given = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert given["quant_method"] == "compressed-tensors" and given["ignore"] == ["lm_head"]
    tensors = load_file(plain / "model.safetensors")
    found = matrices(tmp_path / "out", torch.float32)
    assert len(found) == 14
    for name, matrix in found.items():
        known = KNOWN[scheme](matrix.shape[1])
        assert known is not None
        stored = writable(known, "float32")
        assert torch.equal(matrix, stored.decode(stored.encode(tensors[name]), torch.float32)), name
    if not scheme.startswith("int4"):
        # At load groups have float16 scales, in a folder those of the model's dtype.
        assert greedy(tmp_path / "out", [5, 9, 2, 80], 12) == greedy(plain, [5, 9, 2, 80], 12, quantization=scheme)


def test_loss_and_rules_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The bird sat on the wall. It sang a song, and then it flew away over the trees.\n" * 20)
    out = tmp_path / "out"
    assert main(["quantize", str(canary.model_folder()), str(out), "--scheme", "int8", "--rules", "last=plain", "--rules",
                 "*.down_proj=fp8", "--text", str(text), "--window", "64", "--skills", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "bytes of tensors" in said and "perplexity: " in said and "skills: " in said
    groups = configured(out)["quantization_config"]["config_groups"].values()
    assert sorted(len(group["targets"]) for group in groups) == [7, 42]
    assert (out / "tokenizer.json").is_file()


def test_rounding_by_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPTQ with canary: other codes with the same scales, and products of the text's own inputs change less."""
    from penstock.quant.dialects.at_load import SCHEMES as KNOWN
    from penstock.quant.dialects.compressed_tensors import writable

    text, model = tmp_path / "text", canary.model_folder()
    text.write_text("The bird sat on the wall. It sang a song, and then it flew away over the trees.\n" * 30)
    command = ["quantize", str(model), "--scheme", "int4", "--rules", "first=plain", "--device", "cpu"]
    assert main([*command[:2], str(tmp_path / "nearest"), *command[2:]]) == 0
    assert main([*command[:2], str(tmp_path / "gptq"), *command[2:], "--calibrate", str(text), "--samples", "2", "--window",
                 "128"]) == 0
    nearest, found = (load_file(tmp_path / name / "model.safetensors") for name in ("nearest", "gptq"))
    assert nearest.keys() == found.keys()
    assert all(torch.equal(found[name], nearest[name]) for name in found if not name.endswith("weight_packed"))
    name = "model.layers.1.mlp.down_proj"
    assert not torch.equal(found[f"{name}.weight_packed"], nearest[f"{name}.weight_packed"])
    ids = Tokenizer.load(model).encode(text.read_text())
    moments = Moments(model, configured(model), "float32", "cpu", [ids[:128], ids[128:256]]).of("blocks.1.mlp.down")
    assert moments is not None
    matrix = load_file(model / "model.safetensors")[f"{name}.weight"].float()
    scheme = KNOWN["int4"](matrix.shape[1])
    assert scheme is not None
    scheme = writable(scheme, "bfloat16")
    exact = matrices(tmp_path / "gptq", torch.float32)[f"{name}.weight"] - matrix
    plain_loss = loss(scheme, matrix, scheme.encode(matrix), moments)
    assert float((exact @ moments * exact).sum() / (matrix @ moments * matrix).sum()) < 0.7 * plain_loss
    assert main([*command[:2], str(tmp_path / "no"), "--scheme", "fp8", "--calibrate", str(text)]) != 0
    assert "--calibrate rounds integers, and fp8 has none" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "scheme"), [("awq", "int4"), ("smoothquant", "int8")])
def test_scales_are_folded_into_what_comes_before(method: str, scheme: str, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A norm's weight times a matrix stays what it was, up to rounding; and products with the text's inputs change less."""
    text, model = tmp_path / "text", canary.model_folder()
    text.write_text("The bird sat on the wall. It sang a song, and then it flew away over the trees.\n" * 30)
    command = ["quantize", str(model), "--scheme", scheme, "--device", "cpu"]
    assert main([*command[:2], str(tmp_path / "nearest"), *command[2:]]) == 0
    assert main([*command[:2], str(tmp_path / "out"), *command[2:], "--calibrate", str(text), "--samples", "2",
                 "--window", "128", "--method", method]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    found, rounded = (matrices(tmp_path / name, torch.float32) for name in ("out", "nearest"))
    for norm, name in (("input_layernorm", "self_attn.k_proj"), ("post_attention_layernorm", "mlp.gate_proj")):
        norm, name = f"model.layers.2.{norm}.weight", f"model.layers.2.{name}.weight"
        assert not torch.equal(before[norm], after[norm])
        wanted, made = before[name].float() * before[norm].float(), found[name] * after[norm].float()
        assert (made - wanted).norm() < 1.2 * (rounded[name] * before[norm].float() - wanted).norm() + 0.01 * wanted.norm()
    if method == "awq":
        ids = Tokenizer.load(model).encode(text.read_text())
        moments = Moments(model, configured(model), "float32", "cpu", [ids[:128], ids[128:256]]).of("blocks.2.mlp.gate_up")
        assert moments is not None
        errors = [made - before[name].float()
                  for made in (found[name] * (after[norm].float() / before[norm].float()), rounded[name])]
        assert float((errors[0] @ moments * errors[0]).sum()) < float((errors[1] @ moments * errors[1]).sum())
    assert main([*command[:2], str(tmp_path / "no"), *command[2:], "--method", method]) != 0
    assert "needs a text to calibrate on" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused(plain: Path, tmp_path: Path,  # noqa: F811
                                           capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (((str(plain), "--scheme", "q8_0"), "compressed-tensors has no q8_0; possible are fp8"),
                        ((str(plain), "--scheme", "int5"), "'int5' is not known"),
                        ((str(plain), "--scheme", "fp8", "--rules", "first"), "is not of the form PATTERN=SCHEME"),
                        ((str(plain), "--scheme", "fp8", "--text", "/nowhere"), "there is no file /nowhere")):
        model, *rest = words
        assert main(["quantize", model, str(tmp_path / "out"), *rest]) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["quantize", str(plain), str(tmp_path / "full"), "--scheme", "fp8"]) == 1
    assert "is not empty; name a new folder" in capsys.readouterr().err


WRONG = [
    (["{tmp}/file"], "file is not empty; name a new folder or file"),
    (["{tmp}/file/out"], "cannot be written"), (["{tmp}/file/out.gguf"], "cannot be written"),
    (["{tmp}/out", "--window", "0"], "--window must be at least 3, got 0"),
    (["{tmp}/out", "--samples", "-1"], "--samples must be at least 1, got -1"),
    (["{tmp}/out", "--skills", "-1"], "--skills must be at least 0, got -1"),
    (["{tmp}/out", "--text", "{tmp}/bytes"], "that is text in UTF-8"),
    (["{tmp}/out", "--calibrate", "{tmp}/bytes"], "that is text in UTF-8"),
    (["{tmp}/out", "--text", "{tmp}/empty"], "too short to be scored"),
    (["{tmp}/out", "--text", "{tmp}/file", "--window", "9999"], "handles 2 to"),
    (["{tmp}/out.gguf", "--text", "{tmp}/empty"], "too short to be scored"),
    (["{tmp}/out", "--rules", "*=plain"], "or rules leave all plain"),
    (["{tmp}/out", "--rules", "lm_haed=plain"], "'lm_haed' fits no matrix of this model; possible are"),
    (["{tmp}/out.gguf", "--rules", "lm_haed=q8_0"], "'lm_haed' fits no matrix of this model; possible are")]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda one: one if isinstance(one, str) else "")
def test_wrong_words_leave_nothing_behind(words: list[str], said: str, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("One two three.")
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(bytes(range(128, 200)))
    before = sorted(tmp_path.iterdir())
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    scheme = "q8_0" if words[0].endswith(".gguf") else "int8"
    assert main(["quantize", "canary", *words, "--scheme", scheme, "--device", "cpu"]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: ")]
    assert len(told) == 1 and said in told[0]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_a_disk_that_is_full_leaves_nothing_behind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.models import gguf_out, quantized

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantized.compressed_tensors, "config", full)
    monkeypatch.setattr(gguf_out, "_bytes", full)
    scheme = "q8_0" if name.endswith(".gguf") else "int8"
    assert main(["quantize", "canary", str(tmp_path / "new" / name), "--scheme", scheme]) == 1
    assert "cannot be written: [Errno 28] No space left on device; name another place" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())


def test_every_module_of_a_checkpoint_has_its_projection() -> None:
    """Calibration asks for the inputs of matrices by the files' names: joined ones (Phi 3), shared experts and low ranks."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    phi = {**sizes, "architectures": ["Phi3ForCausalLM"]}
    found = projections(describe(phi), phi)
    assert found["model.layers.1.mlp.gate_up_proj"] == "blocks.1.mlp.gate_up"
    assert found["model.layers.1.self_attn.qkv_proj"] == "blocks.1.attention.qkv"
    deep = {**sizes, "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "moe_intermediate_size": 128,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
            "n_shared_experts": 1}
    found = projections(describe(deep), deep)
    assert found["model.layers.1.mlp.shared_experts.up_proj"] == "blocks.1.mlp.shared.gate_up"
    assert found["model.layers.1.self_attn.q_b_proj"] == "blocks.1.attention.q_b"
