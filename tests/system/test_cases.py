"""What: things that went wrong for users of such software, each as a small test of the right
outcome. How: a whole rota over fake engines; the letters name the rows of our case list."""

from __future__ import annotations

import asyncio
import random
import signal
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from rota.core.types import Scaling
from tests.system.rig import Fake, end, is_alive, rota, until
from tests.system.sdk import Burst, call_at_once

ONE = {"gpu0": 1_000}


def said(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])


def is_broken_off(text: str) -> bool:
    """Whether a stream says at its end that it is none."""
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    return '"error"' in events[-1] and '"stop"' not in text


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
        assert (await rig.engine_stats("a"))["active_max"] == 1


async def test_a_burst_of_thirty_is_served(tmp_path: Path) -> None:
    # case Q2
    async with rota(tmp_path, [Fake("a")], ONE) as rig:
        answers = await asyncio.gather(*(rig.chat("a") for _ in range(30)))
        assert {answer.status_code for answer in answers} == {200}
        assert (await rig.engine_stats("a"))["active_max"] <= 10


@pytest.mark.slow
async def test_six_hundred_calls_of_an_sdk_lose_none(tmp_path: Path) -> None:
    # case Q3; the queue holds half of them, so the others are told to come back, and do
    fake = Fake("a", ("--first-token-s", "0.1")).with_facts(queue_max=300)
    async with rota(tmp_path, [fake], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200  # how long one takes is known from now on
        prompts = tuple(str(number) for number in range(600))
        answers = await call_at_once(Burst(rig.url, "a", prompts, max_retries=5))
        assert len(answers) == 600
        assert all(answers)
        assert (await rig.engine_stats("a"))["requests"] == 600 + 1


async def test_calls_over_the_limit_are_told_when_to_come_back(tmp_path: Path) -> None:
    # case Q3
    fake = Fake("a", ("--first-token-s", "0.1")).with_facts(queue_max=20)
    async with rota(tmp_path, [fake], ONE) as rig:
        answers = await asyncio.gather(*(rig.chat("a") for _ in range(100)))
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in answers:
            if answer.status_code == 429:
                assert said(answer) == "queue_full"
                assert 2 <= int(answer.headers["retry-after"]) <= 60


async def test_a_generation_ends_before_its_model_makes_way(tmp_path: Path) -> None:
    # case Q4
    talker = Fake("a", ("--tokens", "30", "--tokens-per-second", "20"))
    async with rota(tmp_path, [talker, Fake("b")], ONE) as rig, rig.begun("a") as rest:
        asked = asyncio.create_task(rig.chat("b"))
        await until(lambda: rig.model("b")["waiting"] == 1)
        lines = [line async for line in rest]
        assert lines[-2:] == ["data: [DONE]", ""]
        assert (await asked).status_code == 200
        assert rig.model("a")["loads"] == rig.model("b")["loads"] == 1


async def test_two_loads_at_once_both_end_in_order(tmp_path: Path) -> None:
    # case Q5
    async with rota(tmp_path, [Fake("a"), Fake("b"), Fake("c")], ONE) as rig:
        await rig.chat("a")
        served: list[str] = []

        async def ask(name: str) -> None:
            assert (await rig.chat(name)).status_code == 200
            served.append(name)

        first = asyncio.create_task(ask("b"))
        await until(lambda: rig.model("b")["waiting"] == 1)
        await asyncio.gather(first, ask("c"))
        assert served == ["b", "c"]
        assert [rig.model(name)["loads"] for name in "abc"] == [1, 1, 1]


async def test_two_clients_that_alternate_break_nothing(tmp_path: Path) -> None:
    # case Q8: every load serves someone, so there are no more than changes of direction
    async with rota(tmp_path, [Fake("a"), Fake("b")], ONE) as rig:
        served: list[str] = []

        async def client(names: str) -> None:
            for name in names:
                assert (await rig.chat(name)).status_code == 200
                served.append(name)

        rounds = 10
        await asyncio.gather(client("ab" * rounds), client("ba" * rounds))
        changes = sum(before != after for before, after in pairwise(served))
        assert rig.model("a")["loads"] + rig.model("b")["loads"] <= changes + 1


# ── loading ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_fifty_requests_at_a_cold_model_start_one_process(
    tmp_path: Path, stream: bool
) -> None:
    # case H1; there is room for one for each of them
    async with rota(tmp_path, [Fake("a", ("--load-s", "1"), memory_mib=10)], ONE) as rig:
        prompts = tuple(str(number) for number in range(50))
        answers = await call_at_once(Burst(rig.url, "a", prompts, stream=stream))
        assert len(answers) == 50
        assert all(answers)
        assert rig.model("a")["loads"] == 1
        assert len(rig.processes()["a"]) == 1
        assert (await rig.engine_stats("a"))["requests"] == 50


async def test_a_client_that_times_out_does_not_start_the_load_over(tmp_path: Path) -> None:
    # case L1; it leaves three times before the load has ended
    async with rota(tmp_path, [Fake("a", ("--load-s", "3"))], ONE) as rig:
        for _ in range(3):
            asked = asyncio.create_task(rig.chat("a"))
            await until(lambda: rig.model("a")["waiting"] == 1)
            asked.cancel()
            await asyncio.wait([asked])
            await until(lambda: rig.model("a")["waiting"] == 0)
        assert rig.state("a") == "loading"
        assert (await rig.chat("a")).status_code == 200
        assert rig.model("a")["loads"] == 1


@pytest.mark.slow
async def test_an_sdk_that_has_little_time_is_served_by_its_retries(tmp_path: Path) -> None:
    # case L1; it states its time-out, so it is answered before that and told when to come back
    async with rota(tmp_path, [Fake("a", ("--load-s", "1"))], ONE) as rig:
        await rig.controller.load("a")  # how long a load takes is known from now on
        await rig.controller.unload("a")
        burst = Burst(rig.url, "a", ("hi",), timeout_s=0.8, max_retries=5)
        assert all(await call_at_once(burst))
        assert rig.model("a")["loads"] == 1 + 1


async def test_a_load_over_its_time_fails_cleanly_and_may_be_tried_again(tmp_path: Path) -> None:
    # case L2; the second load is quick, as one of a file that is in memory by now
    counter = tmp_path / "tried"
    script = f"if [ -e {counter} ]; then s=0; else touch {counter}; s=600; fi; "
    slow_once = Fake("a", start_timeout_ms=1_500, shell=script, knobs=("--load-s", "$s"))
    async with rota(tmp_path, [slow_once], ONE) as rig:
        asked = asyncio.create_task(rig.chat("a"))
        await until(lambda: rig.pid("a"))
        pid = rig.pid("a")
        assert pid is not None
        answer = await asked
        assert (answer.status_code, said(answer)) == (503, "model_cooling")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        message = answer.json()["error"]["message"]
        assert "not ready after 1.5 s" in message
        assert "Its last lines:\nfake engine, pid" in message  # case W29
        assert not is_alive(pid)
        assert rig.model("a")["replicas"] == []
        await rig.controller.load("a")  # by hand at once; a request would when it has cooled down
        assert (await rig.chat("a")).status_code == 200


@pytest.mark.slow
async def test_what_failed_is_tried_again_by_whoever_comes_back(tmp_path: Path) -> None:
    # case L2, and the SDK waits as long as it is told
    counter = tmp_path / "tried"
    script = f"if [ ! -e {counter} ]; then touch {counter}; exit 1; fi; "
    async with rota(tmp_path, [Fake("a", shell=script)], ONE) as rig:
        assert all(await call_at_once(Burst(rig.url, "a", ("hi",))))
        assert rig.model("a")["loads"] == 2


async def test_a_probe_that_is_never_answered_ends_the_start(tmp_path: Path) -> None:
    # case W30; the next model waits for the room that the hanging one has
    hangs = Fake("a", ("--probe-hangs",), start_timeout_ms=1_500)
    async with rota(tmp_path, [hangs, Fake("b")], ONE) as rig:
        asked = asyncio.create_task(rig.chat("a"))
        await until(lambda: rig.pid("a"))
        pid = rig.pid("a")
        assert pid is not None
        rival = asyncio.create_task(rig.chat("b"))
        answer = await asked
        assert (answer.status_code, said(answer)) == (503, "model_cooling")
        assert not is_alive(pid)
        assert (await rival).status_code == 200


# ── engines that break ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "knobs", [("--drop-after-tokens", "5"), ("--crash-at", "token:5")], ids=["reset", "death"]
)
async def test_an_engine_that_breaks_off_is_no_normal_end(
    tmp_path: Path, knobs: tuple[str, ...]
) -> None:
    # cases S1, W12
    async with rota(tmp_path, [Fake("a", knobs)], ONE) as rig:
        streamed = await rig.chat("a", stream=True)
        assert is_broken_off(streamed.text)
        await until(lambda: rig.in_flight() == 0)
    async with rota(tmp_path, [Fake("a", knobs)], ONE) as rig:
        whole = await rig.chat("a")
        assert whole.status_code == 502
        assert isinstance(whole.json()["error"]["message"], str)
        await until(lambda: rig.in_flight() == 0)


async def test_an_engine_killed_in_mid_stream_is_told_and_replaced(tmp_path: Path) -> None:
    # case W12; one call streamed and one not are under way
    talker = Fake("a", ("--tokens", "30", "--tokens-per-second", "20"))
    async with rota(tmp_path, [talker], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200
        async with rig.begun("a") as rest:
            whole = asyncio.create_task(rig.chat("a"))
            await until(lambda: rig.in_flight() == 2)
            pid = rig.pid("a")
            assert pid is not None
            end(pid, signal.SIGKILL)
            assert is_broken_off("\n".join([line async for line in rest]))
            answer = await whole
            assert answer.status_code == 502
            assert isinstance(answer.json()["error"]["message"], str)
        await until(lambda: rig.pid("a") != pid, "its end is known")
        assert rig.in_flight() == 0
        assert is_whole(await rig.chat("a", stream=True))
        assert rig.pid("a") != pid


async def test_nothing_of_a_killed_engine_keeps_its_memory(tmp_path: Path) -> None:
    # case Z1; the engine's own child is in a session of its own and ignores SIGTERM
    with_child = Fake("a", ("--grandchild", "setsid"))
    async with rota(tmp_path, [with_child], ONE) as rig:
        await rig.chat("a")
        pids = (await rig.engine_stats("a"))["pids"]
        assert len(pids) == 2
        end(pids[0], signal.SIGKILL)
        assert (await rig.chat("a")).status_code == 200  # whether its end is known by then or not
        assert not any(map(is_alive, pids))
        assert not set(pids) & set((await rig.engine_stats("a"))["pids"])


STUBBORN = ("--ignore-sigterm", "--tokens", "30", "--tokens-per-second", "1")


async def test_one_that_ignores_the_order_is_stopping_until_it_is_gone(tmp_path: Path) -> None:
    # case Z3
    stubborn = Fake("a", STUBBORN).with_facts(stop_grace_ms=700)
    async with rota(tmp_path, [stubborn], ONE) as rig:
        await rig.controller.load("a")
        pid = rig.pid("a")
        assert pid is not None
        unloading = asyncio.create_task(rig.controller.unload("a"))
        await until(lambda: rig.state("a") == "stopping")
        was_alive = []
        while rig.state("a") == "stopping":
            was_alive.append(is_alive(pid))
            await asyncio.sleep(0.005)
        assert any(was_alive)
        assert rig.model("a")["replicas"] == []
        assert not is_alive(pid)
        await unloading


@pytest.mark.parametrize("knobs", [STUBBORN[1:], STUBBORN], ids=["polite", "stubborn"])
@pytest.mark.parametrize("query", ["grace_s=0.2", "grace_s=0"])
async def test_unloading_removes_an_engine_that_hangs(
    tmp_path: Path, knobs: tuple[str, ...], query: str
) -> None:
    # case W14
    async with (
        rota(tmp_path, [Fake("a", knobs).with_facts(stop_grace_ms=300)], ONE) as rig,
        rig.begun("a") as rest,
    ):
        pid = rig.pid("a")
        assert pid is not None
        end(pid, signal.SIGSTOP)
        answer = await rig.http.post(f"/rota/v1/models/a/unload?wait=true&{query}")
        assert answer.status_code == 200
        assert not is_alive(pid)
        assert is_broken_off("\n".join([line async for line in rest]))
        assert rig.in_flight() == 0


@pytest.mark.parametrize("knobs", [(), STUBBORN], ids=["polite", "stubborn"])
async def test_a_hung_idle_engine_makes_way(tmp_path: Path, knobs: tuple[str, ...]) -> None:
    # case W15
    hung = Fake("a", knobs).with_facts(stop_grace_ms=300)
    async with rota(tmp_path, [hung, Fake("b")], ONE) as rig:
        await rig.controller.load("a")
        pid = rig.pid("a")
        assert pid is not None
        end(pid, signal.SIGSTOP)
        assert (await rig.chat("b")).status_code == 200
        assert not is_alive(pid)


@pytest.mark.parametrize("tail", ["& wait", "& wait $!; true", "| cat"])
async def test_a_shell_that_forks_is_ended_with_all_it_started(tmp_path: Path, tail: str) -> None:
    # case W18
    async with rota(tmp_path, [Fake("a", shell="true; ", shell_tail=tail)], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200
        (server,) = (await rig.engine_stats("a"))["pids"]
        shell = rig.pid("a")
        assert shell not in (None, server)
        answer = await rig.http.post("/rota/v1/models/a/unload?wait=true")
        assert answer.status_code == 200
        assert not is_alive(server)
        assert (await rig.chat("a")).status_code == 200


# ── the end of use ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rounds", [8, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "knobs", [("--exit-s", "0.2"), ("--ignore-sigterm",)], ids=["slow", "deaf"]
)
async def test_a_request_that_meets_an_ending_model_is_served(
    tmp_path: Path, knobs: tuple[str, ...], rounds: int
) -> None:
    # case W1: it comes at a random moment of the fifth of a second that the ending takes
    ends_slowly = Fake("a", knobs, scaling=Scaling(0, 1, 20)).with_facts(stop_grace_ms=200)
    random_ = random.Random(1)
    async with rota(tmp_path, [ends_slowly], ONE) as rig:
        for number in range(rounds):
            assert (await rig.chat("a")).status_code == 200
            await until(lambda: rig.state("a") != "ready", f"the end of round {number}")
            await asyncio.sleep(random_.uniform(0.0, 0.25))
        assert rig.model("a")["loads"] == rounds


async def test_the_idle_clock_starts_when_the_answer_has_ended(tmp_path: Path) -> None:
    # case W3; the answer takes longer than an idle model stays
    talker = Fake(
        "a", ("--tokens", "20", "--tokens-per-second", "10"), scaling=Scaling(0, 1, 1_500)
    )
    async with rota(tmp_path, [talker], ONE) as rig:
        assert is_whole(await rig.chat("a", stream=True))
        pid = rig.pid("a")
        assert pid is not None
        async with rig.begun("a"):
            assert rig.pid("a") == pid
        await until(lambda: rig.state("a") == "cold", "and then it does step down")
        assert rig.model("a")["loads"] == 1


# ── clients that leave ───────────────────────────────────────────────────────────────────


async def test_two_hundred_clients_that_leave_at_random_leave_nothing(tmp_path: Path) -> None:
    # case W10
    random_ = random.Random(10)
    knobs = ("--load-s", "0.4", "--tokens", "30", "--tokens-per-second", "60")
    async with rota(tmp_path, [Fake("a", knobs), Fake("b", knobs)], ONE) as rig:

        async def leave_at_some_time(name: str) -> None:
            asked = asyncio.create_task(rig.chat(name, stream=random_.random() < 0.7))
            await asyncio.wait([asked], timeout=random_.uniform(0.0, 1.5))
            asked.cancel()
            await asyncio.wait([asked])

        async def leave_at_some_token(name: str) -> None:
            async with rig.begun(name) as rest:
                for _ in range(random_.randrange(30)):
                    await anext(rest)

        ways = [leave_at_some_time] * 140 + [leave_at_some_token] * 60
        random_.shuffle(ways)
        await asyncio.gather(*(leave(random_.choice("ab")) for leave in ways))
        await until(lambda: rig.in_flight() == 0, "every slot is back")
        await until(lambda: rig.waiting() == 0, "nobody is waiting")
        for name in "ab":
            assert is_whole(await rig.chat(name, stream=True))
            assert (await rig.engine_stats(name))["active"] == 0
