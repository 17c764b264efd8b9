"""What: twelve models share four devices, as a newcomer would describe it, told in order.
How: a whole rota over real fake-engine processes on fake devices; each paragraph one step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from rota.core.types import Scaling
from tests.system.rig import ALWAYS, BOUND_S, OFF, Fake, Rig, rota, until

DEVICES = {f"gpu{n}": 1_000 for n in range(4)}
BRIEFLY_IDLE = Scaling(min=0, max=1, idle_timeout_ms=400)


def twelve_models() -> list[Fake]:
    return [
        *(Fake(f"chat-{n}", memory_mib=900) for n in range(6)),
        Fake("steps-down", scaling=BRIEFLY_IDLE, memory_mib=900),
        Fake("slow", ("--load-s", "1.2"), memory_mib=900).with_facts(activation_wait_ms=300),
        Fake(
            "long-answers",
            ("--tokens", "4000", "--tokens-per-second", "20"),
            scaling=BRIEFLY_IDLE,
            memory_mib=900,
        ),
        Fake("off", scaling=OFF),
        Fake("unstated", scaling=OFF),  # what a file that states no scaling comes to
        Fake("embedder", scaling=ALWAYS, memory_mib=100),
    ]


async def test_twelve_models_on_four_devices(tmp_path: Path) -> None:
    async with rota(tmp_path, twelve_models(), DEVICES) as rig:
        await what_is_always_on_is_there_unasked(rig)
        await what_is_on_demand_loads_when_asked_and_steps_down_unused(rig)
        await what_is_off_stays_off_however_often_it_is_asked_for(rig)
        await what_is_unknown_is_unknown_at_once(rig)
        await what_loads_slowly_says_so_and_serves_who_comes_back(rig)
        await more_models_than_room_take_turns(rig)
        await what_is_busy_stays_however_long_ago_it_was_loaded(rig)
        await what_is_only_watched_steps_down(rig)


async def what_is_always_on_is_there_unasked(rig: Rig) -> None:
    await until(lambda: rig.state("embedder") == "ready")


async def what_is_on_demand_loads_when_asked_and_steps_down_unused(rig: Rig) -> None:
    assert rig.state("steps-down") == "cold"
    answer = await rig.chat("steps-down")
    assert answer.status_code == 200
    assert answer.headers["x-rota-model-loaded"] == "1"
    assert rig.state("steps-down") == "ready"
    await until(lambda: rig.state("steps-down") == "cold", "idle for its time-out")


async def what_is_off_stays_off_however_often_it_is_asked_for(rig: Rig) -> None:
    for name in ("off", "unstated"):
        for _ in range(3):
            answer = await rig.chat(name)
            assert (answer.status_code, said(answer)) == (409, "model_off")
            assert answer.headers["x-should-retry"] == "false"
        assert rig.model(name)["replicas"] == []


async def what_is_unknown_is_unknown_at_once(rig: Rig) -> None:
    answer = await rig.chat("chat-99")
    assert (answer.status_code, said(answer)) == (404, "model_not_found")


async def what_loads_slowly_says_so_and_serves_who_comes_back(rig: Rig) -> None:
    first = await rig.chat("slow")
    assert (first.status_code, said(first)) == (503, "model_loading")
    assert int(first.headers["retry-after"]) >= 2
    await until(lambda: rig.state("slow") == "ready")
    assert (await rig.chat("slow")).status_code == 200


async def more_models_than_room_take_turns(rig: Rig) -> None:
    for name in [f"chat-{n}" for n in range(6)] * 2:
        answer = await rig.chat(name)
        assert answer.status_code == 200, answer.text
    assert max(rig.devices.peak_mib().values()) <= 1_000
    assert rig.state("embedder") == "ready"


async def what_is_busy_stays_however_long_ago_it_was_loaded(rig: Rig) -> None:
    async with rig.begun("long-answers"):
        pid = rig.pid("long-answers")
        assert (await rig.chat("steps-down")).status_code == 200
        await until(lambda: rig.state("steps-down") == "cold", "idle for as long as that is busy")
        for n in range(6):  # each of these is loaded later, and used later
            assert (await rig.chat(f"chat-{n}")).status_code == 200
        assert rig.state("long-answers") == "ready"
        assert rig.pid("long-answers") == pid
        assert rig.in_flight() == 1
    await until(lambda: rig.state("long-answers") == "cold", "idle once its client has left")


async def what_is_only_watched_steps_down(rig: Rig) -> None:
    await rig.chat("steps-down")
    async with asyncio.timeout(BOUND_S):
        while rig.state("steps-down") != "cold":  # asked all the while: none of this is use
            for path in ("/health", "/v1/models", "/v1/models/steps-down", "/rota/v1/status"):
                assert (await rig.http.get(path)).status_code == 200


def said(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])
