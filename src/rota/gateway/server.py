"""uvicorn in our own loop: we own the socket, the signals and the end.

uvicorn is given a bound socket, so a taken port is our complaint and can name who holds it.
Its signal handling is left out: rota drains its grants before the server is stopped, and only
rota knows when that is.

Against slow and vanished clients: the kernel ends a connection whose peer takes nothing for
`STALL_S_MAX` (TCP_USER_TIMEOUT, inherited from the listening socket), so neither a stalled
reader nor a machine that lost its power holds a slot for good; `intake` bounds the wait for a
body, `connection` what precedes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from rota.config.values import Config
from rota.errors import ConfigError
from rota.gateway.app import App
from rota.gateway.connection import Connection
from rota.node import ports

# SDKs keep an idle connection for 5 s; closing at the same moment would cut their next request.
KEEP_ALIVE_S = 75
STALL_S_MAX = 300
STOP_S_MAX = 2  # for answers still under way; rota has drained its grants before
LAST_WORDS_S_MAX = 1  # for telling those cut off after that
BACKLOG = 2_048

# Far above the default (700, 10, 10): requests leave few cycles, and scanning for them took
# 14 to 35 % of a request's CPU at 64 clients.
_GC_THRESHOLD = (50_000, 20, 50)

_log = logging.getLogger(__name__)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The fastest event loop there is, for `asyncio.Runner`: uvloop's, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class RunningServer:
    """A server that accepts connections."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@contextlib.asynccontextmanager
async def serve(
    app: App, config: Config, *, listener: socket.socket | None = None
) -> AsyncIterator[RunningServer]:
    """Serve until the block is left; then take no new connection, give answers still under way
    `STOP_S_MAX`, and close everything, the app's connections to engines included.

    Args:
        listener: a bound socket, closed at the end; None = one is bound to `config.host` and
            `config.port` (0 = any free one; `RunningServer.port` says which).

    Raises:
        ConfigError: the address cannot be had; the message says who holds it, if that can be
            seen.
    """
    listener = listener or bind(config.host, config.port)
    host, port = listener.getsockname()[:2]
    server = _Server(_uvicorn_config(app))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        yield RunningServer(host, port)
    finally:
        listening.cancel()
        server.leave()
        await asyncio.shield(_end(running, app))


async def _end(running: asyncio.Task[None], app: App) -> None:
    await running
    await app.close()


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address. Raises: ConfigError: it cannot be had."""
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {where}: {error}", code="listen_failed") from error
    # `localhost` is two addresses; every client tries the older one.
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_S_MAX * 1_000)
        listener.bind(address)
        listener.listen(BACKLOG)  # now, so that a second rota is told so at once
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        holder = ports.holder_of(port, anywhere=True) if is_taken else None
        by = f"; {holder} listens there" if holder else ""
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}{by}", code="listen_failed"
        ) from error
    return listener


@contextlib.contextmanager
def settled_memory() -> Iterator[None]:
    """Spare the collector what start-up made and will stay, and run it rarely.

    For the process that serves; undone at the end of the block.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers and its polling, and with a bounded end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """Once a second, for the date that answers carry and for clients that never come to
        the point; uvicorn's own looks ten times."""
        clock = asyncio.get_running_loop().time
        while not self._leaving.is_set():
            await self.on_tick(0)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):  # not one that became a web socket
                    connection.turn_away_if_slow(clock())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), 1)

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order: the socket, idle connections, answers under way, whoever is left."""
        for listening in self.servers:
            listening.close()
        for given in sockets or ():
            given.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        await self._quiet(STOP_S_MAX)
        for task in list(state.tasks):
            task.cancel()  # each tells its client why, if that listens
        await self._quiet(LAST_WORDS_S_MAX)
        for connection in list(state.connections):
            connection.transport.abort()
        await self._quiet(LAST_WORDS_S_MAX)

    async def _quiet(self, bound_s: float) -> None:
        """Wait for connections and tasks to end. They tell nobody, so it is looked."""
        state = self.server_state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.002)


def _uvicorn_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=Connection,
        ws="none",  # see `sockets`
        lifespan="off",
        loop="none",  # it runs in the loop it is started from
        log_config=None,
        log_level="critical",  # the app logs its own failures, with their cause
        access_log=False,
        proxy_headers=False,  # a peer's address is the socket's, whatever its headers say
        server_header=False,  # the engine's own is passed on
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
