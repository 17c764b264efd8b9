"""The upstream client against a server that sends exact bytes.
How: real sockets on loopback, one script per answer; boundaries drawn from a printed seed."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rota.engines.base import Endpoint
from rota.gateway import client as client_module
from rota.gateway.client import BUFFER_MAX, BrokenOffError, Client, Response, UnreachableError
from tests.gateway.conftest import until
from tests.gateway.fakes import (
    EVENTS_HEAD,
    LAST_CHUNK,
    Exchange,
    FakeEngine,
    Script,
    answer_bytes,
    answering,
    chunk,
    fake_engine,
)

CERTIFICATE = Path(__file__).parent / "loopback.pem"  # self-signed, for 127.0.0.1, no secret


@asynccontextmanager
async def speaking(script: Script) -> AsyncIterator[tuple[FakeEngine, Client]]:
    async with fake_engine(script) as engine:
        client = Client()
        try:
            yield engine, client
        finally:
            await client.close()


async def ask(
    client: Client, engine: FakeEngine, body: bytes = b"", method: str = "POST"
) -> Response:
    return await client.send(engine.endpoint, method, "/x?y=1", [(b"a", b"b")], body)


async def read_all(response: Response) -> bytes:
    pieces = []
    while not response.at_end:
        pieces.append(await response.read())
    return b"".join(pieces)


async def test_request_is_sent_as_given() -> None:
    async with speaking(answering(b"hello")) as (engine, client):
        endpoint = Endpoint(engine.endpoint.host, engine.endpoint.port, base_path="/base")
        response = await client.send(endpoint, "POST", "/x?y=1", [(b"a", b"b")], b"\x00\xff")
        assert (response.status, await read_all(response)) == (200, b"hello")
        (request,) = engine.requests
        assert (request.method, request.target) == ("POST", "/base/x?y=1")
        assert request.headers == [
            ("host", f"127.0.0.1:{endpoint.port}"),
            ("content-length", "2"),
            ("a", "b"),
        ]
        assert request.body == b"\x00\xff"


@pytest.mark.parametrize("seed", range(6))
async def test_any_cut_of_the_bytes_gives_the_same_answer(seed: int) -> None:
    chance = random.Random(seed)
    body = chance.randbytes(chance.choice([1, 100, 70_000, 600_000]))
    pieces, rest = [], body
    while rest:
        size = chance.randint(1, max(1, len(body) // 5))
        pieces.append(rest[:size])
        rest = rest[size:]
    raw = EVENTS_HEAD + b"".join(map(chunk, pieces)) + LAST_CHUNK
    cuts = sorted(chance.sample(range(1, len(raw)), 5))

    async def script(exchange: Exchange) -> None:
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            await exchange.write(raw[start:end])
            await asyncio.sleep(0)

    async with speaking(script) as (engine, client):
        for _ in range(3):
            assert await read_all(await ask(client, engine)) == body
        assert engine.connections == 1


async def test_head_may_come_byte_by_byte() -> None:
    async def script(exchange: Exchange) -> None:
        for byte in answer_bytes(b"hi", headers={"X-Long": "v" * 50}):
            await exchange.write(bytes([byte]))
            await asyncio.sleep(0)

    async with speaking(script) as (engine, client):
        response = await ask(client, engine)
        assert (b"X-Long", b"v" * 50) in response.headers
        assert await read_all(response) == b"hi"


@pytest.mark.parametrize(
    ("method", "raw", "body", "is_kept"),
    [
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        ("POST", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", True),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"", False),
        ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", True),
        ("POST", b"HTTP/1.1 100 Continue\r\n\r\n" + answer_bytes(b"hi"), b"hi", True),
        ("POST", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" * 3 + answer_bytes(b"hi"), b"hi", True),
        ("POST", answer_bytes(b"hi", headers={"Connection": "close"}), b"hi", False),
        ("POST", answer_bytes(b"hi").replace(b"1.1", b"1.0"), b"hi", False),
        ("POST", EVENTS_HEAD + chunk(b"hi") + b"0\r\nTrailer: x\r\n\r\n", b"hi", True),
    ],
)  # fmt: skip
async def test_ends_by_the_rules(method: str, raw: bytes, body: bytes, is_kept: bool) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(raw)

    async with speaking(script) as (engine, client):
        for _ in range(2):
            assert await read_all(await ask(client, engine, method=method)) == body
        assert engine.connections == (1 if is_kept else 2)


async def test_answer_may_end_with_its_connection() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await exchange.write(b"lo")
        exchange.close()

    async with speaking(script) as (engine, client):
        response = await ask(client, engine)
        assert not response.is_delimited
        assert await read_all(response) == b"hello"


async def test_connections_are_reused() -> None:
    async with speaking(answering(b"x")) as (engine, client):
        for _ in range(20):
            await read_all(await ask(client, engine))
        assert engine.connections == 1
        together = [ask(client, engine) for _ in range(5)]
        for response in await asyncio.gather(*together):
            await read_all(response)
        assert engine.connections <= 5
        client.forget(engine.endpoint)
        await until(lambda: engine.open == 0)


async def test_answer_left_unread_does_not_go_to_the_next() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(answer_bytes(exchange.request.body))

    async with speaking(script) as (engine, client):
        first = await ask(client, engine, b"first")
        await until(lambda: first.is_complete)
        second = await ask(client, engine, b"second")
        assert await read_all(second) == b"second"
        assert await read_all(first) == b"first"


async def test_stale_connection_is_tried_again_once() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.request.body == b"stale" and len(engine.requests) == 2:
            exchange.abort()
        else:
            await exchange.write(answer_bytes(b"served"))

    async with speaking(script) as (engine, client):
        await read_all(await ask(client, engine))
        assert await read_all(await ask(client, engine, b"stale")) == b"served"
        assert (engine.connections, len(engine.requests)) == (2, 3)


async def test_fresh_connection_is_not_tried_again() -> None:
    async def script(exchange: Exchange) -> None:
        exchange.abort()

    async with speaking(script) as (engine, client):
        with pytest.raises(BrokenOffError, match="before it answered") as raised:
            await ask(client, engine)
        assert not raised.value.begun
        assert len(engine.requests) == 1


async def test_begun_answer_is_not_asked_for_again() -> None:
    async def script(exchange: Exchange) -> None:
        if len(engine.requests) == 1:
            await exchange.write(answer_bytes(b"x"))
        else:
            await exchange.write(b"HTTP/1.1 2")
            exchange.close()

    async with speaking(script) as (engine, client):
        await read_all(await ask(client, engine))
        with pytest.raises(BrokenOffError) as raised:
            await ask(client, engine)
        assert raised.value.begun
        assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", "101"),
        (b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", "999"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"v" * 200_000, "head of more than"),
        (b"HTTP/1.1 100 Continue\r\nX: v\r\n\r\n" * 10_000, "head of more than"),
    ],
)
async def test_what_is_not_an_answer_is_said_to_be_none(raw: bytes, complaint: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(raw)
        await exchange.peer_left()

    async with speaking(script) as (engine, client):
        with pytest.raises(BrokenOffError, match=complaint):
            await ask(client, engine)
        await until(lambda: engine.open == 0)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
        EVENTS_HEAD + chunk(b"hello"),
        EVENTS_HEAD + b"a\r\nhello",
        EVENTS_HEAD + chunk(b"hello") + b"0\r\n",
        EVENTS_HEAD + chunk(b"hello") + b"zz\r\n",
    ],
)
async def test_cut_body_is_noticed_and_what_came_is_read(raw: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(raw)
        exchange.close()

    async with speaking(script) as (engine, client):
        response = await ask(client, engine)
        got = b""
        while len(got) < 5:
            got += await response.read()
        assert got == b"hello"
        assert not response.at_end
        with pytest.raises(BrokenOffError):
            await response.read()


async def test_bytes_beyond_an_answer_spoil_the_connection_only() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(answer_bytes(b"one") + b"HTTP/1.1 200 OK\r\n")

    async with speaking(script) as (engine, client):
        for _ in range(2):
            assert await read_all(await ask(client, engine)) == b"one"
        assert engine.connections == 2


async def test_nobody_listens() -> None:
    async with speaking(answering(b"")) as (engine, client):
        endpoint = engine.endpoint
    with pytest.raises(UnreachableError):
        await client.send(endpoint, "POST", "/", [])
    with pytest.raises(UnreachableError):
        await Client().send(Endpoint("no\x00name." + "x" * 80, 1), "POST", "/", [])


async def test_connecting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and never shakes hands (TLS) is as good as none."""
    monkeypatch.setattr(client_module, "CONNECT_S_MAX", 0.05)
    async with fake_engine(answering(b"")) as engine:
        endpoint = Endpoint("127.0.0.1", engine.endpoint.port, scheme="https")
        with pytest.raises(UnreachableError, match="no connection within"):
            await Client().send(endpoint, "POST", "/", [])


async def test_https() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_bytes(b"secret"))
        await reader.read()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], scheme="https")
    client = Client(ssl_context=ssl.create_default_context(cafile=str(CERTIFICATE)))
    async with server:
        response = await client.send(endpoint, "POST", "/", [])
        assert await read_all(response) == b"secret"
        await client.close()
        with pytest.raises(UnreachableError, match="certificate"):
            await Client().send(endpoint, "POST", "/", [])


async def test_large_request_arrives_whole() -> None:
    body = random.Random(1).randbytes(8 * 2**20)
    async with speaking(answering(b"ok")) as (engine, client):
        for _ in range(2):
            assert await read_all(await ask(client, engine, body)) == b"ok"
        assert engine.requests[1].body == body
        assert engine.connections == 1


async def test_large_request_refused_early_is_not_sent_to_its_end() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_bytes(b"too much", status="413 Content Too Large"))
        await gate.wait()
        writer.close()

    gate = asyncio.Event()
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    client = Client()
    async with server:
        response = await client.send(endpoint, "POST", "/", [], b"x" * 32 * 2**20)
        assert (response.status, await read_all(response)) == (413, b"too much")
        gate.set()
        await client.close()


async def test_unread_answer_is_left_with_the_engine() -> None:
    """Back-pressure: an endless answer that nobody reads stops growing."""
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.write(EVENTS_HEAD)
        while True:
            await exchange.write(chunk(b"x" * 65_536))
            sent += 65_536

    async with speaking(script) as (engine, client):
        response = await ask(client, engine)
        connection = response._connection
        assert connection is not None
        await until(lambda: not connection._is_reading)
        await settled(lambda: sent)
        unread = sum(map(len, response._pieces))
        assert BUFFER_MAX < unread <= BUFFER_MAX + 512 * 1024
        before = sent
        while sent == before:  # and goes on when it is read, once the sockets between have room
            assert await response.read()
        response.close()
        await until(lambda: engine.open == 0)


async def test_cancelled_request_closes_its_connection() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.peer_left()

    async with speaking(script) as (engine, client):
        asking = asyncio.create_task(ask(client, engine))
        await until(lambda: len(engine.requests) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: engine.open == 0)


async def settled(measure) -> None:  # type: ignore[no-untyped-def]
    """Wait until a growing figure has stood still for a good while."""
    still, last = 0, measure()
    while still < 30:
        await asyncio.sleep(0.005)
        still = still + 1 if measure() == last else 0
        last = measure()
