"""What: an engine that runs and answers nothing any more costs a bounded time, and no other model.
How: a whole rota over fake engines that hang for as long as a file exists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rota.core.types import Scaling
from tests.system.rig import ALWAYS, ON_DEMAND, Fake, is_alive, rota, until
from tests.system.test_cases import ONE, is_broken_off

SLOW = ("--tokens", "600", "--tokens-per-second", "20")


def hanging(file: Path, *knobs: str, scaling: Scaling = ON_DEMAND) -> Fake:
    """Model a, which hangs while the file exists."""
    fake = Fake("a", ("--hangs-while", str(file), *knobs), scaling=scaling, silent_after_ms=1_000)
    return fake.with_facts(stop_grace_ms=300)


@pytest.mark.parametrize("scaling", [ON_DEMAND, ALWAYS], ids=["on demand", "always"])
async def test_one_that_hangs_while_idle_is_replaced(tmp_path: Path, scaling: Scaling) -> None:
    hangs = tmp_path / "hangs"
    async with rota(tmp_path, [hanging(hangs, scaling=scaling)], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200
        pid = rig.pid("a")
        assert pid is not None
        hangs.touch()
        await until(lambda: rig.pid("a") != pid, "its end")
        assert not is_alive(pid)
        hangs.unlink()
        assert (await rig.chat("a")).status_code == 200
        assert rig.pid("a") not in (None, pid)


@pytest.mark.parametrize("knobs", [(), ("--ignore-sigterm",)], ids=["polite", "stubborn"])
async def test_one_that_hangs_at_work_fails_its_requests_and_makes_way(
    tmp_path: Path, knobs: tuple[str, ...]
) -> None:
    # case W15: B waits for room until then
    hangs = tmp_path / "hangs"
    async with rota(tmp_path, [hanging(hangs, *SLOW, *knobs), Fake("b")], ONE) as rig:
        async with rig.begun("a") as rest:
            pid = rig.pid("a")
            assert pid is not None
            whole = asyncio.create_task(rig.chat("a"))
            await until(lambda: rig.in_flight() == 2)
            hangs.touch()
            rival = asyncio.create_task(rig.chat("b"))
            assert is_broken_off("\n".join([line async for line in rest]))
        answer = await whole
        assert answer.status_code == 502
        assert isinstance(answer.json()["error"]["message"], str)
        assert not is_alive(pid)
        assert (await rival).status_code == 200
        assert rig.in_flight() == 0


async def test_one_that_streams_is_not_silent_though_its_health_hangs(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    knobs = ("--probe-hangs-while", str(hangs), "--tokens", "60", "--tokens-per-second", "20")
    async with rota(tmp_path, [Fake("a", knobs, silent_after_ms=1_000)], ONE) as rig:
        async with rig.begun("a") as rest:
            hangs.touch()
            lines = [line async for line in rest]
        assert lines[-2:] == ["data: [DONE]", ""]
