"""A whole rota in this process, over real fake-engine processes and fake devices.

The fake devices refuse what does not fit, as a driver would, so a rota that starts an engine
into memory that is not free is caught by the engine's own crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from rota.cluster.local import LocalCluster
from rota.config.values import CommandEngine, Config, DeviceConfig, JobsConfig, ModelConfig
from rota.controller import Controller
from rota.core.types import Model, Scaling
from rota.gateway.app import App
from rota.gateway.server import serve
from rota.node.guard import descendants
from rota.store import LeaseStore
from rota.testing.fake_devices import FakeDevices

ON_DEMAND = Scaling(0, 1, 600_000)
OFF = Scaling(0, 0, 0)
ALWAYS = Scaling(1, 1, 600_000)
BOUND_S = 30.0  # on every wait in a test; nothing is expected to take this long


@dataclass(frozen=True)
class Fake:
    """A model served by the fake engine.

    Args:
        knobs: its flags, see `rota.testing.fake_engine`.
        takes_mib: what the engine really takes; by default what the catalog says.
        shell: what a shell does first, when the engine is to be started by one.
        shell_tail: what the engine's command ends in then.
    """

    name: str
    knobs: tuple[str, ...] = ()
    memory_mib: int = 600
    takes_mib: int | None = None
    scaling: Scaling = ON_DEMAND
    start_timeout_ms: int = 30_000
    silent_after_ms: int = 60_000
    shell: str = ""
    shell_tail: str = ""
    aliases: tuple[str, ...] = ()
    upstream_model: str | None = None
    facts: tuple[tuple[str, Any], ...] = ()
    jobs: JobsConfig | None = None
    websocket_idle_ms: int = 0

    def entry(self, devices: Path) -> ModelConfig:
        takes = self.memory_mib if self.takes_mib is None else self.takes_mib
        command = (
            *(sys.executable, "-m", "rota.testing.fake_engine", "--port", "${PORT}"),
            *("--name", self.name, "--device", str(devices), "--device-mib", str(takes)),
            *self.knobs,
        )
        if self.shell:
            command = ("sh", "-c", f"{self.shell} {' '.join(command)} {self.shell_tail}")
        facts: dict[str, Any] = {"stop_grace_ms": 1_000, "slots": 10} | dict(self.facts)
        return ModelConfig(
            model=Model(self.name, self.scaling, self.memory_mib, **facts),
            engine=CommandEngine(command),
            aliases=self.aliases,
            upstream_model=self.upstream_model,
            start_timeout_ms=self.start_timeout_ms,
            silent_after_ms=self.silent_after_ms,
            jobs=self.jobs,
            websocket_idle_ms=self.websocket_idle_ms,
        )

    def with_facts(self, **facts: Any) -> Fake:
        return replace(self, facts=(*self.facts, *facts.items()))


class Rig:
    """A running rota, and a client beside it."""

    def __init__(
        self,
        url: str,
        controller: Controller,
        devices: FakeDevices | None,
        http: httpx2.AsyncClient,
    ) -> None:
        self.url = url
        self.controller = controller
        self._devices = devices
        self.http = http

    @property
    def devices(self) -> FakeDevices:
        assert self._devices is not None, "these engines are real"
        return self._devices

    def processes(self) -> dict[str, list[int]]:
        """The engines that run, by model, as the machine has it and not as rota does."""
        mine = str(self.devices.path)
        found: dict[str, list[int]] = {}
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "rota.testing.fake_engine" in argv and mine in argv and is_alive(pid):
                    found.setdefault(argv[argv.index("--name") + 1], []).append(pid)
        return found

    async def chat(self, model: str, *, stream: bool = False, **headers: str) -> httpx2.Response:
        """One chat request."""
        body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post("/v1/chat/completions", json=body, headers=named)

    @asynccontextmanager
    async def begun(self, model: str) -> AsyncIterator[AsyncIterator[str]]:
        """A streamed chat whose answer has begun: the lines of the rest."""
        body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            yield lines

    def model(self, name: str) -> dict[str, Any]:
        """A model's status."""
        models: Any = self.controller.status()["models"]
        return next(model for model in models if model["name"] == name)

    def state(self, name: str) -> str:
        return str(self.model(name)["state"])

    def pid(self, name: str) -> int | None:
        """The process of a model's only replica."""
        replicas = self.model(name)["replicas"]
        return replicas[0]["pid"] if replicas else None

    def in_flight(self) -> int:
        models: Any = self.controller.status()["models"]
        return sum(r["in_flight"] for model in models for r in model["replicas"])

    def waiting(self) -> int:
        models: Any = self.controller.status()["models"]
        return sum(model["waiting"] for model in models)

    async def engine_stats(self, name: str) -> dict[str, Any]:
        """What the fake engine says of itself, asked past rota."""
        port = self.model(name)["replicas"][0]["port"]
        async with httpx2.AsyncClient(timeout=BOUND_S) as http:
            stats: dict[str, Any] = (await http.get(f"http://127.0.0.1:{port}/stats")).json()
            return stats


@asynccontextmanager
async def rota(
    tmp_path: Path, fakes: Iterable[Fake], devices: Mapping[str, int], **config: Any
) -> AsyncIterator[Rig]:
    """Run rota over fakes until the block is left; then they may hold no memory."""
    path = tmp_path / "devices.json"
    fake_devices = FakeDevices.create(path, devices)
    entries = [fake.entry(path) for fake in fakes]
    settings = Config(
        host="127.0.0.1",
        port=0,
        models={entry.name: entry for entry in entries},
        devices=tuple(DeviceConfig(name, mib, visible=name) for name, mib in devices.items()),
        state_dir=tmp_path / "state",
        **config,
    )
    async with running(settings, fake_devices) as rig:
        yield rig
    assert set(fake_devices.used_mib().values()) <= {0}, fake_devices.used_mib()


@asynccontextmanager
async def running(settings: Config, devices: FakeDevices | None = None) -> AsyncIterator[Rig]:
    """Run rota until the block is left; then no process of it may remain."""
    before = set(descendants(os.getpid()))
    settings.state_dir.mkdir(exist_ok=True)
    with LeaseStore(settings.state_dir) as leases:
        async with (
            Controller(settings, LocalCluster(settings), leases) as controller,
            serve(App(controller, records=leases), settings) as server,
            httpx2.AsyncClient(base_url=server.url, timeout=BOUND_S) as http,
        ):
            yield Rig(server.url, controller, devices, http)
            await controller.shutdown(grace_ms=0)
    await until(lambda: before.issuperset(descendants(os.getpid())), "no process is left")


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for a condition, with a bound."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"still not so: {what or condition}") from None


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end(pid: int, signal: int) -> None:
    os.kill(pid, signal)
