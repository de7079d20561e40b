"""Encoders with random weights against transformers in float32: hidden states, embeddings, labels and scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers

from penstock import LLM
from penstock.core.errors import ModelError, RequestError
from penstock.ops import attention
from tests.system.served import served

SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
KINDS: dict[str, tuple[Any, Any]] = {
    "bert": (transformers.BertConfig, {"max_position_embeddings": 80}),
    "roberta": (transformers.RobertaConfig, {"max_position_embeddings": 82, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlmr": (transformers.XLMRobertaConfig, {"max_position_embeddings": 82, "pad_token_id": 1, "type_vocab_size": 1}),
    # Layers 1 and 2 see four tokens on either side.
    "modernbert": (transformers.ModernBertConfig, {"max_position_embeddings": 80, "local_attention": 8, "pad_token_id": 0,
                                                   "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}),
    "nomic": (transformers.NomicBertConfig, {"max_position_embeddings": 80}),
    "jina3": (transformers.JinaEmbeddingsV3Config, {"max_position_embeddings": 80, "pad_token_id": 1}),
}
PROMPTS = [[2, *range(10, 10 + length), 3] for length in (1, 5, 70, 17, 40, 2)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 96, "skip_tokenizer_init": True,
                           "enable_prefix_caching": True}


def saved(kind: str, make: Any, folder: Path, **more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config, own = KINDS[kind]
    model = make.from_config(config(**SHAPE, **own, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_transformers(kind: str, tmp_path: Path) -> None:
    """Prompts of several lengths in a step, longer together than one; the second round would find beginnings in a cache."""
    model = saved(kind, transformers.AutoModel, tmp_path)
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for _ in range(2):
            for found, states in zip(llm.encode(PROMPTS, False), wanted, strict=True):
                np.testing.assert_allclose(found.outputs.data, states, atol=2e-5)
        for pooling, reduce in (("mean", lambda one: one.mean(0)), ("cls", lambda one: one[0]), ("last", lambda one: one[-1])):
            for found, states in zip(llm.encode(PROMPTS, False, pooling=pooling), wanted, strict=True):
                np.testing.assert_allclose(found.outputs.data, reduce(states), atol=2e-5)
        assert llm.stats().cached_tokens == 0
        with pytest.raises(RequestError, match="cannot generate"):
            llm.generate([PROMPTS[0]], use_tqdm=False)
        longest = list(range(100, 180))
        with torch.inference_mode():
            states = model(torch.tensor([longest])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(llm.encode([longest], False)[0].outputs.data, states, atol=2e-5)
        with pytest.raises(RequestError, match=r"at most 80 .*--max-num-batched-tokens"):
            llm.encode([list(range(81))], False)


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in KINDS), ("modernbert", {
    "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "mlp_bias": True, "attention_bias": True})])
def test_labels_are_transformers(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = saved(kind, transformers.AutoModelForSequenceClassification, tmp_path, num_labels=3, **more)
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).logits[0].softmax(-1).numpy() for prompt in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for found, probabilities in zip(llm.classify(PROMPTS, False), wanted, strict=True):
            np.testing.assert_allclose(found.outputs.probs, probabilities, atol=2e-5)
        assert llm.info.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_a_masked_language_model_embeds_by_its_encoder(tmp_path: Path) -> None:
    model = saved("bert", transformers.AutoModelForMaskedLM, tmp_path)
    with torch.inference_mode():
        wanted = model.bert(torch.tensor([PROMPTS[2]])).last_hidden_state[0].numpy()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        np.testing.assert_allclose(llm.encode([PROMPTS[2]], False)[0].outputs.data, wanted, atol=2e-5)


WORDS = ["the", "sea", "is", "deep", "and", "cold", "dog", "cat", "ran", "home", "sun", "red", "a", "small", "river", "water"]
TEXTS = ["the sea is deep and cold", "a small dog ran home", "red sun", "the cat"]


def tokenizer(folder: Path, kind: str) -> transformers.PreTrainedTokenizerFast:
    """A small one of the model's kind, with its special tokens and its template of pairs."""
    if kind == "bert":
        cls, sep, pad, unk = "[CLS]", "[SEP]", "[PAD]", "[UNK]"
        names = [pad, unk, cls, sep, *WORDS, *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
        core = tokenizers.Tokenizer(tokenizers.models.WordPiece({name: i for i, name in enumerate(names)}, unk_token=unk))
        core.normalizer, core.decoder = tokenizers.normalizers.BertNormalizer(), tokenizers.decoders.WordPiece()
        core.pre_tokenizer, pair = tokenizers.pre_tokenizers.BertPreTokenizer(), f"{cls} $A {sep} $B:1 {sep}:1"
    else:
        cls, sep, pad, unk = "<s>", "</s>", "<pad>", "<unk>"
        names = [cls, pad, sep, unk, *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz▁"]
        core = tokenizers.Tokenizer(tokenizers.models.Unigram([(name, -float(i)) for i, name in enumerate(names)], unk_id=3))
        core.pre_tokenizer, core.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
        pair = f"{cls} $A {sep} {sep} $B {sep}"
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=pair, special_tokens=[(name, core.token_to_id(name)) for name in (cls, sep)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, cls_token=cls, sep_token=sep, pad_token=pad,
                                                unk_token=unk)
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("bound", ["max_model_len", "max_num_batched_tokens"])
def test_a_text_may_be_as_long_as_its_bound(bound: str, tmp_path: Path) -> None:
    """An encoder writes nothing, so no place of the context is kept for it."""
    model = saved("bert", transformers.AutoModel, tmp_path)
    with torch.inference_mode():
        wanted = model(torch.tensor([list(range(10, 50))])).last_hidden_state[0].numpy()
    with LLM(str(tmp_path), **{**OPTIONS, bound: 40}) as llm:
        assert llm.info.max_model_len == 40
        np.testing.assert_allclose(llm.encode([list(range(10, 50))], False)[0].outputs.data, wanted, atol=2e-5)
        for keep in (-1, 40):
            assert len(llm.encode([list(range(10, 90))], False, truncate_prompt_tokens=keep)[0].prompt_token_ids) == 40
        with pytest.raises(RequestError, match="has 41 tokens; at most 40"):
            llm.encode([list(range(10, 51))], False)


@pytest.mark.parametrize("kind", [pytest.param("bert", marks=pytest.mark.exhaustive), "xlmr"])
def test_embeddings_over_http_are_of_the_mean(kind: str, tmp_path: Path) -> None:
    """As sentence-transformers has it for a folder that does not say."""
    model, words = saved(kind, transformers.AutoModel, tmp_path), tokenizer(tmp_path, kind)
    with torch.inference_mode():
        states = [model(torch.tensor([words(text)["input_ids"]])).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
    with served(str(tmp_path), "--max-num-seqs", "4", "--dtype", "float32") as server:
        found = server.post("/v1/embeddings", input=TEXTS).json()
        for one, state in zip(found["data"], states, strict=True):
            np.testing.assert_allclose(one["embedding"], state / np.linalg.norm(state), atol=1e-5)
        assert found["usage"]["prompt_tokens"] == sum(len(words(text)["input_ids"]) for text in TEXTS)
        # As transformers cuts: within the tokens that the tokenizer puts around a text.
        for side in ("right", "left"):
            words.truncation_side = side
            given = words(TEXTS[0], truncation=True, max_length=5)["input_ids"]
            more = {} if side == "right" else {"truncation_side": side}
            asked = ({"input": TEXTS[0], "truncate_prompt_tokens": 5, **more}, {"input": given})
            cut, short = (server.post("/v1/embeddings", **one).json()["data"][0]["embedding"] for one in asked)
            assert len(given) == 5
            np.testing.assert_allclose(cut, short, atol=1e-6)
        asked = server.post("/v1/completions", prompt="the sea")
        assert asked.status_code == 400 and "cannot generate" in asked.text


def test_reranking_and_labels_over_http(tmp_path: Path) -> None:
    """XLM-R's template of pairs has two separators between the texts."""
    model = saved("xlmr", transformers.AutoModelForSequenceClassification, tmp_path, num_labels=1)
    words = tokenizer(tmp_path, "xlmr")

    def label(*texts: str) -> float:
        with torch.inference_mode():
            return torch.sigmoid(model(torch.tensor([words(*texts)["input_ids"]])).logits[0, 0]).item()

    scores, alone = [label(TEXTS[0], text) for text in TEXTS], label(TEXTS[1])
    with served(str(tmp_path), "--max-num-seqs", "4", "--dtype", "float32") as server:
        ranked = server.post("/rerank", query=TEXTS[0], documents=TEXTS).json()["results"]
        assert [one["index"] for one in ranked] == sorted(range(4), key=lambda place: -scores[place])
        for one in ranked:
            assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
        found = server.post("/score", text_1=TEXTS[0], text_2=TEXTS[2]).json()["data"]
        assert found[0]["score"] == pytest.approx(scores[2], abs=1e-5)
        [raw] = server.post("/score", data_1=TEXTS[0], data_2=TEXTS[2], use_activation=False).json()["data"]
        assert 1 / (1 + math.exp(-raw["score"])) == pytest.approx(scores[2], abs=1e-5)
        assert server.post("/classify", input=TEXTS[1]).json()["data"][0]["probs"] == [pytest.approx(alone, abs=1e-5)]


@pytest.mark.parametrize("kind", ["bert", "nomic"])
def test_pairs_are_told_apart_by_types(kind: str, tmp_path: Path) -> None:
    """Cross-encoders: the second text's tokens have the second type."""
    model = saved(kind, transformers.AutoModelForSequenceClassification, tmp_path, num_labels=1)
    words = tokenizer(tmp_path, "bert")

    def label(one: str, two: str) -> float:
        given = words(one, two, return_tensors="pt", return_token_type_ids=True)
        assert given["token_type_ids"].sum() > 1
        with torch.inference_mode():
            return torch.sigmoid(model(**given).logits[0, 0]).item()

    with LLM(str(tmp_path), **{**OPTIONS, "skip_tokenizer_init": False}) as llm:
        found = llm.score(TEXTS[0], TEXTS, False)
        assert [one.outputs.score for one in found] == pytest.approx([label(TEXTS[0], text) for text in TEXTS], abs=1e-5)
        assert len(llm.classify(["the sea"], False)[0].outputs.probs) == 1
        with pytest.raises(RequestError, match="ids 0 to 599"):
            llm.encode([[600]], False)


def test_jina_2_is_its_formula(tmp_path: Path) -> None:
    """transformers has no such class: BERT whose scores fall with the distance, and whose feed-forward part is gated."""
    torch.manual_seed(5)
    width, inner, heads, layers = 32, 64, 4, 2
    shapes = {"embeddings.word_embeddings.weight": (300, width), "embeddings.token_type_embeddings.weight": (2, width),
              "embeddings.LayerNorm.weight": (width,), "embeddings.LayerNorm.bias": (width,)}
    for layer in range(layers):
        at = f"encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{at}{name}.weight": (width, width), f"{at}{name}.bias": (width,)}
        shapes |= {f"{at}mlp.gated_layers.weight": (2 * inner, width), f"{at}mlp.wo.weight": (width, inner),
                   f"{at}mlp.wo.bias": (width,)}
        for name in ("attention.output.LayerNorm", "mlp.layernorm"):
            shapes |= {f"{at}{name}.weight": (width,), f"{at}{name}.bias": (width,)}
    w = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    safetensors.torch.save_file(w, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "position_embedding_type": "alibi", "vocab_size": 300,
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "max_position_embeddings": 80, "feed_forward_type": "geglu", "auto_map": {"AutoModel": "other--code"}}))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    def wanted(ids: list[int]) -> torch.Tensor:
        x = norm(w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0],
                 "embeddings.LayerNorm")
        at = torch.arange(len(ids))
        falls = torch.tensor([2.0 ** -(8 * (i + 1) / heads) for i in range(heads)])[:, None, None] * (at[:, None] - at).abs()
        for layer in range(layers):
            here = f"encoder.layer.{layer}."
            q, k, v = (F.linear(x, w[f"{here}attention.self.{name}.weight"], w[f"{here}attention.self.{name}.bias"])
                       .view(len(ids), heads, -1).transpose(0, 1) for name in ("query", "key", "value"))
            seen = ((q @ k.mT / (width // heads) ** 0.5 - falls).softmax(-1) @ v).transpose(0, 1).flatten(1)
            seen = F.linear(seen, w[f"{here}attention.output.dense.weight"], w[f"{here}attention.output.dense.bias"])
            x = norm(x + seen, f"{here}attention.output.LayerNorm")
            gate, up = F.linear(x, w[f"{here}mlp.gated_layers.weight"]).chunk(2, -1)
            down = F.linear(F.gelu(gate) * up, w[f"{here}mlp.wo.weight"], w[f"{here}mlp.wo.bias"])
            x = norm(x + down, f"{here}mlp.layernorm")
        return x

    with LLM(str(tmp_path), **OPTIONS) as llm:
        for prompt, found in zip(PROMPTS, llm.encode(PROMPTS, False), strict=True):
            np.testing.assert_allclose(found.outputs.data, wanted(prompt).numpy(), atol=2e-5)


def test_distances_are_masked_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A long text's scores have addends for some queries at a time."""
    saved("modernbert", transformers.AutoModel, tmp_path)
    with LLM(str(tmp_path), **OPTIONS, kernels={"attention": "reference"}) as llm:
        whole = [one.outputs.data for one in llm.encode(PROMPTS, False)]
        monkeypatch.setattr(attention, "_MASKED", 16)
        for one, wanted in zip(llm.encode(PROMPTS, False), whole, strict=True):
            np.testing.assert_allclose(one.outputs.data, wanted, atol=1e-5)


@pytest.mark.parametrize("form", ["own", "transformers"])
def test_nomic_in_both_forms(form: str, tmp_path: Path) -> None:
    """The folders on the hub have the keys and names of the models' own code, and need none of it."""
    model = saved("nomic", transformers.AutoModel, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    if form == "own":
        assert any("attn.Wqkv" in name for name in tensors)
        config = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 300, "n_embd": 32, "n_head": 4,
                  "n_layer": 3, "n_inner": 64, "n_positions": 320, "max_trained_positions": 80, "type_vocab_size": 2,
                  "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
                  "rotary_emb_fraction": 1.0, "prenorm": False, "causal": False, "auto_map": {"AutoModel": "other--code"}}
    else:
        tensors = model.state_dict()
    safetensors.torch.save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPTS[2]])).last_hidden_state[0].numpy()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        np.testing.assert_allclose(llm.encode([PROMPTS[2]], False)[0].outputs.data, wanted, atol=2e-5)
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_every_n_layers": 2}))
    with pytest.raises(ModelError, match="moe_every_n_layers"):
        LLM(str(tmp_path), **OPTIONS)
