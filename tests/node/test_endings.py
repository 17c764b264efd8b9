"""Whatever ends, and however, nothing of an engine is left.
Real processes are killed in every combination; who must be gone is noted before, by pid and
start time, and then looked for until it is (zombies count as left where reaping is ours).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from rota.config.values import CommandEngine
from rota.core.events import ReplicaReady, ReplicaStopped, StopCause
from rota.node import guard, processes
from tests.node.support import (
    PATIENCE_S,
    Alive,
    all_end,
    fake,
    identities,
    model,
    scene,
    script,
    until,
)


@pytest.fixture
def guard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guard leaves is ended by rota itself, later; here that is a failure."""

    def end_all(find: Callable[[], set[int]]) -> set[int]:
        raise AssertionError(f"the guard left {find()}")

    alone = SimpleNamespace(MARK=processes.MARK, marked=processes.marked, end_all=end_all)
    monkeypatch.setattr("rota.node.replica.processes", alone)


@dataclass
class RotaLike:
    pid: int
    server: set[Alive]
    guards: set[Alive]
    rest: set[Alive]


@asynccontextmanager
async def rota_like(state_dir: Path) -> AsyncIterator[RotaLike]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.node.rota_like", str(state_dir), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        pids = json.loads(line)
        assert len(pids["guards"]) == 3
        assert len(pids["rest"]) == 4, "three engines and one grandchild"
        yield RotaLike(
            process.pid,
            identities([pids["server"]]),
            identities(pids["guards"]),
            identities(pids["rest"]),
        )
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_kill_9_of_rota_leaves_nothing(tmp_path: Path) -> None:
    # case Z2, case W19; what it must take at most: docs say 2 s, the guard's own bounds say less
    assert guard.LOST_GRACE_S + guard.KILL_EVERY_S < 2
    async with rota_like(tmp_path) as rota:
        os.kill(rota.pid, signal.SIGKILL)
        await all_end(rota.rest | rota.guards | rota.server)
        async with scene(tmp_path, model("again", fake())) as it:
            await it.up("again")


@pytest.mark.parametrize("first", ["server", "rota"])
async def test_kill_9_of_rota_and_the_guard_server_leaves_nothing(
    tmp_path: Path, first: str
) -> None:
    async with rota_like(tmp_path) as rota:
        (server,) = rota.server
        both = [server.pid, rota.pid] if first == "server" else [rota.pid, server.pid]
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        await all_end(rota.rest | rota.guards | rota.server)


async def test_kill_9_of_rota_and_of_every_guard_leaves_nothing(tmp_path: Path) -> None:
    async with rota_like(tmp_path) as rota:
        for pid in [rota.pid, *(one.pid for one in rota.guards)]:
            os.kill(pid, signal.SIGKILL)
        await all_end(rota.rest | rota.guards | rota.server)


async def test_what_outlived_everyone_is_ended_at_the_next_start(tmp_path: Path) -> None:
    # case Z2: rota, server and guards are all killed; only the escaped grandchild can be left.
    async with rota_like(tmp_path) as rota:
        for one in [*rota.server, *rota.guards]:
            os.kill(one.pid, signal.SIGKILL)
        os.kill(rota.pid, signal.SIGKILL)
        await until(lambda: sum(one.is_alive() for one in rota.rest) <= 1, "the engines' end")
        async with scene(tmp_path):
            assert not any(one.is_alive() for one in rota.rest)


async def test_a_signal_to_all_leaves_the_guards_to_their_work(tmp_path: Path) -> None:
    # A terminal or a service manager signals everything at once; rota drains, guards stay.
    async with scene(tmp_path, model("a", fake("--ignore-sigterm"))) as it:
        replica = await it.up("a")
        for pid in (it.server_pid(), it.guard_pid(replica)):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        await it.ask(replica, "/health")
        it.stop(replica, grace_ms=0)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)


async def test_a_killed_guard_takes_its_engine_along(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--grandchild", "setsid"))) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        assert len(everyone) == 2
        os.kill(it.guard_pid(replica), signal.SIGKILL)
        stopped = await it.stopped()
        assert (stopped.replica, stopped.cause) == (replica, StopCause.CRASHED)
        assert "the process that guarded it is gone" in stopped.detail
        assert not any(one.is_alive() for one in everyone)
        await it.up("a")


async def test_a_killed_guard_server_harms_nobody_and_is_replaced(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake("--grandchild", "setsid"))) as it:
        before = await it.up("a")
        everyone = it.all_of(before)
        server = it.server_pid()
        os.kill(server, signal.SIGKILL)
        after = await it.up("a")
        assert it.server_pid() != server
        await it.ask(before, "/health")
        it.stop(before, grace_ms=100)
        assert await it.stopped() == ReplicaStopped(before, StopCause.ASKED)
        await all_end(everyone)
        await it.ask(after, "/health")


async def test_a_stuck_guard_does_not_keep_an_engine_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.node.replica.GUARD_WAIT_S", 0.1)
    async with scene(tmp_path, model("a", fake("--grandchild", "setsid"))) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        stuck = it.guard_pid(replica)
        os.kill(stuck, signal.SIGSTOP)
        it.stop(replica, grace_ms=50)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_alive() for one in everyone)


@pytest.mark.usefixtures("guard_alone")
async def test_kill_9_of_the_engine_ends_what_it_started(tmp_path: Path) -> None:
    # case Z1
    async with scene(tmp_path, model("a", fake("--grandchild", "ignores-sigterm"))) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        assert len(everyone) == 2
        os.kill(it.pid(replica), signal.SIGKILL)
        stopped = await it.stopped()
        assert stopped.detail.startswith("a was killed by SIGKILL")
        assert not any(one.is_left() for one in everyone)


@pytest.mark.usefixtures("guard_alone")
@pytest.mark.parametrize("kind", ["stays", "ignores-sigterm", "setsid"])
async def test_a_stop_ends_grandchildren_too(tmp_path: Path, kind: str) -> None:
    # case Z1
    async with scene(tmp_path, model("a", fake("--grandchild", kind))) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        assert len(everyone) == 2
        it.stop(replica, grace_ms=200)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_left() for one in everyone)


@pytest.mark.usefixtures("guard_alone")
async def test_one_that_ignores_sigterm_is_killed_after_its_grace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # case Z3
    async with scene(tmp_path, model("a", fake("--ignore-sigterm"))) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        it.stop(replica, grace_ms=100)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_left() for one in everyone)
    assert "a-1 did not end in 0.1 s: killed" in caplog.text


async def test_a_grace_is_granted_to_those_who_use_it(tmp_path: Path) -> None:
    text = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.2)
    os.write(1, b"put away\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, b"up\\n")
time.sleep(60)
"""
    async with scene(tmp_path, model("a", script(text, ready=None))) as it:
        replica = await it.up("a")
        await until(lambda: it.node.tail(replica, 1) == ["up"], "its first line")
        it.stop(replica, grace_ms=60_000)
        await it.stopped()
    assert (tmp_path / "logs" / "a.log").read_text() == "up\nput away\n"


async def test_a_second_longer_stop_is_not_even_heard(tmp_path: Path) -> None:
    text = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
os.write(1, b"up\\n")
while True: time.sleep(60)
"""
    async with scene(tmp_path, model("a", script(text, ready=None))) as it:
        replica = await it.up("a")
        await until(lambda: it.node.tail(replica, 1) == ["up"], "its first line")
        it.stop(replica, grace_ms=60_000)
        await until(lambda: it.node.tail(replica, 1) == ["asked"], "the first order")
        it.stop(replica, grace_ms=600_000)
        it.stop(replica, grace_ms=200)
        await it.stopped()
    assert (tmp_path / "logs" / "a.log").read_text() == "up\nasked\nasked\n"


async def test_a_stopped_one_hears_sigterm(tmp_path: Path) -> None:
    # case W14, case W15: SIGSTOPped, it would not even run its SIGTERM handler
    async with scene(tmp_path, model("a", fake())) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        os.kill(it.pid(replica), signal.SIGSTOP)
        it.stop(replica, grace_ms=600_000)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_left() for one in everyone)


@pytest.mark.usefixtures("guard_alone")
async def test_a_stopped_and_stubborn_one_is_killed_after_its_grace(tmp_path: Path) -> None:
    # case W14, case W15
    async with scene(tmp_path, model("a", fake("--ignore-sigterm"))) as it:
        replica = await it.up("a")
        os.kill(it.pid(replica), signal.SIGSTOP)
        it.stop(replica, grace_ms=100)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)


@pytest.mark.usefixtures("guard_alone")
@pytest.mark.parametrize("shell", ["{} & wait", "{}; true", "({} &) ; sleep 600"])
async def test_a_shell_around_the_server_changes_nothing(tmp_path: Path, shell: str) -> None:
    # case W18
    server = " ".join(fake().argv)
    engine = CommandEngine(("sh", "-c", shell.format(server)))
    async with scene(tmp_path, model("a", engine)) as it:
        replica = await it.up("a")
        everyone = it.all_of(replica)
        assert len(everyone) >= 2
        it.stop(replica)
        assert await it.stopped() == ReplicaStopped(replica, StopCause.ASKED)
        assert not any(one.is_left() for one in everyone)


async def test_a_daemon_that_leaves_its_parent_is_not_left_behind(tmp_path: Path) -> None:
    # The launcher returns at once, as some servers' do: that counts as the engine's end.
    engine = CommandEngine(("sh", "-c", f"{' '.join(fake('--load-s', '600').argv)} & echo done"))
    async with scene(tmp_path, model("a", engine)) as it:
        it.start("a")
        stopped = await it.stopped()
        assert stopped.cause is StopCause.CRASHED
        assert "exited with code 0 while it was starting" in stopped.detail
        await until(lambda: not guard.descendants(it.server_pid()), "the guard's end")


async def test_many_starts_and_stops_leave_no_descriptor_and_no_process(tmp_path: Path) -> None:
    # case W21
    async with scene(tmp_path, model("a", script("import time; time.sleep(60)", ready=None))) as it:
        await it.up("a")

        def open_here() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        before = open_here()
        for _ in range(10):
            replicas = [await it.up("a") for _ in range(3)]
            for replica in replicas:
                it.stop(replica, grace_ms=0)
            assert {(await it.stopped()).replica for _ in replicas} == set(replicas)
        server_fds = Path(f"/proc/{it.server_pid()}/fd")
        await until(lambda: open_here() <= before, "the end of its sockets")
        assert len(list(server_fds.iterdir())) < 10
        await until(lambda: len(guard.descendants(it.server_pid())) == 2, "the guards' end")


async def test_engines_inherit_nothing_but_their_own_output(tmp_path: Path) -> None:
    text = "import os; print(sorted(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/0'))"
    async with scene(tmp_path, model("a", script(text)), model("b", fake())) as it:
        await it.up("b")
        it.start("a")
        stopped = await it.stopped()
        # 3 is the listing itself
        assert stopped.detail.endswith("['0', '1', '2', '3'] /dev/null")
        assert it.events.empty()


async def test_rotas_own_environment_stays_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_SECRET", "x")
    monkeypatch.setenv("ELSE", "y")
    text = "import os; print(os.environ.get('ROTA_SECRET'), os.environ['ELSE'], os.environ['OWN'])"
    engine = script(text, env={"OWN": "${MODEL}"})
    async with scene(tmp_path, model("a", engine)) as it:
        it.start("a")
        assert (await it.stopped()).detail.endswith("None y a")


async def test_stopping_and_crashing_at_once_is_one_stop(tmp_path: Path) -> None:
    async with scene(tmp_path, model("a", fake())) as it:
        for _ in range(5):
            replica = it.start("a")
            assert await it.next() == ReplicaReady(replica)
            os.kill(it.pid(replica), signal.SIGKILL)
            it.stop(replica)
            assert (await it.stopped()).replica == replica
    assert it.events.empty()
