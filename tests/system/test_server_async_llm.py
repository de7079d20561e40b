"""AsyncLLM: an engine process used from asyncio, without HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock import AsyncLLM, SamplingParams
from penstock.core.errors import ConfigError, EngineDeadError, RequestError
from tests.data import MODELS, need
from tests.system.fakes import NAME as FAKE, SLOW
from tests.system.served import ROOT

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)


@pytest.fixture(autouse=True)
def found_by_the_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine process must find the fake engine."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    yield


@asynccontextmanager
async def started(engine: str | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(str(need(MODELS / "stories260k")), **options, **({"engine": engine} if engine else {}))
    await llm.start()
    try:
        yield llm
    finally:
        await llm.shutdown()


async def last_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None) -> Any:
    return [output async for output in llm.generate(prompt, params, name)][-1]


async def settled(llm: AsyncLLM) -> None:
    for _ in range(200):
        if not (llm.live or llm.stats.running or llm.stats.pages_used):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"something runs on: {llm.stats}")


def test_generate() -> None:
    """vLLM's call shape: cumulative outputs, texts and ids alike, names that can be used again at once."""

    async def run() -> None:
        async with started() as llm:
            lengths = []
            async for output in llm.generate("Once upon a time", GREEDY, "mine"):
                lengths.append(len(output.outputs[0].token_ids))
            assert lengths == sorted(lengths) and lengths[-1] == 12 and output.finished and output.request_id == "mine"
            assert output.outputs[0].text.startswith(", there was") and output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].logprobs) == 12 and output.prompt == "Once upon a time"
            same = await asyncio.gather(*(last_of(llm, form, GREEDY) for form in (
                output.prompt_token_ids, {"prompt_token_ids": output.prompt_token_ids}, {"prompt": "Once upon a time"})))
            assert {tuple(o.outputs[0].token_ids) for o in same} == {tuple(output.outputs[0].token_ids)}

            long = SamplingParams(max_tokens=400, ignore_eos=True)
            for _ in range(20):
                generator = llm.generate("Once", long, "again")
                await anext(generator)
                await generator.aclose()
                short = await last_of(llm, "Once upon a time", GREEDY, "again")
                assert short.outputs[0].token_ids == output.outputs[0].token_ids
            await settled(llm)

            generator = llm.generate("Once", long, "busy")
            await anext(generator)
            with pytest.raises(RequestError, match="unique"):
                await last_of(llm, "Once", GREEDY, "busy")
            await llm.abort("busy")
            aborted = [output async for output in generator][-1]
            assert aborted.outputs[0].finish_reason == "abort"
            with pytest.raises(RequestError, match="512"):
                await last_of(llm, [1] * 512, GREEDY)
            await settled(llm)
            assert llm.unhealthy() is None and not llm.errored

    asyncio.run(run())


@pytest.mark.serial
def test_long_texts_do_not_stop_the_loop() -> None:
    """While a text of a megabyte is tokenized, the loop goes on."""

    async def run() -> None:
        async with started() as llm:
            gaps, began = [], asyncio.get_running_loop().time()
            text, tokenizer = "one day " * 125_000, llm.tokenizer
            assert tokenizer is not None
            sent = asyncio.create_task(llm.work.run(len(text), lambda: tokenizer.encode(text)))
            while not sent.done():
                await asyncio.sleep(0.005)
                gaps.append((now := asyncio.get_running_loop().time()) - began)
                began = now
            assert len(await sent) > 100_000 and len(gaps) > 5, gaps
            # A text that cannot fit is refused before all of it is tokenized.
            with pytest.raises(RequestError, match="more than"):
                await last_of(llm, text, GREEDY)

    asyncio.run(run())


def test_the_death_of_an_engine() -> None:
    async def run() -> None:
        async with started(FAKE) as llm:
            waiting = [asyncio.create_task(last_of(llm, [SLOW], SamplingParams(max_tokens=500))) for _ in range(3)]
            await asyncio.sleep(0.2)
            os.kill(llm.engine_pid or 0, signal.SIGKILL)
            for task in waiting:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await task
            assert llm.errored and "SIGKILL" in (llm.unhealthy() or "")
            with pytest.raises(EngineDeadError):
                await last_of(llm, [1], SamplingParams())

    asyncio.run(run())


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM("anything", max_model_length=5)


def test_an_engine_that_cannot_start() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="take another"):
            async with started(FAKE, seed=13):
                pass

    asyncio.run(run())


def test_shutdown_ends_what_runs() -> None:
    async def run() -> None:
        async with started(FAKE) as llm:
            task = asyncio.create_task(last_of(llm, [SLOW], SamplingParams(max_tokens=500)))
            await asyncio.sleep(0.2)
            await llm.shutdown()
            with pytest.raises(EngineDeadError, match="shutting down"):
                await task

    asyncio.run(run())


def test_the_golden_outputs_stream_in_pieces() -> None:
    """The deltas of a stream, joined, are the whole."""
    case = json.loads((need(MODELS / "stories260k") / "greedy_golden.json").read_text())["cases"][2]

    async def run() -> None:
        async with started() as llm:
            params = SamplingParams(temperature=0.0, max_tokens=len(case["greedy_ids"]), ignore_eos=True)
            request = llm.inputs.request(llm.new_id(), case["prompt_ids"], params)
            ids, text = [], ""
            async for deltas in llm.open([request]):
                for delta in deltas:
                    ids += delta.token_ids
                    text += delta.text
            assert ids == case["greedy_ids"]
            assert llm.tokenizer is not None
            assert llm.tokenizer.decode(case["prompt_ids"]) + text == llm.tokenizer.decode(case["prompt_ids"] + ids)

    asyncio.run(run())
