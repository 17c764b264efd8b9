"""What a client can do to a connection before, between and beside its requests.
How: exact bytes on a real socket, before a fake controller and a fake engine."""

from __future__ import annotations

import asyncio

import pytest

from rota.core.events import Outcome
from rota.gateway import connection
from tests.gateway.conftest import start_gateway, until
from tests.gateway.fakes import EVENTS_HEAD, Exchange, answering, chunk
from tests.gateway.wire import CHAT, HANG_S, Wire, ask, chat, connect, request_bytes

OK = answering(b'{"ok":true}')
CHUNKED = {"transfer-encoding": "chunked"}


async def one_event(exchange: Exchange) -> None:
    """A stream that says one thing and goes on until the client leaves."""
    await exchange.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
    await asyncio.Event().wait()


async def pour(wire: Wire, piece: bytes) -> None:
    """Write until the other side has had enough."""
    async with asyncio.timeout(HANG_S):
        while not wire.reader.at_eof() and not wire.writer.is_closing():
            wire.writer.write(piece)
            try:
                await wire.writer.drain()
            except ConnectionError:
                return


@pytest.mark.parametrize(
    ("before", "piece"),
    [
        (b"GET /health HTTP/1.1\r\n", b"x-more: " + b"y" * 8_000 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nx-long: ", b"y" * 8_000),
        (b"GET /", b"y" * 8_000),
        (b"", b"\r\n" * 4_000),
        (request_bytes("POST", CHAT, headers=CHUNKED) + b"1;", b"y" * 8_000),
        (
            request_bytes("POST", CHAT, headers=CHUNKED) + b"0\r\n",
            b"x-t: " + b"y" * 8_000 + b"\r\n",
        ),
    ],
    ids=["headers", "header", "target", "blank lines", "chunk extension", "trailers"],
)
async def test_what_is_no_body_is_bounded(before: bytes, piece: bytes) -> None:
    async with start_gateway(OK) as gateway:
        async with connect(gateway.port) as wire:
            wire.writer.write(before)
            await pour(wire, piece)
        assert (await ask(gateway.port, "GET", "/health")).status == 200


async def test_too_large_a_head_is_answered() -> None:
    async with start_gateway(OK) as gateway, connect(gateway.port) as wire:
        await wire.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        await wire.write(b"x-more: " + b"y" * connection.HEAD_BYTES_MAX)
        answer = await wire.read_head()
        assert (answer.status, answer.header("connection")) == (431, "close")
        assert "larger than 65536 bytes" in (await wire.read_body()).json()["error"]["message"]


async def test_a_large_head_passes() -> None:
    more = {f"x-{n}": "y" * 8_000 for n in range(7)}
    async with start_gateway(OK) as gateway:
        assert (await ask(gateway.port, "POST", CHAT, chat(), more)).status == 200


async def test_a_body_in_small_chunks_passes() -> None:
    body = chat(text="x" * 20_000)
    pieces = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in body)
    async with start_gateway(OK) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, headers=CHUNKED) + pieces + b"0\r\n\r\n")
        assert (await wire.read_head()).status == 200
        assert gateway.engine.requests[0].body == body


async def test_trailers_do_not_become_headers() -> None:
    body = chat()
    async with start_gateway(OK) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, headers=CHUNKED))
        await wire.write(b"%x\r\n%s\r\n0\r\nx-evil: 1\r\n\r\n" % (len(body), body))
        assert (await wire.read_head()).status == 200
        assert "x-evil" not in dict(gateway.engine.requests[0].headers)


@pytest.mark.parametrize("path", [CHAT, "/health"])
async def test_who_is_refused_while_sending_hears_why(path: str) -> None:
    body = b"x" * 5_000_000
    async with start_gateway(OK, body_bytes_max=1_000) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", path, body, {"connection": "close"}))
        assert (await wire.read_head()).status in (405, 413)
        assert (await wire.read_body()).is_whole
        assert await asyncio.wait_for(wire.reader.read(), HANG_S) == b""


async def test_a_refused_body_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNHEARD_S_MAX", 0.1)
    async with start_gateway(OK, body_bytes_max=1_000) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, headers={"content-length": "9999"}))
        assert (await wire.read_head()).status == 413
        await wire.read_body()
        assert await asyncio.wait_for(wire.reader.read(), HANG_S) == b""


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nx: "])
async def test_a_client_that_never_asks_is_turned_away(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.1)
    async with start_gateway(OK) as gateway, connect(gateway.port) as wire:
        await wire.write(begun)
        assert (await wire.read_head()).status == 408
        await wire.read_body()
        assert await asyncio.wait_for(wire.reader.read(), HANG_S) == b""


async def test_a_long_answer_is_no_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.0)
    async with start_gateway(one_event) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
        await wire.read_head()
        assert await wire.read_piece() == b"data: 1\n\n"
        assert gateway.controller.running == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0",
        request_bytes("POST", CHAT, headers=CHUNKED) + b"zz\r\n",
        request_bytes("POST", CHAT, b"{}", CHUNKED),  # two lengths
    ],
)
async def test_what_is_not_http_is_told_so_in_our_shape(garbage: bytes) -> None:
    async with start_gateway(OK) as gateway, connect(gateway.port) as wire:
        await wire.write(garbage)
        assert (await wire.read_head()).status == 400
        assert (await wire.read_body()).json()["error"]["code"] == "invalid_request"


async def test_garbage_does_not_land_in_an_answer() -> None:
    async with start_gateway(one_event) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
        await wire.read_head()
        await wire.read_piece()
        await wire.write(b"\0garbage")
        answer = await wire.read_body()
        assert (answer.body, answer.is_whole) == (b"", False)
        await until(lambda: gateway.controller.outcomes == [Outcome.CANCELLED])


@pytest.mark.parametrize("model", ["m", "far"])
async def test_a_client_that_pipelines_and_leaves_is_noticed(model: str) -> None:
    request = request_bytes("POST", CHAT, chat(model, stream=True))
    async with start_gateway(one_event) as gateway:
        async with connect(gateway.port) as wire:
            await wire.write(request)
            await until(lambda: gateway.controller.waiting + gateway.controller.running == 1)
            await wire.write(request + request)
        await gateway.settles()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with start_gateway(OK) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, chat()) * 5)
        for _ in range(5):
            assert (await wire.read_head()).status == 200
            assert (await wire.read_body()).json() == {"ok": True}


async def test_too_many_pipelined_requests_end_the_connection() -> None:
    async with start_gateway(one_event) as gateway:
        async with connect(gateway.port) as wire:
            await pour(wire, request_bytes("POST", CHAT, chat(stream=True)))
        await gateway.settles()
