"""A probe tells what it met, never raises and never outlasts its time.
Small real servers on loopback that answer well, badly, late or not at all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from rota.engines.base import Endpoint
from rota.engines.probe import Answer, probe

LONG_S = 30.0

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, base_path: str = "") -> AsyncIterator[Endpoint]:
    handled: list[asyncio.Task[None] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handled.append(asyncio.current_task())
        with suppress(OSError, EOFError):  # the probe may leave at any moment
            await handler(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Endpoint("127.0.0.1", port, base_path=base_path)
        while not handled:  # accepted, not yet taken up
            await asyncio.sleep(0.001)
        await asyncio.gather(*filter(None, handled))  # none of them hangs


def saying(answer: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    return handler


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\n", 503),
        (b"HTTP/1.1 204\r\n\r\n", 204),
        (b"SSH-2.0-OpenSSH_9.6\r\n", None),
        (b"HTTP/1.1 two hundred\r\n\r\n", None),
        (b"", None),
        (b"\x00" * 200_000, None),
    ],
)
async def test_it_reads_the_status(answer: bytes, status: int | None) -> None:
    async with serving(saying(answer)) as endpoint:
        assert await probe(endpoint, "/health", timeout_s=LONG_S) == Answer(True, status)


async def test_it_asks_for_the_path_below_the_base() -> None:
    asked: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

    async with serving(handler, base_path="/base") as endpoint:
        await probe(endpoint, "/health?x=1", timeout_s=LONG_S)
    assert asked[0].startswith(b"GET /base/health?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_without_a_path_it_only_connects() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(handler) as endpoint:
        assert await probe(endpoint, None, timeout_s=LONG_S) == Answer(True)


async def test_a_hanging_server_is_cut_off() -> None:
    # case W30
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the probe leaves

    async with serving(handler) as endpoint:
        assert await probe(endpoint, "/health", timeout_s=0.05) == Answer(True, None)


async def test_nobody_there_is_an_answer_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = Endpoint("127.0.0.1", gone.getsockname()[1])
    assert await probe(endpoint, "/health", timeout_s=LONG_S) == Answer(False)
    nowhere = Endpoint("no-such-host.invalid", 80)
    assert await probe(nowhere, "/health", timeout_s=LONG_S) == Answer(False)


async def test_tls_against_a_plain_server_is_no_answer() -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\n")) as endpoint:
        secure = Endpoint(endpoint.host, endpoint.port, "https")
        assert await probe(secure, "/health", timeout_s=0.3) == Answer(False)
