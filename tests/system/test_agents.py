"""What: agents whose rounds call tools keep their model while the tool runs, unasked, and swap no
oftener than they change direction. How: a whole rota over fake engines that call tools."""

from __future__ import annotations

import asyncio
import itertools
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.system.rig import Fake, Rig, rota

ONE = {"gpu0": 1_000}
TOOLS = [{"type": "function", "function": {"name": "run_tests", "parameters": {}}}]
ASKED = [{"role": "user", "content": "mend it"}]
TOLD = {"role": "tool", "tool_call_id": "call-1", "content": "two failed"}


class Agent:
    """Rounds of two requests with one model, then with the other; a tool runs in between.

    It sends what any client sends: no header speaks of holds or patience.
    """

    def __init__(self, rig: Rig, key: str, tool_s: float) -> None:
        self._rig = rig
        self._key = key
        self._tool_s = tool_s

    async def work(self, models: str, until_s: float, served: list[str]) -> None:
        """At least four rounds, however long they take."""
        clock = asyncio.get_running_loop().time
        for number, model in enumerate(itertools.cycle(models)):
            if number >= 4 and clock() >= until_s:
                return
            call = await self._ask(model, ASKED)
            assert call["finish_reason"] == "tool_calls"
            served.append(model)
            loads = self._rig.model(model)["loads"]
            await asyncio.sleep(self._tool_s)
            answer = await self._ask(model, [*ASKED, call["message"], TOLD])
            assert answer["finish_reason"] == "stop"
            assert self._rig.model(model)["loads"] == loads, "it was kept for this"

    async def _ask(self, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        answer: httpx2.Response = await self._rig.http.post(
            "/v1/chat/completions",
            json={"model": model, "messages": messages, "tools": TOOLS},
            headers={"Authorization": f"Bearer {self._key}"},
        )
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


@pytest.mark.parametrize(
    ("for_s", "tool_s", "hold_finished_ms"),
    [(0, 0.2, 100), pytest.param(60, 3, 1_000, marks=pytest.mark.slow)],
)
async def test_agents_that_alternate_swap_once_for_each_change_of_direction(
    tmp_path: Path, for_s: float, tool_s: float, hold_finished_ms: int
) -> None:
    # case Q8, case W5; one begins with the model that the other ends with
    holds = {"hold_ms": 10_000, "hold_finished_ms": hold_finished_ms}  # as files have them
    fakes = [Fake(name).with_facts(**holds) for name in "ab"]
    async with rota(tmp_path, fakes, ONE) as rig:
        served: list[str] = []
        agents = [Agent(rig, key, tool_s) for key in ("architect", "editor")]
        until_s = asyncio.get_running_loop().time() + for_s
        await asyncio.gather(
            agents[0].work("ab", until_s, served), agents[1].work("ba", until_s, served)
        )
        changes = sum(before != after for before, after in pairwise(served))
        assert sum(rig.model(name)["loads"] for name in "ab") <= changes + 1
