"""What: more than can be served is turned away in time and in words, and what is broken costs
the others nothing. How: a whole rota over fake engines."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from rota.core import scheduler
from tests.system.rig import Fake, rota, until

ONE = {"gpu0": 1_000}
ASIDE = ("/", "/health", "/v1/models", "/v1/models/a", "/rota/v1/status", "/rota/v1/queue")


def said(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["code"])


async def test_more_requests_than_slots_are_served_in_their_order(tmp_path: Path) -> None:
    # case W7
    fake = Fake("a", ("--first-token-s", "0.05")).with_facts(slots=1)
    async with rota(tmp_path, [fake], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200
        served: list[int] = []

        async def ask(number: int) -> None:
            assert (await rig.chat("a")).status_code == 200
            served.append(number)

        async with asyncio.TaskGroup() as group:
            asked: list[asyncio.Task[None]] = []

            def are_known() -> bool:
                return rig.waiting() + rig.in_flight() + len(served) == len(asked)

            for number in range(25):
                asked.append(group.create_task(ask(number)))
                await until(are_known)
        assert served == list(range(25))


async def test_a_full_queue_says_when_to_come_back_and_only_requests_count(
    tmp_path: Path,
) -> None:
    # case W7; who comes back when it was told to is served
    hangs = tmp_path / "hangs"
    knobs = ("--first-token-s", "0.05", "--hangs-while", str(hangs))
    fake = Fake("a", knobs).with_facts(slots=2, queue_max=10)
    async with rota(tmp_path, [fake], ONE) as rig:
        assert (await rig.chat("a")).status_code == 200  # how long one takes is known from now on
        hangs.touch()
        crowd = [asyncio.create_task(rig.chat("a")) for _ in range(12)]
        await until(lambda: rig.waiting() == 10)
        refused = await rig.chat("a")
        assert (refused.status_code, said(refused)) == (429, "queue_full")
        for path in ASIDE:
            assert (await rig.http.get(path)).status_code == 200
        hangs.unlink()
        assert {answer.status_code for answer in await asyncio.gather(*crowd)} == {200}
        again_s = int(refused.headers["retry-after"])
        assert 2 <= again_s < 60  # a minute is what is said when nothing is known
        await asyncio.sleep(again_s)
        assert (await rig.chat("a")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("facts", [{"queue_max": 0}, {"rejects_when_full": True}])
async def test_over_the_limit_a_streaming_request_is_refused_before_it_has_begun(
    tmp_path: Path, stream: bool, facts: dict[str, object]
) -> None:
    # case W8
    fake = Fake("a", ("--tokens", "1000", "--tokens-per-second", "50")).with_facts(slots=1, **facts)
    async with rota(tmp_path, [fake], ONE) as rig:
        await rig.controller.load("a")
        async with rig.begun("a"):
            refused = await rig.chat("a", stream=stream)
            assert refused.status_code == 429
            assert refused.headers["content-type"] == "application/json"
            assert said(refused) in ("queue_full", "model_busy")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        await until(lambda: rig.in_flight() == 0)


async def poll_broken(
    tmp_path: Path, *, requests: int, every_s: float
) -> tuple[list[float], list[httpx2.Response]]:
    """A poller that retries a model that breaks while it loads, another model beside it; when
    each process was started, and what the poller was told."""
    starts = tmp_path / "starts"
    note = f"cut -d' ' -f1 /proc/uptime >> {starts}; exec"
    broken = Fake("a", ("--crash-at", "load"), shell=note)
    async with rota(tmp_path, [broken, Fake("b", memory_mib=400)], ONE) as rig:
        assert (await rig.chat("b")).status_code == 200
        pid = rig.pid("b")
        answers = []
        for _ in range(requests):
            answers.append(await rig.chat("a"))
            assert (await rig.chat("b")).status_code == 200
            assert rig.devices.used_mib() == {"gpu0": 400}
            await asyncio.sleep(every_s)
        assert rig.pid("b") == pid
        assert len(starts.read_text().split()) == rig.model("a")["loads"]
    return [float(line) for line in starts.read_text().split()], answers


def check_told(answers: list[httpx2.Response]) -> None:
    for answer in answers:
        assert (answer.status_code, said(answer)) == (503, "model_cooling")
        assert 2 <= int(answer.headers["retry-after"]) <= 60
        assert "told to crash while loading" in answer.json()["error"]["message"]


async def test_a_broken_model_rests_longer_after_each_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case H5; a tenth of the pauses that users have
    monkeypatch.setattr(scheduler, "COOLDOWN_MS_MIN", 500)
    starts, answers = await poll_broken(tmp_path, requests=60, every_s=0.03)
    check_told(answers)
    assert len(starts) >= 2
    for number, (before, after) in enumerate(pairwise(starts)):
        assert after - before >= 0.49 * 2**number  # the clock of starts has hundredths


@pytest.mark.slow
async def test_a_broken_model_is_started_three_times_in_ten_seconds_at_most(
    tmp_path: Path,
) -> None:
    # case H5; what comes after ten seconds is another matter
    begun_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    starts, answers = await poll_broken(tmp_path, requests=60, every_s=10 / 60)
    check_told(answers)
    assert 1 <= len([start for start in starts if start - begun_s <= 10]) <= 3
