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
from pathlib import Path

from rota.cli.check import kind_of
from rota.cli.streams import log_to_stderr, open_missing
from rota.cluster.local import LocalCluster
from rota.config import load
from rota.config.fit import fits, needs_of, want_of
from rota.config.units import show_mib
from rota.config.values import Config
from rota.controller import Controller
from rota.core.types import Model
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
    """A rota that accepts requests."""

    controller: Controller
    url: str


def serve(path: Path, *, listen: str | None, allow_open: bool, state_dir: Path | None) -> None:
    """Serve a file until a signal. Raises ConfigError: it cannot be served."""
    open_missing()
    _raise_descriptor_limit()
    config = load(path, listen=listen, allow_open=allow_open, state_dir=state_dir)
    with log_to_stderr(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_until_signalled(config))


async def _until_signalled(config: Config) -> None:
    ending = end_on_signal()
    for warning in config.warnings:
        log.warning("%s", warning)
    async with running(config) as rota:
        _say_what_is_served(rota.controller)
        log.info("listening on %s", rota.url)
        with settled_memory():
            await ending.wait()
        log.info("ending: the running get %d s", DRAIN_MS // 1000)
    log.info("ended")


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Running]:
    """Serve while the block runs; then drain, and end everything that was started.

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
                app = App(controller, records=leases)
                async with serve_app(app, config, listener=listener) as server:
                    try:
                        yield Running(controller, server.url)
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


def end_on_signal() -> asyncio.Event:
    """An event that the first SIGTERM, SIGINT or SIGHUP (the terminal is gone) sets; a second
    one ends the process at once.

    Engines end with the process, however it ends: their guards see to it. A signal that rota
    was started to ignore, as under nohup, stays ignored.
    """
    ending = asyncio.Event()

    def heard(number: int) -> None:
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
    config = controller.config
    devices = controller.status()["devices"]
    assert isinstance(devices, list), devices
    totals = {str(device["id"]): int(device["memory_mib"]) for device in devices}
    where = ", ".join(f"{device} {show_mib(mib)}" for device, mib in totals.items())
    log.info("devices, %s: %s", "as stated" if config.devices else "as found", where)
    for entry in config.models.values():
        log.info("model %s: %s", entry.name, kind_of(entry))
    if not config.devices:  # else the file's own warnings have said so
        _say_what_will_not_fit([entry.model for entry in config.models.values()], totals)


def _say_what_will_not_fit(models: list[Model], totals: dict[str, int]) -> None:
    served = [model for model in models if not model.is_external and not model.scaling.is_off]
    for model in served:
        if not fits([want_of(model)], totals):
            log.warning("model %s will not fit: it needs %s", model.name, needs_of(model))
    always = [model for model in served for _ in range(model.scaling.min)]
    if not fits([want_of(model) for model in always], totals):
        names = ", ".join(sorted({model.name for model in always}))
        log.warning("models that always run will not fit together: %s", names)
