"""The fallback to transformers' modules: families that Penstock knows, forced through it, say the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.checkpoint import read_config
from penstock.core.errors import ConfigError, ModelError
from penstock.layers.foreign import ForeignSpec
from penstock.models import configured, describe, quantized
from tests.models.families import CASES, PROMPT, make, randomise
from tests.models.foreign import beside_towers
from tests.models.harness import Runner, open_model
from tests.models.test_families import chosen


def forget(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Makes a family unknown."""
    registry = importlib.import_module("penstock.models.registry")
    known = registry.registry()
    left = {name: family for name, family in known.architectures.items() if name != architecture}
    monkeypatch.setattr(registry, "registry", lambda: registry.Registry(left, known.model_types))


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3-plain", "mistral-window", "phi-normed", "gemma2-plain",
                                  "gpt-oss-plain"])
def test_a_family_through_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == name)
    make(case, tmp_path)
    prompt = torch.randint(3, 199, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    logits, ids, _ = Runner(open_model(tmp_path)).greedy(prompt, 20, row=1)
    forget(monkeypatch, case.model)
    if name.startswith("gpt-oss"):  # its experts are stored in another form than that of its modules
        with pytest.raises(ModelError, match="mixture"):
            describe(read_config(tmp_path))
        return
    (block,) = describe(read_config(tmp_path)).blocks
    assert isinstance(block.mixers[0], ForeignSpec)
    runner = Runner(open_model(tmp_path))
    found, said, _ = runner.greedy(prompt, 20, row=1)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)
    assert said == ids
    together = runner.step([(1, [7]), (0, prompt[:20])])
    torch.testing.assert_close(together[1:], logits[:20], atol=1e-4, rtol=0)


def test_quantized_matrices_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized folder answers as through its family; to quantize at load would change answers and save nothing."""
    make(next(case for case in CASES if case.name == "llama-plain"), tmp_path / "plain")
    quantized.write(tmp_path / "plain", tmp_path / "int8", "int8_weights", {}, "float32")
    prompt = list(range(3, 40))
    expected = Runner(open_model(tmp_path / "int8")).prompt(0, prompt)
    off = Runner(open_model(tmp_path / "plain")).prompt(0, prompt) - expected
    forget(monkeypatch, "LlamaForCausalLM")
    decoder = open_model(tmp_path / "int8")
    assert isinstance(decoder.spec.blocks[0].mixers[0], ForeignSpec)
    torch.testing.assert_close(Runner(decoder).prompt(0, prompt), expected, atol=1e-4, rtol=0)
    assert off.abs().max() > 1e-2
    with pytest.raises(ConfigError, match=r"no matrix of this model is stored as int8_weights.*transformers' modules run it"):
        describe(configured(tmp_path / "plain", "int8_weights"))


SMALL = {"vocab_size": 199, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "sliding_window": 20, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0}


def test_a_family_that_only_transformers_knows(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.VaultGemmaConfig(**SMALL, intermediate_size=64, query_pre_attn_scalar=16)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.VaultGemmaForCausalLM(config).float().eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 199, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    weights, values = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    published = beside_towers(weights, values, architecture="VaultGemmaForConditionalGeneration", model_type="vaultgemma")
    for stored in ((weights, values), published):
        save_file({name: tensor.contiguous() for name, tensor in stored[0].items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(stored[1]))
        logits, found, _ = Runner(open_model(tmp_path)).greedy(prompt, 10)
        expected, ids = chosen(model, prompt, found)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert len(found) == 10 and found == ids


def test_buffers_of_one_number(tmp_path: Path) -> None:
    """Apertus 1.5 stores some of its activation's numbers without a dimension."""
    transformers = pytest.importorskip("transformers")
    model = transformers.Apertus1p5TextForCausalLM(transformers.Apertus1p5TextConfig(**SMALL)).float().eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    prompt = list(range(3, 40))
    logits = Runner(open_model(tmp_path)).prompt(0, prompt)
    torch.testing.assert_close(logits, chosen(model, prompt, [3])[0], atol=1e-4, rtol=0)


def test_lengths_by_another_name(tmp_path: Path) -> None:
    """CodeGen's config says n_positions."""
    transformers = pytest.importorskip("transformers")
    model = transformers.CodeGenForCausalLM(transformers.CodeGenConfig(
        vocab_size=199, n_positions=128, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, bos_token_id=1, eos_token_id=2))
    randomise(model.float().eval())
    model.save_pretrained(tmp_path)
    prompt = list(range(3, 40))
    logits = Runner(open_model(tmp_path)).prompt(0, prompt)
    torch.testing.assert_close(logits, chosen(model, prompt, [3])[0], atol=1e-4, rtol=0)


def test_a_mask_that_is_given_by_its_name() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DoryConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                                     vocab_size=199, intermediate_size=88, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with pytest.raises(ModelError, match=r"DoryForCausalLM.* 4 of its 2 layers use the attention"):
        describe({**json.loads(config.to_json_string(use_diff=False)), "architectures": ["DoryForCausalLM"]})


def test_layers_with_states_of_their_own_are_refused(tmp_path: Path) -> None:
    """Falcon-H1 has attention in every layer, so that all calls are seen, and a recurrence beside each."""
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconH1Config(
        vocab_size=199, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, mamba_d_ssm=32, mamba_n_heads=4,
        mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
    torch.manual_seed(0)
    model = transformers.FalconH1ForCausalLM(config).float().eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"do not run here as they are.*time_step_limit"):
        open_model(tmp_path)  # as transformers itself wrote and cannot read it
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "time_step_limit": [0.0, 9.0]}))
    with pytest.raises(ModelError, match="FalconH1ForCausalLM keep other states than keys and values"):
        open_model(tmp_path)


def test_through_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Several at once, in chunks, with pages found again; it is said at start."""
    make(next(case for case in CASES if case.name == "qwen3-plain"), tmp_path)
    prompts = [torch.randint(3, 199, (50 - 9 * i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
    asked = [{"prompt_token_ids": prompt} for prompt in (*prompts, prompts[0])]
    params, options = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True), {
        "skip_tokenizer_init": True, "max_model_len": 128, "device": "cpu", "max_num_batched_tokens": 24, "max_num_seqs": 3,
        "block_size": 8, "dtype": "float32"}

    def answers() -> list[list[int]]:
        with LLM(str(tmp_path), **options) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    own = answers()
    forget(monkeypatch, "Qwen3ForCausalLM")
    with caplog.at_level("WARNING"):
        assert answers() == own
    assert "transformers' own modules" in caplog.text


def test_what_cannot_be_driven_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(next(case for case in CASES if case.name == "granite-plain"), tmp_path)
    forget(monkeypatch, "GraniteForCausalLM")
    with pytest.raises(ModelError, match="GraniteForCausalLM changes its logits"):
        open_model(tmp_path)
    with pytest.raises(ModelError, match="cannot be divided"):
        describe(read_config(tmp_path)).share(2)
    for name, why in (("bloom-plain", "0 of its 3 layers"), ("llama-dynamic", "depends on the longest")):
        case = next(case for case in CASES if case.name == name)
        make(case, tmp_path / name)
        forget(monkeypatch, case.model)
        with pytest.raises(ModelError, match=why):
            describe(read_config(tmp_path / name))
    with pytest.raises(ModelError, match="brings code of its own"):
        describe({"architectures": ["SomethingForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling.Something"}})
