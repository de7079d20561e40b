"""Pooled hidden states, embeddings, classes and scores of the engine, against transformers in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock import LLM
from penstock.core.errors import ModelError, RequestError
from penstock.core.request import Pool
from penstock.engine.pooling import Scorer, Text
from tests.data import DATA, MODELS, need
from tests.system.served import served

TEXTS = ["Once upon a time there was a little girl named Lily who liked to play outside in the sun. " * 3, "The sea is", "A"]
SMALL = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(need(MODELS / "stories260k")), **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def states(llm: LLM) -> list[np.ndarray]:
    """transformers' hidden states after the last norm."""
    model = transformers.AutoModel.from_pretrained(MODELS / "stories260k", dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([llm.get_tokenizer().encode(text)])).last_hidden_state[0].numpy() for text in TEXTS]


def reduced(states: np.ndarray, pooling: str) -> np.ndarray:
    return {"all": states, "last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]


@pytest.mark.parametrize("pooling", ["all", "last", "mean", "cls"])
def test_pooling_is_transformers(llm: LLM, states: list[np.ndarray], pooling: str) -> None:
    # The first text is longer than a step; the second round finds prompts in the cache.
    for _ in range(2):
        for found, wanted in zip(llm.encode(TEXTS, False, pooling=pooling), states, strict=True):
            np.testing.assert_allclose(found.outputs.data, reduced(wanted, pooling), atol=1e-4)
    assert not llm.engine.busy


def test_cached_prompts_serve_the_last_token_alone(llm: LLM) -> None:
    def computed(pooling: str) -> int:
        before = llm.stats().cached_tokens
        llm.encode(TEXTS[:1], False, pooling=pooling)
        return llm.stats().cached_tokens - before

    llm.encode(TEXTS[:1], False, pooling="last")
    assert computed("last") > 60 and computed("mean") == computed("all") == computed("cls") == 0


def test_pooling_runs_beside_generation_and_survives_preemption() -> None:
    """Vectors do not depend on what runs beside them, nor on pages taken away meanwhile."""
    folder = str(need(MODELS / "stories260k"))
    prompts = [TEXTS[0][:50 * n] for n in range(1, 5)] * 3
    with LLM(folder, **SMALL) as alone:
        wanted = {kind: [one.outputs.data for one in alone.encode(prompts, False, pooling=kind)] for kind in ("mean", "last")}
    with LLM(folder, **SMALL, kv_cache_memory_bytes=260 << 10, max_model_len=180) as llm:
        inputs, vectors = llm.inputs, dict[str, np.ndarray]()
        for place, prompt in enumerate(prompts):
            kind = ("mean", "last")[place % 2]
            llm.engine.submit(inputs.pooling(f"{kind} {place}", prompt, Pool(kind)))
            llm.engine.submit(inputs.request(f"write {place}", prompt, inputs.default_params().replace(max_tokens=60)))
        while llm.engine.busy:
            for update in llm.engine.turn():
                if update.pooled is not None:
                    vectors[update.request_id] = np.frombuffer(update.pooled, "<f4")
        llm.engine.scheduler.check()
        assert llm.stats().preemptions > 0, "the cache is small enough to preempt"
    assert len(vectors) == len(prompts)
    for name, vector in vectors.items():
        kind, place = name.split()
        np.testing.assert_allclose(vector, wanted[kind][int(place)], atol=1e-4)


def test_embeddings_are_normalised_and_cut(llm: LLM, states: list[np.ndarray]) -> None:
    for found, wanted in zip(llm.embed(TEXTS, False), states, strict=True):
        np.testing.assert_allclose(found.outputs.embedding, wanted[-1] / np.linalg.norm(wanted[-1]), atol=1e-5)
    [cut] = llm.embed(TEXTS[1], False, dimensions=8)
    wanted = states[1][-1][:8] / np.linalg.norm(states[1][-1][:8])
    np.testing.assert_allclose(cut.outputs.embedding, wanted, atol=1e-5)
    [plain] = llm.embed(TEXTS[1], False, normalize=False)
    np.testing.assert_allclose(plain.outputs.embedding, states[1][-1], atol=1e-4)
    with pytest.raises(RequestError, match="this model's embeddings have 64"):
        llm.embed("A", False, dimensions=65)


def test_scores_are_cosines(llm: LLM, states: list[np.ndarray]) -> None:
    scaled = [one[-1] / np.linalg.norm(one[-1]) for one in states]
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, False)]
    np.testing.assert_allclose(scores, [scaled[0] @ one for one in scaled], atol=1e-5)
    with pytest.raises(RequestError, match="no head of labels"):
        llm.classify("A", False)
    with pytest.raises(RequestError, match="only possible with a reranker"):
        llm.score("A", "B", False, instruction="Judge")


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (MODELS / "stories260k" / name).exists():
            shutil.copy(MODELS / "stories260k" / name, folder)
    return folder


def tiny(labels: int = 3) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
                                    num_labels=labels, pad_token_id=0)


def test_classifier(tmp_path: Path, llm: LLM) -> None:
    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification(tiny()).eval()
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    with torch.inference_mode():
        wanted = [model(torch.tensor([one])).logits[0].softmax(-1).numpy() for one in ids]
    with LLM(str(save(model, tmp_path)), **SMALL) as classifier:
        assert classifier.info.task == "classify" and classifier.info.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
        for found, probabilities in zip(classifier.classify(ids, False), wanted, strict=True):
            np.testing.assert_allclose(found.outputs.probs, probabilities, atol=1e-5)
        with pytest.raises(RequestError, match="cannot generate"):
            classifier.generate("A", use_tqdm=False)
        with pytest.raises(RequestError, match="scores need one"):
            classifier.score("A", "B", False)


def test_a_classifier_of_tokens(tmp_path: Path, llm: LLM) -> None:
    """Also of a prompt that is computed in several steps."""
    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification(tiny()).eval()
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    with torch.inference_mode():
        logits = [model.score(model.model(torch.tensor([one])).last_hidden_state[0]) for one in ids]
    with served(save(model, tmp_path), "--max-num-batched-tokens", "32", "--max-num-seqs", "8",
                "--max-model-len", "256") as server:
        assert max(map(len, ids)) > 64
        for more, wanted in (({}, [one.softmax(-1) for one in logits]), ({"use_activation": False}, logits)):
            answer = server.post("/pooling", input=ids, task="token_classify", **more).json()["data"]
            for found, values in zip(answer, wanted, strict=True):
                np.testing.assert_allclose(found["data"], values.numpy(), atol=2e-5)
        [last] = server.post("/pooling", input=ids[0], task="classify").json()["data"]
        np.testing.assert_allclose(last["data"], logits[0][-1].softmax(-1).numpy(), atol=2e-5)


def test_a_classifier_of_one_label_scores_pairs(tmp_path: Path, llm: LLM) -> None:
    torch.manual_seed(2)
    model = transformers.Qwen3ForSequenceClassification(tiny(1)).eval()
    encode = llm.get_tokenizer().encode
    with torch.inference_mode():
        wanted = [float(model(torch.tensor([[*encode(TEXTS[2]), *encode(text, False)]])).logits.sigmoid()) for text in TEXTS]
    with LLM(str(save(model, tmp_path)), **SMALL) as reranker:
        scores = [one.outputs.score for one in reranker.score(TEXTS[2], TEXTS, False)]
    np.testing.assert_allclose(scores, wanted, atol=1e-5)


def test_a_bare_backbone_with_sentence_transformers_modules(tmp_path: Path, llm: LLM) -> None:
    torch.manual_seed(3)
    model = transformers.Qwen3Model(tiny()).eval()
    folder = save(model, tmp_path)
    (folder / "1_Pooling").mkdir()
    kinds = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **kinds}))
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
               {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    with torch.inference_mode():
        wanted = [model(torch.tensor([one])).last_hidden_state[0].mean(0).numpy() for one in ids]
    with LLM(str(folder), **SMALL) as embedder:
        assert embedder.info.task == "embed"
        for found, vector in zip(embedder.embed(ids, False), wanted, strict=True):
            np.testing.assert_allclose(found.outputs.embedding, vector, atol=1e-5)
        with pytest.raises(RequestError, match="cannot generate"):
            embedder.generate("A", use_tqdm=False)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 3, "do_lower_case": False}))
    with LLM(str(folder), **SMALL) as embedder:
        with pytest.raises(RequestError, match=r"at most 3 are possible \(the max_seq_length"):
            embedder.embed([ids[0][:4]], False)
        cut, short = (embedder.embed([given], False, truncate_prompt_tokens=-1)[0].outputs.embedding
                      for given in (ids[0][:4], ids[0][:3]))
        np.testing.assert_allclose(cut, short, atol=1e-6)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": "many"}))
    with pytest.raises(ModelError, match="max_seq_length is 'many'"):
        LLM(str(folder), **SMALL)
    (folder / "sentence_bert_config.json").unlink()
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 2, "path": "2_Dense", "type": "models.Dense"}]))
    with LLM(str(folder), **SMALL) as embedder, pytest.raises(RequestError, match="a module of the type Dense"):
        embedder.embed("A", False)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        LLM(str(folder), **SMALL)


def test_qwen3_reranker(tmp_path: Path) -> None:
    """Qwen3's rerankers judge by the logits of yes and no after their own prompt."""
    words = need(DATA / "tokenizers" / "qwen3")
    torch.manual_seed(4)
    config = tiny()
    config.vocab_size = 151_669
    model = transformers.Qwen3ForCausalLM(config).eval()
    folder = tmp_path / "Qwen3-Reranker-tiny"
    model.to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, folder)
    with LLM(str(folder), **SMALL, max_model_len=200) as llm:
        pairs = [("What is a penstock?", text) for text in ("A gate for water.", "A kind of sheep.")]
        scores = [one.outputs.score for one in llm.score(pairs[0][0], [text for _, text in pairs], False)]
        texts = Scorer(llm.inputs).texts(pairs, None)
        assert all(isinstance(text, Text) and "<Instruct>: Given a web search query" in text.prompt for text in texts)
        encode = llm.get_tokenizer().encode
        [no], [yes] = encode("no", False), encode("yes", False)
        with torch.inference_mode():
            logits = [model(torch.tensor([encode(text.prompt, False)])).logits[0, -1, [no, yes]] for text in texts]
    np.testing.assert_allclose(scores, [float(one.softmax(-1)[1]) for one in logits], atol=1e-5)
