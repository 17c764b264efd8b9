"""Leases and pins over HTTP, and what a caller can get wrong about them.

How: the real server before a fake controller, and a real store of what has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rota.gateway.app import App
from rota.gateway.server import serve
from rota.store import LeaseStore
from tests.gateway.conftest import Gateway, start_gateway, until
from tests.gateway.fakes import FakeController, answering, make_config
from tests.gateway.wire import Answer, ask, connect, request_bytes

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # nothing here leans on the loop

LEASES = "/rota/v1/leases"


@dataclass
class Rota:
    """A gateway with a store."""

    port: int
    controller: FakeController

    async def post(self, path: str = "", body: object = None) -> Answer:
        return await ask(self.port, "POST", LEASES + path, json.dumps(body).encode())

    async def get(self, path: str = "") -> Answer:
        return await ask(self.port, "GET", LEASES + path)

    async def take(self, **more: object) -> dict[str, Any]:
        answer = await self.post(body={"model": "m", "ttl_s": 60, **more})
        assert answer.status == 201, answer.body
        taken: dict[str, Any] = answer.json()
        return taken


@asynccontextmanager
async def start(folder: Path, *, clock: Callable[[], float] = time.time) -> AsyncIterator[Rota]:
    with LeaseStore(folder, clock=clock) as store:
        controller = FakeController(
            make_config(),
            engine=None,  # type: ignore[arg-type]
            keeper=store,
        )
        app = App(controller, records=store)
        async with serve(app, controller.config) as server:
            yield Rota(server.port, controller)
        await app.close()


async def test_a_lease_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        taken = await rota.take(model="gpt-4o-mini", ttl_s=90.5, reason="a render")
        assert taken == {"lease": "lease-1", "model": "m", "replica": "m-1", "expires_in_s": 90.5}
        assert rota.controller.asked == [
            ("lease", "m", "peer:127.0.0.1", 90_500, "a render", False)
        ]
        active = (await rota.get("/lease-1")).json()
        assert (active["state"], active["reason"]) == ("active", "a render")
        assert (await rota.get()).json() == {"leases": [active], "ended": []}

        answer = await rota.post("/lease-1/renew", {"ttl_s": 1})
        assert (answer.status, answer.json()) == (200, {**taken, "expires_in_s": 1.0})

        answer = await rota.post("/lease-1/release")
        ended = answer.json()
        assert (answer.status, ended["state"], ended["why"]) == (200, "ended", "released")
        assert ended["ended_at"].endswith("+00:00")
        assert (await rota.get()).json() == {"leases": [], "ended": [ended]}
        assert (await rota.get("/lease-1")).json() == ended


async def test_releasing_again_says_how_it_ended(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        for _ in range(2):
            await rota.take()
        rota.controller.end_lease("lease-1", "expired")
        assert (await rota.post("/lease-1/release")).json()["why"] == "expired"
        for _ in range(2):
            answer = await ask(rota.port, "DELETE", f"{LEASES}/lease-2")
            assert (answer.status, answer.json()["why"]) == (200, "released")
        answer = await rota.post("/lease-1/renew", {"ttl_s": 5})
        assert (answer.status, answer.json()["error"]["code"]) == (404, "lease_not_found")
        assert ": expired; take another one" in answer.json()["error"]["message"]


async def test_a_clock_that_is_set_back_makes_no_lease_last_less_than_nothing(
    tmp_path: Path,
) -> None:
    times = iter([9_000.0, 4_000.0])
    async with start(tmp_path, clock=lambda: next(times)) as rota:
        await rota.take()
        assert (await rota.post("/lease-1/release")).json()["lasted_s"] == 0


async def test_a_lease_that_never_was(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        for method, path, body in (
            ("GET", "/nope", None),
            ("DELETE", "/nope", None),
            ("POST", "/nope/release", b""),
            ("POST", "/nope/renew", b'{"ttl_s": 1}'),
        ):
            answer = await ask(rota.port, method, LEASES + path, body)
            assert (answer.status, answer.json()["error"]["code"]) == (404, "lease_not_found")
        answer = await ask(rota.port, "PUT", LEASES)
        assert answer.status == 405
        assert set((answer.header("allow") or "").split(", ")) == {"GET", "HEAD", "POST"}
        assert (await ask(rota.port, "POST", f"{LEASES}/x", b"{}")).status == 405


async def test_without_records_a_release_is_a_release() -> None:
    async with start_gateway(answering(b"")) as gateway:
        body = json.dumps({"model": "m", "ttl_s": 1}).encode()
        lease = (await ask(gateway.port, "POST", LEASES, body)).json()["lease"]
        answer = await ask(gateway.port, "DELETE", f"{LEASES}/{lease}")
        assert answer.json() == {"lease": lease, "state": "ended", "why": "released"}
        assert (await ask(gateway.port, "GET", LEASES)).json() == {"leases": [], "ended": []}
        assert (await ask(gateway.port, "DELETE", f"{LEASES}/{lease}")).status == 404


async def test_a_cold_model_is_leased_only_with_its_load(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        rota.controller.is_loaded = False
        answer = await rota.post(body={"model": "m", "ttl_s": 1})
        assert (answer.status, answer.json()["error"]["code"]) == (409, "not_loaded")
        assert (await rota.take(load=True))["replica"] == "m-1"


async def test_who_leaves_while_it_waits_takes_none(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        rota.controller.loading = asyncio.Event()
        async with connect(rota.port) as wire:
            body = json.dumps({"model": "m", "ttl_s": 1, "load": True}).encode()
            await wire.write(request_bytes("POST", LEASES, body))
            await until(lambda: ("load", "m") in rota.controller.asked)
        await until(lambda: ("load withdrawn", "m") in rota.controller.asked)
        assert rota.controller.leases() == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "the body is not JSON"),
        ("{", "the body is not JSON"),
        ("[]", "an object with `model`, `ttl_s`, `reason`, `load`"),
        ("\xff", "the body is not JSON"),
        ("[" * 10_000, "the body is"),
        ('{"ttl_s": 1}', "missing required field `model`"),
        ('{"model": "m"}', "missing required field `ttl_s`"),
        ('{"model": 1, "ttl_s": 1}', "Expected `str`, got `int` - at `$.model`"),
        ('{"model": "m", "ttl_s": "1"}', "got `str` - at `$.ttl_s`"),
        ('{"model": "m", "ttl_s": true}', "got `bool` - at `$.ttl_s`"),
        ('{"model": "m", "ttl_s": null}', "got `null` - at `$.ttl_s`"),
        ('{"model": "m", "ttl_s": NaN}', "the body is not JSON"),
        ('{"model": "m", "ttl_s": 0}', "a lease lasts for more than 0 seconds"),
        ('{"model": "m", "ttl_s": -1}', "a lease lasts for more than 0 seconds"),
        ('{"model": "m", "ttl_s": 1, "load": 1}', "got `int` - at `$.load`"),
        ('{"model": "m", "ttl": 1}', "unknown key 'ttl'; did you mean `ttl_s`?"),
        ('{"model": "m", "ttl_s": 1, "wombat": 1}', "unknown key 'wombat'; there is `model`,"),
        (f'{{"model": "m", "ttl_s": 1, "reason": "{"x" * 501}"}}', "at `$.reason`"),
    ],
)
async def test_wrong_bodies(tmp_path: Path, body: str, said: str) -> None:
    async with start(tmp_path) as rota:
        answer = await ask(rota.port, "POST", LEASES, body.encode("latin-1"))
        assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert said in answer.json()["error"]["message"]
        assert not rota.controller.asked


async def test_bodies_and_times_have_a_bound(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        answer = await ask(rota.port, "POST", LEASES, b" " * 70_000)
        assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")
        await rota.take(ttl_s=1e300)
        await rota.take(ttl_s=1e-9)
        assert [call[3] for call in rota.controller.asked] == [365 * 86_400_000, 1]
        answer = await rota.post(body={"model": "nope", "ttl_s": 1})
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_leases_are_for_this_machine(tmp_path: Path) -> None:
    async with start(tmp_path) as rota:
        await rota.take()
        headers = {"origin": "http://evil.example"}
        for method, path in (
            *(("GET", ""), ("POST", ""), ("GET", "/lease-1"), ("DELETE", "/lease-1")),
            *(("POST", "/lease-1/renew"), ("POST", "/lease-1/release")),
        ):
            answer = await ask(rota.port, method, LEASES + path, b"{}", headers)
            assert (answer.status, answer.json()["error"]["code"]) == (403, "forbidden")
        for verb in ("pin", "unpin"):
            path = f"/rota/v1/models/m/{verb}"
            assert (await ask(rota.port, "POST", path, headers=headers)).status == 403
        assert len(rota.controller.leases()) == 1


async def pin(gateway: Gateway, name: str, verb: str) -> Answer:
    return await ask(gateway.port, "POST", f"/rota/v1/models/{name}/{verb}")


async def test_pins() -> None:
    async with start_gateway(answering(b"")) as gateway:
        answer = await pin(gateway, "gpt-4o-mini", "pin")
        assert (answer.status, answer.json()) == (200, {"model": "m", "pinned": True})
        answer = await pin(gateway, "org/model:7b", "unpin")
        assert answer.json() == {"model": "org/model:7b", "pinned": False}
        assert gateway.controller.asked == [("pin", "m", True), ("pin", "org/model:7b", False)]
        answer = await pin(gateway, "nope", "pin")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await ask(gateway.port, "GET", "/rota/v1/models/m/pin")).status == 405
