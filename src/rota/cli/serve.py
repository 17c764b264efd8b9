"""`rota serve`: puts the rooms together, and takes them apart in order when told to end.

`running` is the composition root, used by the demo and the tests as well. The order is: bind
(a taken port is said before anything starts), lock the state directory, open the node, serve.
The end runs backwards, after the controller has drained: callers are answered while there is
still a server to answer them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from rota.cli.check import kind_of
from rota.cli.reloader import Loaded, Reloader, Source, beside
from rota.cli.room import say_devices, warn_of_room
from rota.cli.streams import log_to_stderr, open_missing
from rota.cluster.local import LocalCluster
from rota.config.values import Config
from rota.controller import Controller
from rota.errors import ConfigError
from rota.gateway.app import App
from rota.gateway.server import bind, loop_factory, settled_memory
from rota.gateway.server import serve as serve_app
from rota.node.lock import StateLock
from rota.store import LeaseStore

DRAIN_MS = 10_000
DESCRIPTORS = 65_536
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger("rota")


@dataclass(frozen=True, slots=True)
class Running:
    """A rota that accepts requests.

    Args:
        reloader: None = it was not started from a file that may change.
    """

    controller: Controller
    url: str
    reloader: Reloader | None = None


def serve(source: Source, *, is_watched: bool) -> None:
    """Serve a file until a signal.

    Args:
        is_watched: load it again whenever it changes.

    Raises:
        ConfigError: it cannot be served.
    """
    open_missing()
    _raise_descriptor_limit()
    loaded = source.open()
    with log_to_stderr(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_until_signalled(loaded, is_watched=is_watched))


async def _until_signalled(loaded: Loaded, *, is_watched: bool) -> None:
    asked = asyncio.Event()
    ending = end_on_signal(asked)
    if loaded.config.dialect != "rota":
        log.info("%s is read as %s's", loaded.config.path, loaded.config.dialect)
    for warning in loaded.config.warnings:
        log.warning("%s", warning)
    async with running(loaded.config, loaded) as rota:
        assert rota.reloader is not None
        _say_what_is_served(rota.controller)
        log.info("listening on %s", rota.url)
        works = [rota.reloader.reload_when(asked)]
        works += [rota.reloader.watch()] if is_watched else []
        with settled_memory():
            async with beside(*works):
                await ending.wait()
        log.info("ending: the running get %d s", DRAIN_MS // 1000)
    log.info("ended")


@contextlib.asynccontextmanager
async def running(config: Config, loaded: Loaded | None = None) -> AsyncIterator[Running]:
    """Serve while the block runs; then drain, and end everything that was started.

    Args:
        loaded: where the configuration is from; None = it is not loaded again.

    Raises:
        ConfigError: the port or the state directory is taken, or of no use.
    """
    listener = bind(config.host, config.port)
    with contextlib.closing(listener):
        config = replace(config, port=listener.getsockname()[1])
        with (
            StateLock(config.state_dir, f"{config.host}:{config.port}"),
            LeaseStore(config.state_dir) as leases,
        ):
            async with _controlled(config, leases) as controller:
                reloader = None if loaded is None else Reloader(loaded, controller)
                app = App(controller, records=leases, reloader=reloader)
                async with serve_app(app, config, listener=listener) as server:
                    try:
                        yield Running(controller, server.url, reloader)
                    finally:
                        await controller.shutdown(grace_ms=DRAIN_MS)


@contextlib.asynccontextmanager
async def _controlled(config: Config, leases: LeaseStore) -> AsyncIterator[Controller]:
    """A controller over this machine. Raises ConfigError: its state directory is of no use."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            controller = Controller(config, LocalCluster(config), leases)
            await stack.enter_async_context(controller)
        except OSError as error:
            raise ConfigError(
                f"cannot use the state directory {config.state_dir}: {error.strerror}",
                code="state_unusable",
            ) from error
        yield controller


def end_on_signal(reload_asked: asyncio.Event | None = None) -> asyncio.Event:
    """An event that the first SIGTERM, SIGINT or SIGHUP sets; a second one ends the process at
    once.

    Two things are said by SIGHUP: that the terminal is gone, and that a daemon's file is to be
    loaded again. It is the first if rota was started on a terminal and that is gone, else the
    second. Engines end with the process, however it ends: their guards see to it. A signal that
    rota was started to ignore, as under nohup, stays ignored.

    Args:
        reload_asked: set by a SIGHUP of the second kind; None = each one ends.
    """
    ending = asyncio.Event()
    terminals = [fd for fd in (0, 2) if os.isatty(fd)]

    def heard(number: int) -> None:
        is_gone = any(not os.isatty(fd) for fd in terminals)
        if number == signal.SIGHUP and reload_asked is not None and not is_gone:
            reload_asked.set()
            return
        if ending.is_set():
            os._exit(128 + number)
        ending.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, heard, number)
    return ending


def _raise_descriptor_limit() -> None:
    """Up to what we may have, or enough: a soft limit of 1,024 is the usual default, and one
    model's full queue passes it. Not beyond, for engines inherit it, and old programs close
    each descriptor they could have had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with a bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say_what_is_served(controller: Controller) -> None:
    """What was found, who is off, and what will not fit on what was found."""
    say_devices(controller)
    for entry in controller.config.models.values():
        log.info("model %s: %s", entry.name, kind_of(entry))
    warn_of_room(controller)
