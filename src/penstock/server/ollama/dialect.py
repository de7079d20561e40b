"""Ollama's API as a dialect: its routes, its bodies as the chat endpoint's, and answers: a JSON object, or one a line."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.dialects.parser import Parser
from penstock.engine.outputs import Delta
from penstock.engine.pooling import Text, embedding, embedding_pool
from penstock.server.blocks import Blocks, BlocksAnswer, Change
from penstock.server.body import BodyReader
from penstock.server.dialect import Route, json_response, utc
from penstock.server.fleet import Slot
from penstock.server.ollama import protocol as o
from penstock.server.openai import protocol as chat
from penstock.server.openai.answers import Namer, chat_content, namer
from penstock.server.openai.chat import prepared
from penstock.server.openai.form import converted, refusing
from penstock.server.openai.prepare import prepare, sampling_params
from penstock.server.pooling.dialect import PooledTexts, pool_texts
from penstock.server.pooling.protocol import PoolingFields
from penstock.server.respond import Wire, respond
from penstock.server.state import State


def line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


class OllamaAnswer(BlocksAnswer):
    def __init__(self, model: str, prompt_tokens: int, blocks: Blocks, *, chat: bool, thinking: bool,
                 namer: Namer | None) -> None:
        """`chat`: a message, else a response; `thinking`: whether it is shown; `namer`: of log probabilities, if wanted."""
        super().__init__(blocks)
        self.model = model
        self._prompt_tokens = prompt_tokens
        self._chat = chat
        self._thinking = thinking
        self._namer = namer
        self._entries: list[Any] = []

    def events(self, deltas: list[Delta]) -> bytes:
        found = []
        for delta in deltas:
            changes, entries = self.take(delta), self._scored(delta)
            said = self._said([change for change in changes if change.what == "add"], [c for c in changes if c.what == "end"])
            if said or entries:
                found.append(line({"model": self.model, "created_at": utc(), **self._shown(said), **entries, "done": False}))
        return b"".join(found)

    def last_events(self) -> bytes:
        return line({"model": self.model, "created_at": utc(), **self._shown({}), **self._last()})

    def add(self, deltas: list[Delta]) -> None:
        super().add(deltas)
        self._entries += [entry for delta in deltas for entry in self._scored(delta).get("logprobs", ())]

    def whole(self) -> dict[str, Any]:
        grown = [Change("add", block, block.text) for block in self.blocks.all if block.kind != "call"]
        said = self._said(grown, [Change("end", block) for block in self.blocks.calls])
        entries = {"logprobs": self._entries} if self._namer is not None else {}
        return {"model": self.model, "created_at": utc(), **self._shown(said), **entries, **self._last()}

    def _scored(self, delta: Delta) -> dict[str, Any]:
        if self._namer is None or not delta.logprobs:
            return {}
        return {"logprobs": [msgspec.json.decode(entry) for entry in chat_content(delta.logprobs, self._namer)]}

    def _said(self, grown: list[Change], ended: list[Change]) -> dict[str, Any]:
        """The fields of a message that are new. A call is shown when it is whole."""
        said: dict[str, Any] = {}
        for change in grown:
            name = {"text": "content", "reasoning": "thinking"}.get(change.block.kind)
            if name is not None and (name == "content" or self._thinking):
                said[name] = said.get(name, "") + change.text
        calls = [{"id": change.block.id, "function": {"index": place, "name": change.block.name,
                                                      "arguments": change.block.arguments()}}
                 for change in ended if change.block.kind == "call" and not change.block.failed
                 for place in (self.blocks.calls.index(change.block),)]
        return {**said, "tool_calls": calls} if calls else said

    def _shown(self, said: dict[str, Any]) -> dict[str, Any]:
        if self._chat:
            return {"message": {"role": "assistant", "content": "", **said}}
        return {"response": said.get("content", ""), **({"thinking": said["thinking"]} if "thinking" in said else {})}

    def _last(self) -> dict[str, Any]:
        end = self.end
        times = end.timings if end is not None else None
        spans = (0.0, 0.0, 0.0) if times is None else (
            times.finished - times.arrival, (times.first_token or times.finished) - (times.first_scheduled or times.arrival),
            times.finished - (times.first_token or times.finished))
        total, prompt, output = (max(0, int(seconds * 1e9)) for seconds in spans)
        return {"done": True, "done_reason": "length" if end is not None and end.finish_reason == "length" else "stop",
                "total_duration": total, "load_duration": 0, "prompt_eval_count": self._prompt_tokens,
                "prompt_eval_duration": prompt, "eval_count": self.output_tokens, "eval_duration": output}


VERSION = "0.12.0"
"""The version of Ollama whose API this is; its clients ask for it."""

SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")

WIRE = Wire(media_type="application/x-ndjson", keep_alive=b"", done=b"", failed=line)

MANAGED = {"/api/pull": "POST", "/api/push": "POST", "/api/create": "POST", "/api/copy": "POST", "/api/delete": "DELETE"}
"""Routes that change which models there are; this server serves what it was started with."""


class Ollama:
    def __init__(self, state: State) -> None:
        self.state = state
        self.bodies = BodyReader(state, refusing(o.WHY_REFUSED), o.IDLE)

    def routes(self) -> Sequence[Route]:
        return (
            Route("POST", "/api/chat", self.chat, "Answer a conversation, in Ollama's form", o.ChatRequest,
                  (WIRE.media_type,)),
            Route("POST", "/api/generate", self.generate, "Answer a prompt, in Ollama's form", o.GenerateRequest,
                  (WIRE.media_type,)),
            Route("POST", "/api/embed", self.embed, "Turn texts into vectors, in Ollama's form", o.EmbedRequest),
            Route("POST", "/api/embeddings", self.embeddings, "Turn a text into a vector, Ollama's older form",
                  o.EmbeddingsRequest),
            Route("GET", "/api/tags", self.tags, "The served names, in Ollama's form"),
            Route("GET", "/api/ps", self.ps, "The loaded models, in Ollama's form"),
            Route("POST", "/api/show", self.show, "About a served name, in Ollama's form", o.ShowRequest),
            Route("GET", "/api/version", self.version, "The version of Ollama whose API this is"),
            *(Route(method, path, self.managed, "Refused: the served models are chosen at the server's start")
              for path, method in MANAGED.items()))

    def error_body(self, error: RequestError) -> Any:
        return {"error": error.message}

    # -- answers

    async def chat(self, http: Request, body: o.ChatRequest) -> Response:
        model = self._admit(body)
        if not body.messages:
            return json_response({"model": body.model, "created_at": utc(), "message": {"role": "assistant", "content": ""},
                                  "done": True, "done_reason": "load"})
        messages = [_message(message) for message in body.messages]
        tools = {"tools": msgspec.to_builtins(body.tools)} if body.tools else {}
        return await self._answer(http, body, {**self._fields(body, model), "messages": messages, **tools}, True)

    async def generate(self, http: Request, body: o.GenerateRequest) -> Response:
        """Answers a prompt, through the chat template unless it is raw."""
        model = self._admit(body)
        if not body.prompt:
            return json_response({"model": body.model, "created_at": utc(), "response": "", "done": True,
                                  "done_reason": "unload" if body.keep_alive in (0, "0") else "load"})
        fields = self._fields(body, model)
        if not body.raw:
            system = [] if not body.system else [{"role": "system", "content": body.system}]
            return await self._answer(http, body, {**fields, "messages": [*system, {"role": "user", "content": body.prompt}]},
                                      False)
        for name in ("chat_template_kwargs", "reasoning_effort"):
            fields.pop(name, None)
        fields["max_tokens"] = fields.pop("max_completion_tokens", None)
        scored = bool(fields.pop("logprobs", False))
        top = fields.pop("top_logprobs", None) or 0
        asked = converted({**fields, "prompt": body.prompt}, chat.CompletionRequest)
        state = self.state
        params = sampling_params(asked, state.llm.inputs.defaults, asked.max_tokens, top if scored else None)
        [request] = await prepare(state, http, [body.prompt], params, asked, add_special_tokens=True)
        plain = Parser(state.llm.inputs.choice.dialect, None, calls=False, reasoning=False)
        answer = OllamaAnswer(body.model, len(request.prompt_ids), Blocks(plain), chat=False, thinking=False,
                              namer=namer(state, asked) if scored else None)
        return await respond(http, state.llm.open([request]), answer, body.stream, WIRE)

    async def _answer(self, http: Request, body: o.AnswerFields, fields: dict[str, Any], is_chat: bool) -> Response:
        state, asked = self.state, converted(fields, chat.ChatRequest)
        ready = await prepared(state, http, asked)
        answer = OllamaAnswer(body.model, len(ready.request.prompt_ids), Blocks(ready.parser(state)), chat=is_chat,
                              thinking=body.think is not False, namer=namer(state, asked) if asked.logprobs else None)
        return await respond(http, state.llm.open([ready.request]), answer, body.stream, WIRE)

    def _fields(self, body: o.AnswerFields, model: str) -> dict[str, Any]:
        """The fields of the chat endpoint that mean the same."""
        options = body.options or o.Options()
        fields: dict[str, Any] = {name: getattr(options, name) for name in SAME_NAME}
        fields |= {"model": model, "repetition_penalty": options.repeat_penalty}
        if options.num_predict is not None and options.num_predict >= 0:
            fields["max_completion_tokens"] = max(1, options.num_predict)
        if body.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(body.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
        if isinstance(body.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": body.think, "thinking": body.think}
        elif body.think is not None:
            fields["reasoning_effort"] = body.think
        if body.logprobs or body.top_logprobs:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
        return fields

    # -- vectors

    async def embed(self, http: Request, body: o.EmbedRequest) -> Response:
        texts = [body.input] if isinstance(body.input, str) else body.input
        run, vectors = await self._vectors(http, body, texts, body.truncate, body.dimensions)
        return json_response({"model": body.model, "embeddings": vectors, "total_duration": 0, "load_duration": 0,
                              "prompt_eval_count": run.usage.prompt_tokens})

    async def embeddings(self, http: Request, body: o.EmbeddingsRequest) -> Response:
        _, [vector] = await self._vectors(http, body, [body.prompt], True, None)
        return json_response({"embedding": vector})

    async def _vectors(self, http: Request, body: o.ModelFields, texts: list[str], truncate: bool,
                       dimensions: int | None) -> tuple[PooledTexts, list[list[float]]]:
        self._admit(body)
        fields = PoolingFields(truncate_prompt_tokens=-1 if truncate else None)
        run = await pool_texts(self.state, http, body.model, fields, [Text(text) for text in texts],
                               embedding_pool(self.state.llm.inputs))
        # Ollama's are of length 1.
        return run, [embedding(vector, True, dimensions).tolist() for vector in run.vectors]

    # -- models

    def _admit(self, body: o.ModelFields) -> str:
        """The served name that a model's name with or without a tag means."""
        name = self.state.admit(self._name(body.model))
        if body.keep_alive is not None:
            self.state.fleet.current.keep = _seconds(body.keep_alive)
        return name

    def _name(self, model: str) -> str:
        bare = model.removesuffix(":latest")
        return bare if bare in self.state.fleet.names and model not in self.state.fleet.names else model

    async def tags(self, http: Request) -> Response:
        fleet = self.state.fleet
        return json_response({"models": [self._described(name, fleet.named(name)) for name in fleet.names]})

    async def ps(self, http: Request) -> Response:
        found = []
        for slot in self.state.fleet.loaded:
            if (info := slot.llm.info) is not None:
                size = info.weight_bytes + info.kv_bytes
                held = {"size": size, "size_vram": 0 if info.device == "cpu" else size, "context_length": info.max_model_len,
                        "expires_at": "2318-01-01T00:00:00Z"}
                found += [{**self._described(name, slot), **held} for name in [*slot.names, *slot.llm.adapters]]
        return json_response({"models": found})

    async def show(self, http: Request, body: o.ShowRequest) -> Response:
        name = body.model or body.name
        if not name:
            raise RequestError("model is missing", param="model", code="missing_required_parameter")
        self.state.admit(self._name(name))
        llm, info = self.state.llm, self.state.llm.info
        assert info is not None
        template = next(iter(llm.template.sources.values()), "") if llm.template is not None else ""
        dialect = llm.inputs.choice.dialect
        able = {"completion": info.task == "generate", "embedding": info.task == "embed",
                "tools": info.task == "generate" and dialect.written is not None,
                "thinking": info.task == "generate" and dialect.reasoning is not None}
        parameters = "\n".join(f"{name} {value}" for name, value in llm.inputs.defaults.items())
        return json_response({
            "modelfile": f"FROM {info.model}", "parameters": parameters, "template": template, "license": "",
            "details": _details(self.state.fleet.current), "modified_at": utc(self.state.created),
            "capabilities": [name for name, has in able.items() if has],
            "model_info": {"general.architecture": info.architecture, "general.parameter_count": 0,
                           f"{info.architecture}.context_length": info.max_model_len,
                           f"{info.architecture}.vocab_size": info.vocab_size}})

    async def version(self, http: Request) -> Response:
        return json_response({"version": VERSION})

    async def managed(self, http: Request) -> Response:
        raise RequestError(f"{http.url.path} is not possible: this server serves what it was started with "
                           "(penstock serve MODEL)", code="not_implemented", status=501)

    def _described(self, name: str, slot: Slot) -> dict[str, Any]:
        info = slot.llm.info
        return {"name": name, "model": name, "modified_at": utc(self.state.created), "size": info.weight_bytes if info else 0,
                "digest": sha256((info.cache_identity or info.model if info else name).encode()).hexdigest(),
                "details": _details(slot)}


def _details(slot: Slot) -> dict[str, Any]:
    info = slot.llm.info
    family = info.architecture if info else ""
    return {"parent_model": "", "format": "safetensors", "family": family, "families": [family], "parameter_size": "",
            "quantization_level": info.dtype if info else ""}


def _seconds(keep: float | str) -> float:
    """Ollama's durations: a number of seconds, or 10m."""
    if isinstance(keep, str):
        unit = keep.lstrip("-0123456789.")
        return float(keep.removesuffix(unit) if unit else keep) * {"ms": 1e-3, "m": 60.0, "h": 3600.0}.get(unit, 1.0)
    return keep


def _message(message: o.Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content, "reasoning_content": message.thinking,
                             "tool_call_id": message.tool_call_id, "name": message.name or message.tool_name}
    if message.tool_calls:
        found["tool_calls"] = [{"id": call.id or f"call_{place}", "type": "function", "function": {
            "name": call.function.name, "arguments": call.function.arguments}} for place, call in enumerate(message.tool_calls)]
    return {name: value for name, value in found.items() if value is not None}
