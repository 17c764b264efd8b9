"""What: at random and all at once, everything that callers, operators and machines do to a rota;
each error among the answers is one that the rules allow. How: seeded choices over real processes;
the interleaving is the machine's own, so what is checked holds for every one of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rota.core import clearing, orders, scheduler, words
from tests.system.rig import OFF, Fake, Rig, end, is_alive, rota, until

DEVICES = {"gpu0": 1_000, "gpu1": 1_000}
WAIT_MS = 1_500
QUEUE_MAX = 4
FACTS = {
    "slots": 2,
    "queue_max": QUEUE_MAX,
    "activation_wait_ms": WAIT_MS,
    "queue_wait_ms": WAIT_MS,
    "patience_ms": 1_000,
    "hold_finished_ms": 50,
    "stop_grace_ms": 200,
}
TALKS = ("--tokens", "30", "--tokens-per-second", "100")
BREAKS_AFTER = 6
SOUND = {
    "quick": (*TALKS,),
    "small": (*TALKS,),
    "slow": ("--load-s", "0.4", "--bind-late", *TALKS),
    "stubborn": ("--ignore-sigterm", *TALKS),
    "brittle": ("--crash-at", f"token:{BREAKS_AFTER}", *TALKS),
}
SCALED = {  # what users have in seconds and minutes; nothing else is changed
    (words, "RETRY_MS_MIN"): 1_000,
    (words, "RETRY_MS_MAX"): 1_000,
    (scheduler, "OWED_MS"): 1_000,
    (scheduler, "COOLDOWN_MS_MIN"): 250,
    (scheduler, "COOLDOWN_MS_MAX"): 1_000,
    (scheduler, "FORGET_MS"): 2_000,
    (orders, "FORGET_MS"): 2_000,
    (clearing, "BARRIER_MS"): 2_000,
    (clearing, "REOPENED_MS"): 500,
}
COOLDOWN_S = 1.0
NOTICED_S = 1.0
"""How long one who has left may still be in the queue."""


def fakes() -> list[Fake]:
    sizes = {"small": 300}
    models = [Fake(name, knobs, memory_mib=sizes.get(name, 600)) for name, knobs in SOUND.items()]
    broken = Fake("broken", ("--crash-at", "load"), memory_mib=300)
    return [fake.with_facts(**FACTS) for fake in (*models, broken, Fake("off", scaling=OFF))]


class Deeds:
    """What was done to which model, and from when until when: all that may explain an error."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], list[list[float]]] = {}

    @contextmanager
    def doing(self, what: str, model: str) -> Iterator[None]:
        span = [now_s(), math.inf]
        self._spans.setdefault((what, model), []).append(span)
        try:
            yield
        finally:
            span[1] = now_s()

    def count(self, what: str, model: str | None, since_s: float) -> int:
        """How often it was done to this model, or to any, at or after a time."""
        return sum(
            span[1] >= since_s
            for (done, to), spans in self._spans.items()
            if done == what and model in (None, to)
            for span in spans
        )


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Rounds:
    """One rota, and those who use and misuse it."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._seed = seed
        self._deeds = Deeds()
        self.seen: Counter[str] = Counter()
        self.unexplained: list[str] = []

    async def run(self, count: int, at_once: int) -> None:
        """So many rounds, some of them at once, under the eyes of a watchman."""
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await self._round(number)

        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(work() for _ in range(at_once)))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _round(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        deeds = {
            self._ask: 36,
            self._leave: 18,
            self._return: 14,
            self._lease: 10,
            self._load: 5,
            self._unload: 4,
            self._kill: 6,
            self._crash: 4,
            self._pin: 3,
        }
        (deed,) = chance.choices(list(deeds), list(deeds.values()))
        await deed(chance, str(number))

    # ── callers ──────────────────────────────────────────────────────────────────────────

    async def _ask(self, chance: random.Random, who: str) -> None:
        names = [*SOUND] * 4 + ["broken", "off", "unknown"]
        await self._chat(chance.choice(names), who, stream=chance.random() < 0.6)

    async def _return(self, chance: random.Random, who: str) -> None:
        """It comes back when it is told to, perhaps a little late, three times."""
        name, stream = chance.choice([*SOUND]), chance.random() < 0.6
        for _ in range(3):
            again_s = await self._chat(name, who, stream=stream)
            if again_s is None:
                return
            await asyncio.sleep(again_s + chance.uniform(0, 0.5))

    async def _leave(self, chance: random.Random, who: str) -> None:
        name = chance.choice([*SOUND])
        asked = asyncio.create_task(self._chat(name, who, stream=chance.random() < 0.6))
        await asyncio.wait([asked], timeout=chance.choice([0.05, 0.5, 1.5]) * chance.random())
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked

    async def _chat(self, name: str, who: str, *, stream: bool, tokens: int = 4) -> float | None:
        """Ask, and check what is answered. Returns when to come back, if that was said."""
        since_s = now_s()
        body = {
            "model": name,
            "stream": stream,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens if name == "brittle" else 30,
        }
        headers = {"X-Conversation-Id": who}
        try:
            with self._deeds.doing("ask", name):
                path = "/v1/chat/completions"
                answer = await self._rig.http.post(path, json=body, headers=headers)
        except httpx2.TransportError as error:  # an answer that was begun, and broken off
            self._account(name, since_s, "broken off", is_ended=True, more=repr(error))
            return None
        if answer.status_code == 200:
            is_whole = _is_whole(answer, stream=stream)
            what = "served" if is_whole else "broken off"
            self._account(name, since_s, what, is_ended=not is_whole, more=answer.text[-200:])
            return None
        return self._refused(name, since_s, answer)

    # ── operators and machines ───────────────────────────────────────────────────────────

    async def _kill(self, chance: random.Random, _who: str) -> None:
        name = chance.choice([*SOUND])
        pid = self._rig.pid(name)
        if pid is None or not is_alive(pid):
            return
        with self._deeds.doing("end", name):
            with suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
            self.seen["killed"] += 1
            await until(lambda: self._rig.pid(name) != pid, f"the end of {name} is known")

    async def _crash(self, _chance: random.Random, who: str) -> None:
        """One asks for more than the engine can bear."""
        with self._deeds.doing("end", "brittle"):
            await self._chat("brittle", who, stream=True, tokens=2 * BREAKS_AFTER)
            await until(lambda: not self._is_unnoticed("brittle"), "its end is known")

    def _is_unnoticed(self, name: str) -> bool:
        """Whether it counts as ready, and nobody is at its port."""
        replicas = self._rig.model(name)["replicas"]
        return any(r["phase"] == "ready" and not _accepts(r["port"]) for r in replicas)

    async def _unload(self, chance: random.Random, _who: str) -> None:
        name, grace_s, since_s = chance.choice([*SOUND]), chance.choice([0, 0.2]), now_s()
        pid = self._rig.pid(name)
        with self._deeds.doing("unload", name), self._deeds.doing("end", name):
            path = f"/rota/v1/models/{name}/unload?wait=true&grace_s={grace_s}"
            answer = await self._rig.http.post(path)
        is_done = answer.status_code == 200 and (pid is None or not is_alive(pid))
        if is_done:
            self._account(name, since_s, "unloaded")
        else:
            self._blame(name, since_s, f"not unloaded: {answer.text}, pid {pid}")

    async def _load(self, chance: random.Random, _who: str) -> None:
        """Whoever asks for a load may leave, and it waits in the queue for as long as it takes."""
        name, since_s = chance.choice([*SOUND, "broken", "off"]), now_s()
        path = f"/rota/v1/models/{name}/load?wait={chance.choice(['true', 'false'])}"
        with self._deeds.doing("load", name):
            try:
                async with asyncio.timeout(2 * chance.random()):
                    answer = await self._rig.http.post(path)
            except TimeoutError:
                self._account(name, since_s, "load goes on")
                return
            finally:
                await until(lambda: not self._is_to_load(name), f"the load of {name} is over")
        if answer.status_code in (200, 202):
            self._account(name, since_s, "loaded")
        else:
            self._refused(name, since_s, answer)

    def _is_to_load(self, name: str) -> bool:
        queue: Any = self._rig.controller.queue()["queue"]
        return any(row["model"] == name and row["wants"] == "load" for row in queue)

    async def _lease(self, chance: random.Random, who: str) -> None:
        name, ttl_s, load = chance.choice([*SOUND]), chance.uniform(0.2, 1), chance.random() < 0.7
        since_s, claim = now_s(), {"model": name, "ttl_s": ttl_s, "load": load}
        with self._deeds.doing("ask", name):
            answer = await self._rig.http.post(
                "/rota/v1/leases", json=claim, headers={"X-Conversation-Id": who}
            )
        if answer.status_code != 201:
            self._refused(name, since_s, answer, is_cold_lease=not load)
            return
        self._account(name, since_s, "leased")
        lease, replica = answer.json()["lease"], answer.json()["replica"]
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0, 0.2))
            is_there = replica in [r["id"] for r in self._rig.model(name)["replicas"]]
            listed = (await self._rig.http.get(f"/rota/v1/leases/{lease}")).json()
            if listed["state"] == "active" and not is_there:
                self._blame(name, since_s, f"{replica} left although {lease} was on it")
            if listed["state"] == "ended" and listed["why"] != "expired":
                self._account(name, since_s, "lease cut", is_ended=True, more=str(listed))
                return
            await self._rig.http.post(f"/rota/v1/leases/{lease}/renew", json={"ttl_s": 0.3})
        if chance.random() < 0.7:
            released = await self._rig.http.delete(f"/rota/v1/leases/{lease}")
            if released.status_code != 200:
                self._blame(name, since_s, f"not released: {released.text}")

    async def _pin(self, chance: random.Random, _who: str) -> None:
        name = chance.choice([*SOUND])
        with self._deeds.doing("pin", name):
            await self._rig.http.post(f"/rota/v1/models/{name}/pin")
            await asyncio.sleep(chance.uniform(0, 0.6))
            await self._rig.http.post(f"/rota/v1/models/{name}/unpin")

    # ── what is right ────────────────────────────────────────────────────────────────────

    def _refused(
        self, name: str, since_s: float, answer: httpx2.Response, *, is_cold_lease: bool = False
    ) -> float | None:
        """Check a refusal against the rules. Returns when to come back, if that was said."""
        error = answer.json()["error"]
        again = answer.headers.get("retry-after")
        has_waited = now_s() - since_s >= (WAIT_MS - 2) / 1_000
        done = self._deeds.count
        match answer.status_code, error["code"]:
            case 404, "model_not_found":
                is_right = name == "unknown"
            case 409, "model_off":
                is_right = name == "off"
            case 409, "not_loaded":
                is_right = is_cold_lease
            case 503, "model_cooling":
                is_right = name == "broken" or done("end", name, since_s - COOLDOWN_S) > 0
            case (503, "model_loading" | "model_waiting") | (429, "model_busy"):
                is_right = has_waited
            case 429, "queue_full":
                is_right = done("ask", name, since_s - NOTICED_S) > QUEUE_MAX
            case 503, "no_room":
                is_right = done("pin", None, since_s) > 0
            case 503, "model_unloaded":
                is_right = done("unload", name, since_s) > 0
            case 502, "engine_failed":
                is_right = done("end", name, since_s) > 0
            case 502, "replica_gone":  # it was asked once more, and met another end
                is_right = done("end", name, since_s) > 1
            case _:
                is_right = False
        may_return = error["code"] not in (
            *("model_not_found", "model_off", "not_loaded", "no_room"),
            *("model_unloaded", "engine_failed", "replica_gone"),
        )
        if is_right and error["message"] and (again is not None) == may_return:
            self.seen[error["code"]] += 1
        else:
            self._blame(name, since_s, f"{answer.status_code}, back in {again}: {error}")
        return None if again is None else float(again)

    def _account(
        self, name: str, since_s: float, what: str, *, is_ended: bool = False, more: str = ""
    ) -> None:
        """Count what happened; what ends an engine must have been done by someone."""
        if is_ended and not self._deeds.count("end", name, since_s):
            self._blame(name, since_s, f"{what}: {more}")
        else:
            self.seen[what] += 1

    def _blame(self, name: str, since_s: float, what: str) -> None:
        self.unexplained.append(f"{name}, asked {now_s() - since_s:.3f} s ago: {what}")

    async def _watch(self) -> None:
        """Look all the while: one replica is one process, and one model one replica."""
        pids: dict[str, int] = {}
        while True:
            models: Any = self._rig.controller.status()["models"]
            for model in models:
                if len(model["replicas"]) > 1:
                    self.unexplained.append(f"two replicas: {model['replicas']}")
                for replica in model["replicas"]:
                    pid = replica["pid"]
                    if pid is not None and pids.setdefault(replica["id"], pid) != pid:
                        self.unexplained.append(f"another process: {replica}")
            if len(set(pids.values())) != len(pids):
                self.unexplained.append(f"two replicas of one process: {pids}")
            for name, running in self._rig.processes().items():
                if sum(map(is_alive, running)) > 1:  # asked again, of all of them
                    self.unexplained.append(f"two processes of {name}: {running}")
            self.seen["looks"] += 1
            await asyncio.sleep(0.1)

    async def check_quiet(self) -> None:
        """Nothing is left of all that, and whoever asks is served."""
        await until(lambda: self._rig.in_flight() == 0, "every slot is back")
        await until(lambda: self._rig.waiting() == 0, "nobody is waiting")
        await until(lambda: not self._rig.controller.leases(), "every lease is over")
        for name in SOUND:
            for number in itertools.count():
                again_s = await self._chat(name, "the last", stream=True)
                if again_s is None or number == 10:
                    break
                await asyncio.sleep(again_s)
            assert self._rig.state(name) == "ready", (name, self.unexplained)


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def _is_whole(answer: httpx2.Response, *, stream: bool) -> bool:
    if stream:
        return answer.text.rstrip().endswith("data: [DONE]")
    return bool(json.loads(answer.text)["choices"][0]["finish_reason"])


@pytest.mark.parametrize(
    ("count", "at_once", "seed"),
    [(60, 8, 1), pytest.param(1_000, 16, 2, marks=pytest.mark.slow)],
)
async def test_random_rounds_leave_no_error_unexplained_and_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
    at_once: int,
    seed: int,
) -> None:
    # case W21
    print(f"seed {seed}")
    for (module, name), value in SCALED.items():
        monkeypatch.setattr(module, name, value)
    async with rota(tmp_path, fakes(), DEVICES) as rig:
        rounds = Rounds(rig, seed)
        await rounds.run(count, at_once)
        await rounds.check_quiet()
        print(dict(rounds.seen))
        assert rounds.unexplained == []
        assert rounds.seen["served"] > count / 10
        assert max(rig.devices.peak_mib().values()) <= 1_000
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.getMessage() for one in errors if one.name.startswith("rota")] == []
