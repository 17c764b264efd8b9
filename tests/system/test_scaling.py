"""What: a model gets one more process when its callers have waited for a slot, and a default model
is back when the one that displaced it has gone. How: a whole rota over fake engines; the machine's
own list of processes is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rota.core.types import Preload, Scaling
from tests.system.rig import Fake, rota, until

ONE = {"gpu0": 1_000}
SLOW = ("--tokens", "40", "--tokens-per-second", "40")


async def test_one_more_process_serves_those_who_waited_and_leaves_after_them(
    tmp_path: Path,
) -> None:
    wide = Fake("wide", SLOW, memory_mib=300, scaling=Scaling(0, 2, 500))
    wide = wide.with_facts(slots=1, scale_up_after_ms=200)
    async with rota(tmp_path, [wide], ONE) as rig:
        answers = await asyncio.gather(
            *(rig.chat("wide", x_conversation_id=str(number)) for number in range(3))
        )
        assert [answer.status_code for answer in answers] == [200] * 3
        assert rig.devices.peak_mib() == {"gpu0": 600}
        assert rig.model("wide")["loads"] == 2
        await until(lambda: not rig.processes())


async def test_one_more_does_not_make_a_working_model_leave(tmp_path: Path) -> None:
    wide = Fake("wide", SLOW, memory_mib=500, scaling=Scaling(0, 2, 600_000))
    wide = wide.with_facts(slots=1, scale_up_after_ms=100)
    other = Fake("other", ("--tokens", "200", "--tokens-per-second", "40"), memory_mib=500)
    async with rota(tmp_path, [wide, other], ONE) as rig, rig.begun("other") as rest:
        answers = await asyncio.gather(
            *(rig.chat("wide", x_conversation_id=str(number)) for number in range(2))
        )
        assert [answer.status_code for answer in answers] == [200] * 2
        assert rig.model("wide")["loads"] == 1
        assert [line async for line in rest][-2:] == ["data: [DONE]", ""]


async def test_a_default_model_is_back_when_the_big_one_has_gone(tmp_path: Path) -> None:
    # case W55
    default = Fake("default", memory_mib=600).with_facts(preload=Preload.ALWAYS)
    big = Fake("big", memory_mib=900, scaling=Scaling(0, 1, 300))
    async with rota(tmp_path, [default, big], ONE) as rig:
        await until(lambda: rig.state("default") == "ready")
        assert (await rig.chat("big")).status_code == 200
        assert rig.processes().keys() == {"big"}
        await until(lambda: rig.state("default") == "ready")
        assert rig.processes().keys() == {"default"}
        assert rig.model("default")["loads"] == 2
        answer = await rig.chat("default")
        assert answer.headers["x-rota-model-loaded"] == "0"
