"""What: things that went wrong for users of such software, each as a small test of the right
outcome. How: a whole rota over fake engines; the letters name the rows of our case list."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import httpx2
import openai
import pytest

from rota.core.types import Scaling
from tests.system.rig import Fake, Rig, end, is_alive, rota, until

ONE = {"gpu0": 1_000}


def said(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])


def is_whole(answer: httpx2.Response) -> bool:
    return answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")


# ── queues ───────────────────────────────────────────────────────────────────────────────


async def test_a_queue_limit_holds_also_when_the_model_is_loaded(tmp_path: Path) -> None:
    # case Q1
    fake = Fake("a", ("--first-token-s", "0.5")).with_facts(slots=1, queue_max=1)
    async with rota(tmp_path, [fake], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200
        answers = await asyncio.gather(*(rig.chat("a") for _ in range(6)))
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert (len(served), len(refused)) == (2, 4)
        assert {said(answer) for answer in refused} == {"queue_full"}
        assert all(2 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)


async def test_a_burst_of_thirty_is_served(tmp_path: Path) -> None:
    # case Q2
    async with rota(tmp_path, [Fake("a")], ONE) as rig:
        answers = await asyncio.gather(*(rig.chat("a") for _ in range(30)))
        assert {answer.status_code for answer in answers} == {200}


@pytest.mark.slow
async def test_six_hundred_calls_of_an_sdk_lose_none(tmp_path: Path) -> None:
    # case Q3
    async with rota(tmp_path, [Fake("a")], ONE) as rig:
        sdk = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=5)
        async with sdk:
            calls = (
                sdk.chat.completions.create(
                    model="a", messages=[{"role": "user", "content": str(number)}]
                )
                for number in range(600)
            )
            answers = await asyncio.gather(*calls)
        assert all(answer.choices[0].message.content for answer in answers)


async def test_a_generation_ends_before_its_model_makes_way(tmp_path: Path) -> None:
    # case Q4
    talker = Fake("a", ("--tokens", "20", "--tokens-per-second", "20"))
    async with rota(tmp_path, [talker, Fake("b")], ONE) as rig:
        talking = asyncio.create_task(rig.chat("a", stream=True))
        await until(lambda: rig.in_flight() == 1)
        rival = await rig.chat("b")
        assert talking.done()
        assert is_whole(await talking)
        assert rival.status_code == 200


async def test_two_loads_at_once_both_end(tmp_path: Path) -> None:
    # case Q5
    async with rota(tmp_path, [Fake("a"), Fake("b"), Fake("c")], ONE) as rig:
        await rig.chat("a")
        answers = await asyncio.gather(rig.chat("b"), rig.chat("c"))
        assert {answer.status_code for answer in answers} == {200}


async def test_two_clients_that_alternate_break_nothing(tmp_path: Path) -> None:
    # case Q8
    async with rota(tmp_path, [Fake("a"), Fake("b")], ONE) as rig:

        async def client(names: str) -> list[int]:
            return [(await rig.chat(name)).status_code for name in names]

        rounds = 10
        statuses = await asyncio.gather(client("ab" * rounds), client("ba" * rounds))
        assert [status for client_ in statuses for status in client_] == [200] * 4 * rounds
        loads = int(rig.model("a")["loads"]) + int(rig.model("b")["loads"])
        assert loads <= 4 * rounds  # each client changes direction so often, at one swap each


# ── loading ──────────────────────────────────────────────────────────────────────────────


async def test_fifty_requests_at_a_cold_model_start_one_process(tmp_path: Path) -> None:
    # case H1
    async with rota(tmp_path, [Fake("a", ("--load-s", "0.3"))], ONE) as rig:
        sdk = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none")
        async with sdk:
            calls = (
                sdk.chat.completions.create(
                    model="a", messages=[{"role": "user", "content": str(number)}]
                )
                for number in range(50)
            )
            answers = await asyncio.gather(*calls)
        assert len([a for a in answers if a.choices[0].message.content]) == 50
        assert rig.model("a")["loads"] == 1
        assert (await rig.engine_stats("a"))["requests"] == 50


async def test_a_client_that_times_out_does_not_start_the_load_over(tmp_path: Path) -> None:
    # case L1
    async with rota(tmp_path, [Fake("a", ("--load-s", "1.5"))], ONE) as rig:
        for _ in range(3):
            with pytest.raises(httpx2.ReadTimeout):
                await rig.http.post("/v1/chat/completions", json={"model": "a"}, timeout=0.4)
        answer = await rig.chat("a")
        assert answer.status_code == 200
        assert rig.model("a")["loads"] == 1


async def test_a_load_over_its_time_fails_cleanly_and_may_be_tried_again(tmp_path: Path) -> None:
    # cases L2, W30
    hangs = Fake("a", ("--probe-hangs",), start_timeout_ms=500)
    async with rota(tmp_path, [hangs, Fake("b")], ONE) as rig:
        asked = asyncio.create_task(rig.chat("a"))
        await until(lambda: rig.pid("a"))
        pid = rig.pid("a")
        assert pid is not None
        answer = await asked
        assert (answer.status_code, said(answer)) == (503, "model_cooling")
        assert not is_alive(pid)
        assert (await rig.chat("b")).status_code == 200
        with pytest.raises(Exception, match="not ready after"):
            await rig.controller.load("a")  # it may be tried again, and is
        assert rig.model("a")["loads"] == 2


# ── engines that break ───────────────────────────────────────────────────────────────────


async def test_an_engine_that_breaks_off_is_no_normal_end(tmp_path: Path) -> None:
    # cases S1, W12
    breaks = Fake("a", ("--drop-after-tokens", "5"))
    async with rota(tmp_path, [breaks], ONE) as rig:
        streamed = await rig.chat("a", stream=True)
        events = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert '"error"' in events[-1]
        assert 'finish_reason": "stop' not in streamed.text
        whole = await rig.chat("a")
        assert whole.status_code == 502
        assert isinstance(whole.json()["error"]["message"], str)
        assert rig.in_flight() == 0


async def test_an_engine_killed_in_mid_stream_is_told_and_replaced(tmp_path: Path) -> None:
    # case W12
    talker = Fake("a", ("--tokens", "400", "--tokens-per-second", "20"))
    async with rota(tmp_path, [talker], ONE) as rig:
        talking = asyncio.create_task(rig.chat("a", stream=True))
        await until(lambda: rig.in_flight() == 1)
        pid = rig.pid("a")
        assert pid is not None
        end(pid, signal.SIGKILL)
        answer = await talking
        assert '"error"' in answer.text or answer.status_code == 502
        await until(lambda: not is_alive(pid))
        assert rig.in_flight() == 0


async def test_unloading_removes_an_engine_that_hangs(tmp_path: Path) -> None:
    # case W14
    async with rota(tmp_path, [Fake("a", ("--tokens-per-second", "5"))], ONE) as rig:
        asked = asyncio.create_task(rig.chat("a", stream=True))
        await until(lambda: rig.in_flight() == 1)
        pid = rig.pid("a")
        assert pid is not None
        end(pid, signal.SIGSTOP)
        answer = await rig.http.post("/rota/v1/models/a/unload?wait=true&grace_s=0")
        assert answer.status_code == 200
        assert not is_alive(pid)
        await asyncio.wait([asked])


async def test_a_hung_idle_engine_makes_way(tmp_path: Path) -> None:
    # case W15
    async with rota(tmp_path, [Fake("a"), Fake("b")], ONE) as rig:
        await rig.chat("a")
        pid = rig.pid("a")
        assert pid is not None
        end(pid, signal.SIGSTOP)
        assert (await rig.chat("b")).status_code == 200
        assert not is_alive(pid)


# ── the end of use ───────────────────────────────────────────────────────────────────────


async def test_a_request_that_meets_an_ending_model_is_served(tmp_path: Path) -> None:
    # case W1
    slow_to_end = Fake("a", ("--ignore-sigterm",), scaling=Scaling(0, 1, 30))
    async with rota(tmp_path, [slow_to_end.with_facts(stop_grace_ms=100)], ONE) as rig:
        random_ = random.Random(1)
        for _ in range(20):
            answer = await rig.chat("a")
            assert answer.status_code == 200
            await asyncio.sleep(random_.uniform(0.0, 0.12))  # around the instant it steps down


async def test_the_idle_clock_starts_when_the_answer_has_ended(tmp_path: Path) -> None:
    # case W3
    talker = Fake("a", ("--tokens", "10", "--tokens-per-second", "10"))
    async with rota(
        tmp_path, [Fake(talker.name, talker.knobs, scaling=Scaling(0, 1, 700))], ONE
    ) as rig:
        assert is_whole(await rig.chat("a", stream=True))
        pid = rig.pid("a")
        assert pid is not None
        assert (await rig.chat("a")).status_code == 200
        assert rig.pid("a") == pid


# ── clients that leave ───────────────────────────────────────────────────────────────────


async def test_two_hundred_clients_that_leave_at_random_leave_nothing(tmp_path: Path) -> None:
    # case W10
    random_ = random.Random(10)
    knobs = ("--load-s", "0.4", "--tokens", "30", "--tokens-per-second", "60")
    async with rota(tmp_path, [Fake("a", knobs), Fake("b", knobs)], ONE) as rig:

        async def client(number: int) -> None:
            asked = asyncio.create_task(rig.chat("ab"[number % 2], stream=bool(number % 3)))
            await asyncio.wait([asked], timeout=random_.uniform(0.0, 1.5))
            asked.cancel()
            await asyncio.wait([asked])

        await asyncio.gather(*(client(number) for number in range(200)))
        await until(lambda: rig.in_flight() == 0, "every slot is back")
        await until(lambda: not waiting(rig), "nobody is waiting")
        for name in "ab":
            assert is_whole(await rig.chat(name, stream=True))
            assert (await rig.engine_stats(name))["active"] == 0


def waiting(rig: Rig) -> int:
    return sum(rig.model(name)["waiting"] for name in "ab")
