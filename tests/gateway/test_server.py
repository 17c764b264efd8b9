"""The server's life: its port, its end, and what slow clients can do to it.
How: real sockets; a process of our own holds the port that is taken."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from contextlib import AsyncExitStack

import pytest

from rota.config.values import Config
from rota.core.events import Outcome
from rota.errors import ConfigError
from rota.gateway import intake
from rota.gateway.app import App
from rota.gateway.server import bind, serve, settled_memory
from tests.gateway.conftest import start_gateway, until
from tests.gateway.fakes import (
    EVENTS_HEAD,
    Exchange,
    FakeController,
    FakeGrant,
    GrantCall,
    answering,
    chunk,
    make_config,
)
from tests.gateway.test_client import settled
from tests.gateway.wire import CHAT, HANG_S, ask, chat, connect, request_bytes


def app_for(config: Config) -> App:
    return App(FakeController(config, engine=None))  # type: ignore[arg-type]


async def endless(exchange: Exchange) -> None:
    await exchange.write(EVENTS_HEAD)
    while True:
        await exchange.write(chunk(b"x" * 65_536))


# case P2
async def test_taken_port_names_its_holder() -> None:
    code = "import socket,sys; s=socket.create_server(('127.0.0.1',0));"
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        port = int(await holder.stdout.readline())
        config = make_config(port=port)
        with pytest.raises(ConfigError) as raised:
            async with serve(app_for(config), config):
                pass
        assert f"127.0.0.1:{port}" in raised.value.message
        assert f"pid {holder.pid}" in raised.value.message
    finally:
        holder.kill()
        await holder.communicate()


@pytest.mark.parametrize("host", ["256.0.0.1", "no such host", "203.0.113.1", "a" * 300])
async def test_address_that_cannot_be_had(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_bound_port_is_reported(host: str) -> None:
    config = make_config(host=host)
    async with serve(app_for(config), config) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(server.host, server.port)


async def test_given_socket_is_used_and_closed() -> None:
    listener = bind("127.0.0.1", 0)
    config = make_config(port=1)
    async with serve(app_for(config), config, listener=listener) as server:
        assert server.port == listener.getsockname()[1]
        assert (await ask(server.port, "GET", "/health")).status == 200
    assert listener.fileno() == -1


async def test_signals_stay_ours() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with start_gateway(answering(b"")):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


async def test_stopping_answers_who_waits_and_ends_who_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.gateway.server.STOP_S_MAX", 0.05)

    async def script(exchange: Exchange) -> None:
        await exchange.write(EVENTS_HEAD + chunk(b"data: 1\n\n"))
        await exchange.peer_left()

    async def decide(call: GrantCall, grant: FakeGrant) -> None:
        if call.model != "m":
            await asyncio.Event().wait()

    async with AsyncExitStack() as connections:  # they outlive the server they are made to
        async with start_gateway(script) as gateway:
            gateway.controller.decide = decide
            waiting = await connections.enter_async_context(connect(gateway.port))
            streaming = await connections.enter_async_context(connect(gateway.port))
            await waiting.write(request_bytes("POST", CHAT, chat("far")))
            await streaming.write(request_bytes("POST", CHAT, chat("m", stream=True)))
            await streaming.read_head()
            await streaming.read_piece()
            await until(lambda: gateway.controller.waiting == 1)
        answer = await waiting.read_head()
        assert (answer.status, answer.header("connection")) == (503, "close")
        assert (await waiting.read_body()).json()["error"]["code"] == "shutting_down"
        answer = await streaming.read_body()
        assert b"shutting_down" in answer.body
        assert gateway.controller.outcomes == [Outcome.CANCELLED]
        assert (gateway.controller.waiting, gateway.controller.running) == (0, 0)


async def test_stalled_reader_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.gateway.server.STOP_S_MAX", 0.05)
    monkeypatch.setattr("rota.gateway.server.LAST_WORDS_S_MAX", 0.05)
    async with AsyncExitStack() as connections:
        async with start_gateway(endless) as gateway:
            wire = await connections.enter_async_context(connect(gateway.port, limit=1024))
            await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
            await settled(lambda: len(gateway.controller.grants))
        assert gateway.controller.outcomes == [Outcome.CANCELLED]


async def test_upload_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "UPLOAD_STALL_S_MAX", 0.05)
    async with start_gateway(answering(b"")) as gateway, connect(gateway.port) as wire:
        await wire.write(request_bytes("POST", CHAT, headers={"content-length": "100"}) + b"{")
        assert (await wire.read_head()).status == 408
        assert (await wire.read_body()).json()["error"]["code"] == "request_timeout"
        assert await asyncio.wait_for(wire.reader.read(), HANG_S) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the bound is Linux's")
async def test_reader_that_stalls_for_good_is_ended_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.gateway.server.STALL_S_MAX", 1)

    async with start_gateway(endless) as gateway, connect(gateway.port, limit=1024) as wire:
        await wire.write(request_bytes("POST", CHAT, chat(stream=True)))
        await until(lambda: gateway.controller.outcomes == [Outcome.CANCELLED])
        await until(lambda: gateway.engine.open == 0)


async def test_idle_connections_do_not_delay_the_end() -> None:
    async with start_gateway(answering(b"")) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        await ask(gateway.port, "GET", "/health")
    assert await asyncio.wait_for(reader.read(), HANG_S) == b""
    writer.close()
    await writer.wait_closed()


def test_memory_is_settled_and_given_back() -> None:
    before = gc.get_threshold()
    with settled_memory():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
