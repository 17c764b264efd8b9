"""What: jobs and web sockets keep their model for as long as they need it, and no longer.
How: a whole rota over fake engines, one device that holds one of two models."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from rota.config.values import JobsConfig
from tests.system.rig import BOUND_S, Fake, Rig, end, rota, until

ONE = {"gpu0": 1_000}
VIDEOS = "/v1/videos"


def maker(job_s: float, *knobs: str, keep_ms: int = 0) -> Fake:
    return Fake("a", knobs=("--job-s", str(job_s), *knobs), jobs=JobsConfig(keep_ms=keep_ms))


async def begin(rig: Rig) -> str:
    """A job of `a`: the path to ask after it under."""
    answer = await rig.http.post(VIDEOS, json={"model": "a", "prompt": "a cat"})
    assert answer.status_code == 200, answer.text
    return f"{VIDEOS}/{answer.json()['id']}"


async def status(rig: Rig, job: str) -> str:
    answer = await rig.http.get(job)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["status"])


def leases(rig: Rig, name: str) -> list[dict[str, object]]:
    return [lease for lease in rig.controller.leases() if lease["model"] == name]


async def test_a_job_keeps_its_model_until_it_is_done(tmp_path: Path) -> None:
    # case U2
    async with rota(tmp_path, [maker(1.5), Fake("b")], ONE) as rig:
        job = await begin(rig)
        assert rig.in_flight() == 0
        other = asyncio.create_task(rig.chat("b"))
        await until(lambda: rig.model("b")["waiting"])
        pid = rig.pid("a")
        while await status(rig, job) != "completed":
            assert (rig.state("a"), rig.pid("a")) == ("ready", pid)
            assert not other.done()
            await asyncio.sleep(0.05)
        assert (await other).status_code == 200
        assert rig.pid("a") is None


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [(), ("--job-fails",)])
async def test_a_job_that_nobody_asks_after_keeps_it_no_longer(
    tmp_path: Path, knobs: tuple[str, ...]
) -> None:
    # case U2
    job_s = 5
    clock = asyncio.get_running_loop().time
    async with rota(tmp_path, [maker(job_s, *knobs), Fake("b")], ONE) as rig:
        await begin(rig)
        begun = clock()
        assert (await rig.engine_stats("a"))["jobs"] == 1
        assert (await rig.chat("b")).status_code == 200
        assert clock() - begun >= job_s - 0.1  # its engine began it a little earlier


async def test_asking_after_a_job_loads_nothing_and_takes_no_slot(tmp_path: Path) -> None:
    fake = maker(0, keep_ms=60_000).with_facts(slots=1)
    async with rota(tmp_path, [fake, Fake("b")], ONE) as rig:
        job = await begin(rig)
        assert await status(rig, job) == "completed"
        film = await rig.http.get(f"{job}/content")
        assert film.content == b"the work of a fake engine"
        await until(lambda: not leases(rig, "a"), "what was fetched is not kept")
        assert (await rig.chat("b")).status_code == 200
        gone = await rig.http.get(job)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "job_not_found")
        assert rig.state("a") == "cold"
        assert rig.model("a")["loads"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("poll_status", [404, 500])
async def test_a_job_that_is_lost_keeps_nothing(tmp_path: Path, poll_status: int) -> None:
    fake = maker(600, "--poll-status", str(poll_status))
    async with rota(tmp_path, [fake], ONE) as rig:
        await begin(rig)
        assert leases(rig, "a")
        await until(lambda: not leases(rig, "a"))


async def test_the_longest_a_job_can_keep_its_model(tmp_path: Path) -> None:
    fake = Fake("a", knobs=("--job-s", "600"), jobs=JobsConfig(ttl_ms=300))
    async with rota(tmp_path, [fake, Fake("b")], ONE) as rig:
        await begin(rig)
        assert (await rig.chat("b")).status_code == 200


async def test_an_engine_that_dies_takes_its_jobs_along(tmp_path: Path) -> None:
    async with rota(tmp_path, [maker(600)], ONE) as rig:
        job = await begin(rig)
        pid = rig.pid("a")
        assert pid is not None
        end(pid, signal.SIGKILL)
        await until(lambda: not leases(rig, "a"))
        assert (await rig.http.get(job)).status_code == 404
        again = await begin(rig)
        assert await status(rig, again) == "in_progress"


# -- web sockets


def socket(rig: Rig, model: str = "a") -> connect:
    url = f"{rig.url.replace('http', 'ws', 1)}/v1/realtime?model={model}"
    return connect(url, proxy=None, open_timeout=BOUND_S, close_timeout=BOUND_S)


async def echoes(client: ClientConnection, message: str = "hi") -> bool:
    await client.send(message)
    async with asyncio.timeout(BOUND_S):
        return await client.recv() == message


async def closing(client: ClientConnection) -> int | None:
    async with asyncio.timeout(BOUND_S):
        await client.wait_closed()
    return client.close_code


def talker(idle_ms: int) -> Fake:
    return Fake("a", websocket_idle_ms=idle_ms)


async def test_an_idle_socket_does_not_keep_its_model(tmp_path: Path) -> None:
    # case W43
    # case U2
    async with rota(tmp_path, [talker(100), Fake("b")], ONE) as rig, socket(rig) as client:
        assert await echoes(client)
        assert (await rig.chat("b")).status_code == 200
        assert await closing(client) == 1012


async def test_a_socket_in_use_does(tmp_path: Path) -> None:
    # case W43
    async with rota(tmp_path, [talker(2_000), Fake("b")], ONE) as rig:
        async with socket(rig) as client:
            other = asyncio.create_task(rig.chat("b"))
            await until(lambda: rig.model("b")["waiting"])
            for _ in range(40):
                assert await echoes(client)
                assert not other.done()
                await asyncio.sleep(0.01)
        assert (await other).status_code == 200


async def test_an_open_socket_is_use_where_nothing_else_is_said(tmp_path: Path) -> None:
    async with rota(tmp_path, [talker(0), Fake("b")], ONE) as rig:
        async with socket(rig) as client:
            other = asyncio.create_task(rig.chat("b"))
            await until(lambda: rig.model("b")["waiting"])
            await asyncio.sleep(0.5)
            assert not other.done()
            assert await echoes(client)
            assert rig.in_flight() == 0
        assert (await other).status_code == 200


async def test_an_idle_socket_is_used_again(tmp_path: Path) -> None:
    async with rota(tmp_path, [talker(50)], ONE) as rig, socket(rig) as client:
        for _ in range(3):
            await until(lambda: not leases(rig, "a"))
            assert await echoes(client)
            assert leases(rig, "a")
        assert rig.model("a")["loads"] == 1


async def test_a_socket_outlives_its_lease_unless_another_waits(tmp_path: Path) -> None:
    fakes = [talker(0), Fake("b")]
    async with rota(tmp_path, fakes, ONE, lease_ttl_ms_max=200) as rig, socket(rig) as client:
        [first] = leases(rig, "a")
        await until(lambda: leases(rig, "a") and leases(rig, "a")[0]["lease"] != first["lease"])
        assert await echoes(client)
        assert (await rig.chat("b", x_rota_patience_ms="0")).status_code == 200
        assert await closing(client) == 1012


@pytest.mark.parametrize("ending", ["die", "end"])
async def test_an_engine_that_ends_is_said_and_comes_again(tmp_path: Path, ending: str) -> None:
    async with rota(tmp_path, [talker(0)], ONE) as rig:
        async with socket(rig) as client:
            await client.send(ending)
            with contextlib.suppress(ConnectionClosed):
                await client.recv()
            assert await closing(client) == 1012
        if ending == "die":
            await until(lambda: rig.state("a") != "ready")
        assert not leases(rig, "a")
        async with socket(rig) as client:
            assert await echoes(client)


async def test_unloading_and_stopping_end_the_sockets(tmp_path: Path) -> None:
    clients: list[Any] = []
    async with rota(tmp_path, [talker(0), Fake("b", memory_mib=100)], {"gpu0": 1_000}) as rig:
        clients += [await socket(rig), await socket(rig, "b")]
        await rig.controller.unload("a", grace_ms=100)
        assert await closing(clients[0]) == 1012
        assert await echoes(clients[1])
    assert await closing(clients[1]) == 1012
