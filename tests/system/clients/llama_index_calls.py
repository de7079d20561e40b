"""llama-index: its OpenAI-like models against this server: completions, chats, streams, tools, structured answers, vectors."""

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

MODEL, BASE = os.environ["PENSTOCK_MODEL"], os.environ["OPENAI_BASE_URL"]
ASK = [ChatMessage(role="user", content="Repeat: dog cat")]


def model(**more: object) -> OpenAILike:
    return OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=True, temperature=0, max_retries=0, **more)


def test_chat_and_completion() -> None:
    assert model().chat(ASK).message.content == "dog cat"
    assert "".join(part.delta or "" for part in model().stream_chat(ASK)) == "dog cat"
    assert model().complete("Repeat: dog cat").text == "dog cat"
    raw = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=False, temperature=0, max_tokens=5)
    assert raw.complete("dog").text == "".join(part.delta or "" for part in raw.stream_complete("dog"))


async def test_a_chat_beside_others() -> None:
    assert (await model().achat(ASK)).message.content == "dog cat"


def test_a_tool_that_must_be_called() -> None:
    def pick(number: int) -> int:
        """Picks a number."""
        return number

    agent = model(is_function_calling_model=True)
    found = agent.chat_with_tools([FunctionTool.from_defaults(pick)], user_msg="Pick 7.", tool_required=True)
    [call] = agent.get_tool_calls_from_response(found)
    assert call.tool_name == "pick" and isinstance(call.tool_kwargs["number"], int)


def test_a_structured_answer() -> None:
    class Pick(BaseModel):
        sure: bool

    found = model(should_use_structured_outputs=True).as_structured_llm(Pick).chat(ASK)
    assert isinstance(found.raw.sure, bool)


def test_vectors() -> None:
    vectors = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE, api_key="none")
    first, second = vectors.get_text_embedding_batch(["a dog", "a cat"])
    assert len(first) == len(second) and first != second
    assert max(abs(x - y) for x, y in zip(vectors.get_text_embedding("a dog"), first, strict=True)) < 1e-3
