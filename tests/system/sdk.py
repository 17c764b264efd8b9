"""The unmodified openai SDK in a process of its own: many calls at once, and what came back.

Beside rota in one event loop it would slow down what it is to test: six hundred calls keep a
loop from its sockets for seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass

import openai


@dataclass(frozen=True)
class Burst:
    """Calls made at once.

    Args:
        prompts: one for each call.
        timeout_s: the SDK's own, which it states to the server.
    """

    url: str
    model: str
    prompts: tuple[str, ...]
    stream: bool = False
    max_tokens: int = 16
    max_retries: int = 2
    timeout_s: float = 600.0


async def call_at_once(burst: Burst) -> list[str]:
    """What each call was answered, in the order of the prompts.

    Raises: AssertionError: one failed; its text says how.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.system.sdk", json.dumps(asdict(burst))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    answers: list[str] = json.loads(output)
    return answers


async def _answers(burst: Burst) -> list[str]:
    sdk = openai.AsyncOpenAI(
        base_url=f"{burst.url}/v1",
        api_key="none",
        max_retries=burst.max_retries,
        timeout=burst.timeout_s,
    )
    async with sdk:
        return await asyncio.gather(*(_call(sdk, burst, prompt) for prompt in burst.prompts))


async def _call(sdk: openai.AsyncOpenAI, burst: Burst, prompt: str) -> str:
    if not burst.stream:
        answer = await sdk.chat.completions.create(
            model=burst.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=burst.max_tokens,
        )
        return answer.choices[0].message.content or ""
    stream = await sdk.chat.completions.create(
        model=burst.model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=burst.max_tokens,
        stream=True,
    )
    pieces = [piece async for piece in stream]
    assert pieces[-1].choices[0].finish_reason, pieces[-1]
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_answers(Burst(**json.loads(sys.argv[1]))))))
