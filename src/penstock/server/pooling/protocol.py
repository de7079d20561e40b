"""The bodies and answers of the pooling routes as msgspec structs."""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.engine.retention import Side
from penstock.server.openai.answers import Head
from penstock.server.openai.protocol import MAX_ENTRIES, Conversation, Count, Messages, ServiceFields, TokenId
from penstock.server.pooling.packing import DType

Item = TypeVar("Item")

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_ENTRIES)]
Input = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""A text, token ids, or a list of either."""


class PoolingFields(ServiceFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of all these routes."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keep only this many of a text's tokens; -1 keeps as many as fit."""
    truncation_side: Side | None = None
    """The end at which the others are cut off: right by default, as in sentence-transformers and vLLM. Tokens that the
    tokenizer puts around a text stay."""


class TextFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids, or as vLLM takes it the messages of a conversation, which the chat template makes one text of."""

    input: Input | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """By default true for texts, and false for messages: a template writes its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None
    """false gives a classifier's logits instead of probabilities, and embeddings that are not scaled to length 1."""

    def __post_init__(self) -> None:
        if self.messages is not None:
            msgspec.convert({"messages": self.messages}, Conversation)


class EmbeddingRequest(TextFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    """base64: of the numbers as `embed_dtype`, in this `endianness`. bytes: the body has the vectors one after another,
    its header `metadata` says where each lies; bytes_only: without that header."""
    embed_dtype: DType | None = None
    """float32 by default; not for the format float."""
    endianness: Literal["native", "little", "big"] | None = None
    """little by default; not for the format float."""
    dimensions: Count | None = None
    """Only the first numbers of each embedding, scaled to length 1 again."""
    normalize: bool | None = None
    """Whether embeddings are scaled to length 1; by default as the model's folder says."""


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify", "token_classify", "encode", "score"] | None = None
    """token_embed and encode give a vector for each token, token_classify a classifier's probabilities."""


class ClassifyRequest(TextFields, kw_only=True, forbid_unknown_fields=True):
    """POST /classify."""


class ScoringFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    instruction: str | None = None
    """The task, for a reranker."""
    use_activation: bool | None = None
    """false gives a reranker's logits instead of probabilities."""


class ScoreRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    """POST /score: one text with each, or each with its counterpart. vLLM has several names for the two."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank, in Cohere's and Jina's form."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_ENTRIES)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Only so many of the best; by default, and with 0, all."""
    return_documents: bool | None = None
    """false leaves the documents' texts out."""
    max_tokens_per_doc: Count | None = None
    """Only so many of a document's first tokens count."""


class PoolUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Answers(Head, Generic[Item]):
    """A list with an answer for each text or pair, in their order."""

    data: list[Item]
    usage: PoolUsage
    object: str = "list"


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Pooled(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class Class(msgspec.Struct):
    index: int
    label: str
    """The most probable one."""
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolUsage
