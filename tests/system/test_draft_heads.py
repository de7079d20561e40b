"""Draft heads: EAGLE's, published in several layouts, and layers for multi-token prediction. Answers stay the target's."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.canary import suite
from penstock.cli.eval import room
from penstock.core.errors import PenstockError
from penstock.core.request import Sequence
from penstock.scheduler.drafting import DraftPolicy
from penstock.worker.graphs import Runner
from tests.system.random_models import saved_head
from tests.system.served import served

ASSETS = Path(__file__).parents[1] / "assets"
CANARY = ASSETS.parents[1] / "src/penstock/canary/model"
EAGLE, LATENT = ASSETS / "canary-eagle", ASSETS / "canary-mla"
FIXED = {"draft_policy": "fixed", "threads": 1, "max_model_len": 2048}
ITEMS = [item for skill in suite.SKILLS if "4k" not in skill for item in suite.prompts(skill, 4)
         if not item.tools and not item.thinking]


def asked(**options: Any) -> tuple[list[list[int]], float, int]:
    """(answers, tokens for each step of the target, drafts)."""
    llm = LLM(**{**FIXED, **options})
    try:
        params = [SamplingParams(temperature=0, max_tokens=min(60, room(item))) for item in ITEMS]
        found = [one.outputs[0].token_ids for one in llm.chat([item.messages for item in ITEMS], params, use_tqdm=False)]
        drafts = llm.engine.stats().drafts
    finally:
        llm.close()
    return [list(ids) for ids in found], sum(map(len, found)) / (len(found) + drafts), drafts


@pytest.mark.parametrize(("target", "options", "card"), [
    ("canary", {"speculative_model": str(EAGLE), "num_speculative_tokens": 4}, EAGLE),
    (str(LATENT), {"speculate": "auto", "num_speculative_tokens": 1}, LATENT),
], ids=["eagle3", "mtp"])
def test_heads_are_right_as_often_as_their_cards_say(target: str, options: dict[str, Any], card: Path) -> None:
    """The cards' figures are of 300 prompts (3.21 and 1.81 tokens a step); these are fewer."""
    recorded = json.loads((card / "scores.json").read_text())["acceptance"]["tokens_a_step"]
    plain, _, _ = asked(model=target)
    drafted, tokens, drafts = asked(model=target, **options)
    assert drafted == plain and drafts > 100
    assert recorded * 0.93 < tokens < recorded * 1.07, tokens


def test_a_head_as_speculators_publish_it_drafts_the_same(tmp_path: Path) -> None:
    given = json.loads((EAGLE / "config.json").read_text())
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": False,
              **{name: given[name] for name in names}, "speculators_config": {"algorithm": "eagle3"},
              "transformer_layer_config": {name: value for name, value in given.items() if "eagle" not in name}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in
               load_file(EAGLE / "model.safetensors").items()}, tmp_path / "model.safetensors")
    options = {"model": "canary", "num_speculative_tokens": 3}
    one, other = (asked(speculative_model=str(folder), **options) for folder in (EAGLE, tmp_path))
    assert one == other


def _with_mtp(folder: Path, architecture: str, layer: str, extra: dict[str, tuple[int, ...]], **config: Any) -> Path:
    """A folder's model under another architecture, with a random layer for multi-token prediction like its first."""
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    first = "model.layers.0."
    for name in [name for name in tensors if name.startswith(first)]:
        shape = tensors[name].shape
        tensors[f"{layer}.{name.removeprefix(first)}"] = torch.randn(shape, generator=draw) * 0.2
    tensors |= {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in extra.items()}
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "architectures": [architecture], **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


W = 32
MIMO = {"model.mtp_layers.0.token_layernorm.weight": (W,), "model.mtp_layers.0.hidden_layernorm.weight": (W,),
        "model.mtp_layers.0.input_proj.weight": (W, 2 * W), "model.mtp_layers.0.final_layernorm.weight": (W,)}
ERNIE = {"model.mtp_emb_norm.0.weight": (W,), "model.mtp_hidden_norm.0.weight": (W,),
         "model.mtp_linear_proj.0.weight": (W, 2 * W)}
GLM = {"model.layers.2.enorm.weight": (W,), "model.layers.2.hnorm.weight": (W,), "model.layers.2.eh_proj.weight": (W, 2 * W),
       "model.layers.2.shared_head.norm.weight": (W,), "model.layers.2.embed_tokens.weight": (160, W),
       "model.layers.2.shared_head.head.weight": (160, W)}
NEXT = {"mtp.fc.weight": (W, 2 * W), "mtp.pre_fc_norm_embedding.weight": (W,), "mtp.pre_fc_norm_hidden.weight": (W,),
        "mtp.norm.weight": (W,)}
SMALL = {"hidden_size": W, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8, "vocab_size": 160, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
MIXTURE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
           "first_k_dense_replace": 0, "n_shared_experts": 1}


DELTA = {"layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RECURRENT = {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
             "shared_expert_intermediate_size": 24}


@pytest.mark.parametrize(("kind", "layer", "extra"), [
    ("MiMo", "model.mtp_layers.0", MIMO), ("Ernie4_5_Moe", "model.mtp_block.0", ERNIE), ("Glm4Moe", "model.layers.2", GLM),
    ("Qwen3Next", "mtp.layers.0", NEXT), ("Qwen3_5", "mtp.layers.0", NEXT)],
    ids=["mimo", "ernie", "glm", "qwen3-next", "qwen3.5"])
def test_layouts_of_multi_token_prediction(kind: str, layer: str, extra: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    import transformers

    name, more = {"MiMo": ("Qwen2", {}), "Ernie4_5_Moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2,
                  "moe_intermediate_size": 24}), "Glm4Moe": ("Glm4Moe", MIXTURE), "Qwen3Next": ("Qwen3Next", RECURRENT),
                  "Qwen3_5": ("Qwen3_5", DELTA)}[kind]
    torch.manual_seed(0)
    config = getattr(transformers, "Qwen3_5TextConfig" if name == "Qwen3_5" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**SMALL, **more))
    model.save_pretrained(tmp_path)
    _with_mtp(tmp_path, f"{kind}ForCausalLM", layer, extra, num_nextn_predict_layers=1)
    found = []
    options: dict[str, Any]
    for options in ({}, {"speculate": "auto", "draft_policy": "fixed", "num_speculative_tokens": 2}):
        llm = LLM(str(tmp_path), threads=1, max_model_len=128, skip_tokenizer_init=True, dtype="float32", **options)
        prompts = [{"prompt_token_ids": [1, *range(3, 3 + count)]} for count in (1, 9, 40)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        found.append([list(one.outputs[0].token_ids) for one in outputs])
        drafts = llm.engine.stats().drafts
        llm.close()
    assert found[0] == found[1] and drafts > 20


def test_a_random_head_of_the_first_version_changes_nothing(tmp_path: Path) -> None:
    head = saved_head(CANARY, tmp_path, 1)
    drafted, tokens, drafts = asked(model="canary", speculative_model=str(head), num_speculative_tokens=3)
    assert drafted == asked(model="canary")[0] and drafts > 200 and tokens < 1.5


@pytest.mark.parametrize("names", [("{0}.0.linear.weight", "{0}.0.linear.bias", "{0}.1.weight"),
                                   ("blocks.{0}.layers.0.weight", "blocks.{0}.layers.0.bias", "lm_heads.{0}.weight")],
                         ids=["medusa", "vllm"])
def test_medusa_heads_change_nothing_and_read_the_state_of_the_last_token(names: tuple[str, str, str], tmp_path: Path) -> None:
    """Layers that add nothing, and logits in which "7" and the space have changed places in the first head alone."""
    embedding = load_file(CANARY / "model.safetensors")["model.embed_tokens.weight"].float()
    width = embedding.shape[1]
    tensors = {name.format(head): torch.zeros(shape) for head in range(2) for name, shape in zip(
        names, ((width, width), (width,), (0,)), strict=True)}
    changed = embedding.clone()
    changed[[25, 223]] = embedding[[223, 25]]
    tensors |= {names[2].format(0): changed, names[2].format(1): embedding}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    prompt = [{"role": "user", "content": "Repeat after me: 7 7 7 7 7 7 7 7 7 7 7 7"}]
    params = SamplingParams(temperature=0, max_tokens=60)
    said, accepted = [], 0
    for options in ({}, {"speculative_model": str(tmp_path), "num_speculative_tokens": 2}):
        llm = LLM("canary", dtype="float32", **FIXED, **options)
        said.append(list(llm.chat(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
        accepted = llm.engine.stats().accepted_tokens
        llm.close()
    assert said[0] == said[1] and said[0][:6] == [25, 223] * 3 and accepted >= 10
    with pytest.raises(PenstockError, match="has 2 Medusa heads"):
        LLM("canary", speculative_model=str(tmp_path), num_speculative_tokens=3, **FIXED)


def _changed(out: Path, **config: Any) -> str:
    """canary-eagle with another config."""
    shutil.copytree(EAGLE, out)
    (out / "config.json").write_text(json.dumps({**json.loads((EAGLE / "config.json").read_text()), **config}))
    return str(out)


def test_heads_that_do_not_fit_are_refused_before_loading(tmp_path: Path) -> None:
    canary = {"model": "canary", "max_model_len": 512, "threads": 1}
    other = saved_head(LATENT, tmp_path / "other", 3)
    for options, message in (
            ({"speculative_model": str(other)}, "drafts for a model of width 160; this one has 192"),
            ({"speculate": "mtp"}, "no layer for multi-token prediction"),
            ({"speculate": "eagle3", "speculative_model": str(ASSETS / "canary-draft")}, "is for draft_model"),
            ({"speculate": "draft_model", "speculative_model": str(EAGLE)}, "is for eagle3"),
            ({"speculative_model": _changed(tmp_path / "far", eagle_aux_hidden_state_layer_ids=[1, 99, 3])}, "layers 0 to 8"),
            ({"speculative_model": _changed(tmp_path / "kind", speculators_model_type="dflash")}, "'dflash'; possible"),
            ({"speculative_model": _changed(tmp_path / "fc", norm_before_fc=True)}, "norm_before_fc"),
    ):
        with pytest.raises(PenstockError, match=message):
            LLM(**canary, **options)


def test_usage_and_metrics_tell_what_was_drafted() -> None:
    with served("canary", "--max-model-len", "1024", "--speculative-model", str(EAGLE), "--draft-policy", "fixed",
                "--num-speculative-tokens", "3") as server:
        body = {"messages": [{"role": "user", "content": "Repeat after me: red blue 7 green"}], "temperature": 0,
                "include_ledger": True}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        usage, ledger = answer["usage"], answer["ledger"]
        metrics = httpx.get(f"{server.url}/metrics").text
    assert 0 < ledger["draft"] < ledger["total"] and ledger["decode"] > 0
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert accepted > 2 and 1 < details["acceptance_length"] <= 4
    told = re.findall(r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} (\S+)", metrics, re.MULTILINE)
    found = {name: float(value) for name, value in told}
    assert found["accepted_tokens"] == accepted and found["draft_tokens"] == accepted + rejected
    assert details["acceptance_length"] == round(1 + accepted / found["drafts"], 3)


class Pausing(DraftPolicy):
    """Drafts four tokens, but rests from one step on up to another."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(4)
        self._first, self._last, self._step = first, last, 0
        self.drafted = self.accepted = 0

    @property
    def reads_prompts(self) -> bool:
        return False

    def begin(self, rows: int) -> int:
        self._step += 1
        return not self._first <= self._step < self._last

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        if self._step > 42:
            self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted


@pytest.mark.parametrize(("draft", "least"), [
    ("canary-eagle", 0.5), pytest.param("canary-draft", 0.95, marks=pytest.mark.exhaustive)])
def test_a_drafter_that_has_rested_drafts_again(draft: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it rests, none of its matrices is read. Then a draft model reads what it has missed; a head lacks those positions,
    the whole prompt in the last case, and is right less often."""
    followed = []
    monkeypatch.setattr(Runner, "forward", lambda self, *given, _forward=Runner.forward, **more: (
        followed.append(self.model), _forward(self, *given, **more))[1])
    prompts = [[{"role": "user", "content": f"Tell me a story about a {animal}."}] for animal in ("fox", "cat", "bear", "hen")]
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    shares, answers = [], []
    with closing(LLM(model="canary", **FIXED, speculative_model=str(ASSETS / draft), num_speculative_tokens=4)) as llm:
        for first, last in ((0, 0), (8, 38), (0, 38)):
            llm.reset_prefix_cache()
            llm.engine.scheduler.drafts.policy = policy = Pausing(first, last)
            followed.clear()
            answers.append([one.outputs[0].token_ids for one in llm.chat(prompts, params, use_tqdm=False)])
            target = llm.engine.rank.worker.model
            resting = sum(model is target for model in followed)
            shares.append(policy.accepted / policy.drafted)
            print(draft, first, last, shares[-1], policy.drafted, resting, len(followed))
    assert answers[1] == answers[0] == answers[2]
    assert shares[1] > least * shares[0] and shares[2] > least * shares[0]
