"""A web socket is opened under a grant, passed on as it is, and counts as use while it is used.
How: a well-known library's client and server at the two ends, scripts where it is too polite."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol

from rota.config.values import KeyConfig
from rota.core.events import Outcome
from rota.engines.base import Endpoint
from rota.errors import CapacityError
from rota.gateway import sockets
from rota.gateway.frames import Frames
from tests.gateway.conftest import Gateway, start_gateway, until
from tests.gateway.fakes import Exchange, FakeGrant, GrantCall, make_config
from tests.gateway.wire import HANG_S, Wire, ask, request_bytes
from tests.gateway.wire import connect as connect_wire

Handler = Callable[[ServerConnection], Awaitable[None]]


async def echo(socket: ServerConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        async for message in socket:
            await socket.send(message)


@asynccontextmanager
async def gateway_before(
    handler: Handler = echo, *, idle_ms: int = 0, engine: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[Gateway]:
    """A gateway before a server of web sockets, in place of the scripted engine."""
    models = dict(make_config().models)
    models["m"] = replace(models["m"], websocket_idle_ms=idle_ms)
    async with (
        serve(handler, "127.0.0.1", 0, **(engine or {})) as server,
        start_gateway(answers_nothing, models=models, **more) as gateway,
    ):
        [listener] = server.sockets
        gateway.controller.engine = Endpoint("127.0.0.1", listener.getsockname()[1])
        yield gateway


async def answers_nothing(exchange: Exchange) -> None:
    await exchange.peer_left()


def url(gateway: Gateway, target: str = "/v1/realtime?model=m") -> str:
    return f"ws://127.0.0.1:{gateway.port}{target}"


def opened(gateway: Gateway, **more: Any) -> connect:
    return connect(url(gateway), open_timeout=HANG_S, close_timeout=HANG_S, proxy=None, **more)


async def closed(client: ClientConnection) -> tuple[int, str]:
    """How the other side closes."""
    async with asyncio.timeout(HANG_S):
        with contextlib.suppress(ConnectionClosed):
            async for _ in client:
                pass
        await client.wait_closed()
    return client.close_code or 0, client.close_reason or ""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def no_lease(gateway: Gateway) -> None:
    await until(lambda: not gateway.controller.active)


async def test_messages_pass_both_ways_whatever_they_are() -> None:
    # case W43
    async with gateway_before(engine={"max_size": None}) as gateway:
        async with opened(gateway, max_size=None) as client:
            for message in ("text", "", "é", b"", b"\0\xff", os.urandom(3_000_000)):
                await client.send(message)
                assert await client.recv() == message
            assert "permessage-deflate" in str(client.response)
            async with asyncio.timeout(HANG_S):
                await (await client.ping())
        [grant] = gateway.controller.grants
        assert grant.outcome is Outcome.OK
        await no_lease(gateway)


async def test_the_grant_becomes_a_lease_when_the_engine_has_agreed() -> None:
    async with gateway_before() as gateway, opened(gateway) as client:
        [grant] = gateway.controller.grants
        assert grant.lease is not None
        assert list(gateway.controller.active) == [grant.lease.lease]
        assert gateway.controller.calls[0].model == "m"
        headers = client.response.headers  # type: ignore[union-attr]
        assert headers["x-rota-model"] == "m"
        assert headers["x-rota-model-loaded"] == "0"
        assert headers["x-request-id"]


async def test_sub_protocols_are_kept_and_keys_are_not() -> None:
    heard: list[Any] = []

    async def note(socket: ServerConnection) -> None:
        heard.append(socket.request)

    offered = [Subprotocol("openai-insecure-api-key.k"), Subprotocol("realtime")]
    headers = {"Authorization": "Bearer k", "X-Api-Key": "k", "Cookie": "k", "X-Mine": "1"}
    async with gateway_before(note, engine={"subprotocols": [Subprotocol("realtime")]}) as gateway:
        async with opened(gateway, subprotocols=offered, additional_headers=headers) as client:
            assert client.subprotocol == "realtime"
        [request] = heard
        assert request.path == "/v1/realtime?model=m"
        assert request.headers["host"] == f"127.0.0.1:{gateway.controller.engine.port}"
        assert request.headers["x-mine"] == "1"
        for name in ("authorization", "x-api-key", "cookie", "origin"):
            assert name not in request.headers
        assert ".k" not in str(request.headers)


async def test_close_codes_are_carried_over_both_ways() -> None:
    heard: list[tuple[int | None, str | None]] = []

    async def closing(socket: ServerConnection) -> None:
        if await socket.recv() == "you":
            await socket.close(4001, "as you wish")
        await socket.wait_closed()
        heard.append((socket.close_code, socket.close_reason))

    async with gateway_before(closing) as gateway:
        async with opened(gateway) as client:
            await client.send("you")
            assert await closed(client) == (4001, "as you wish")
        async with opened(gateway) as client:
            await client.send("me")
            await client.close(4002, "enough")
        await until(lambda: len(heard) == 2)
        assert heard == [(4001, "as you wish"), (4002, "enough")]
        await no_lease(gateway)


async def test_upstream_paths_name_the_model_and_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    paths: list[str] = []

    async def note(socket: ServerConnection) -> None:
        assert socket.request is not None
        paths.append(socket.request.path)

    targets = {
        "/upstream/m/ws?clientId=1%202": "/ws?clientId=1%202",
        "/upstream/gpt-4o-mini/a/b": "/a/b",
        "/upstream/org/model:7b/ws": "/ws",
        "/upstream/mod%C3%A8le/x%2Fy": "/x%2Fy",
        "/upstream/m": "/",
    }
    async with gateway_before(note) as gateway:
        for target in targets:
            async with connect(url(gateway, target), proxy=None) as client:
                await closed(client)
        assert paths == list(targets.values())
        assert [call.model for call in gateway.controller.calls] == [
            "m", "m", "org/model:7b", "modèle", "m"
        ]  # fmt: skip


async def test_a_query_names_the_model_as_its_engine_does() -> None:
    # case W37
    asked: list[str] = []

    async def note(socket: ServerConnection) -> None:
        assert socket.request is not None
        asked.append(socket.request.path)

    async with gateway_before(note) as gateway:
        for query in ("a=%20b&model=gpt-4o-mini&model=x", "model=mod%C3%A8le"):
            async with connect(url(gateway, f"/v1/realtime?{query}"), proxy=None) as client:
                await closed(client)
        assert asked == [
            "/v1/realtime?a=%20b&model=m&model=x",
            "/v1/realtime?model=mod%C3%A8le",
        ]


@pytest.mark.parametrize(
    ("target", "headers", "status", "code"),
    [
        ("/v1/realtime", {}, 400, "invalid_request"),
        ("/v1/realtime?model=nobody", {}, 404, "model_not_found"),
        ("/v1/realtime?model=m" + "&a=1" * 200, {}, 400, "invalid_request"),
        ("/upstream/nobody/ws", {}, 404, "model_not_found"),
        ("/upstream/", {}, 404, "model_not_found"),
        ("/v1/chat/completions", {}, 404, "not_found"),
        ("/v1/realtime?model=m", {"Origin": "https://evil.example"}, 403, "forbidden"),
        ("/v1/realtime?model=m", {"Origin": "null"}, 403, "forbidden"),
        ("/upstream/m/ws", {"Origin": "http://localhost:1"}, 403, "forbidden"),
    ],
)
async def test_what_is_refused_before_any_grant(
    target: str, headers: dict[str, str], status: int, code: str
) -> None:
    async with gateway_before() as gateway:
        with pytest.raises(InvalidStatus) as error:
            await connect(url(gateway, target), additional_headers=headers, proxy=None)
        response = error.value.response
        assert response.status_code == status
        assert f'"{code}"'.encode() in (response.body or b"")
        assert not gateway.controller.calls
        async with connect(url(gateway), origin="http://localhost:1", proxy=None):  # type: ignore[arg-type]
            pass


async def test_a_path_of_nothing_but_slashes_is_refused_as_fast_as_any() -> None:
    """Each slash could end a model's name; looked at all, it would take half a minute."""
    async with gateway_before() as gateway, asyncio.timeout(HANG_S):
        answer = await ask(gateway.port, "GET", "/upstream/" + "/" * 60_000, headers=UPGRADE)
        assert answer.status == 404


async def test_what_a_lease_says_of_a_path_is_short_and_one_line() -> None:
    async with gateway_before() as gateway:
        path = "/upstream/m/a%0a%1b" + "x" * 5_000
        async with connect(url(gateway, path), proxy=None):
            [grant] = gateway.controller.grants
            assert grant.lease is not None
            assert grant.lease.reason.startswith("web socket /upstream/m/a%0A%1Bxxx")
            assert len(grant.lease.reason) < 1_000


async def test_a_refusal_is_an_http_error_that_says_when_to_come_back() -> None:
    async with gateway_before() as gateway:

        async def loading(call: GrantCall, grant: FakeGrant) -> None:
            raise CapacityError("m is loading", code="model_loading", status=503, retry_after_s=9)

        gateway.controller.decide = loading
        with pytest.raises(InvalidStatus) as error:
            await connect(url(gateway), proxy=None)
        assert error.value.response.status_code == 503
        assert error.value.response.headers["retry-after"] == "9"


async def test_where_there_are_keys_a_socket_wants_one_and_any_page_that_has_it_may() -> None:
    keys = {"me": KeyConfig("me", hashlib.sha256(b"secret").digest(), priority=7)}
    stranger = {"Origin": "https://page.example"}
    offered = [Subprotocol("openai-insecure-api-key.secret"), Subprotocol("realtime")]
    engine = {"subprotocols": [Subprotocol("realtime")]}
    async with gateway_before(engine=engine, keys=keys) as gateway:
        with pytest.raises(InvalidStatus) as error:
            await connect(url(gateway), additional_headers=stranger, proxy=None)
        assert error.value.response.status_code == 401
        assert error.value.response.headers["www-authenticate"] == "Bearer"
        async with opened(gateway, subprotocols=offered, additional_headers=stranger) as client:
            assert client.subprotocol == "realtime"
        [call] = gateway.controller.calls
        assert (call.caller, call.priority) == ("key:me", 7)


async def test_without_an_upgrade_it_is_a_426() -> None:
    async with gateway_before() as gateway:
        answer = await ask(gateway.port, "GET", "/v1/realtime?model=m")
        assert (answer.status, answer.header("upgrade")) == (426, "websocket")


async def test_sockets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKETS_MAX", 1)
    async with gateway_before() as gateway:
        async with opened(gateway):
            with pytest.raises(InvalidStatus) as error:
                await opened(gateway)
            assert error.value.response.status_code == 429
        await until(lambda: len(gateway.controller.active) == 0)


UPGRADE = {
    "connection": "keep-alive, Upgrade",
    "upgrade": "WebSocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "x3JJHMbDL1EzLkh9GBhXDw==",
}
AGREED = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


@asynccontextmanager
async def asking(gateway: Gateway, **headers: str) -> AsyncIterator[Wire]:
    async with connect_wire(gateway.port) as wire:
        await wire.write(
            request_bytes("GET", "/v1/realtime?model=m", headers={**UPGRADE, **headers})
        )
        yield wire


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", 404, "answered it with 404"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", 403, "answered it with 403"),
        (b"HTTP/1.1 500 Oops\r\n\r\n", 500, "answered it with 500"),
        (b"HTTP/1.1 499 \r\n\r\n", 499, "answered it with 499"),
        (b"HTTP/1.1 599 Own\r\n\r\n", 599, "answered it with 599"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 502, "answered it with 200"),
        (b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nA: b\nSet-Cookie: c\r\n\r\n", 502, "broke"),
        (b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nno header\r\n\r\n", 502, "broke off"),
        (b"HTTP/1.1 101 S\r\nUpgrade: h2c\r\n\r\n", 502, "another protocol"),
        (b"HTTP/1.1 999 Odd\r\n\r\n", 502, "broke off"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 502, "broke off"),
        (b"HTTP/1.1 101 S\r\n" + b"a: b\r\n" * 20_000, 502, "broke off"),
        (b"", 502, "broke off"),
    ],
)
async def test_an_engine_that_does_not_open_it(answer: bytes, status: int, said: str) -> None:
    async def script(exchange: Exchange) -> None:
        with contextlib.suppress(ConnectionError):
            await exchange.write(answer)
        exchange.close()

    async with start_gateway(script) as gateway, asking(gateway) as wire:
        answered = await wire.read_head()
        await wire.read_body()
        assert answered.status == status
        assert said in answered.json()["error"]["message"]
        assert answered.header("connection") == "close"
        [grant] = gateway.controller.grants
        assert grant.lease is None
        assert grant.outcome is (Outcome.FAILED if status >= 500 else Outcome.OK)
        await until(lambda: gateway.engine.open == 0)


async def test_interim_answers_are_skipped() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" + AGREED)
        await exchange.peer_left()

    async with start_gateway(script) as gateway, asking(gateway) as wire:
        assert (await wire.read_head()).status == 101
        [request] = gateway.engine.requests
        assert request.header("connection") == "Upgrade"
        assert request.header("content-length") is None


async def test_an_engine_that_takes_no_connection() -> None:
    async with gateway_before() as gateway:
        gateway.controller.engine = Endpoint("127.0.0.1", 1)
        async with asking(gateway) as wire:
            assert (await wire.read_head()).status == 502
        assert gateway.controller.outcomes == [Outcome.UNREACHABLE] * 2  # asked once more


async def test_a_client_that_leaves_while_it_waits_withdraws_its_request() -> None:
    async with gateway_before() as gateway:

        async def never(call: GrantCall, grant: FakeGrant) -> None:
            await asyncio.Event().wait()

        gateway.controller.decide = never
        async with asking(gateway) as wire:
            await until(lambda: gateway.controller.waiting == 1)
            wire.abort()
        await until(lambda: gateway.controller.withdrawn == 1)


async def test_a_client_that_leaves_while_the_engine_thinks_about_it() -> None:
    async with start_gateway(answers_nothing) as gateway, asking(gateway) as wire:
        await until(lambda: bool(gateway.engine.requests))
        wire.abort()
        await until(lambda: gateway.engine.open == 0)
        await gateway.settles()
        assert gateway.controller.outcomes == [Outcome.CANCELLED]


async def test_a_client_that_vanishes_takes_its_socket_and_lease_along() -> None:
    left = asyncio.Event()

    async def waits(socket: ServerConnection) -> None:
        await socket.wait_closed()
        left.set()

    async with gateway_before(waits) as gateway:
        async with opened(gateway) as client:
            client.transport.abort()
            await asyncio.wait_for(left.wait(), HANG_S)
        await no_lease(gateway)


@pytest.mark.parametrize("is_abort", [True, False])
async def test_an_engine_that_dies_is_a_close_with_a_reason(is_abort: bool) -> None:
    async def dies(socket: ServerConnection) -> None:
        await socket.recv()
        if is_abort:
            socket.transport.abort()
        else:
            socket.transport.close()

    async with gateway_before(dies) as gateway:
        async with opened(gateway) as client:
            await client.send("die")
            assert await closed(client) == (1012, "the engine has ended; connect again")
        await no_lease(gateway)


async def test_half_a_message_does_not_end_as_a_whole_one() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(AGREED + Frame(Opcode.TEXT, b"whole").serialize(mask=False)[:4])
        exchange.close()

    async with start_gateway(script) as gateway, asking(gateway) as wire:
        assert (await wire.read_head()).status == 101
        data = b""
        with contextlib.suppress(ConnectionError):
            data = await asyncio.wait_for(wire.reader.read(), HANG_S)
        assert b"\x88" not in data
        await no_lease(gateway)


async def test_the_end_of_the_server_is_said() -> None:
    async with gateway_before() as gateway:
        client = await opened(gateway)
    assert await closed(client) == (1012, "rota is stopping")
    assert not gateway.controller.active
    await client.close()


async def test_the_end_of_the_server_refuses_who_waits() -> None:
    async with gateway_before() as gateway:

        async def never(call: GrantCall, grant: FakeGrant) -> None:
            await asyncio.Event().wait()

        gateway.controller.decide = never
        opening = asyncio.create_task(opened(gateway).__aenter__())
        await until(lambda: gateway.controller.waiting == 1)
    with pytest.raises(InvalidStatus) as error:
        await opening
    assert error.value.response.status_code == 503


async def test_a_reader_that_stalls_stops_the_writer() -> None:
    """Both ways: what is read of one end is bounded by what the other takes."""
    sent = [0]
    piece = os.urandom(64 * 1024)  # nothing to be compressed

    async def floods(socket: ServerConnection) -> None:
        for _ in range(1_000):
            await socket.send(piece)
            sent[0] += len(piece)

    async with gateway_before(floods) as gateway, opened(gateway, max_queue=1) as client:
        await until(lambda: sent[0] > 0)
        before = -1
        while before != sent[0]:
            before = sent[0]
            await asyncio.sleep(0.3)
        assert sent[0] < 1_000 * len(piece) / 2
        client.transport.abort()


async def test_a_flood_of_tiny_frames_leaves_others_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pump that always has something to pass on goes to the end of the line after each piece."""
    turns = [0]

    class Counting(Frames):
        def read(self, piece: bytes) -> bool:
            turns[0] += 1
            return super().read(piece)

    monkeypatch.setattr(sockets, "PIECE_BYTES", 1_024)
    reader, frames = asyncio.StreamReader(), Counting()
    reader.feed_data(b"\x82\x00" * 512 * 50)
    reader.feed_eof()

    class Sink:
        def write(self, piece: bytes) -> None: ...
        async def drain(self) -> None: ...

    class Free:
        async def use(self) -> None: ...

    pump = asyncio.create_task(sockets._pump(reader, Sink(), frames, Free()))  # type: ignore[arg-type]
    seen: list[int] = []
    while not pump.done():
        await asyncio.sleep(0)
        seen.append(turns[0])
    assert turns[0] == 50
    assert len(set(seen)) >= 50, seen


# -- idle


async def test_a_socket_that_is_never_idle_keeps_its_lease_when_silent() -> None:
    async with gateway_before() as gateway, opened(gateway):
        await asyncio.sleep(0.2)
        assert gateway.controller.active


async def test_pings_do_not_count_as_use_and_pass_without_a_lease() -> None:
    # case U2
    async with (
        gateway_before(idle_ms=100) as gateway,
        opened(gateway, ping_interval=0.01) as client,
    ):
        await no_lease(gateway)
        async with asyncio.timeout(HANG_S):
            await (await client.ping())
        assert not gateway.controller.active


async def test_a_message_takes_a_lease_on_the_same_replica_first() -> None:
    async with gateway_before(idle_ms=50) as gateway, opened(gateway) as client:
        await no_lease(gateway)
        gateway.controller.retaking = asyncio.Event()
        await client.send("one")
        await client.send("two")
        await until(lambda: ("lease again", "m-1") in gateway.controller.asked)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.recv(), 0.1)
        gateway.controller.retaking.set()
        assert [await client.recv(), await client.recv()] == ["one", "two"]
        again = [asked for asked in gateway.controller.asked if asked[0] == "lease again"]
        assert len(again) == 1
        await no_lease(gateway)


async def test_the_engine_speaking_takes_one_too() -> None:
    speak = asyncio.Event()

    async def speaks(socket: ServerConnection) -> None:
        await speak.wait()
        await socket.send("news")
        await socket.wait_closed()

    async with gateway_before(speaks, idle_ms=50) as gateway, opened(gateway) as client:
        await no_lease(gateway)
        speak.set()
        assert await client.recv() == "news"
        assert ("lease again", "m-1") in gateway.controller.asked


async def test_an_idle_socket_of_a_replica_that_is_gone_is_closed_with_a_reason() -> None:
    async with gateway_before(idle_ms=50) as gateway, opened(gateway) as client:
        await no_lease(gateway)
        gateway.controller.gone.add("m-1")
        await client.send("hello?")
        assert await closed(client) == (1012, "replica m-1 is gone")


async def test_a_lease_that_expires_is_taken_again_or_the_socket_closed() -> None:
    async with gateway_before() as gateway, opened(gateway) as client:
        [lease] = gateway.controller.active
        gateway.controller.end_lease(lease, "expired")
        await until(lambda: list(gateway.controller.active) == ["lease-2"])
        await client.send("on")
        assert await client.recv() == "on"
        gateway.controller.gone.add("m-1")
        gateway.controller.end_lease("lease-2", "expired")
        assert (await closed(client))[0] == 1012


async def test_many_sockets_leave_nothing_behind() -> None:
    """Clients leave at random points, half of them without a word."""

    async def one(gateway: Gateway, number: int) -> None:
        async with asking(gateway) as wire:
            for _ in range(number % 7):
                await asyncio.sleep(0)
            if number % 3:
                await wire.read_head()
                await wire.write(Frame(Opcode.TEXT, b"x" * number).serialize(mask=True))
            if number % 2:
                wire.abort()

    async with gateway_before() as gateway:
        before = descriptors()
        await asyncio.gather(*(one(gateway, number) for number in range(60)))
        await no_lease(gateway)
        await gateway.settles()
        await until(lambda: descriptors() <= before)
        await until(lambda: len(asyncio.all_tasks()) < 12)
