"""Listening to an engine: who gives signs of life is let be, who gives none is noticed.
Small servers in this process, which answer each question as the test says.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from rota.engines.base import Endpoint
from rota.engines.probe import Answer
from rota.node.silence import Listener
from tests.node.support import until


@asynccontextmanager
async def answering(
    say: Callable[[int], bytes | None],
) -> AsyncIterator[tuple[Endpoint, Counter[str]]]:
    """A server whose answer to each question, by its number, the test says; None = none."""
    seen: Counter[str] = Counter()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen["asked"] += 1
        seen["open"] += 1
        seen["open at most"] = max(seen["open"], seen["open at most"])
        with suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            if (answer := say(seen["asked"])) is None:
                await reader.read()  # until the other end leaves
            else:
                writer.write(answer)
                await writer.drain()
        seen["open"] -= 1
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]), seen
        await until(lambda: seen["open"] == 0, "the last question's end")


def listener(endpoint: Endpoint, silent_after_s: float = 0.2) -> Listener:
    return Listener(endpoint, "/health", silent_after_s=silent_after_s)


async def test_any_http_answer_is_a_sign_of_life() -> None:
    def say(number: int) -> bytes | None:
        return b"HTTP/1.1 503 Busy\r\n\r\n" if number <= 8 else None

    async with answering(say) as (endpoint, seen):
        assert await listener(endpoint).silence() == Answer(connected=True)
        assert seen["asked"] >= 8 + 3


async def test_one_lost_question_condemns_nobody() -> None:
    def say(number: int) -> bytes | None:
        is_lost = number % 2 or number > 6
        return None if is_lost else b"HTTP/1.1 200 OK\r\n\r\n"

    async with answering(say) as (endpoint, seen):
        await listener(endpoint, silent_after_s=1.0).silence()
        assert seen["asked"] >= 6 + 3
        assert seen["open at most"] == 1


async def test_what_is_no_http_is_no_answer() -> None:
    async with answering(lambda _: b"SSH-2.0-OpenSSH_9.6\r\n") as (endpoint, _):
        assert await listener(endpoint).silence() == Answer(connected=True)


async def test_a_busy_engine_is_not_asked() -> None:
    async with answering(lambda _: None) as (endpoint, seen):
        one = listener(endpoint, silent_after_s=2.0)
        listening = asyncio.create_task(one.silence())
        for _ in range(150):
            one.heard()
            await asyncio.sleep(0.01)
        assert not listening.done()
        assert seen["asked"] == 0
        listening.cancel()
        await asyncio.wait([listening])


async def test_the_time_in_which_rota_itself_stood_still_is_not_held_against_it() -> None:
    async with answering(lambda _: b"HTTP/1.1 200 OK\r\n\r\n") as (endpoint, seen):
        listening = asyncio.create_task(listener(endpoint).silence())
        for _ in range(5):
            asked = seen["asked"]
            await until(lambda: seen["asked"] > asked, "a question")  # noqa: B023
            time.sleep(0.5)  # blocks the loop, and is meant to
        assert not listening.done()
        listening.cancel()
        await asyncio.wait([listening])


async def test_nobody_there_is_silence_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = Endpoint("127.0.0.1", gone.getsockname()[1])
    assert await listener(endpoint).silence() == Answer(connected=False)
