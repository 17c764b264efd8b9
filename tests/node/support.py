"""Set-up for the node's tests: a node on fake engines, its events, and who is still alive.

Everything is real but the engines, which are `rota.testing.fake_engine`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rota.config.values import CommandEngine, DeviceConfig, EngineConfig, ModelConfig
from rota.core.effects import Start, Stop
from rota.core.events import Event, ReplicaReady, ReplicaStopped
from rota.core.types import Model, Placement, Scaling
from rota.node import Node, processes
from rota.node.guard import descendants

PATIENCE_S = 30.0  # a bound for what must come; never a figure that is asserted


def fake(*knobs: str, **engine: Any) -> CommandEngine:
    command = (sys.executable, "-P", "-m", "rota.testing.fake_engine", "--port", "${PORT}")
    return CommandEngine((*command, *knobs), **engine)


def script(text: str, *args: str, **engine: Any) -> CommandEngine:
    return CommandEngine((sys.executable, "-c", text, *args), **engine)


def model(
    name: str,
    engine: EngineConfig,
    *,
    start_timeout_ms: int = 30_000,
    start_timeout_ms_max: int = 120_000,
    silent_after_ms: int = 60_000,
) -> ModelConfig:
    return ModelConfig(
        Model(name, Scaling(0, 1, 0), 100),
        engine,
        start_timeout_ms=start_timeout_ms,
        start_timeout_ms_max=start_timeout_ms_max,
        silent_after_ms=silent_after_ms,
    )


@dataclass
class Scene:
    """A node and what it posts."""

    node: Node
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    _started: int = 0

    def start(self, name: str, *devices: str) -> str:
        self._started += 1
        replica = f"{name}-{self._started}"
        placement = Placement(self.node.id, devices, (100,) * len(devices))
        self.node.start(Start(replica, name, placement, "a test"))
        return replica

    async def up(self, name: str, *devices: str) -> str:
        replica = self.start(name, *devices)
        assert await self.next() == ReplicaReady(replica)
        return replica

    def stop(self, replica: str, grace_ms: int = 10_000) -> None:
        self.node.stop(Stop(replica, "any", grace_ms, "a test"))

    async def next(self) -> Event:
        return await asyncio.wait_for(self.events.get(), PATIENCE_S)

    async def stopped(self) -> ReplicaStopped:
        event = await self.next()
        assert isinstance(event, ReplicaStopped), event
        return event

    def pid(self, replica: str) -> int:
        facts = self.node.facts(replica)
        assert facts is not None
        assert facts.pid is not None
        return facts.pid

    def guard_pid(self, replica: str) -> int:
        child = self.node._replicas[replica].child
        assert child is not None
        assert child.guard_pid is not None
        return child.guard_pid

    def server_pid(self) -> int:
        server = self.node._guards._server
        assert server is not None
        return server.pid

    def all_of(self, replica: str) -> set[Alive]:
        """The engine and everything below its guard."""
        return identities({self.pid(replica), *descendants(self.guard_pid(replica))})

    async def ask(self, replica: str, path: str) -> Any:
        endpoint = self.node.endpoint(replica)
        return await asyncio.to_thread(get, endpoint.port, path)


@asynccontextmanager
async def scene(
    state_dir: Path, *models: ModelConfig, devices: Iterable[DeviceConfig] = ()
) -> AsyncIterator[Scene]:
    events: asyncio.Queue[Event] = asyncio.Queue()
    catalog = {one.name: one for one in models}
    node = Node("here", tuple(devices), catalog, state_dir, events.put_nowait)
    await node.open()
    try:
        yield Scene(node, events)
    finally:
        await node.close()


@dataclass(frozen=True)
class Alive:
    """A process that cannot be mistaken for a later one of the same pid."""

    pid: int
    start: int | None

    def is_alive(self) -> bool:
        return self.start is not None and processes.start_ticks(self.pid) == self.start

    def is_left(self) -> bool:
        """Alive, or dead and not reaped."""
        return Path(f"/proc/{self.pid}").exists() and (
            self.is_alive() or processes.start_ticks(self.pid) is None
        )


def identities(pids: Iterable[int]) -> set[Alive]:
    return {Alive(pid, processes.start_ticks(pid)) for pid in pids}


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)


async def all_end(those: Iterable[Alive]) -> None:
    """Wait until none of them lives, and fail naming those that do not end."""
    watched = set(those)
    assert watched
    await until(lambda: not any(one.is_alive() for one in watched), f"the end of {watched}")


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())
