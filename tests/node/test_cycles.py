"""Random lives side by side, with stops, crashes and kills at random moments: each ends once.
Seeded choices over real processes; the interleaving is the machine's own, so what is asserted
holds for every one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from rota.core.events import ReplicaReady, ReplicaStopped
from rota.node import processes
from rota.node.records import Records
from tests.node.support import Scene, fake, model, scene

MODELS = (
    model("plain", fake()),
    model("slow", fake("--load-s", "0.2", "--bind-late")),
    model("stubborn", fake("--ignore-sigterm", "--grandchild", "setsid")),
    model("crashing", fake("--load-s", "0.1", "--crash-at", "load")),
    model("never", fake("--probe-hangs"), start_timeout_ms=400),
    model("absent", fake(cwd=Path("/no/such/folder"))),
)


async def one_life(it: Scene, chance: random.Random) -> None:
    replica = it.start(chance.choice(MODELS).name)
    await asyncio.sleep(chance.random() * 0.5)
    facts = it.node.facts(replica)
    match chance.choice(["stop", "stop", "kill engine", "kill guard", "kill server"]):
        case "kill engine" if facts and facts.pid:
            _kill(facts.pid)
        case "kill guard" if facts and facts.pid:
            with contextlib.suppress(KeyError):
                _kill(it.guard_pid(replica))
        case "kill server":
            _kill(it.server_pid())
    await asyncio.sleep(chance.random() * 0.3)
    it.stop(replica, grace_ms=chance.choice([0, 100, 300]))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _each_ends_once(state: Path, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    async with scene(state, *MODELS) as it:
        for _ in range(rounds):
            await asyncio.gather(*(one_life(it, chance) for _ in range(3)))
    # Closed: every event has been posted.
    events = [it.events.get_nowait() for _ in range(it.events.qsize())]
    stops = Counter(one.replica for one in events if isinstance(one, ReplicaStopped))
    readies = Counter(one.replica for one in events if isinstance(one, ReplicaReady))
    assert len(stops) == 3 * rounds, f"seed {seed}"
    assert set(stops.values()) == {1}, f"seed {seed}"
    assert set(readies.values()) <= {1}, f"seed {seed}"
    for replica in readies:
        of_it = [type(one) for one in events if getattr(one, "replica", "") == replica]
        assert of_it == [ReplicaReady, ReplicaStopped], f"seed {seed}"
    assert not processes.marked(Records(state).mark("")), f"seed {seed}"
    assert not list((state / "replicas").iterdir()), f"seed {seed}"


async def test_each_life_ends_once_and_leaves_nothing(tmp_path: Path) -> None:
    # case W21
    await _each_ends_once(tmp_path, seed=0, rounds=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_each_of_many_lives_ends_once_and_leaves_nothing(tmp_path: Path, seed: int) -> None:
    # case W21
    run = uvloop.run if seed % 2 else asyncio.run
    run(_each_ends_once(tmp_path, seed, rounds=15))
