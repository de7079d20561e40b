"""Several streams at once from a running server, with the official client: client.py [URL]. Needs the openai package."""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, prompt: str) -> None:
    stream = await client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    print(f"{prompt!r} -> {text!r}")


async def main(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    model = (await client.models.list()).data[0].id
    await asyncio.gather(*[ask(client, model, f"Once upon a time there was a {thing}") for thing in ("dog", "cat", "river")])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
