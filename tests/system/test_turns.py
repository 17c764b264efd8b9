"""What: models that share a device take turns, and nobody is cut off, forgotten or made to wait
for ever. How: a whole rota over fake engines, of which the device holds one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from rota.core import words
from tests.system.rig import Fake, Rig, is_alive, rota, until
from tests.system.sdk import Burst, call_at_once

ONE = {"gpu0": 1_000}
PATIENCE_MS = 1_000  # stands for the five minutes that a model has
NEVER_READY = ("--load-s", "600")


def is_whole(text: str) -> bool:
    return text.rstrip().endswith("data: [DONE]")


class Line:
    """Callers one behind the other, and in which order they were served."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._asked: list[asyncio.Task[httpx2.Response]] = []
        self.served: list[str] = []

    async def join(self, name: str) -> None:
        """Ask, as a conversation of its own, and go on once it is known to wait or be served."""
        rig, number = self._rig, len(self._asked)

        async def ask() -> httpx2.Response:
            answer = await rig.chat(name, x_conversation_id=str(number))
            self.served.append(name)
            return answer

        self._asked.append(asyncio.create_task(ask()))
        await until(lambda: rig.waiting() + rig.in_flight() + len(self.served) == number + 1)

    async def answers(self) -> list[httpx2.Response]:
        return await asyncio.gather(*self._asked)


@asynccontextmanager
async def kept_busy(rig: Rig, name: str) -> AsyncIterator[None]:
    """Two clients' worth of traffic, the next request begun before the last one ends; all of it
    is answered, though some may be told to come back."""
    is_over = asyncio.Event()

    async def one(is_half_done: asyncio.Event) -> None:
        while True:
            body = {"model": name, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            async with rig.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = [answer.headers.get("retry-after", "")]
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len(lines) > 10:
                        is_half_done.set()
                if answer.status_code == 200:
                    assert is_whole("\n".join(lines)), lines[-3:]
                    return
                assert answer.status_code == 503, lines
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), float(lines[0]))
                return

    async def steady() -> None:
        async with asyncio.TaskGroup() as group:
            while not is_over.is_set():
                is_half_done = asyncio.Event()
                work = group.create_task(one(is_half_done))
                half = group.create_task(is_half_done.wait())
                await asyncio.wait([work, half], return_when=asyncio.FIRST_COMPLETED)
                half.cancel()

    traffic = asyncio.create_task(steady())
    try:
        await until(lambda: rig.in_flight() >= 2, "the traffic is steady")
        yield
    finally:
        is_over.set()
        await traffic


TALKER = ("--tokens", "12", "--tokens-per-second", "24")


# ── order ────────────────────────────────────────────────────────────────────────────────


async def test_requests_that_alternate_cost_one_load_of_each_model(tmp_path: Path) -> None:
    # case W5; all come while the first load is under way
    slow = ("--load-s", "0.5")
    async with rota(tmp_path, [Fake("a", slow), Fake("b", slow)], ONE) as rig:
        line = Line(rig)
        for name in "ababab":
            await line.join(name)
        assert {answer.status_code for answer in await line.answers()} == {200}
        assert [rig.model(name)["loads"] for name in "ab"] == [1, 1]


async def test_queued_jobs_are_done_before_their_model_makes_way(tmp_path: Path) -> None:
    # case Q9; one at a time, ten in line, and somebody who has time
    jobs = Fake("a", ("--first-token-s", "0.05")).with_facts(slots=1)
    async with rota(tmp_path, [jobs, Fake("b")], ONE) as rig:
        line = Line(rig)
        for name in "a" * 5 + "b" + "a" * 5:
            await line.join(name)
        assert {answer.status_code for answer in await line.answers()} == {200}
        assert line.served == ["a"] * 10 + ["b"]
        assert [rig.model(name)["loads"] for name in "ab"] == [1, 1]


async def test_queued_jobs_wait_for_one_who_is_out_of_patience(tmp_path: Path) -> None:
    # case Q9; the line takes four times as long as the other has patience
    jobs = Fake("a", ("--first-token-s", "0.4")).with_facts(slots=1)
    chat = Fake("b").with_facts(patience_ms=PATIENCE_MS)
    async with rota(tmp_path, [jobs, chat], ONE) as rig:
        line = Line(rig)
        for name in "a" * 5 + "b" + "a" * 5:
            await line.join(name)
        assert {answer.status_code for answer in await line.answers()} == {200}
        assert line.served.index("b") < 9
        assert [rig.model(name)["loads"] for name in "ab"] == [2, 1]


# ── those who wait ───────────────────────────────────────────────────────────────────────


async def test_steady_traffic_makes_way_for_who_has_waited_long_enough(tmp_path: Path) -> None:
    # case W6
    rival = Fake("b").with_facts(patience_ms=PATIENCE_MS)
    async with rota(tmp_path, [Fake("a", TALKER), rival], ONE) as rig, kept_busy(rig, "a"):
        assert (await rig.chat("b", x_conversation_id="b")).status_code == 200
        assert rig.model("b")["loads"] == 1


@pytest.mark.parametrize("wait_s", [2, pytest.param(60, marks=pytest.mark.slow)])
async def test_steady_traffic_makes_way_for_an_sdk_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: int
) -> None:
    """The unmodified SDK, with its default retries, is told to return long before its patience
    is over; its place is kept, and what was loaded meanwhile stays for it."""
    # case W6
    monkeypatch.setattr(words, "RETRY_MS_MAX", wait_s * 1_000)  # a minute, as users have it
    rival = Fake("b").with_facts(patience_ms=PATIENCE_MS, activation_wait_ms=200)
    busy = Fake("a", TALKER).with_facts(activation_wait_ms=1_000)
    async with rota(tmp_path, [busy, rival], ONE) as rig, kept_busy(rig, "a"):
        asked = asyncio.create_task(call_at_once(Burst(rig.url, "b", ("hi",))))

        def is_away() -> bool:
            queue = rig.controller.queue()["queue"]
            assert isinstance(queue, list)
            return any(row["model"] == "b" and not row["is_here"] for row in queue)

        await until(is_away, "it was told to come back")
        await until(lambda: rig.state("b") == "ready", "it is loaded for one who is away")
        assert all(await asked)
        assert rig.model("b")["loads"] == 1


async def test_a_load_that_nobody_waits_for_makes_way_at_once(tmp_path: Path) -> None:
    # case W31; the abandoned load would never end
    async with rota(tmp_path, [Fake("a", NEVER_READY), Fake("b")], ONE) as rig:
        wrong = asyncio.create_task(rig.chat("a"))
        await until(lambda: rig.pid("a"))
        pid = rig.pid("a")
        assert pid is not None
        right = asyncio.create_task(rig.chat("b"))
        await until(lambda: rig.model("b")["waiting"] == 1)
        wrong.cancel()
        assert (await right).status_code == 200
        assert not is_alive(pid)
        assert rig.model("a")["loads"] == 1


# ── those who are served ─────────────────────────────────────────────────────────────────


async def test_what_was_loaded_runs_its_request_before_it_makes_way(tmp_path: Path) -> None:
    # case Q10; the other has lost all patience before the load has ended
    rival = Fake("b").with_facts(patience_ms=1)
    slow = Fake("a", ("--load-s", "0.5", *TALKER))
    async with rota(tmp_path, [slow, rival], ONE) as rig:
        line = Line(rig)
        await line.join("a")
        await line.join("b")
        assert {answer.status_code for answer in await line.answers()} == {200}
        assert line.served == ["a", "b"]
        assert [rig.model(name)["loads"] for name in "ab"] == [1, 1]


async def test_what_was_loaded_for_one_who_is_away_stays_until_it_is_back(tmp_path: Path) -> None:
    # case Q10; it is told to come back in two seconds at least, the load takes one
    slow = Fake("a", ("--load-s", "1")).with_facts(activation_wait_ms=200)
    rival = Fake("b").with_facts(patience_ms=1)
    async with rota(tmp_path, [slow, rival], ONE) as rig:
        await rig.controller.load("a")  # how long a load takes is known from now on
        await rig.controller.unload("a")
        away = await rig.chat("a", x_conversation_id="away")
        assert (away.status_code, away.json()["error"]["code"]) == (503, "model_loading")
        asked = asyncio.create_task(rig.chat("b", x_conversation_id="other"))
        await until(lambda: rig.state("a") == "ready")
        await until(lambda: rig.model("b")["waiting"] == 1)
        back = await rig.chat("a", x_conversation_id="away")
        assert (back.status_code, back.headers["x-rota-model-loaded"]) == (200, "0")
        assert (await asked).status_code == 200
        assert [rig.model(name)["loads"] for name in "ab"] == [1 + 1, 1]


@pytest.mark.parametrize(
    "patience_ms", [PATIENCE_MS, pytest.param(300_000, marks=pytest.mark.slow)]
)
async def test_sessions_with_different_models_are_never_cut(
    tmp_path: Path, patience_ms: int
) -> None:
    # case W68; five sessions, three models, room for one of them
    fakes = [Fake(name, TALKER).with_facts(patience_ms=patience_ms) for name in "abc"]
    async with rota(tmp_path, fakes, ONE) as rig:
        served: list[str] = []

        async def session(names: str) -> None:
            for name in names:
                async with rig.begun(name) as rest:
                    served.append(name)
                    assert is_whole("\n".join([line async for line in rest]))

        await asyncio.gather(*map(session, ("abc", "bca", "cab", "aba", "cbc")))
        changes = sum(before != after for before, after in pairwise(served))
        assert sum(rig.model(name)["loads"] for name in "abc") <= changes + 1


async def test_a_session_is_cut_by_who_asks_for_that(tmp_path: Path) -> None:
    # case W68
    endless = ("--tokens", "100000", "--tokens-per-second", "20")
    async with rota(tmp_path, [Fake("a", endless)], ONE) as rig, rig.begun("a") as rest:
        answer = await rig.http.post("/rota/v1/models/a/unload?wait=true&grace_s=0")
        assert answer.status_code == 200
        lines = [line async for line in rest]
        assert '"error"' in [line for line in lines if line.startswith("data: ")][-1]
        assert not is_whole("\n".join(lines))
