"""The pooling routes: OpenAI's /v1/embeddings, vLLM's /pooling, /classify and /score, Cohere's and Jina's /rerank.

Bodies go through the same limits and the same engine as all others; errors have OpenAI's shape."""

import base64
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.core.request import Pool
from penstock.core.sampling import SamplingParams
from penstock.engine import pooling
from penstock.engine.pooling import Floats, Text, class_pool, embedding, embedding_pool, paired, probabilities, vectors_of
from penstock.engine.retention import Side
from penstock.server.dialect import BYTES, EVENTS, Route, json_response
from penstock.server.openai import chat, completions
from penstock.server.openai.completions import split_prompts
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.messages import render
from penstock.server.openai.prepare import admitted
from penstock.server.openai.protocol import ChatRequest, CompletionRequest, Message, TokenizeRequest
from penstock.server.pooling import protocol as p
from penstock.server.pooling.packing import packed
from penstock.server.respond import gather
from penstock.server.state import State

Answerer = Callable[[Request, Any], Awaitable[Response]]

_MOST_PLACES = 256
"""Vectors that the header of an answer in bytes tells of. Clients read no header of more than 64 KiB."""


class PooledTexts:
    """One request's texts through the engine: a vector for each, and the usage."""

    def __init__(self, http: Request, model: str, vectors: list[Floats], tokens: int) -> None:
        self.id: str = http.scope["request_id"]
        self.model = model
        self.vectors = vectors
        self.usage = p.PoolUsage(tokens, tokens)
        self.created = int(time.time())
        self.numbers = sum(vector.size for vector in vectors)


class Pooling(OpenAIForm):
    def routes(self) -> Sequence[Route]:
        def both(path: str, answered: Answerer, about: str, body: type[Any], answer: Any,
                 prefixes: Sequence[str] = ("", "/v1")) -> list[Route]:
            return [Route("POST", prefix + path, answered, about, body, answer=answer,
                          also=(BYTES,) if issubclass(body, p.EmbeddingRequest) else ()) for prefix in prefixes]

        return (
            Route("POST", "/invocations", self.invocations, "What the body asks for, by its fields, for SageMaker",
                  tuple(self.by_body), (EVENTS, BYTES), (Message,)),
            *both("/embeddings", self.embeddings, "Turn texts into vectors", p.EmbeddingRequest,
                  p.Answers[p.Embedding], ("/v1",)),
            *both("/pooling", self.pooling, "Hidden states of texts, pooled or by token", p.PoolingRequest,
                  p.Answers[p.Pooled]),
            *both("/classify", self.classify, "Probabilities of a classifier's labels", p.ClassifyRequest, p.Answers[p.Class]),
            *both("/score", self.score, "Score pairs of texts", p.ScoreRequest, p.Answers[p.Score]),
            *both("/rerank", self.rerank, "Order documents by how well they fit a query", p.RerankRequest, p.Ranking,
                  ("", "/v1", "/v2")))

    # -- the endpoints

    @property
    def by_body(self) -> dict[type[Any], Answerer]:
        return {ChatRequest: partial(chat.answer, self.state), CompletionRequest: partial(completions.answer, self.state),
                p.EmbeddingRequest: self.embeddings, p.ClassifyRequest: self.classify, p.RerankRequest: self.rerank,
                p.ScoreRequest: self.score}

    async def invocations(self, http: Request) -> Response:
        """The answer of the route that takes such a body."""
        body = await self.bodies.read(http, self._kind_of)
        return await self.by_body[type(body)](http, body)

    def _kind_of(self, fields: Container[str]) -> type[Any]:
        """The kind of request that has these fields. RequestError if there is none."""
        task = self._inputs.info.task if self.state.llm.info is not None else "generate"
        texts = p.ClassifyRequest if task == "classify" else p.EmbeddingRequest
        kinds = {"prompt": CompletionRequest, "query": p.RerankRequest, "input": texts,
                 "messages": ChatRequest if task == "generate" else texts,
                 **dict.fromkeys(("text_1", "queries", "data_1"), p.ScoreRequest)}
        for name, kind in kinds.items():
            if name in fields:
                return kind
        raise RequestError("Missing required parameter: 'messages' or 'prompt', 'input' (for vectors or classes), 'query' or "
                           "'queries' (for scores)", param="messages", code="missing_required_parameter")

    async def embeddings(self, http: Request, body: p.EmbeddingRequest) -> Response:
        return await self._vectors(http, body, "embed", "embd", p.Embedding)

    async def pooling(self, http: Request, body: p.PoolingRequest) -> Response:
        """Hidden states or a classifier's probabilities: of each text, or of its tokens."""
        return await self._vectors(http, body, body.task, "pool", p.Pooled)

    async def _vectors(self, http: Request, body: p.EmbeddingRequest, task: str | None, prefix: str,
                       kind: Callable[[int, Any], Any]) -> Response:
        model, scale = self.state.admit_bare(body.model), _scaling(body, self._inputs.pooler.normalize)
        task = task or ("classify" if self._inputs.info.task == "classify" else "embed")
        if task in ("classify", "score", "token_classify"):
            pool = class_pool(self._inputs, task == "token_classify")
            scale = probabilities if body.use_activation is not False else lambda logits: logits
        elif task == "embed":
            pool = embedding_pool(self._inputs)
        else:
            # vLLM scales the vectors of tokens too, unless told otherwise.
            pool, scale = Pool("all"), _scaling(body, True)
        run = await pool_texts(self.state, http, model, body, await self._texts(http, body), pool)
        return await self._written(run, prefix, kind, scale, body)

    async def classify(self, http: Request, body: p.ClassifyRequest) -> Response:
        model = self.state.admit_bare(body.model)
        run = await pool_texts(self.state, http, model, body, await self._texts(http, body), class_pool(self._inputs))
        names = self._inputs.info.labels

        def line(place: int, logits: Floats) -> p.Class:
            shown = logits if body.use_activation is False else probabilities(logits)
            return p.Class(place, names[int(logits.argmax())], shown.tolist(), len(logits))

        return await self._answer(run, "classify", lambda: [line(*one) for one in enumerate(run.vectors)])

    async def score(self, http: Request, body: p.ScoreRequest) -> Response:
        model = self.state.admit_bare(body.model)
        one, two = (self._given(body, names) for names in (("text_1", "queries", "data_1"),
                                                           ("text_2", "documents", "items", "data_2")))
        scores, run = await self._scores(http, model, body, paired(one, two, ("text_1", "text_2")))
        return await self._answer(run, "score", lambda: [p.Score(*one) for one in enumerate(scores)])

    @staticmethod
    def _given(body: p.ScoreRequest, names: tuple[str, ...]) -> str | list[str]:
        """The value of the one of these fields that a body has. RequestError if it has none, or several."""
        found = [name for name in names if getattr(body, name) is not None]
        if not found:
            raise RequestError(f"Missing required parameter: '{names[0]}'", param=names[0], code="missing_required_parameter")
        if len(found) > 1:
            raise RequestError(f"{' and '.join(found)} are names of the same field; send one of them", param=found[1])
        value: str | list[str] = getattr(body, found[0])
        return value

    async def rerank(self, http: Request, body: p.RerankRequest) -> Response:
        model = self.state.admit_bare(body.model)
        documents = [one if isinstance(one, str) else one.text for one in body.documents]
        scores, run = await self._scores(http, model, body, [(body.query, one) for one in await self._cut(body, documents)])
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[:body.top_n or None]

        def line(place: int) -> p.Ranked:
            shown = msgspec.UNSET if body.return_documents is False else p.Document(text=documents[place])
            return p.Ranked(place, scores[place], shown)

        return json_response(p.Ranking(f"rerank-{run.id}", model, [line(place) for place in order], run.usage))

    # -- how

    @property
    def _inputs(self) -> Any:
        return self.state.llm.inputs

    async def _texts(self, http: Request, body: p.TextFields) -> list[Text]:
        """The texts of a body. RequestError unless it has either input or messages."""
        if (body.input is None) == (body.messages is None):
            raise RequestError("give either input or messages", param="input", code="missing_required_parameter")
        if body.input is not None:
            return [Text(prompt, body.add_special_tokens is not False) for prompt in split_prompts(body.input, "input")]
        asked = TokenizeRequest(messages=body.messages, add_generation_prompt=bool(body.add_generation_prompt),
                                continue_final_message=body.continue_final_message, chat_template=body.chat_template,
                                chat_template_kwargs=body.chat_template_kwargs)
        return [Text((await render(self.state, http, asked)).text, bool(body.add_special_tokens))]

    async def _cut(self, body: p.RerankRequest, documents: list[str]) -> list[str]:
        """The documents' beginnings of `max_tokens_per_doc` tokens."""
        most, tokenizer = body.max_tokens_per_doc, self._inputs.tokenizer
        if most is None or tokenizer is None:
            return documents
        return await self.state.llm.work.run(sum(map(len, documents)), lambda: [
            document if len(ids) <= most else tokenizer.decode(ids[:most])
            for document in documents for ids in [tokenizer.encode(document, False)]])

    async def _scores(self, http: Request, model: str, body: p.ScoringFields,
                      pairs: list[tuple[str, str]]) -> tuple[list[float], PooledTexts]:
        scorer = pooling.Scorer(self._inputs)
        size = sum(len(one) + len(two) for one, two in pairs)
        self.state.limits.check_text(max(len(one) + len(two) for one, two in pairs), self._inputs.info.max_model_len)
        texts = await self.state.llm.work.run(size, lambda: scorer.texts(pairs, body.instruction))
        # A written prompt asks its question at the end.
        run = await pool_texts(self.state, http, model, body, texts, scorer.pool,
                               "left" if self._inputs.reranker == "qwen3" else "right")
        return scorer.scores(pairs, run.vectors, body.use_activation is not False), run

    async def _written(self, run: PooledTexts, prefix: str, kind: Callable[[int, Any], Any], scale: Callable[[Floats], Floats],
                       body: p.EmbeddingRequest) -> Response:
        """The vectors in the format that the body asks for."""
        form, dtype, endianness = body.encoding_format, body.embed_dtype or "float32", body.endianness or "little"
        if form == "float" and (body.embed_dtype or body.endianness):
            field = "embed_dtype" if body.embed_dtype else "endianness"
            raise RequestError(f"{field} is only possible with the encoding_format base64, bytes or bytes_only", param=field)
        if form == "bytes" and len(run.vectors) > _MOST_PLACES:
            raise RequestError(f"the header of the encoding_format bytes has room for {_MOST_PLACES} vectors, not for "
                               f"{len(run.vectors)}; send bytes_only", param="encoding_format")
        if form == "float":
            return await self._answer(run, prefix, lambda: [kind(*one) for one in enumerate(
                scale(vector).tolist() for vector in run.vectors)])
        if form == "base64":
            return await self._answer(run, prefix, lambda: [kind(*one) for one in enumerate(
                base64.b64encode(packed(scale(vector), dtype, endianness)).decode() for vector in run.vectors)])

        def in_bytes() -> Response:
            parts, places, end = list[bytes](), list[dict[str, Any]](), 0
            for index, vector in enumerate(map(scale, run.vectors)):
                parts.append(packed(vector, dtype, endianness))
                places.append({"index": index, "embed_dtype": dtype, "endianness": endianness, "start": end,
                               "end": (end := end + len(parts[-1])), "shape": vector.shape})
            said = msgspec.json.encode(p.Answers(f"{prefix}-{run.id}", run.created, run.model, places, run.usage)).decode()
            return Response(b"".join(parts), headers={"metadata": said} if form == "bytes" else {}, media_type=BYTES)

        return await self.state.llm.work.run(run.numbers // 4, in_bytes)

    async def _answer(self, run: PooledTexts, prefix: str, data: Callable[[], list[Any]]) -> Response:
        return await self.state.llm.work.run(run.numbers // 4, lambda: json_response(
            p.Answers(f"{prefix}-{run.id}", run.created, run.model, data(), run.usage)))


async def pool_texts(state: State, http: Request, model: str, body: p.PoolingFields, texts: Sequence[Text],
                     pool: Pool, side: Side = "right") -> PooledTexts:
    """Pools texts under the limits of every request; those that are too long are cut at `side`, unless the body says where.
    RequestError naming the limit or the field at fault."""
    inputs = state.llm.inputs
    for text in texts:
        if isinstance(text.prompt, str):
            state.limits.check_text(len(text.prompt), inputs.info.max_model_len, "input")
    requests = await admitted(state, http, body, None, len(texts), SamplingParams(), lambda whose: [
        inputs.pooling(state.llm.new_id(), text.prompt, pool, add_special_tokens=text.add_special_tokens,
                       keep=body.truncate_prompt_tokens, side=body.truncation_side or side, **whose) for text in texts],
        sum(100 + len(text.prompt) for text in texts))
    found: dict[str, bytes] = {}
    await gather(http, state.llm.open(requests),
                 lambda deltas: found.update((delta.request_id, delta.pooled or b"") for delta in deltas))
    vectors = [vectors_of(found[request.id], pool, len(request.prompt_ids)) for request in requests]
    return PooledTexts(http, model, vectors, sum(len(request.prompt_ids) for request in requests))


def _scaling(body: p.EmbeddingRequest, default: bool) -> Callable[[Floats], Floats]:
    said = body.use_activation if body.normalize is None else body.normalize
    return lambda vector: embedding(vector, default if said is None else said, body.dimensions)
