"""What: an agent between two rounds keeps its model, and nobody waits for that for ever.
How: a whole rota over fake engines, with the headers that clients send."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rota.core.types import Scaling
from tests.system.rig import Fake, rota, until

ONE = {"gpu0": 1_000}


async def test_two_agents_swap_once_for_each_change_of_direction(tmp_path: Path) -> None:
    """Both take three rounds of two requests, a tool running between the two."""
    async with rota(tmp_path, [Fake("a"), Fake("b")], ONE) as rig:

        async def agent(name: str) -> None:
            for _ in range(3):
                first = await rig.chat(name, x_rota_hold_ms="60000", x_conversation_id=name)
                await asyncio.sleep(0.2)  # the tool
                second = await rig.chat(name, x_rota_hold_ms="0", x_conversation_id=name)
                assert (first.status_code, second.status_code) == (200, 200)
                assert second.headers["x-rota-model-loaded"] == "0"

        await asyncio.gather(agent("a"), agent("b"))
        assert rig.model("a")["loads"] <= 3
        assert rig.model("b")["loads"] <= 3


async def test_a_hold_lasts_no_longer_than_a_waiter_honours_it(tmp_path: Path) -> None:
    async with rota(tmp_path, [Fake("a"), Fake("b")], ONE) as rig:
        await rig.chat("a", x_rota_hold_ms="300000")
        patient = asyncio.create_task(rig.chat("b"))
        await until(lambda: "kept" in str(rig.model("b")["reason"]))
        patient.cancel()
        await asyncio.wait([patient])
        assert rig.state("a") == "ready"
        impatient = await rig.chat("b", x_rota_patience_ms="0", x_conversation_id="other")
        assert impatient.status_code == 200


async def test_a_hold_puts_off_stepping_down(tmp_path: Path) -> None:
    fake = Fake("a", scaling=Scaling(0, 1, 50))
    async with rota(tmp_path, [fake], ONE) as rig:
        await rig.chat("a", x_rota_hold_ms="60000", x_conversation_id="c")
        pid = rig.pid("a")
        await asyncio.sleep(0.3)
        assert rig.pid("a") == pid
        await rig.chat("a", x_rota_hold_ms="0", x_conversation_id="c")
        assert rig.model("a")["loads"] == 1
