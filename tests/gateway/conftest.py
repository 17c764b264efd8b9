"""A whole gateway on a free port, before a fake controller and a fake engine.

Every async test of this room runs twice, on asyncio's loop and on uvloop: the data path leans
on how transports pause, close and report, and users get uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
import uvloop

from rota.gateway.app import App
from rota.gateway.client import Client
from rota.gateway.server import serve
from tests.gateway.fakes import FakeController, FakeEngine, Script, fake_engine, make_config
from tests.gateway.wire import HANG_S


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@dataclass
class Gateway:
    """What a test sees of a running gateway."""

    port: int
    controller: FakeController
    engine: FakeEngine
    client: Client

    async def settles(self) -> None:
        """Wait until nothing waits, nothing is granted and the engine has no busy request."""
        await until(lambda: not self.controller.waiting and not self.controller.running)


Start = Callable[[Script], AbstractAsyncContextManager[Gateway]]


@asynccontextmanager
async def start_gateway(script: Script, **config: object) -> AsyncIterator[Gateway]:
    async with fake_engine(script) as engine:
        controller = FakeController(make_config(**config), engine.endpoint)
        client = Client()
        app = App(controller, client=client)
        async with serve(app, controller.config) as server:
            yield Gateway(server.port, controller, engine, client)


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that other tasks bring about; a bound that strikes fails the test."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.002)
