"""Embeddings, scores and classes from a prompt's hidden states: which prompts and poolings a task needs, and what is made of
the numbers that the engine reports. `LLM` and the server share it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.errors import RequestError, UnsupportedError
from penstock.core.request import Pool, Request
from penstock.engine.inputs import Inputs
from penstock.engine.outputs import Delta

Floats = npt.NDArray[np.float32]

QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3 = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. '
          'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n'
          "<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
"""The prompt that Qwen3's rerankers were trained with."""


class Text(NamedTuple):
    """A prompt to pool: a text or token ids."""

    prompt: str | list[int]
    add_special_tokens: bool = True


def embedding_pool(inputs: Inputs) -> Pool:
    """The pooling of an embedding, as the model has it. RequestError where there is none."""
    if inputs.pooler.refused:
        raise UnsupportedError(f"this model cannot embed: {inputs.pooler.refused}")
    return Pool(inputs.pooler.kind)


def class_pool(inputs: Inputs, each: bool = False) -> Pool:
    """The pooling of a classification, or of `each` token's. RequestError if the model is no classifier."""
    if inputs.info.task != "classify":
        raise UnsupportedError("this model does not classify: its checkpoint has no head of labels (an architecture that ends "
                               "in ForSequenceClassification)")
    return Pool("tokens" if each else "labels")


def embedding(vector: Floats, normalize: bool, dimensions: int | None = None) -> Floats:
    """A pooled vector, or several, as an embedding: its first `dimensions` numbers, scaled to length 1 if wanted."""
    width = vector.shape[-1]
    if dimensions is not None and dimensions > width:
        raise RequestError(f"dimensions is {dimensions}; this model's embeddings have {width}", param="dimensions")
    vector = vector[..., :dimensions]
    # As torch.nn.functional.normalize: a vector of zeros stays one.
    return vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12) if normalize else vector


def probabilities(logits: Floats) -> Floats:
    """Of a classifier's labels, [..., labels]: softmax, or for a single label the sigmoid."""
    if logits.shape[-1] == 1:
        return np.asarray(1 / (1 + np.exp(-logits)), np.float32)
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True), np.float32)


class Scorer:
    """Scores pairs of texts: an embedder by the cosine of two embeddings, a reranker by one prompt for each pair."""

    def __init__(self, inputs: Inputs) -> None:
        """RequestError if the model cannot score."""
        self._inputs = inputs
        info = inputs.info
        if info.task == "classify" and len(info.labels) != 1:
            raise UnsupportedError(f"this model cannot score pairs: it has {len(info.labels)} labels, and scores need one")
        self.reranks = info.task == "classify" or inputs.reranker == "qwen3"
        """One prompt for each pair; else one for each text."""
        self.pool = embedding_pool(inputs) if not self.reranks else Pool("labels")
        if self.reranks and info.task != "classify":
            tokenizer = inputs.tokenizer
            ids = [tokenizer.token_id(word) if tokenizer is not None else None for word in ("no", "yes")]
            if None in ids:
                raise UnsupportedError("this model cannot rerank: its vocabulary has no tokens yes and no")
            self.pool = Pool("labels", [token for token in ids if token is not None])

    def texts(self, pairs: Sequence[tuple[str, str]], instruction: str | None) -> list[Text]:
        """The prompts of some pairs; of an embedder each text is there once."""
        if not self.reranks:
            if instruction is not None:
                raise UnsupportedError("instruction is only possible with a reranker", "instruction")
            return [Text(text) for text in dict.fromkeys(text for pair in pairs for text in pair)]
        if self._inputs.reranker == "qwen3":
            return [Text(_QWEN3.format(instruction or QWEN3_INSTRUCTION, query, document), False) for query, document in pairs]
        tokenizer = self._inputs.tokenizer
        if tokenizer is None:
            raise RequestError("there is no tokenizer (skip_tokenizer_init), so pairs of texts cannot be scored",
                               code="no_tokenizer")
        if instruction is not None:
            raise UnsupportedError("instruction is only possible with a reranker whose prompt has a place for it (--reranker)",
                                   "instruction")
        if self._inputs.info.pairs == "template":
            return [Text(tokenizer.encode_pair(query, document, self._inputs.info.second)) for query, document in pairs]
        return [Text([*tokenizer.encode(query), *tokenizer.encode(document, False)]) for query, document in pairs]

    def scores(self, pairs: Sequence[tuple[str, str]], vectors: Sequence[Floats], activation: bool = True) -> list[float]:
        """The score of each pair, given what came of its `texts`; without `activation` a reranker's logit, of yes over no."""
        if self.reranks:
            return [float(probabilities(logits)[-1] if activation else logits[-1] - logits[:-1].sum()) for logits in vectors]
        of = dict(zip(dict.fromkeys(text for pair in pairs for text in pair),
                      (embedding(vector, True) for vector in vectors), strict=True))
        return [float(of[one] @ of[two]) for one, two in pairs]


def paired(one: str | Sequence[str], two: str | Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """Pairs of texts: one with each, or each with its counterpart. RequestError naming the field."""
    left, right = ([one] if isinstance(one, str) else list(one)), ([two] if isinstance(two, str) else list(two))
    if not left or not right:
        raise RequestError(f"{names[0] if not left else names[1]} is empty; send at least one text",
                           param=names[0] if not left else names[1])
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise RequestError(f"{names[0]} has {len(left)} texts and {names[1]} {len(right)}; send one, or as many as there are "
                           f"{names[1]}", param=names[0])
    return list(zip(left, right, strict=True))


def vectors_of(pooled: bytes, pool: Pool, prompt_len: int) -> Floats:
    """The engine's result: [width], of each position [prompt, width]."""
    flat = np.frombuffer(pooled, "<f4")
    return flat.reshape(prompt_len, -1) if pool.each else flat


# -- vLLM's shapes


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingOutput:
    data: Floats
    """[width], or for each token [tokens, width]."""


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and what was pooled from it. `outputs` has the shape of the call: `embedding`, `probs`, `score` or `data`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Any = None
    finished: bool = False
    error: str | None = None
    vector: Floats = field(default_factory=lambda: np.zeros(0, np.float32), repr=False)
    pool: Pool = field(default=Pool("last"), repr=False)

    @classmethod
    def empty(cls, request: Request) -> "PoolingRequestOutput":
        assert request.pool is not None
        return cls(request.id, request.prompt_ids, pool=request.pool)

    def add(self, delta: Delta) -> None:
        self.finished, self.error = True, delta.error
        if delta.pooled is not None:
            self.vector = vectors_of(delta.pooled, self.pool, len(self.prompt_token_ids))
