"""Fakes for the gateway's two neighbours: a scripted engine and a scripted controller.

Both are real where it matters (the engine is a socket that sends exact bytes) and count what
a test must see come back to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rota.config.values import CommandEngine, Config, ModelConfig, UrlEngine
from rota.core.events import Outcome
from rota.core.types import LeaseClaim, Model, Scaling
from rota.engines.base import Endpoint
from rota.errors import ReplicaError, RequestError
from rota.store import LeaseKeeper
from tests.gateway.wire import HANG_S


@dataclass
class Received:
    """A request as the engine saw it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


class Exchange:
    """One request at the fake engine, and the means to answer it badly or well."""

    def __init__(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.request = request
        self._reader = reader
        self.writer = writer

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def peer_left(self) -> None:
        """Wait until the other side has closed, which a quiet connection shows by its end."""
        try:
            while await asyncio.wait_for(self._reader.read(65_536), HANG_S):
                pass
        except ConnectionError:
            pass

    def abort(self) -> None:
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


Script = Callable[[Exchange], Awaitable[None]]


class FakeEngine:
    """An HTTP server that runs a script per request. `open` counts live connections."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Received] = []
        self.connections = 0
        self.open = 0
        self.endpoint = Endpoint("127.0.0.1", 0)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while not writer.is_closing():
                request = await _read_request(reader)
                self.requests.append(request)
                await self.script(Exchange(request, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def _read_request(reader: asyncio.StreamReader) -> Received:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    pairs = [line.split(": ", 1) for line in lines[1:] if line]
    headers = [(name.lower(), value) for name, value in pairs]
    body = await reader.readexactly(int(dict(headers).get("content-length", "0")))
    return Received(method, target, headers, body)


@asynccontextmanager
async def fake_engine(script: Script) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(script)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def answer_bytes(
    body: bytes, *, status: str = "200 OK", headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole answer with its length."""
    lines = {"Content-Type": "application/json", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answering(body: bytes, **more: object) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.write(answer_bytes(body, **more))  # type: ignore[arg-type]

    return script


@dataclass
class GrantCall:
    """What the gateway asked of the controller."""

    request: str
    model: str
    caller: str
    body_bytes: int
    activation_wait_ms: int | None
    queue_wait_ms: int | None
    hold_ms: int | None
    default_holds_ms: tuple[int | None, int | None]
    patience_ms: int | None
    priority: int | None


@dataclass
class FakeGrant:
    """A grant that remembers how it ended."""

    request: str
    model: str
    endpoint: Endpoint
    replica: str = "m-1"
    waited_ms: int = 0
    loaded: bool = False
    why: str = ""
    outcome: Outcome | None = None
    is_tool_call: bool = False
    lease: LeaseClaim | None = None
    heard_count: int = 0
    on_lease: Callable[[FakeGrant, LeaseClaim], None] = lambda grant, claim: None

    def end(
        self, outcome: Outcome, *, is_tool_call: bool = False, lease: LeaseClaim | None = None
    ) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.is_tool_call = is_tool_call
            self.lease = lease
            if lease is not None:
                self.on_lease(self, lease)

    def heard(self) -> None:
        self.heard_count += 1


@dataclass
class FakeLease:
    """A lease as a caller sees it."""

    id: str
    model: str
    replica: str
    expires_in_s: float


Decide = Callable[[GrantCall, FakeGrant], Awaitable[None]]


async def _at_once(call: GrantCall, grant: FakeGrant) -> None:
    pass


@dataclass
class FakeController:
    """Grants as `decide` says, which may wait, raise, or fill in the grant."""

    config: Config
    engine: Endpoint  # where every replica answers
    decide: Decide = _at_once
    calls: list[GrantCall] = field(default_factory=list)
    grants: list[FakeGrant] = field(default_factory=list)
    waiting: int = 0
    withdrawn: int = 0
    asked: list[tuple[object, ...]] = field(default_factory=list)
    load_error: Exception | None = None
    loading: asyncio.Event | None = None
    keeper: LeaseKeeper | None = None
    active: dict[str, dict[str, object]] = field(default_factory=dict)
    ends: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    is_loaded: bool = True
    gone: set[str] = field(default_factory=set)  # replicas
    retaking: asyncio.Event | None = None  # what a lease on a named replica waits for

    def grant(
        self,
        *,
        request: str,
        model: str,
        caller: str,
        mark: int = 0,
        body_bytes: int = 0,
        activation_wait_ms: int | None = None,
        queue_wait_ms: int | None = None,
        hold_ms: int | None = None,
        default_holds_ms: tuple[int | None, int | None] = (None, None),
        patience_ms: int | None = None,
        priority: int | None = None,
    ) -> AbstractAsyncContextManager[FakeGrant]:
        call = GrantCall(
            request,
            model,
            caller,
            body_bytes,
            activation_wait_ms,
            queue_wait_ms,
            hold_ms,
            default_holds_ms,
            patience_ms,
            priority,
        )
        self.calls.append(call)
        return self._grant(call)

    @asynccontextmanager
    async def _grant(self, call: GrantCall) -> AsyncIterator[FakeGrant]:
        if call.model not in self.config.models:
            raise RequestError(
                f"there is no model {call.model!r}", code="model_not_found", status=404
            )
        grant = FakeGrant(call.request, call.model, self.engine, on_lease=self._claimed)
        self.waiting += 1
        try:
            await self.decide(call, grant)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        finally:
            self.waiting -= 1
        self.grants.append(grant)
        try:
            yield grant
        except asyncio.CancelledError:
            grant.end(Outcome.CANCELLED)
            raise
        except BaseException:
            grant.end(Outcome.FAILED)
            raise
        grant.end(Outcome.OK)

    @property
    def running(self) -> int:
        return sum(grant.outcome is None for grant in self.grants)

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [grant.outcome for grant in self.grants]

    async def lease(
        self,
        *,
        model: str,
        caller: str,
        ttl_ms: int,
        reason: str = "",
        load: bool = False,
        replica: str | None = None,
        activation_wait_ms: int | None = None,
    ) -> FakeLease:
        self.asked.append(("lease", model, caller, ttl_ms, reason, load))
        if not self.is_loaded and not load:
            raise RequestError(f"{model} is not loaded", code="not_loaded", status=409)
        if load:
            await self.load(model)
        if replica is not None:
            self.asked.append(("lease again", replica))
            if self.retaking is not None:
                await self.retaking.wait()
            self.endpoint(replica)
        lease, replica = f"lease-{len(self.ends) + 1}", replica or f"{model}-1"
        self._activate(lease, model, replica, caller, reason, ttl_ms)
        if self.keeper is not None:
            self.keeper.taken(lease, model, replica, caller, reason, ttl_ms)
        return FakeLease(lease, model, replica, ttl_ms / 1_000)

    def _claimed(self, grant: FakeGrant, claim: LeaseClaim) -> None:
        self._activate(
            claim.lease, grant.model, grant.replica, "its request's", claim.reason, claim.ttl_ms
        )

    def _activate(
        self, lease: str, model: str, replica: str, caller: str, reason: str, ttl_ms: int
    ) -> None:
        self.ends[lease] = asyncio.get_running_loop().create_future()
        self.active[lease] = {
            "lease": lease,
            "model": model,
            "replica": replica,
            "caller": caller,
            "reason": reason,
            "age_s": 0.0,
            "expires_in_s": ttl_ms / 1_000,
        }

    def endpoint(self, replica: str) -> Endpoint:
        if replica in self.gone:
            raise ReplicaError(f"replica {replica} is gone", code="replica_gone", status=502)
        return self.engine

    def renew_lease(self, lease: str, ttl_ms: int) -> FakeLease:
        active = self.active[lease]
        active["expires_in_s"] = ttl_ms / 1_000
        return FakeLease(lease, str(active["model"]), str(active["replica"]), ttl_ms / 1_000)

    def release_lease(self, lease: str) -> None:
        self.end_lease(lease, "released")

    def end_lease(self, lease: str, why: str) -> None:
        if self.active.pop(lease, None) is not None:
            self.ends[lease].set_result(why)
            if self.keeper is not None:
                self.keeper.ended(lease, why)

    def leases(self) -> list[dict[str, object]]:
        return list(self.active.values())

    def find_lease(self, lease: str) -> dict[str, object] | None:
        return self.active.get(lease)

    def lease_end(self, lease: str) -> asyncio.Future[str]:
        return self.ends[lease]

    def pin(self, model: str, *, is_pinned: bool) -> None:
        self.asked.append(("pin", model, is_pinned))

    async def load(self, model: str) -> str:
        self.asked.append(("load", model))
        if self.load_error is not None:
            raise self.load_error
        if self.loading is not None:
            try:
                await self.loading.wait()
            except asyncio.CancelledError:
                self.asked.append(("load withdrawn", model))
                raise
        return f"{model}-1"

    def ask_load(self, model: str) -> None:
        self.asked.append(("ask_load", model))
        if self.load_error is not None:
            raise self.load_error

    async def unload(
        self, model: str | None, *, grace_ms: int | None = None, wait: bool = True
    ) -> None:
        self.asked.append(("unload", model, grace_ms, wait))

    def status(self) -> dict[str, object]:
        replica = {"id": "m-1", "phase": "ready", "pid": 1, "port": 2, "command": ["serve", "m x"]}
        models = [
            {
                "name": name,
                "state": "ready" if name == "m" else "cold",
                "replicas": [replica] if name == "m" else [],
            }
            for name in self.config.models
        ]
        return {"models": models, "devices": []}

    def queue(self) -> dict[str, object]:
        return {"queue": []}

    async def plan(self, model: str) -> dict[str, object]:
        self.asked.append(("plan", model))
        return {"model": model}

    async def explain(self, request: str) -> dict[str, object]:
        self.asked.append(("explain", request))
        return {"requests": []}

    async def save_journal(self) -> Path:
        return Path("/state/journals/now.jsonl")


def make_config(**more: object) -> Config:
    scaling = Scaling(0, 1, 600_000)
    command = CommandEngine(("serve",))
    far = Model("far", scaling, None, device_count=0)
    models = [
        ModelConfig(Model("m", scaling, 100), command, aliases=("gpt-4o-mini",)),
        ModelConfig(Model("org/model:7b", scaling, 100), command),
        ModelConfig(Model("modèle", scaling, 100), command),
        ModelConfig(far, UrlEngine("http://127.0.0.1:1")),
    ]
    values: dict[str, object] = {
        "host": "127.0.0.1",
        "port": 0,
        "models": {model.name: model for model in models},
        **more,
    }
    return Config(**values)  # type: ignore[arg-type]
